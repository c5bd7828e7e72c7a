"""Statements that make jobs of a campaign's lines. Nothing here executes.

A campaign is loaded by one process at a time, which holds a lease on its row. Each chunk of lines is a transaction of
whoever holds the lease: the jobs, the errors, and how far the file is read. A chunk is loaded or it is not, and whoever
goes on begins where the last one ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Interval, Select, TextClause, Update, and_, cast, exists, func, null, or_, select, text, update
from sqlalchemy.sql.dml import ReturningUpdate
from sqlalchemy.sql.elements import ColumnElement

from rushes_core.campaigns.items import Item
from rushes_core.campaigns.lines import FileUnreadable, LineError, Position
from rushes_core.campaigns.tables import Campaign, CampaignCount
from rushes_core.models import ApiKey, Job

LEASE_SECONDS = 12.0
"""How long a process that works on a campaign may be silent before another one takes over."""
STATEMENT_SECONDS = 50
STATEMENT_LIMIT = f"SET LOCAL statement_timeout = '{STATEMENT_SECONDS}s'"
"""For statements that change some thousands of rows, which a busy server may take longer for than for others. Who runs
them holds the campaign's row, which nobody takes over meanwhile."""
DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
MAX_REPORTED = 1_000
"""Bad lines that are told of a file that was only read."""

MAX_FAILURES = 5
"""Failures in a row, other than outages, after which the rest of a file is given up."""
_EXPIRED = "batch_expired"
"""OpenAI's code for it."""

