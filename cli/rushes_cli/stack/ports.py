"""Free TCP ports on the loopback interface.

A port found free can be taken by another process before the server binds it; callers start again with another one then.
The ranges lie below the kernel's ephemeral range (32768 and up), so that no outgoing connection takes one.
"""

import random
import socket

from rushes_cli.stack.errors import StackError

SINGLE = range(26_000, 32_000)
SEAWEEDFS = range(10_000, 16_000)
GRPC_OFFSET = 10_000


def is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1:`port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_port(preferred: int | None = None) -> int:
    """`preferred` if it is free, otherwise a random free port."""
    return _first_free(preferred, SINGLE, (0,))


def free_seaweedfs_base(preferred: int | None = None) -> int:
    """A port P with P..P+4 free, and P+10000..P+10004, which SeaweedFS takes for gRPC."""
    offsets = (*range(5), *range(GRPC_OFFSET, GRPC_OFFSET + 5))
    return _first_free(preferred, SEAWEEDFS, offsets)


def _first_free(preferred: int | None, candidates: range, offsets: tuple[int, ...]) -> int:
    tries = [] if preferred is None else [preferred]
    tries += random.sample(candidates, 200)
    for port in tries:
        if all(is_free(port + offset) for offset in offsets):
            return port
    raise StackError(f"no free port on 127.0.0.1 between {candidates.start} and {candidates.stop} after 200 tries")
