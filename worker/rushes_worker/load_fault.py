"""What a rank tells of an error that keeps it from becoming ready: whether another rank would come upon it, too."""

import sys
import time

from rushes_core.errors import CheckpointUnreadable, RushesError, with_variable

from rushes_worker.commands import NotLoaded, Unfit

_REPEATED = (
    "no kernel image is available",
    "PTX was compiled with an unsupported toolchain",
    "device kernel image is invalid",
    "Failed to find C compiler",
)
"""What CUDA and Triton say of a device that they have no code for, or cannot make any."""


def report_of(error: Exception) -> Unfit | NotLoaded:
    """What the supervisor is told of `error`."""
    if isinstance(error, CheckpointUnreadable):
        return NotLoaded(with_variable(error), time.time(), is_unreadable=True)
    told = f"{type(error).__name__}: {error}"
    # what is raised on purpose says where in its message, which the launcher tells once for all ranks
    if isinstance(error, RushesError) or type(error) is ValueError:
        return Unfit(with_variable(error))
    if isinstance(error, ValueError):
        return Unfit(told)
    return Unfit(told) if _comes_again(error) else NotLoaded(told, time.time())


def _comes_again(error: Exception) -> bool:
    """Whether it is of what is installed and of the device, and not of their state."""
    if isinstance(error, ImportError | NotImplementedError):
        return True
    # neither is loaded where it was not used
    kernels, triton = sys.modules.get("rushes_kernels.nvrtc"), sys.modules.get("triton.errors")
    if kernels is not None and isinstance(error, kernels.KernelError) and not isinstance(error, kernels.DriverError):
        return True
    if triton is not None and isinstance(error, triton.TritonError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _REPEATED)
