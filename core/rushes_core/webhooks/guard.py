"""Where webhooks may go: the check of a URL when it is given, and of every address when it is used.

A name is resolved once for an attempt, every address that it has must be allowed, and one of those is connected to: a
name that changes in between gains nothing.
"""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Any
from urllib.parse import urlsplit

import idna

from rushes_core.errors import InvalidRequest
from rushes_core.fields import shown
from rushes_core.redact import without_password
from rushes_core.setting_rules import listed
from rushes_core.settings import Settings

MAX_URL = 2_048
MAX_HOST = 253
LOOKUP_SECONDS = 2.0
"""How long a name is looked up when a URL is given; one whose servers do not answer is left to the attempts."""

Address = IPv4Address | IPv6Address
Lookup = Callable[[str, int], list[str]]
"""Addresses of a name; blocks."""

# urllib.parse removes tabs and newlines from a URL, and browsers take a backslash for a slash
_VISIBLE = re.compile(r"[^\x00-\x20\x7f-\x9f\\\s]+")
_NUMERIC = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.ASCII)
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)

_NOT_PUBLIC_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        # of a cloud, to its own machines
        "168.63.129.16/32",
    )
)
_PUBLIC_V6 = IPv6Network("2000::/3")
# Teredo and other protocols, documentation, 6to4, which nobody routes any more
_NOT_PUBLIC_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_NAT64 = IPv6Network("64:ff9b::/96")


class BlockedAddress(InvalidRequest):
    """A host that webhooks must not go to, or one of its addresses."""


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that was checked, in parts and as it is sent."""

    url: str
    scheme: str
    host: str
    """In ASCII, lower case, without a trailing dot; an address without brackets."""
    port: int
    address: Address | None
    """The host, if it is an address."""

    @property
    def origin(self) -> str:
        """With the port, given or not."""
        return f"{self.scheme}://{_bracketed(self.host)}:{self.port}"


class Guard:
    """The rules of a deployment."""

    def __init__(self, settings: Settings) -> None:
        self._http = settings.webhook_http
        self._ports = frozenset(map(int, listed(settings.webhook_ports)))
        self._hosts = tuple(host.lower().rstrip(".") for host in listed(settings.webhook_hosts))
        self._networks = tuple(map(ip_network, listed(settings.webhook_networks)))
        self._loopback = settings.webhook_loopback
        self._own_host = urlsplit(settings.api_origin).hostname or None

    def check_url(self, text: str, *, param: str = "url") -> Target:
        """`text` as a URL that webhooks may be sent to, as far as that can be said without resolving its name.

        Raises:
            BlockedAddress: says what is wrong with it.
        """

        def refuse(problem: str) -> BlockedAddress:
            return BlockedAddress(f"{param} {problem}, got {shown(without_password(text))}", param=param)

        if len(text) > MAX_URL:
            raise BlockedAddress(f"{param} must have at most {MAX_URL} characters, got {len(text)}", param=param)
        if not _VISIBLE.fullmatch(text):
            raise refuse("must be a URL without spaces, control characters and backslashes")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise refuse(f"must be a URL ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise refuse("must be a URL that begins with https://")
        if "@" in parts.netloc:
            raise refuse("must not hold a user name or password")
        if parts.fragment:
            raise refuse("must not have a fragment")
        try:
            host, address = _host(parts.netloc, parts.hostname or "")
        except ValueError as error:
            raise refuse(str(error)) from error
        is_here = self._is_this_machine(host, address)
        if parts.scheme != "https" and not (self._http or is_here):
            raise refuse("must begin with https://")
        if port is None:
            port = 443 if parts.scheme == "https" else 80
        allowed = self._ports | {80} if self._http else self._ports
        if port not in allowed and not (is_here and port > 0):
            raise refuse(f"must be to port {' or '.join(map(str, sorted(allowed)))}")
        if self._hosts and not is_here and not any(_matches(host, pattern) for pattern in self._hosts):
            raise refuse("must be at a host that this deployment allows")
        if host == self._own_host and not is_here:
            raise refuse("must not be at this API itself")
        if address is not None:
            self.check_addresses([address], shown_as=shown(text), param=param)
        elif not is_here and _is_local_name(host) and not self._is_listed(host):
            raise refuse("must be at a public host")
        url = parts._replace(netloc=_bracketed(host) if parts.port is None else f"{_bracketed(host)}:{port}").geturl()
        if not url.isascii():
            raise refuse("must be percent-encoded ASCII after the host")
        return Target(url, parts.scheme, host, port, address)

    @staticmethod
    def origin_of(url: str) -> str:
        """The origin of a URL that was checked once, as `Target` writes it."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return f"{parts.scheme}://{_bracketed(parts.hostname or '')}:{port}"

    def check_addresses(self, addresses: Iterable[Address], *, shown_as: str, param: str = "url") -> None:
        """
        Raises:
            BlockedAddress: there is none, or one of them is not allowed.
        """
        found = list(addresses)
        if not found or not all(self._is_allowed(address) for address in found):
            # which address it was is nobody's business outside
            raise BlockedAddress(f"{param} must be at a public host, got {shown_as}", param=param)

    def is_private(self, address: Address) -> bool:
        """Whether `address`, which is allowed, is so only because an operator allowed its network."""
        plain = _unwrapped(address)
        return not _is_public(plain) and not plain.is_loopback

    def resolve(self, host: str, port: int, lookup: Lookup) -> list[Address]:
        """Every address of the name `host`, each of them allowed; one look-up, which blocks.

        Raises:
            BlockedAddress
            OSError: the name could not be resolved.
        """
        found = [parse_address(text) for text in lookup(host, port)]
        self.check_addresses(found, shown_as=host)
        return found

    def _is_allowed(self, address: Address) -> bool:
        plain = _unwrapped(address)
        if plain.is_loopback:
            return self._loopback
        return _is_public(plain) or any(plain in network for network in self._networks)

    def _is_this_machine(self, host: str, address: Address | None) -> bool:
        if not self._loopback:
            return False
        return host == "localhost" if address is None else _unwrapped(address).is_loopback

    def _is_listed(self, host: str) -> bool:
        return any(_matches(host, pattern) for pattern in self._hosts)


