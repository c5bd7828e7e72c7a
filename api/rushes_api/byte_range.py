"""Range requests on one representation of known length (RFC 9110, sections 13 and 14)."""

import re
from dataclasses import dataclass

_SPEC = re.compile(r"(?P<first>[0-9]*)-(?P<last>[0-9]*)", re.ASCII)
_ETAG = re.compile(r"""(W/)?("[^"]*")""")
_HUGE = 10**18


class Unsatisfiable(ValueError):
    """No byte of the representation is asked for, or the range is malformed."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `first` to `last`, both included."""

    first: int
    last: int

    @property
    def num_bytes(self) -> int:
        return self.last - self.first + 1


def parse_range(header: str | None, num_bytes: int) -> ByteRange | None:
    """The part of `num_bytes` bytes that a Range header asks for; None for all of it.

    Other units than bytes and several ranges at once are answered with the whole, as the RFC allows.

    Raises:
        Unsatisfiable
    """
    if header is None:
        return None
    unit, equals, specs = header.partition("=")
    if not equals or unit.strip().lower() != "bytes":
        return None
    parts = [part.strip() for part in specs.split(",") if part.strip()]
    if len(parts) > 1:
        return None
    match = _SPEC.fullmatch(parts[0]) if parts else None
    if match is None or not (match["first"] or match["last"]):
        raise Unsatisfiable(f"not a byte range: {header[:100]!r}")
    if not match["first"]:
        length = min(_number(match["last"]), num_bytes)
        first, last = num_bytes - length, num_bytes - 1
    else:
        first = _number(match["first"])
        asked = _number(match["last"]) if match["last"] else num_bytes - 1
        if match["last"] and asked < first:
            raise Unsatisfiable(f"the range {first}-{asked} ends before it begins")
        last = min(asked, num_bytes - 1)
    if first > last:
        raise Unsatisfiable(f"the range lies beyond the {num_bytes} bytes that there are")
    return ByteRange(first, last)


def _number(digits: str) -> int:
    return int(digits) if len(digits) <= 18 else _HUGE


def etag_matches(header: str | None, etag: str, *, weak: bool = True) -> bool:
    """Whether an If-Match or If-None-Match header names `etag` or is `*`."""
    if header is None:
        return False
    if header.strip() == "*":
        return True
    return any(tag == etag and (weak or not is_weak) for is_weak, tag in _ETAG.findall(header))
