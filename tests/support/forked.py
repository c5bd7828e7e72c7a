"""Processes of Rushes as forks of one that has imported what they run: imports would take them more than what most of
them do for a test. Each is a process of its own, whose parent is that one, and inherits only what it is given.

Tests that are about how a process starts, or what it loads, start it as operators do.
"""

import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

_preloaded = ["pytest"]


def preload(*modules: str) -> None:
    """Have them imported by the process that all others are forks of, unless there is one already."""
    _preloaded.extend(modules)
    multiprocessing.set_forkserver_preload(_preloaded)


class Forked:
    """A running `main` of a module, as `rushes_core.starting` calls it; the methods are those of `Popen`.

    Args:
        log: what stdout and stderr are appended to.
        listener: a socket that it inherits, whose descriptor there is the last of its arguments.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        listener: socket.socket | None = None,
    ) -> None:
        actions = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
        inherited = {number: action for number, action in actions.items() if isinstance(action, signal.Handlers)}
        # who waits for a line in it need not wait for the file
        log.touch()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(
            target=_run, args=(module, list(arguments), dict(env), log, listener, inherited)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    module: str,
    arguments: list[str],
    env: dict[str, str],
    log: Path,
    listener: socket.socket | None,
    inherited: dict[signal.Signals, signal.Handlers],
) -> None:
    # as a new program has them
    for number, action in inherited.items():
        signal.signal(number, action)
    # what was imported before the fork is not for the collector of each of them to go through
    gc.freeze()
    os.environ.clear()
    os.environ.update(env)
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
        (2, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    if listener is not None:
        arguments.append(str(listener.fileno()))
    sys.exit(import_module(module).main(arguments))