async def check_resolves(
    guard: Guard, target: Target, *, resolve: Callable[[str, int], Awaitable[object]], param: str = "url"
) -> None:
    """Refuse a target whose name does not exist or leads where webhooks must not go. Every attempt asks again.

    Args:
        resolve: `guard.resolve` without its lookup, which blocks nobody and may be given up.

    Raises:
        BlockedAddress
    """
    if target.address is not None:
        return
    try:
        async with asyncio.timeout(LOOKUP_SECONDS):
            await resolve(target.host, target.port)
    except BlockedAddress as error:
        raise BlockedAddress(f"{param} must be at a public host, got {shown(target.url)}", param=param) from error
    except TimeoutError:
        return
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, _EAI_NODATA):
            raise BlockedAddress(
                f"{param} must be at a host that exists, got {shown(target.url)}", param=param
            ) from error


_EAI_NODATA = getattr(socket, "EAI_NODATA", socket.EAI_NONAME)


def look_up(host: str, port: int) -> list[str]:
    """The system's answer."""
    found: list[tuple[Any, Any, Any, Any, Any]] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


def parse_address(text: str) -> Address:
    """An address as a resolver writes it, with the scope that it may have.

    Raises:
        ValueError
    """
    return IPv6Address(text.partition("%")[0]) if ":" in text else IPv4Address(text)


def _host(netloc: str, hostname: str) -> tuple[str, Address | None]:
    """The host in its one spelling, and the address that it is."""
    if "[" in netloc:
        # no scope: it names an interface of this machine
        if "%" in hostname:
            raise ValueError("must not have an address with a scope")
        try:
            address = IPv6Address(hostname)
        except ValueError:
            raise ValueError("must have a host that is a name or an address") from None
        return address.compressed, address
    host = hostname
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True, std3_rules=True).decode()
        except idna.IDNAError:
            raise ValueError("must have a host that is a valid international name") from None
    host = host.lower().removesuffix(".")
    labels = host.split(".")
    if _NUMERIC.fullmatch(labels[-1]):
        # what looks like a number is taken for an address by some resolvers, in any of its spellings
        try:
            address = IPv4Address(host)
        except ValueError:
            raise ValueError("must have a host that is a name, or an address of four decimal numbers") from None
        return str(address), address
    if not host or len(host) > MAX_HOST or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("must have a host that is a name or an address")
    return host, None


def _is_local_name(host: str) -> bool:
    # a name of one label is looked for in the search domains of this machine
    return "." not in host or host.endswith((".localhost", ".local", ".internal"))


def _matches(host: str, pattern: str) -> bool:
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _unwrapped(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one that stands for it on this machine or its network."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64 or (int(address) >> 32 == 0 and int(address) > 1):
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    return address in _PUBLIC_V6 and not any(address in network for network in _NOT_PUBLIC_V6)
