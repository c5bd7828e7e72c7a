"""A wake-up that `multiprocessing.connection.wait` can wait for beside sockets."""

import os
from contextlib import suppress


class Wake:
    """Any thread or signal handler pokes; one thread waits for `fileno` to be readable and clears it."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)

    def fileno(self) -> int:
        return self._reading

    def poke(self) -> None:
        with suppress(BlockingIOError):  # full of pokes that nobody has seen yet
            os.write(self._writing, b"\0")

    def clear(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._reading, 4096):
                pass

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)
