"""Who is calling: one bearer key for now, and the project that it belongs to."""

import hmac
import re
from dataclasses import dataclass
from hashlib import sha256

from rushes_core.settings import Settings

from rushes_api.errors import Unauthorized

DEFAULT_PROJECT = "default"
KEY_ID_CHARACTERS = 16

_KEY = re.compile(r"[\x21-\x7e]{1,512}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the project, and an id of the key that says nothing about the key."""

    project: str
    api_key: str


class ApiKeys:
    """The keys that are accepted, as digests."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            ValueError: there is no key, or it holds characters that a header cannot carry.
        """
        key = settings.api_key.get_secret_value()
        if not key:
            raise ValueError("RUSHES_API_KEY is not set: the API does not start without a key")
        if not _KEY.fullmatch(key):
            raise ValueError("RUSHES_API_KEY must be 1 to 512 visible ASCII characters without spaces")
        self._digest = _digest(key)

    def caller(self, authorization: list[str]) -> Caller:
        """The caller who sent these Authorization headers.

        Raises:
            Unauthorized: no key was sent, or not one of ours.
        """
        if len(authorization) != 1:
            raise Unauthorized("an API key is required: send one header `Authorization: Bearer <key>`")
        scheme, _, key = authorization[0].strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("the Authorization header must be `Bearer <key>`")
        if not hmac.compare_digest(_digest(key.strip()), self._digest):
            raise Unauthorized("the API key is not valid")
        return Caller(DEFAULT_PROJECT, self._digest.hex()[:KEY_ID_CHARACTERS])


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
