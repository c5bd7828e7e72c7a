"""Public identifiers: a prefix and a ULID, so that they sort by creation time."""

import re
import secrets
import time
from collections.abc import Iterator

from ulid import ULID

VIDEO_PREFIX = "video_"
REQUEST_PREFIX = "req_"
KEY_PREFIX = "key_"
FILE_PREFIX = "file_"
ENDPOINT_PREFIX = "whe_"
DELIVERY_PREFIX = "whd_"
CAMPAIGN_PREFIX = "batch_"
TEST_EVENT_PREFIX = "evt_test_"

_DELIVERY = re.compile(rf"{DELIVERY_PREFIX}[0-9a-f]{{32}}", re.ASCII)


def new_video_id() -> str:
    """A new job id, `video_` and 26 characters of Crockford base 32."""
    return f"{VIDEO_PREFIX}{ULID()}"


def video_ids(after: str | None = None) -> Iterator[str]:
    """New job ids without end, each greater than the one before it.

    Args:
        after: an id that all of them are greater than, whatever the clock says.
    """
    last = 0 if after is None else int.from_bytes(ULID.from_str(after.removeprefix(VIDEO_PREFIX)).bytes)
    while True:
        drawn = int.from_bytes(ULID().bytes)
        # one more in the same millisecond would be in no order: it is the next number
        last = drawn if drawn >> 80 > last >> 80 else last + 1
        yield f"{VIDEO_PREFIX}{ULID(last.to_bytes(16))}"


def first_video_id(unix: float) -> str:
    """The least id of a job that was created at this time, in Unix seconds by the clock that drew it, or later."""
    milliseconds = max(0, int(unix * 1_000))
    return f"{VIDEO_PREFIX}{ULID(milliseconds.to_bytes(6, 'big') + bytes(10))}"


def new_request_id() -> str:
    """An id for a request that brought none."""
    return f"{REQUEST_PREFIX}{ULID()}"


def new_key_id() -> str:
    """An id for a new API key. It is no secret."""
    return f"{KEY_PREFIX}{ULID()}"


def new_file_id() -> str:
    """An id for an uploaded file."""
    return f"{FILE_PREFIX}{ULID()}"


def new_campaign_id() -> str:
    """An id for a campaign, which OpenAI calls a batch."""
    return f"{CAMPAIGN_PREFIX}{ULID()}"


def new_endpoint_id() -> str:
    """An id for an endpoint of webhooks."""
    return f"{ENDPOINT_PREFIX}{ULID()}"


def new_test_event_id() -> str:
    """An id for an event that tells of nothing."""
    return f"{TEST_EVENT_PREFIX}{ULID()}"


def new_delivery_id() -> str:
    """An id for a delivery, as the function `new_webhook_delivery_id` of the database draws them too."""
    return f"{DELIVERY_PREFIX}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def is_delivery_id(value: str) -> bool:
    """Whether `value` is well formed as the id of a delivery; says nothing about its existence."""
    return _DELIVERY.fullmatch(value) is not None


def is_endpoint_id(value: str) -> bool:
    """Whether `value` is well formed as the id of a registered endpoint; says nothing about its existence."""
    return _is_id(value, ENDPOINT_PREFIX)


def is_video_id(value: str) -> bool:
    """Whether `value` is well formed as a job id; says nothing about its existence."""
    return _is_id(value, VIDEO_PREFIX)


def is_key_id(value: str) -> bool:
    """Whether `value` is well formed as the id of an API key; says nothing about its existence."""
    return _is_id(value, KEY_PREFIX)


def is_file_id(value: str) -> bool:
    """Whether `value` is well formed as the id of a file; says nothing about its existence."""
    return _is_id(value, FILE_PREFIX)


def is_campaign_id(value: str) -> bool:
    """Whether `value` is well formed as the id of a campaign; says nothing about its existence."""
    return _is_id(value, CAMPAIGN_PREFIX)


def _is_id(value: str, prefix: str) -> bool:
    if not value.startswith(prefix):
        return False
    text = value.removeprefix(prefix)
    try:
        return str(ULID.from_str(text)) == text
    except ValueError:
        return False
