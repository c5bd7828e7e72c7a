"""The clients of the store: how each is configured, with which credentials, and how long it waits."""

# botocore is not typed
# pyright: standard

import base64
import hashlib
import time
from functools import cache, cached_property
from typing import Any

from botocore.config import Config
from botocore.exceptions import NoCredentialsError
from botocore.loaders import Loader
from botocore.session import Session

from rushes_core.errors import StorageError
from rushes_core.settings import Settings

_REDIRECTS = (301, 302, 307, 308)
_CONNECT_SECONDS = 3
"""How long a connection may take to be made."""
_READ_TIMEOUT_SECONDS = 20
"""How long the store may be silent in the middle of an answer, or of a body that it is sent."""
_LOOK_SECONDS = 1.0
_CHECK_SECONDS = 3
"""The same when it is only asked whether it is there."""
_CONNECTIONS = 32
"""Kept open between requests: as many as the API has threads for them."""


class StoreClients:
    """Made when they are first needed: that takes a moment. What is raised then is raised until it can be done."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._looks_again_at = 0.0
        """When credentials that nobody had are looked for again: that may take seconds, which callers wait in turn."""

    @cached_property
    def internal(self) -> Any:
        return self._new_client(self._settings.s3_endpoint_url)

    @cached_property
    def sending(self) -> Any:
        """For what has a body: on a new connection that must not stall for longer than it may take to connect. One that
        does not come about then takes long, and is tried less often."""
        return self._new_client(
            self._settings.s3_endpoint_url,
            connect_timeout=_READ_TIMEOUT_SECONDS,
            retries={"mode": "standard", "total_max_attempts": 3},
        )

    @cached_property
    def public(self) -> Any:
        return self._new_client(self._settings.s3_public_endpoint_url or self._settings.s3_endpoint_url)

    @cached_property
    def impatient(self) -> Any:
        return self._new_client(
            self._settings.s3_endpoint_url, read_timeout=_CHECK_SECONDS, retries={"total_max_attempts": 1}
        )

    def _new_client(self, endpoint_url: str, **options: Any) -> Any:
        settings = self._settings
        style = settings.s3_addressing_style
        if style == "auto":
            # a dotted bucket name or a bare address cannot be a virtual host
            style = "path" if endpoint_url else "virtual"
        session = Session()
        session.register_component("data_loader", _loader())
        if not settings.s3_access_key_id:
            # the client would never look for them again, and what has them may only not be up yet
            if time.monotonic() < self._looks_again_at:
                raise NoCredentialsError
            if session.get_credentials() is None:
                self._looks_again_at = time.monotonic() + _LOOK_SECONDS
                raise NoCredentialsError
        client = session.create_client(
            "s3",
            region_name=settings.s3_region,
            endpoint_url=endpoint_url or None,
            aws_access_key_id=settings.s3_access_key_id or None,
            aws_secret_access_key=settings.s3_secret_access_key.get_secret_value() or None,
            config=Config(
                # presigned URLs for a custom endpoint would be signed with the old version otherwise
                signature_version="s3v4",
                tcp_keepalive=True,
                max_pool_connections=_CONNECTIONS,
                # everything is read by range, and some stores say the checksum of the whole then
                response_checksum_validation="when_required",
                s3={"addressing_style": style},
                **{
                    "connect_timeout": _CONNECT_SECONDS,
                    "read_timeout": _READ_TIMEOUT_SECONDS,
                    "retries": {"mode": "standard", "max_attempts": 4},
                    **options,
                },
            ),
        )
        client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
        if endpoint_url:
            client.meta.events.register_first("needs-retry.s3", _refuse_redirect)
        return client


@cache
def _loader() -> Loader:
    """What reads descriptions of services for botocore, and keeps them: to read those of S3 is most of the time that it
    takes to make a client."""
    return Session().get_component("data_loader")


def _add_md5(params: dict[str, Any], **_: object) -> None:
    # botocore sends a newer checksum, and many a store refuses to delete without this one
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _refuse_redirect(response: Any, **_: object) -> None:
    # botocore takes it for a bucket of another region, and asks which until it may call no deeper
    if response is None:
        return
    answer, _ = response
    if answer.status_code in _REDIRECTS and "x-amz-bucket-region" not in answer.headers:
        where = answer.headers.get("location", "nowhere")
        raise StorageError(f"the store's endpoint answers {answer.status_code} and leads to {where}")