_IS_UNREAD = and_(
    Campaign.state.in_(("validating", "in_progress")), Campaign.loaded_at.is_(None), Campaign.deleted_at.is_(None)
)
_LOADS = and_(_IS_UNREAD, or_(Campaign.dry_run, Campaign.expires_at.is_(None), Campaign.expires_at > func.now()))
_IS_FREE = or_(Campaign.lease_until.is_(None), Campaign.lease_until <= func.now())


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may write to a campaign."""

    campaign_id: str
    fence: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """A line that becomes a job."""

    line: int
    job_id: str
    item: Item


@dataclass(frozen=True, slots=True)
class Refused:
    """A line that cannot become a job."""

    line: int
    custom_id: str | None
    error: LineError


def is_any_to_load(*, model: str | None = None, but: str | None = None) -> Select[bool]:
    """Whether a campaign, another one than `but`, has lines that nobody is loading."""
    conditions: list[ColumnElement[bool]] = [_LOADS, _IS_FREE]
    if model is not None:
        conditions.append(Campaign.model == model)
    if but is not None:
        conditions.append(Campaign.id != but)
    return select(exists().where(*conditions))


def claim(*, owner: str, model: str) -> ReturningUpdate[Campaign]:
    """Take the campaign whose loading nobody has looked after for longest. No row: there is none."""
    first = (
        select(Campaign.id)
        .where(_LOADS, _IS_FREE, Campaign.model == model)
        .order_by(Campaign.lease_until.nulls_first(), Campaign.id)
        .limit(1)
        # whoever counts its jobs refers to the row, and is not to be waited for
        .with_for_update(skip_locked=True, key_share=True)
        .cte("first")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    return update(Campaign).where(Campaign.id == first.c.id).values(**leased(owner)).returning(Campaign)


def leased(owner: str) -> dict[str, Any]:
    """The columns of a campaign that `owner` takes."""
    return {"lease_owner": owner, "lease_until": lease_end(), "fence": Campaign.fence + 1}


def lease_end() -> ColumnElement[datetime]:
    """When a lease that is taken or renewed now ends."""
    return func.now() + func.make_interval(0, 0, 0, 0, 0, 0, LEASE_SECONDS)


def renew(lease: Lease) -> ReturningUpdate[str]:
    """No row: the lease is lost, or what was to be done is not to be done any more."""
    return update(Campaign).where(is_held(lease), _LOADS).values(lease_until=lease_end()).returning(Campaign.id)


def release(lease: Lease, *, after_seconds: float = 0) -> Update:
    """Let others take the campaign, not before so many seconds."""
    until = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, after_seconds)
    return update(Campaign).where(is_held(lease)).values(lease_owner=None, lease_until=until)


def is_held(lease: Lease) -> ColumnElement[bool]:
    return and_(Campaign.id == lease.campaign_id, Campaign.fence == lease.fence, Campaign.lease_owner.is_not(None))


def terms(lease: Lease) -> Select[int, int | None]:
    """What the next chunk's jobs have of their campaign, class and attempts, which stays so until the transaction ends.

    The first lock that it takes, as in every transaction that changes a campaign and its jobs. No row: the lease is
    lost, or nothing is to be loaded any more.
    """
    return (
        select(Campaign.priority, Campaign.max_attempts).where(is_held(lease), _LOADS).with_for_update(key_share=True)
    )


def priorities_of(api_key: str) -> Select[list[str]]:
    """Words of the classes that jobs of this key may have."""
    return select(ApiKey.priorities).where(ApiKey.id == api_key)


def last_id(campaign_id: str) -> Select[str]:
    """Id of the last of its jobs."""
    return select(Job.id).where(Job.campaign_id == campaign_id).order_by(Job.line.desc()).limit(1)


def num_queued(project: str, *, but: str = "") -> Select[int]:
    """Jobs of the project's campaigns that wait, and lines that will become some; those of the campaign `but` are left
    out."""
    waiting = (
        select(func.coalesce(func.sum(CampaignCount.queued), 0))
        .join(Campaign, Campaign.id == CampaignCount.campaign_id)
        .where(Campaign.project == project, Campaign.state.in_(("validating", "in_progress", "cancelling")))
    )
    unread = select(func.coalesce(func.sum(Campaign.num_lines - Campaign.loaded_lines), 0)).where(
        Campaign.project == project, _LOADS, Campaign.id != but
    )
    return select(waiting.scalar_subquery() + unread.scalar_subquery())


def note_lines(lease: Lease, num_lines: int) -> ReturningUpdate[str]:
    """Keep a place for each line of a file that is to be loaded. No row: the lease is lost."""
    return update(Campaign).where(is_held(lease), _LOADS).values(num_lines=num_lines).returning(Campaign.id)


def cut_off() -> ReturningUpdate[str]:
    """Read no more of campaigns whose completion window is over: what was loaded expires, and `errors` says from which
    line on nothing was. Those that others have locked are passed over."""
    over = (
        select(Campaign.id)
        .where(_IS_UNREAD, ~Campaign.dry_run, Campaign.expires_at <= func.now())
        .order_by(Campaign.id)
        .limit(20)
        .with_for_update(skip_locked=True, key_share=True)
        .cte("over")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    message = func.concat(
        "The completion window was over when ", Campaign.loaded_lines, " lines were read: the others are not loaded."
    )
    entry = func.jsonb_build_object(
        "code", _EXPIRED, "message", message, "param", null(), "line", Campaign.loaded_lines + 1
    )
    return (
        update(Campaign)
        .where(Campaign.id == over.c.id)
        .values(
            state="in_progress",
            in_progress_at=func.coalesce(Campaign.in_progress_at, func.now()),
            loaded_at=func.now(),
            errors=func.jsonb_build_object("object", "list", "data", func.jsonb_build_array(entry)),
            lease_owner=None,
            lease_until=None,
        )
        .returning(Campaign.id)
    )


def was_cut_off(campaign: Campaign) -> bool:
    """Whether its completion window was over before all of its file was read."""
    return any(error["code"] == _EXPIRED for error in (campaign.errors or {}).get("data", ()))


def note_failure(lease: Lease) -> ReturningUpdate[int, int]:
    """Count that the lines behind `loaded_lines` could not be loaded: how often in a row, and where that is. No row:
    the lease is lost."""
    return (
        update(Campaign)
        .where(is_held(lease), _LOADS)
        .values(load_failures=Campaign.load_failures + 1)
        .returning(Campaign.load_failures, Campaign.loaded_lines)
    )


def note_store_failure(lease: Lease) -> ReturningUpdate[timedelta]:
    """Write down that the store did not give the file: for how long it has not, since there was more of it last. No
    row: the lease is lost."""
    since = func.coalesce(Campaign.store_failed_at, func.now())
    return (
        update(Campaign)
        .where(is_held(lease), _LOADS)
        .values(store_failed_at=since)
        .returning(cast(func.now() - Campaign.store_failed_at, Interval))
    )


CREATE_CHUNK = """
CREATE TEMP TABLE IF NOT EXISTS campaign_chunk (
    line bigint, id text, custom_id text, prompt text, seed bigint, width bigint, height bigint, num_frames bigint,
    priority smallint, request jsonb, deadline_at timestamptz, retention_seconds bigint
) ON COMMIT DELETE ROWS
"""
COPY_CHUNK = "COPY campaign_chunk FROM STDIN"


def copied(loaded: Loaded) -> tuple[object, ...]:
    """A row of `COPY_CHUNK`."""
    item = loaded.item
    return (
        loaded.line,
        loaded.job_id,
        item.custom_id,
        item.prompt,
        item.seed,
        item.width,
        item.height,
        item.num_frames,
        item.priority,
        item.request,
        item.deadline_at,
        item.retention_seconds,
    )


_INSERT = text("""
INSERT INTO jobs (
    id, project, api_key, hold, priority, model, prompt, seed, width, height, num_frames, request, campaign_id, line,
    custom_id, max_attempts, deadline_at, retain_until
)
SELECT id, :project, :api_key, 'campaign', coalesce(priority, :priority), :model, prompt, seed, width, height,
    num_frames, request, :campaign_id, line, custom_id, :max_attempts, deadline_at,
    now() + make_interval(secs => retention_seconds)
