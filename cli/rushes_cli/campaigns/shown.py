"""What a person is told of a campaign: a line while it runs, and paragraphs at its end."""

import math
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TextIO

from rushes_cli.terminal import BAR_WIDTH

WAITING_WORDS = {
    "paused": "paused",
    "window": "outside its window",
    "not_before": "not yet its time",
    "budget": "budget used up",
    "quota": "GPU time of its key's day used up",
    "approval": "waits for approval",
}


def bar(percent: float) -> str:
    filled = min(BAR_WIDTH, int(BAR_WIDTH * percent / 100))
    return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {int(percent):3d} %"


def describe(campaign: dict[str, Any], *, now: datetime | None = None) -> str:
    """Bar, status, counts, and when it ends."""
    words = [f"{bar(campaign['progress'])}  {status_words(campaign)}", items_text(campaign)]
    if end := eta_text(campaign.get("eta"), now=now):
        words.append(end)
    return "  ".join(words)


def status_words(campaign: dict[str, Any]) -> str:
    if campaign.get("dry_run"):
        return f"dry run, {campaign['status']}"
    reason = campaign.get("hold_reason")
    if campaign["status"] in ("in_progress", "validating") and reason is not None:
        return f"{campaign['status']}, {WAITING_WORDS.get(reason, reason)}"
    return campaign["status"]


def counts_text(counts: dict[str, int]) -> str:
    """The numbers that are not 0, of the total."""
    names = ("completed", "failed", "cancelled", "expired", "in_progress", "queued")
    said = [f"{counts.get(name, 0):,} {name.replace('in_progress', 'running')}" for name in names if counts.get(name)]
    return f"{', '.join(said) or 'nothing yet'} of {counts['total']:,}"


def items_text(campaign: dict[str, Any]) -> str:
    """The counts; of a dry run, which has no items, those of its lines."""
    report: dict[str, Any] = campaign.get("report") or {}
    if not campaign.get("dry_run"):
        return counts_text(campaign["request_counts"])
    return f"{report['valid']:,} good, {report['invalid']:,} bad" if "lines" in report else "none"


def eta_text(eta: dict[str, Any] | None, *, now: datetime | None = None) -> str:
    """When it is expected to end, with the later time that nine of ten keep."""
    if not eta or not eta.get("completes_at"):
        return ""
    at = _clock(eta["completes_at"], now)
    latest = eta.get("completes_at_latest")
    text = (
        f"ends {at}"
        if not latest or _clock(latest, now) == at
        else f"ends {at}, by {_clock(latest, now)} at the latest"
    )
    return f"{text}, not in this window" if eta.get("fits_window") is False else text


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """What a dry run found."""
    if "lines" not in report:
        return
    yield f"{report['lines']:,} requests: {report['valid']:,} good, {report['invalid']:,} bad"
    seconds = report.get("gpu_seconds")
    taken = "unknown: nothing like it was measured" if seconds is None else duration_text(seconds)
    yield f"{report['frames']:,} frames, GPU time {taken}"
    if end := eta_text(report):
        yield f"{end}, within this window" if report.get("fits_window") else end
    errors: list[dict[str, Any]] = report.get("errors") or []
    for error in errors:
        yield plain(f"line {error.get('line')}: {error.get('message')} ({error.get('code')})")
    if (more := report["invalid"] - len(errors)) > 0:
        yield f"and {more:,} more bad lines"


def _clock(unix: float, now: datetime | None) -> str:
    at, today = datetime.fromtimestamp(unix).astimezone(), (now or datetime.now()).astimezone()
    return f"{at:%H:%M}" if at.date() == today.date() else f"{at:%a %H:%M}"


def plain(text: str) -> str:
    """`text` of somebody else's on one line, with what a terminal would obey written out."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def bytes_text(count: float) -> str:
    """As 1.2 GB, in powers of 1,000."""
    unit = min(3, int(math.log10(count) // 3)) if count >= 1 else 0
    return f"{count:.0f} B" if unit == 0 else f"{count / 1_000**unit:.1f} {'kMG'[unit - 1]}B"


def duration_text(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


class Line:
    """One line that is rewritten on a terminal; elsewhere a line for each `key` that differs from the last."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._began = time.monotonic()
        self._last: object = None
        self._is_open = False

    def show(self, text: str, *, key: object = None) -> None:
        """Show `text`; not on a terminal only if `key`, or without one the text, has changed."""
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns
            self._stream.write(f"\r\x1b[K{text[: columns - 1]}")
            self._stream.flush()
            self._is_open = True
        elif (said := text if key is None else key) != self._last:
            print(f"{time.monotonic() - self._began:6.1f} s  {text}", file=self._stream, flush=True)
            self._last = said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._is_open:
            self._stream.write("\n")
            self._stream.flush()
