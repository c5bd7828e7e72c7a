"""Signatures by Standard Webhooks over the bytes that are sent, and secrets that are encrypted at rest."""

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rushes_core.errors import RushesError
from rushes_core.setting_rules import listed
from rushes_core.settings import Settings

SECRET_PREFIX = "whsec_"
SECRET_BYTES = 32
_HINT_CHARACTERS = 4


class WebhooksNotConfigured(RushesError):
    """There is no key to encrypt secrets with."""

    code = "webhooks_not_configured"

    def __init__(self) -> None:
        super().__init__("webhooks are not configured here: RUSHES_WEBHOOK_KEY is not set")


class SecretUnreadable(RushesError):
    """A secret was encrypted with a key that is not among those of `RUSHES_WEBHOOK_KEY`."""

    code = "secret_unreadable"


@dataclass(frozen=True, slots=True)
class SigningSecret:
    """What a receiver verifies with: `whsec_` and base64. It is shown once."""

    text: str

    @classmethod
    def new(cls) -> "SigningSecret":
        return cls(SECRET_PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode())

    @property
    def hint(self) -> str:
        """Enough for people to tell secrets apart."""
        return f"{SECRET_PREFIX}...{self.text.rstrip('=')[-_HINT_CHARACTERS:]}"

    @property
    def key(self) -> bytes:
        """The bytes that sign: not the text."""
        return base64.b64decode(self.text.removeprefix(SECRET_PREFIX))

    def __repr__(self) -> str:
        return "SigningSecret(...)"


class Vault:
    """Encrypts secrets and decrypts them."""

    def __init__(self, settings: Settings) -> None:
        keys = listed(settings.webhook_key.get_secret_value())
        self._fernet = MultiFernet([Fernet(key) for key in keys]) if keys else None

    def lock(self, secret: SigningSecret) -> bytes:
        """
        Raises:
            WebhooksNotConfigured
        """
        return self._opened().encrypt(secret.text.encode())

    def unlock(self, token: bytes) -> SigningSecret:
        """
        Raises:
            WebhooksNotConfigured, SecretUnreadable
        """
        try:
            return SigningSecret(self._opened().decrypt(token).decode())
        except InvalidToken as error:
            raise SecretUnreadable("the secret was encrypted with another RUSHES_WEBHOOK_KEY") from error

    def check(self) -> None:
        """
        Raises:
            WebhooksNotConfigured
        """
        self._opened()

    def _opened(self) -> MultiFernet:
        if self._fernet is None:
            raise WebhooksNotConfigured
        return self._fernet


class PublicKeys:
    """Keys that sign for the whole deployment: a receiver needs no secret to verify with them."""

    def __init__(self, settings: Settings) -> None:
        seeds = [base64.b64decode(key) for key in listed(settings.webhook_ed25519_key.get_secret_value())]
        self._keys = [Ed25519PrivateKey.from_private_bytes(seed) for seed in seeds]

    def sign(self, message: bytes) -> list[str]:
        """The signature with the first key; none without keys."""
        return [f"v1a,{base64.b64encode(key.sign(message)).decode()}" for key in self._keys[:1]]

    def jwks(self) -> dict[str, Any]:
        """All of them, as RFC 8037 writes them."""
        return {"keys": [_jwk(key.public_key().public_bytes_raw()) for key in self._keys]}


def sign(
    event_id: str, timestamp: int, body: bytes, keys: Sequence[SigningSecret], public_keys: PublicKeys
) -> dict[str, str]:
    """The headers that go with `body`.

    Args:
        timestamp: of the attempt, in Unix seconds.
        keys: one, and the one before it while both are in use.
    """
    message = b"%s.%d.%s" % (event_id.encode(), timestamp, body)
    signatures = [
        f"v1,{base64.b64encode(hmac.new(secret.key, message, hashlib.sha256).digest()).decode()}" for secret in keys
    ]
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures + public_keys.sign(message)),
    }


def _jwk(public: bytes) -> dict[str, str]:
    members = {"crv": "Ed25519", "kty": "OKP", "x": _base64url(public)}
    # RFC 7638: these members in this order
    thumbprint = hashlib.sha256(json.dumps(members, separators=(",", ":"), sort_keys=True).encode()).digest()
    return members | {"alg": "EdDSA", "use": "sig", "kid": _base64url(thumbprint)}


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
