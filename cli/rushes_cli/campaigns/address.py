"""What is wrong with the address of the API, where to ask again would not help."""

import socket
import ssl
from urllib.parse import urlsplit

import httpx

_PROBE_SECONDS = 5.0
_DEFAULT_PORTS = {"http": 80, "https": 443}


def fault_of(url: str, error: httpx.TransportError) -> str | None:
    """What is wrong with `url` if that is why `error` came of it; None: it may be right, and the API away."""
    cause = _system_error(error)
    host = urlsplit(url).hostname
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
        # a server of TLS answers plain HTTP with an alert, or hangs up on it as one that restarts does
        return tls_fault(url)
    if not isinstance(error, httpx.ConnectError):
        return None
    if isinstance(cause, socket.gaierror):
        return None if cause.errno == socket.EAI_AGAIN else f"there is no host {host}: {cause.strerror}"
    if isinstance(cause, ssl.SSLCertVerificationError):
        trusted = "SSL_CERT_FILE names a file of those who are trusted"
        return f"the certificate of {host} is not trusted: {cause.verify_message}; {trusted}"
    # one that hangs up in the middle may restart
    if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
        said = (cause.reason or str(cause)).replace("_", " ").lower()
        return f"no TLS can be spoken there: {said}; a server of plain HTTP is {_with_scheme(url, 'http')}"
    return None


def _system_error(error: BaseException) -> OSError | None:
    """What `error` came of."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found


def tls_fault(url: str) -> str | None:
    """What is wrong with `url` if it names a server of TLS as one of plain HTTP."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not _speaks_tls(parts.hostname or "", parts.port or _DEFAULT_PORTS["http"]):
        return None
    return f"the server there speaks TLS: it is {_with_scheme(url, 'https')}"


def _with_scheme(url: str, scheme: str) -> str:
    return urlsplit(url)._replace(scheme=scheme).geturl()


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    # whoever it is
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), _PROBE_SECONDS) as connected,
            context.wrap_socket(connected, server_hostname=host),
        ):
            return True
    except OSError:
        return False