FROM campaign_chunk ORDER BY line
ON CONFLICT DO NOTHING
""")


def insert_chunk(campaign: Campaign, *, priority: int, max_attempts: int) -> TextClause:
    """Make jobs of `campaign_chunk`, but for lines whose `custom_id` another line has."""
    return _INSERT.bindparams(
        project=campaign.project,
        api_key=campaign.api_key,
        priority=priority,
        model=campaign.model,
        campaign_id=campaign.id,
        max_attempts=max_attempts,
    )


_DUPLICATES = text("""
SELECT chunk.line, chunk.custom_id, jobs.line AS first
FROM campaign_chunk AS chunk JOIN jobs ON jobs.campaign_id = :campaign_id AND jobs.custom_id = chunk.custom_id
WHERE jobs.line <> chunk.line
""")


def duplicates(campaign_id: str) -> TextClause:
    """Lines of the chunk that are no job because an earlier one has their `custom_id`: `line`, `custom_id`, `first`."""
    return _DUPLICATES.bindparams(campaign_id=campaign_id)


CREATE_SEEN = (
    "CREATE TEMP TABLE campaign_seen (custom_id text PRIMARY KEY, line bigint)",
    "CREATE TEMP TABLE campaign_new (custom_id text, line bigint) ON COMMIT DELETE ROWS",
)
COPY_SEEN = "COPY campaign_new FROM STDIN"
SEE = text("INSERT INTO campaign_seen SELECT custom_id, line FROM campaign_new ORDER BY line ON CONFLICT DO NOTHING")
SEEN_BEFORE = text("""
SELECT new.line, new.custom_id, seen.line AS first
FROM campaign_new AS new JOIN campaign_seen AS seen USING (custom_id) WHERE seen.line <> new.line
""")
"""The same as `insert_chunk` and `duplicates`, for a file that is only read."""


def duplicate(custom_id: str, *, line: int, first: int) -> Refused:
    """The error of a line whose `custom_id` an earlier one has."""
    message = f"custom_id {custom_id[:80]!r} in line {line} is that of line {first} already"
    return Refused(line, custom_id, LineError(DUPLICATE_CUSTOM_ID, "custom_id", message))


_REFUSE = text("""
WITH refused AS (
    INSERT INTO campaign_line_errors (campaign_id, line, custom_id, code, param, message)
    SELECT :campaign_id, * FROM unnest(
        CAST(:lines AS bigint[]), CAST(:custom_ids AS text[]), CAST(:codes AS text[]), CAST(:params AS text[]),
        CAST(:messages AS text[])
    )
    ON CONFLICT DO NOTHING RETURNING line
)
INSERT INTO campaign_counts AS counts (campaign_id, shard, invalid)
SELECT :campaign_id, pg_backend_pid() % 8, count(*) FROM refused HAVING count(*) > 0
ON CONFLICT (campaign_id, shard) DO UPDATE SET invalid = counts.invalid + excluded.invalid
""")


def refuse(campaign_id: str, refused: Sequence[Refused]) -> TextClause:
    """Write lines down as items that have failed, and count them."""
    return _REFUSE.bindparams(
        campaign_id=campaign_id,
        lines=[one.line for one in refused],
        custom_ids=[one.custom_id for one in refused],
        codes=[one.error.code for one in refused],
        params=[_storable(one.error.param) for one in refused],
        messages=[_storable(one.error.message) for one in refused],
    )


def _storable(message: str | None) -> str | None:
    return None if message is None else message.encode(errors="backslashreplace").decode().replace("\0", "\\0")


def advance(lease: Lease, *, begin: Position, end: Position, has_items: bool, is_last: bool) -> ReturningUpdate[str]:
    """Write down that the file is read from `begin` to `end`, in the transaction that loads what is there.

    No row: the lease is lost: nothing of the chunk may be committed.

    Args:
        has_items: whether one of its lines is a request.
        is_last: whether it ends with the file.
    """
    values: dict[str, Any] = {
        "loaded_bytes": end.num_bytes,
        "loaded_lines": end.num_lines,
        "load_failures": 0,
        "store_failed_at": None,
        "lease_until": lease_end(),
    }
    if has_items:
        values |= {"state": "in_progress", "in_progress_at": func.coalesce(Campaign.in_progress_at, func.now())}
    if is_last:
        values["loaded_at"] = func.now()
    return (
        update(Campaign)
        .where(
            is_held(lease),
            _LOADS,
            Campaign.loaded_bytes == begin.num_bytes,
            Campaign.loaded_lines == begin.num_lines,
        )
        .values(**values)
        .returning(Campaign.id)
    )


def fail(
    lease: Lease, errors: Sequence[Mapping[str, Any]], report: Mapping[str, Any] | None = None
) -> ReturningUpdate[str, bool]:
    """VALIDATING -> failed, as a whole: none of its lines is a job. No row: the lease is lost, or some are."""
    return (
        update(Campaign)
        .where(is_held(lease), _LOADS, Campaign.state == "validating")
        .values(
            state="failed",
            failed_at=func.now(),
            errors={"object": "list", "data": list(errors)},
            report=None if report is None else dict(report),
            lease_owner=None,
            lease_until=None,
        )
        .returning(Campaign.id, Campaign.dry_run)
    )


def break_off(lease: Lease, errors: Sequence[Mapping[str, Any]]) -> ReturningUpdate[str]:
    """Write down why the rest of a file cannot be read; the campaign is to be stopped in the same transaction.

    No row: the lease is lost.
    """
    return (
        update(Campaign)
        .where(is_held(lease), _LOADS)
        .values(errors={"object": "list", "data": list(errors)}, lease_owner=None, lease_until=None)
        .returning(Campaign.id)
    )


def file_error(error: FileUnreadable) -> dict[str, Any]:
    """An entry of a campaign's `errors`."""
    return {"code": error.code, "message": str(error), "param": error.param, "line": error.line}


def line_error(refused: Refused) -> dict[str, Any]:
    """The same of a bad line."""
    error = refused.error
    entry: dict[str, Any] = {
        "code": error.code,
        "message": _storable(error.message),
        "param": _storable(error.param),
        "line": refused.line,
    }
    return entry if refused.custom_id is None else entry | {"custom_id": refused.custom_id}


def report(lease: Lease, found: Mapping[str, Any]) -> ReturningUpdate[str]:
    """A dry run -> completed, with what reading its file found. No row: the lease is lost."""
    return (
        update(Campaign)
        .where(is_held(lease), _LOADS)
        .values(
            state="completed",
            completed_at=func.now(),
            loaded_at=func.now(),
            report=dict(found),
            lease_owner=None,
            lease_until=None,
        )
        .returning(Campaign.id)
    )
