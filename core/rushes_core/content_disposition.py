"""The header by which a browser names what it saves."""

import re
import unicodedata
from urllib.parse import quote

_UNSAFE = re.compile(r"[^A-Za-z0-9._ -]+")
_REPEATED = re.compile(r"([-_ ])\1+")


def content_disposition(filename: str, *, kind: str = "inline") -> str:
    """A Content-Disposition value that is safe for any `filename` (RFC 6266).

    What has no ASCII is left out of the name that old clients take.
    """
    folded = unicodedata.normalize("NFKD", filename).encode("ascii", "ignore").decode()
    ascii_name = _REPEATED.sub(r"\1", _UNSAFE.sub("_", folded)).lstrip("-. ") or "file"
    return f"{kind}; filename=\"{ascii_name}\"; filename*=UTF-8''{quote(filename, safe='')}"
