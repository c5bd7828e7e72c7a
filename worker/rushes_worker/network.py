"""Which network interface an address of this machine belongs to."""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_of(host: str) -> str | None:
    """The interface whose address `host` is; None if that cannot be told.

    Raises:
        ValueError: `host` is no address of any machine.
    """
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{host} cannot be resolved: {error}") from error
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
