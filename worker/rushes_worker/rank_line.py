"""The rank's end of its connection to the supervisor."""

from multiprocessing.connection import Connection

from rushes_worker.commands import Command, Render, Report, Stop


class RankLine:
    """Sends reports, and keeps commands until their turn. Used by one thread.

    Every method that hears raises `EOFError` or `OSError` when the supervisor is gone.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._renders: list[Render] = []
        self._stopped: set[int] = set()
        self._void_behind = 0

    def send(self, report: Report) -> None:
        self._connection.send(report)

    def is_stopped(self, serial: int) -> bool:
        """Whether render `serial` is to be given up, as far as was heard."""
        self._hear(0.0)
        return serial in self._stopped

    def next_serial(self, timeout: float) -> int:
        """The serial number of the render that comes next, if it was said within `timeout` seconds, else 0."""
        if not self._renders:
            self._hear(timeout)
        return self._renders[0].serial if self._renders else 0

    def next_render(self) -> Render:
        """The render that comes next, waited for."""
        while not self._renders:
            self._take(self._connection.recv())
        render = self._renders.pop(0)
        self._stopped = {serial for serial in self._stopped if serial >= render.serial}
        return render

    def void_behind(self, serial: int) -> None:
        """What was said behind render `serial`, or will be, does not count."""
        self._void_behind = serial
        self._renders = [render for render in self._renders if render.behind != serial]

    def _hear(self, timeout: float) -> None:
        while self._connection.poll(timeout):
            self._take(self._connection.recv())
            timeout = 0.0

    def _take(self, command: Command) -> None:
        if isinstance(command, Stop):
            self._stopped.add(command.serial)
        elif not command.behind or command.behind != self._void_behind:
            self._renders.append(command)
