"""What the clip of an item is called as a file: the same in an archive and in a directory that it is fetched into."""

import re

from rushes_core.variants import VIDEO

_MAX_NAME = 120
# what may be part of a name everywhere, alone and in lower case only: some file systems take A and a for the same
_PLAIN = re.compile(r"[a-z0-9][a-z0-9._-]*", re.ASCII)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+", re.ASCII)
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.ASCII)
"""Names that are no files on Windows."""
_OWN = frozenset({"manifest", "missing"})


def clip_name(custom_id: str | None, line: int) -> str:
    """Name of the clip of an item: its `custom_id` where that is a name everywhere, and otherwise what is left of it
    with the line, which makes it one of a kind: no plain name has a `~`."""
    wanted = custom_id or ""
    is_plain = _PLAIN.fullmatch(wanted) and len(wanted) <= _MAX_NAME and not wanted.endswith(".")
    if is_plain and not _DEVICES.fullmatch(wanted) and wanted not in _OWN:
        return f"{wanted}{VIDEO.extension}"
    kept = _UNSAFE.sub("_", wanted)[:_MAX_NAME].strip("._-") or "line"
    return f"{kept}~{line}{VIDEO.extension}"
