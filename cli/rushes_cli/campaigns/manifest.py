"""The manifest of a campaign on this disk: what was fetched, and what is to be."""

import csv
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from rushes_cli.campaigns.client import Client, Refused, Unreachable, refusal
from rushes_cli.campaigns.download import Clip, clip_of, part_of
from rushes_cli.main import UsageError

LINES, TABLE = "manifest.jsonl", "manifest.csv"


def save(client: Client, campaign_id: str, target: Path, *, form: str) -> None:
    """Write a manifest as it comes, and give it its name when it is whole.

    Raises:
        Refused, Unreachable
    """
    path = f"/v1/campaigns/{campaign_id}/manifest"
    reason = ""
    for attempt in range(5):
        try:
            with client.stream(path, format=form) as answer, _whole(target) as part, part.open("wb") as file:
                if answer.is_error:
                    answer.read()
                    raise refusal(answer)
                for piece in answer.iter_bytes():
                    file.write(piece)
            return
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        except Refused as error:
            if error.status < 500:
                raise
            reason = str(error)
        time.sleep(2**attempt / 4)
    raise Unreachable(f"{client.url}: {reason}")


def renew(client: Client, campaign_id: str, folder: Path) -> None:
    """Write the manifest as it is now, and leave no part of a clip that was deleted since the last one.

    Raises:
        Refused, Unreachable
    """
    target = folder / LINES
    new = target.with_name(f".{LINES}.next")
    try:
        save(client, campaign_id, new, form="jsonl")
        # while the last one still tells whose they are: whatever ends this, they are found again
        for part in _parts(target) - _parts(new):
            part.unlink()
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A path beside `target`, what is written to which takes its place when it is whole, and is gone otherwise.

    Raises:
        OSError: names `target`.
    """
    part = target.with_name(f".{target.name}.new")
    try:
        yield part
        part.replace(target)
    except OSError as error:
        # a write that fails names nothing
        error.filename = error.filename or str(target)
        raise
    finally:
        part.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for text in file:
            yield json.loads(text)


def owner(folder: Path) -> str | None:
    """The campaign whose clips are here, if one can be told.

    Raises:
        UsageError: what is called as a manifest is none, and nothing to be replaced by one.
    """
    path = folder / LINES
    try:
        bodies = ((line.get("response") or {}).get("body") or {} for line in _lines(path))
        return next((body["campaign_id"] for body in bodies if body.get("campaign_id")), None)
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError):
        raise UsageError(f"{path} is no manifest of a campaign: give the clips a directory of their own") from None


def clips(folder: Path) -> Iterator[Clip]:
    """Of the items that have one."""
    return _clips(folder / LINES)


def _clips(path: Path) -> Iterator[Clip]:
    return (clip for clip in map(clip_of, _lines(path)) if clip is not None)


def _parts(path: Path) -> set[Path]:
    """What is here in part of the clips in a manifest. Other files of such names may be somebody else's."""
    # most often there are none, and a manifest may have a million lines
    if not (here := {part for part in path.parent.glob("*.part") if part.is_file()}):
        return here
    try:
        return here.intersection(part_of(path.with_name(one.name)) for one in _clips(path))
    except FileNotFoundError:
        return set()


def survey(folder: Path) -> tuple[Counter[str], int]:
    """How many items have a `clip`, have `failed` or are `open`, and the bytes of the clips."""
    counts: Counter[str] = Counter()
    total = 0
    for line in _lines(folder / LINES):
        if (clip := clip_of(line)) is not None:
            counts["clip"] += 1
            total += clip.bytes
        else:
            counts["failed" if line.get("error") or line.get("response") else "open"] += 1
    return counts, total


def save_table(client: Client, campaign_id: str, folder: Path) -> None:
    """Write the manifest as CSV, with the file of each clip that is here, and of no other.

    Raises:
        Refused, Unreachable
    """
    table = folder / TABLE
    save(client, campaign_id, table, form="csv")
    with (
        table.open(encoding="utf-8-sig", newline="") as old,
        _whole(table) as part,
        part.open("w", encoding="utf-8-sig", newline="") as new,
    ):
        rows = csv.DictReader(old)
        writer = csv.DictWriter(new, rows.fieldnames or ())
        writer.writeheader()
        for row in rows:
            is_here = bool(row["file"]) and (folder / row["file"]).is_file()
            writer.writerow(row if is_here else row | {"file": ""})
