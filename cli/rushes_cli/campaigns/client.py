"""Requests to the API, repeated while it restarts."""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
from rushes_core.errors import RushesError

from rushes_cli.campaigns.address import fault_of, tls_fault
from rushes_cli.main import UsageError

DEFAULT_URL = "http://127.0.0.1:8000"
PATIENCE_SECONDS = 60.0
"""How long an API that does not answer is asked again."""
TIMEOUT_SECONDS, CONNECT_SECONDS = 60.0, 10.0
"""Of one answer, unless somebody has less patience."""
STREAM_TIMEOUT = httpx.Timeout(20, connect=10)
"""Of answers that are read as they come and go on where they broke off."""
PASSING = frozenset({429, 502, 503, 504})
"""Status codes after which a request is sent again, unless the answer says that this is of no use."""
_UNDER_WAY = "idempotency_in_progress"
"""The code of a request that is sent again while the first one has no answer yet."""
_NO_ROUTE = "unknown_url"
"""The code of an answer to a path that the API does not have."""
_LOCAL = ("127.0.0.1", "localhost", "::1")
_FIRST_DELAY, _LONGEST_DELAY = 0.25, 5.0


class Refused(RushesError):
    """The API answered with an error."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(f"{message} ({code})" if code else message)
        self.status = status
        self.code = code
        self.param = param


class Unreachable(RushesError):
    """The API did not answer for as long as it was asked, or always that it be asked later: `refused` says so then."""

    def __init__(self, message: str, *, refused: Refused | None = None) -> None:
        super().__init__(message)
        self.refused = refused


class WrongAddress(Unreachable, UsageError):
    """Nor would it: `RUSHES_URL` names no server that is spoken to in this way."""


class Client:
    """The API at an address, with a key. Threads may share one."""

    def __init__(
        self, url: str, key: str, *, patience: float = PATIENCE_SECONDS, on_wait: Callable[[str], None] | None = None
    ) -> None:
        self.url = url
        self._patience = patience
        self._on_wait = on_wait
        self._has_answered = False
        """What fails from then on is no fault of the address."""
        self._http = httpx.Client(
            base_url=url,
            verify=httpx.create_ssl_context() if url.startswith("https:") else True,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(min(TIMEOUT_SECONDS, patience), connect=min(CONNECT_SECONDS, patience)),
            # a proxy of the environment is not meant for this machine
            trust_env=urlsplit(url).hostname not in _LOCAL,
            limits=httpx.Limits(max_connections=None),
        )

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        """The answer's object.

        Raises:
            Refused, Unreachable
        """
        wanted = {name: value for name, value in parameters.items() if value is not None}
        return self._repeat(lambda: self._http.get(path, params=wanted))

    def post(
        self,
        path: str,
        members: Mapping[str, Any] | None = None,
        *,
        passing: Collection[int] = PASSING,
        on_repeat: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """The answer's object. Repeated after an answer that was lost it has no second effect.

        Args:
            passing: status codes after which it is sent again.
            on_repeat: called before it is.

        Raises:
            Refused, Unreachable
        """
        headers = {"Idempotency-Key": uuid4().hex}
        body = dict(members) if members else None
        return self._repeat(lambda: self._http.post(path, json=body, headers=headers), passing, on_repeat)

    def delete(self, path: str) -> dict[str, Any]:
        """The answer's object.

        Raises:
            Refused, Unreachable
        """
        return self._repeat(lambda: self._http.delete(path))

    def wait(self, path: str, seconds: int) -> dict[str, Any]:
        """The object at `path`, once it has come to an end, or as it is after `seconds`.

        Raises:
            Refused, Unreachable
        """
        headers = {"Prefer": f"wait={seconds}"}
        timeout = httpx.Timeout(seconds + 30, connect=10)
        return self._repeat(lambda: self._http.get(path, headers=headers, timeout=timeout))

    def patch(self, path: str, members: Mapping[str, Any]) -> dict[str, Any]:
        """The answer's object.

        Raises:
            Refused, Unreachable
        """
        return self._repeat(lambda: self._http.patch(path, json=dict(members)))

    def upload(self, open_file: Callable[[], Any], *, name: str, keep_seconds: int | None = None) -> dict[str, Any]:
        """Store a file of requests, until it is deleted or for so long; `open_file` is called for every attempt.

        Raises:
            Refused, Unreachable
        """
        headers = {"Idempotency-Key": uuid4().hex}
        fields = {"purpose": "batch"}
        if keep_seconds is not None:
            fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(keep_seconds)}

        def send() -> httpx.Response:
            with open_file() as file:
                return self._http.post(
                    "/v1/files",
                    data=fields,
                    files={"file": (name, file, "application/octet-stream")},
                    headers=headers,
                    timeout=httpx.Timeout(600, connect=10),
                )

        return self._repeat(send)

    @contextmanager
    def stream(
        self, url: str, *, headers: Mapping[str, str] | None = None, **parameters: Any
    ) -> Iterator[httpx.Response]:
        """An answer that is read as it comes; asked for once. A redirect is the caller's to follow."""
        with self._http.stream(
            "GET", url, headers=dict(headers or {}), params=parameters or None, timeout=STREAM_TIMEOUT
        ) as answer:
            yield answer

    def pages(self, path: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """Every object of a list, page by page."""
        after = None
        while True:
            page = self.get(path, after=after, **parameters)
            yield from page["data"]
            if not page["has_more"]:
                return
            after = page["last_id"]

    def _repeat(
        self,
        send: Callable[[], httpx.Response],
        passing: Collection[int] = PASSING,
        on_repeat: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        deadline = time.monotonic() + self._patience
        delay = _FIRST_DELAY
        while True:
            wait = delay
            refused = None
            try:
                answer = send()
            except httpx.TransportError as error:
                self._check_address(partial(fault_of, self.url, error))
                reason = _reason(error)
            else:
                if answer.is_success:
                    found = _object(answer)
                    self._has_answered = True
                    return found
                refused = refusal(answer)
                if refused.code == _NO_ROUTE and not self._has_answered:
                    raise WrongAddress(f"RUSHES_URL={self.url}: {refused}")
                self._has_answered |= refused.code is not None
                is_under_way = refused.code == _UNDER_WAY
                is_passing = answer.status_code in passing and answer.headers.get("x-should-retry") != "false"
                if not (is_under_way or is_passing):
                    if answer.status_code == 400:
                        # so a server of TLS may answer plain HTTP
                        self._check_address(partial(tls_fault, self.url))
                    raise refused
                reason = str(refused)
                wait = max(delay, retry_after(answer))
            if time.monotonic() + wait > deadline:
                raise Unreachable(f"{self.url}: {reason}; given up after {self._patience:g} s", refused=refused)
            if self._on_wait is not None:
                self._on_wait(reason)
            time.sleep(wait)
            if on_repeat is not None:
                on_repeat()
            delay = min(2 * delay, _LONGEST_DELAY)

    def _check_address(self, fault_there: Callable[[], str | None]) -> None:
        """Raise `WrongAddress` when there is one, unless the API has answered before."""
        if not self._has_answered and (fault := fault_there()) is not None:
            raise WrongAddress(f"RUSHES_URL={self.url}: {fault}")


def from_environment(
    *,
    patience: float = PATIENCE_SECONDS,
    on_wait: Callable[[str], None] | None = None,
    needs: str = "the scope batches",
) -> Client:
    """A client for what `RUSHES_URL` and `RUSHES_KEY` name, or the operator's `RUSHES_API_KEY`.

    Args:
        needs: what the key must have, in words.

    Raises:
        UsageError
    """
    url = os.environ.get("RUSHES_URL", "").strip() or DEFAULT_URL
    _check(url)
    key = next(filter(None, (os.environ.get(name, "").strip() for name in ("RUSHES_KEY", "RUSHES_API_KEY"))), None)
    if key is None:
        raise UsageError(f"RUSHES_KEY is missing: a key with {needs}; `rushes up` prints one")
    if not (key.isascii() and key.isprintable()):
        raise UsageError("RUSHES_KEY has characters that no key has")
    try:
        return Client(url.rstrip("/").removesuffix("/v1"), key, patience=patience, on_wait=on_wait)
    except OSError as error:
        raise UsageError(f"SSL_CERT_FILE={os.environ.get('SSL_CERT_FILE')}: {error.strerror or error}") from None


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(url).host.encode("idna")
    except (ValueError, httpx.InvalidURL):
        parts, is_one = urlsplit(""), False
    if not is_one:
        raise UsageError(f"RUSHES_URL must be the address of the API, as {DEFAULT_URL}, got {url!r}")
    if "@" in parts.netloc:
        raise UsageError("RUSHES_URL must be without a name and a password: the key is RUSHES_KEY")
    if parts.query or parts.fragment:
        raise UsageError(f"RUSHES_URL must end before `?` and `#`, got {url!r}")


def refusal(answer: httpx.Response) -> Refused:
    """The error that an answer tells of."""
    try:
        error = answer.json()["error"]
        return Refused(answer.status_code, str(error["message"]), code=error.get("code"), param=error.get("param"))
    except (ValueError, KeyError, TypeError, AttributeError):
        what = f"{answer.request.method} {answer.request.url.path} answered {answer.status_code}"
        return Refused(answer.status_code, what)


def retry_after(answer: httpx.Response) -> float:
    """Seconds that the API asks to be left alone."""
    try:
        return min(120.0, max(0.0, float(answer.headers.get("retry-after", 0))))
    except ValueError:
        return 0.0


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        value = answer.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Refused(answer.status_code, f"{answer.request.url} is not the API of Rushes")
    return value


def _reason(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__
