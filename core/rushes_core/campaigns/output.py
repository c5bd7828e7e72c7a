"""Items of a campaign as lines of OpenAI's output and error files, and as rows of a table."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from typing import Any

from rushes_core.campaigns.names import clip_name
from rushes_core.campaigns.tables import CampaignLineError
from rushes_core.models import Job
from rushes_core.states import JobState
from rushes_core.video import Video, error_of

Item = Job | CampaignLineError
Show = Callable[[Job], Video]
"""How a job looks to its client."""

COLUMNS = (
    "custom_id",
    "status",
    "seconds",
    "size",
    "seed",
    "attempts",
    "content_url",
    "error_code",
    "line",
    "video_id",
    "error_message",
    "bytes",
    "sha256",
    "file",
)
"""Of the table; `file` is what the clip is called in an archive."""
FAILED = "failed"
"""The status of a line that could not become a job."""

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What spreadsheets take for the start of a formula."""


def in_order(jobs: Iterable[Job], bad_lines: Iterable[CampaignLineError]) -> Iterator[Item]:
    """Both, each in the order of lines, as one in that order."""
    return merge(jobs, bad_lines, key=line_of)


def line_of(item: Item) -> int:
    assert item.line is not None, "every job of a campaign has its line"
    return item.line


def lines(items: Iterable[Item], show: Show) -> Iterator[bytes]:
    """Lines of JSON, each with its end: OpenAI's members, and `line`.

    An item that has not ended has neither a response nor an error.
    """
    for item in items:
        yield f"{_line(item, show)}\n".encode()


def _line(item: Item, show: Show) -> str:
    is_job = isinstance(item, Job)
    # what the request is known by: the log has it with everything that happened to the job
    number = item.id.partition("_")[2] if is_job else f"{item.campaign_id.partition('_')[2]}_{item.line}"
    custom_id = json.dumps(item.custom_id, ensure_ascii=False)
    head = f'{{"id":{json.dumps(f"batch_req_{number}")},"custom_id":{custom_id},"line":{item.line}'
    if is_job and item.state is JobState.COMPLETED:
        body = show(item).model_dump_json()
        return (
            f'{head},"response":{{"status_code":200,"request_id":{json.dumps(item.id)},"body":{body}}},"error":null}}'
        )
    error = error_members(item)
    text = "null" if error is None else json.dumps(error, ensure_ascii=False, separators=(",", ":"))
    return f'{head},"response":null,"error":{text}}}'


def error_members(item: Item) -> dict[str, Any] | None:
    """Why an item ended without a clip, with its line; None: it has one, or has not ended."""
    if isinstance(item, CampaignLineError):
        return {"code": item.code, "message": item.message, "param": item.param, "line": item.line}
    if not item.state.is_final or item.state is JobState.COMPLETED:
        return None
    error = error_of(item.error or {})
    assert error is not None
    return {**error.model_dump(), "param": None, "line": item.line, "video_id": item.id}


def csv_head() -> bytes:
    """The first row of the table. The mark before it has spreadsheets read it as UTF-8."""
    return b"\xef\xbb\xbf" + _row(COLUMNS)


def csv_rows(items: Iterable[Item], show: Show) -> Iterator[bytes]:
    """Rows of the table, each with its end."""
    for item in items:
        yield _row(_cells(item, show))


def _cells(item: Item, show: Show) -> list[Any]:
    if isinstance(item, CampaignLineError):
        cells: dict[str, Any] = {
            "status": FAILED,
            "custom_id": item.custom_id,
            "error_code": item.code,
            "error_message": item.message,
            "line": item.line,
        }
    else:
        video = show(item)
        has_clip = video.output.bytes is not None and video.output.deleted_at is None
        cells = {
            "custom_id": item.custom_id,
            "status": video.status,
            "seconds": video.seconds,
            "size": video.size,
            "seed": video.seed,
            "attempts": video.attempt,
            "content_url": video.output.content_url if has_clip else None,
            "error_code": None if video.error is None else video.error.code,
            "line": item.line,
            "video_id": item.id,
            "error_message": None if video.error is None else video.error.message,
            "bytes": video.output.bytes,
            "sha256": video.output.sha256,
            "file": clip_name(item.custom_id, line_of(item)) if has_clip else None,
        }
    return [cells.get(name) for name in COLUMNS]


def _row(cells: Iterable[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow([guarded(cell) for cell in cells])
    # a lone surrogate cannot have come into the database
    return text.getvalue().encode()


def guarded(cell: object) -> object:
    """A cell that no spreadsheet takes for a formula: text that looks like the start of one gets an apostrophe before
    it, which spreadsheets do not show. Numbers stay as they are."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULAS) else cell
