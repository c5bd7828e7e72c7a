"""What clients are not shown."""

import re

_PLACE = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"]+|(?<![\w./])/(?:[\w.@+-]+/)+[\w.@+-]*", re.IGNORECASE)


def without_places(message: str) -> str:
    """`message` without the URLs and paths in it: what they name is inside, and nobody's business outside."""
    return _PLACE.sub("[...]", message)


def without_password(url: str) -> str:
    """`url` without what stands before an `@` in it, where the user's name and password would be."""
    before, at, after = url.rpartition("@")
    scheme, slashes, _ = before.partition("//")
    return f"{scheme if slashes else ''}{slashes}[...]@{after}" if at else url
