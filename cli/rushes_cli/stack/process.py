"""A child process in its own session that ends with its starter, logs to a file and is stopped in bounded time."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rushes_cli.stack.errors import StackError

_GUARD = Path(__file__).with_name("guard.py")
_MAX_LOG_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that a later reader can tell from another one with the same number.

    `start_ticks` is field 22 of /proc/PID/stat, `boot_id` tells two boots of a machine apart.
    """

    name: str
    pid: int
    start_ticks: int
    boot_id: str
    stop_signal: int

    @classmethod
    def of(cls, name: str, pid: int, stop_signal: signal.Signals) -> Self:
        return cls(name, pid, _start_ticks(pid) or 0, boot_id(), int(stop_signal))

    def is_alive(self) -> bool:
        """False for a zombie, and for another process that got the same number."""
        return self.boot_id == boot_id() and _start_ticks(self.pid) == self.start_ticks

    def send(self, number: int) -> None:
        """Signal the process group, which the process leads, if it is still this process."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)


@dataclass
class Child:
    """One running program. Made by `spawn`."""

    name: str
    popen: subprocess.Popen[bytes]
    identity: ProcessIdentity
    log: Path
    log_start: int
    stop_signal: signal.Signals
    stop_seconds: float
    _kill_at: float | None = field(default=None, init=False)

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self.popen.poll()

    def output(self) -> str:
        """What this run wrote to its log so far, at most the last 64 KiB."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_start, size - 65_536))
            return file.read().decode(errors="replace")

    def failure(self, what: str) -> StackError:
        """An error that says `what` happened and ends with the log's last lines."""
        return StackError(f"{self.name} {what}; {self.last_words()}")

    def last_words(self) -> str:
        """The last lines of its log, under where that is."""
        lines = [line for line in self.output().splitlines() if line.strip()][-15:]
        tail = "\n".join(f"  | {line}" for line in lines) or "  | (it wrote nothing)"
        return f"last lines of {self.log}:\n{tail}"

    def ask_to_stop(self) -> None:
        """Send the stop signal, once."""
        if self._kill_at is None and self.poll() is None:
            self._kill_at = time.monotonic() + self.stop_seconds
            self.popen.send_signal(self.stop_signal)

    def wait_stopped(self) -> None:
        """Wait for the end; `stop_seconds` after it was asked to stop, kill its process group."""
        left = 0.0 if self._kill_at is None else self._kill_at - time.monotonic()
        try:
            self.popen.wait(max(0.0, left))
        except subprocess.TimeoutExpired:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


def spawn(
    name: str,
    command: Sequence[str | Path],
    *,
    log: Path,
    cwd: Path,
    env: Mapping[str, str],
    stop_signal: signal.Signals = signal.SIGTERM,
    death_signal: signal.Signals | None = None,
    stop_seconds: float = 15.0,
    user: tuple[int, int] | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `command` (its first word an absolute path) with its output appended to `log`.

    The kernel sends it `death_signal` when the calling process ends, however that ends. That is tied to the calling
    *thread*, so only the main thread may spawn.

    Args:
        stop_signal: what `Child.ask_to_stop` sends.
        death_signal: None is the same as `stop_signal`.
        stop_seconds: how long it may take to stop before it is killed.
        user: (uid, gid) to run as; None keeps the caller's.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"{name} must be started from the main thread: it ends with the thread that starts it")
    _rotate(log)
    with log.open("ab") as output:
        popen = subprocess.Popen(
            guarded(command, death_signal or stop_signal, user),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=dict(env),
            start_new_session=True,
            umask=0o077,
            pass_fds=pass_fds,
        )
        log_start = output.seek(0, os.SEEK_END)
    return Child(
        name, popen, ProcessIdentity.of(name, popen.pid, stop_signal), log, log_start, stop_signal, stop_seconds
    )


def guarded(command: Sequence[str | Path], death_signal: signal.Signals, user: tuple[int, int] | None) -> list[str]:
    """`command` wrapped so that it gets `death_signal` when the caller ends, and runs as `user`, (uid, gid)."""
    uid, gid = user or (-1, -1)
    words = [sys.executable, "-I", "-S", _GUARD, os.getpid(), int(death_signal), uid, gid, *command]
    return [str(word) for word in words]


def stop_all(children: Iterable[Child]) -> None:
    """Ask all to stop, then wait for all."""
    children = list(children)
    for child in children:
        child.ask_to_stop()
    for child in children:
        child.wait_stopped()


def end_leftovers(identities: Iterable[ProcessIdentity], *, timeout_seconds: float = 8.0) -> None:
    """End processes that an earlier starter left behind; a process that merely has the same number is not touched."""
    left = [identity for identity in identities if identity.is_alive()]
    for identity in left:
        identity.send(identity.stop_signal)
    deadline = time.monotonic() + timeout_seconds
    while (left := [identity for identity in left if identity.is_alive()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for identity in left:
        identity.send(signal.SIGKILL)
    while any(identity.is_alive() for identity in left) and time.monotonic() < deadline + 2:
        time.sleep(0.02)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _rotate(log: Path) -> None:
    """Keep one older generation of a log that has grown past its limit."""
    if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
        log.replace(log.with_suffix(log.suffix + ".1"))


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the second field is the program's name in parentheses and may hold anything
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
