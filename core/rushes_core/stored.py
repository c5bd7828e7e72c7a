"""What is stored of a job, as clients are told of it."""

import re
import unicodedata
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

from pydantic import BaseModel

from rushes_core.models import Job
from rushes_core.variants import PICTURES, VARIANTS, VIDEO, Variant

_SEEN_CHARACTERS = 400
_NAME_CHARACTERS = 60
_NAME_BYTES = 160
"""With the id and what follows it, within the 255 bytes that file systems allow."""
_MARK = re.compile(r"</?[a-z]+>", re.IGNORECASE)
"""Such as `<d>`, which marks dialogue."""


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """One object of a completed job."""

    variant: Variant
    key: str
    bytes: int
    sha256: str
    details: dict[str, Any]


class Tiles(BaseModel):
    """How the frames of a spritesheet lie: row by row, evenly spaced, each the middle of its part of the clip."""

    columns: int
    count: int
    width: int
    height: int


class OutputVariant(BaseModel):
    """One file that can be fetched."""

    name: str
    content_type: str
    bytes: int
    url: str
    width: int | None = None
    height: int | None = None
    time_seconds: float | None = None
    """Of a thumbnail: the moment that it shows."""
    tiles: Tiles | None = None


def stored_variants(job: Job) -> dict[str, StoredVariant]:
    """By name, what the store has of a job; empty unless it completed and retention has left it."""
    result = job.result
    if result is None or "deleted_at" in result:
        return {}
    # those that a newer release adds are not known here
    described: dict[str, dict[str, Any]] = {VIDEO.name: result, **(result.get("variants") or {})}
    return {
        name: StoredVariant(variant, one["key"], int(one["bytes"]), one["sha256"], one)
        for name, variant in VARIANTS.items()
        if (one := described.get(name)) is not None
    }


def variants_of(job: Job) -> list[OutputVariant]:
    """What can be fetched of a job."""
    return [
        OutputVariant(
            name=name,
            content_type=stored.variant.content_type,
            bytes=stored.bytes,
            url=content_url(job, stored.variant),
            **{field: stored.details.get(field) for field in ("width", "height", "time_seconds", "tiles")},
        )
        for name, stored in stored_variants(job).items()
    ]


def content_url(job: Job, variant: Variant = VIDEO) -> str:
    query = "" if variant == VIDEO else f"?variant={variant.name}"
    return f"/v1/videos/{job.id}/content{query}"


def filename(job: Job, variant: Variant) -> str:
    """What a browser saves a file under: the first words of the prompt and the id.

    Only letters, digits and symbols such as emoji are kept of the prompt, so that no file system objects.
    """
    words = unicodedata.normalize("NFC", _MARK.sub(" ", job.prompt[:_SEEN_CHARACTERS]))
    kept = "".join(character if _is_kept(character) else " " for character in words)
    short = "-".join(kept.split())[:_NAME_CHARACTERS].encode()[:_NAME_BYTES].decode(errors="ignore")
    name = "".join(dropwhile(unicodedata.combining, short)).strip("-")
    kind = f"-{variant.name}" if variant in PICTURES else ""
    return f"{name}-{job.id}{kind}{variant.extension}".lstrip("-")


def _is_kept(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] in "LN" or category in ("So", "Mn", "Mc")
