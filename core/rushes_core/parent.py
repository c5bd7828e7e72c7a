"""What the kernel does to a process when the one that started it ends."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def signal_with_parent(number: signal.Signals) -> None:
    """Have this process get a signal when the thread that started it ends; not if that has happened already.

    Raises:
        OSError: the kernel refused.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
