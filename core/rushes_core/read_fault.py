"""What a system call that failed says of a checkpoint: that it is not to be served, or that it cannot be read now."""

import errno
from pathlib import Path

from rushes_core.errors import CheckpointError, CheckpointUnreadable

_PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENOLINK,
        errno.ENOMEM,
        errno.ENOTCONN,
        errno.ENXIO,
        errno.ESHUTDOWN,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
"""Of disks and of file systems of other machines. What is missing or forbidden is not among them."""


def read_fault(path: Path | str, error: OSError) -> CheckpointError | CheckpointUnreadable:
    """What is to be raised from `error`, which came of reading `path` of a checkpoint."""
    kind = CheckpointUnreadable if error.errno in _PASSING else CheckpointError
    return kind(f"{path}: {error.strerror or error}")
