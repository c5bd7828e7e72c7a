"""Processes that end with the one that started them, and what they inherit."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from rushes_core.parent import signal_with_parent
from rushes_core.signals import ENDING

# ranks and media processes need none of it
if TYPE_CHECKING:
    from rushes_core.settings import Settings

_PREFIX = "RUSHES_"
_SECRET_PREFIXES = (_PREFIX, "AWS_", "PG")


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    leaves_signals: bool = False,
) -> subprocess.Popen[bytes]:
    """Have a process of its own call `main` of `module` with PARENT_PID and the arguments, as the leader of its own
    session and process group.

    The kernel ends a child when the *thread* that started it ends, so only the main thread may start one.

    Args:
        leaves_signals: it calls `leave_signals_to_parent`; until it comes to that, such signals wait.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"{module} must be started from the main thread: it ends with the thread that starts it")
    # inherited, as what is ignored is: but this process ignores nothing
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING if leaves_signals else ())
    try:
        return subprocess.Popen(
            # -P: a folder of the working directory must not shadow an installed package
            [sys.executable, "-P", "-m", "rushes_core.starting", module, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            env=dict(env),
            pass_fds=pass_fds,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; leave at once if that has happened already."""
    signal_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def leave_signals_to_parent() -> None:
    """Have this process not end at what asks a whole worker to stop: some who ask, as systemd, ask each of its
    processes, and its parent decides when that is. What it starts inherits that, and ends with it."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    # what came before is forgotten
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def exit_status(child: subprocess.Popen[bytes]) -> int | None:
    """The `returncode` of `child` once it has ended, without reaping it: until `wait` its number cannot be another
    process's."""
    if child.returncode is not None:
        return child.returncode
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def has_exited(child: subprocess.Popen[bytes]) -> bool:
    """Whether `child` has ended."""
    return exit_status(child) is not None


def how_it_ended(returncode: int) -> str:
    """`returncode` of a `Popen` in words."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def settings_environment(settings: "Settings") -> dict[str, str]:
    """This process's environment with the variables that make `settings` again in a child."""
    env = dict(os.environ)
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if hasattr(value, "get_secret_value"):
            value = value.get_secret_value()
        elif isinstance(value, Enum):
            value = value.value
        env[_PREFIX + name.upper()] = str(value)
    return env


def environment_without_secrets() -> dict[str, str]:
    """This process's environment without what opens the database, Redis or the store: Rushes' own variables, AWS's and
    libpq's."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(_SECRET_PREFIXES)}
