"""A port for a server that is started, or started again, later."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port of `host` that no process is given that asks for any.

    It is bound and nobody listens: who asks for just this one may have it, again and again.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind((host, 0))
        yield keeper.getsockname()[1]
