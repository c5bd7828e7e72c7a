"""What the client library of the store raises, as errors of our own, with what they mean."""

# botocore is not typed
# pyright: standard

from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from botocore.exceptions import BotoCoreError, ClientError

from rushes_core.errors import BucketMissing, ObjectMissing, StorageError, StorageRefused

_KINDS: dict[str, type[StorageError]] = {
    **dict.fromkeys(("404", "NoSuchKey", "NotFound"), ObjectMissing),
    "NoSuchBucket": BucketMissing,
    **dict.fromkeys(("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"), StorageRefused),
}
"""What is raised, by the code of the store's answer."""
_MAX_SKEW = timedelta(minutes=10)
"""How far this machine's clock is at least from the store's when a refusal is put down to that: S3 bears 15 minutes."""


class translated:
    """Turns the client library's exceptions into `StorageError`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (BotoCoreError, ClientError)):
            kind_told = StorageError if _seconds_ahead(error) else _KINDS.get(code_of(error), StorageError)
            raise kind_told(f"{self._what}: {told(error)}") from error


def code_of(error: BaseException | None) -> str:
    """The code of the store's answer; empty where there was none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def told(error: Exception) -> str:
    """What is said of `error`."""
    ahead = _seconds_ahead(error)
    return f"{error}; this machine's clock is {ahead:+d} seconds from that of the store" if ahead else str(error)


def _seconds_ahead(error: Exception) -> int:
    """How far this machine's clock is from that of the store, if that is why it refused."""
    response = error.response["ResponseMetadata"] if isinstance(error, ClientError) else {}
    date = response.get("HTTPHeaders", {}).get("date", "")
    if response.get("HTTPStatusCode") != HTTPStatus.FORBIDDEN or not date:
        return 0
    try:
        ahead = datetime.now(UTC) - parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return 0
    return round(ahead.total_seconds()) if abs(ahead) > _MAX_SKEW else 0
