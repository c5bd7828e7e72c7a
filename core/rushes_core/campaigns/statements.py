"""Statements on campaigns: what the API asks of them. Nothing here executes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    Double,
    Integer,
    Select,
    TextClause,
    Update,
    and_,
    case,
    exists,
    func,
    literal_column,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.selectable import TextualSelect

from rushes_core.campaigns.tables import ACTIVE_STATES, Campaign, CampaignCount, CampaignLineError
from rushes_core.models import File, Job
from rushes_core.predicates import in_states
from rushes_core.states import JobState

CHANGED_AT_ONCE = 1_000
"""Jobs that one `retry_some` or `delete_some` changes at most."""
DRY_RUN_HOURS = 24
"""How long a dry run is kept after it ended."""
OPEN_STATES = ("validating", "in_progress")
"""Those in which a campaign may still be changed."""
ENDED_STATES = ("completed", "cancelled", "expired")
"""Those whose jobs may be retried although nothing is left to do."""


def create(**values: Any) -> ReturningInsert[Campaign]:
    """A new campaign, which a loader will read. No row: it was made already."""
    return insert(Campaign).values(**values).on_conflict_do_nothing(index_elements=[Campaign.id]).returning(Campaign)


def get(campaign_id: str, *, project: str) -> Select[Campaign]:
    """The campaign, or the tombstone that is left of it."""
    return select(Campaign).where(Campaign.id == campaign_id, Campaign.project == project)


def lock(campaign_id: str, *, project: str) -> Select[Campaign]:
    """The same; until the transaction ends, nobody else changes it."""
    statement = get(campaign_id, project=project).with_for_update(key_share=True)
    return statement.execution_options(populate_existing=True)


def change(campaign_id: str, **values: Any) -> ReturningUpdate[Campaign]:
    return _update().where(Campaign.id == campaign_id).values(**values).returning(Campaign)


def _update() -> Update:
    return update(Campaign).execution_options(synchronize_session=False, populate_existing=True)


@dataclass(frozen=True, slots=True)
class Filters:
    """Which campaigns are listed. Those that all of them let through."""

    states: tuple[str, ...] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    dry_runs: bool = False
    """Dry runs alone; otherwise none of them."""


def listed(*, project: str, filters: Filters) -> Select[Campaign]:
    """The campaigns that a project sees, in no order."""
    statement = select(Campaign).where(
        Campaign.project == project, Campaign.deleted_at.is_(None), Campaign.dry_run == filters.dry_runs
    )
    if filters.states is not None:
        statement = statement.where(Campaign.state.in_(filters.states))
    if filters.metadata:
        statement = statement.where(Campaign.metadata_.cast(JSONB).contains(dict(filters.metadata)))
    return statement


def num_active(*, project: str, at_most: int) -> Select[int]:
    """Campaigns of a project that have not ended, counted up to a bound."""
    found = (
        select(literal_column("1", Integer))
        .where(Campaign.project == project, Campaign.deleted_at.is_(None), Campaign.state.in_(ACTIVE_STATES))
        .limit(at_most)
        .subquery()
    )
    return select(func.count()).select_from(found)


def num_active_by_state() -> Select[str, int]:
    """How many campaigns of all projects are in each of `ACTIVE_STATES`."""
    active = select(Campaign.state, func.count()).where(Campaign.state.in_(ACTIVE_STATES))
    return active.group_by(Campaign.state)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many items of a campaign are how far, by the counters that every move of a job changes."""

    queued: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    """Jobs."""
    cancelled: int = 0
    expired: int = 0
    invalid: int = 0
    """Lines that could not become jobs."""
    remaining_cost: int = 0
    gpu_seconds: float = 0.0

    @property
    def total(self) -> int:
        return self.ended + self.queued + self.in_progress

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled + self.expired + self.invalid


_COUNTED = tuple(Counts.__dataclass_fields__)


def counts(ids: Collection[str]) -> Select[*tuple[Any, ...]]:
    """One row for each of these campaigns that has items: its id, and what `counts_of` makes `Counts` of."""
    sums = [func.sum(getattr(CampaignCount, name)).label(name) for name in _COUNTED]
    return (
        select(CampaignCount.campaign_id, *sums)
        .where(CampaignCount.campaign_id.in_(ids))
        .group_by(CampaignCount.campaign_id)
    )


def counts_of(row: Any) -> Counts:
    """From a row of `counts`."""
    values = {name: int(getattr(row, name)) for name in _COUNTED if name != "gpu_seconds"}
    return Counts(**values, gpu_seconds=float(row.gpu_seconds))


def hold_reasons(ids: Collection[str]) -> Select[str, str | None]:
    """Why each of these campaigns opens none of its jobs now."""
    return select(Campaign.id, Campaign.hold_reason).where(Campaign.id.in_(ids))


PARTS: dict[str, tuple[JobState, ...] | None] = {
    "output": (JobState.COMPLETED,),
    "errors": (JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED),
    "all": None,
}
"""Parts of a manifest, and the states of the jobs in it; None: every state. Bad lines are in `errors` and in `all`."""


def jobs_from(campaign_id: str, *, after: int, limit: int, states: Collection[JobState] | None = None) -> Select[Job]:
    """The first jobs of a campaign behind a line, in the order of lines."""
    if states is None:
        return _jobs(select(Job), campaign_id, after, limit)
    # one ordered scan of the index for each state, merged
    each = [
        _jobs(select(Job.id, Job.line), campaign_id, after, limit).where(in_states(state)).subquery(f"in_{state}")
        for state in states
    ]
    if len(each) == 1:
        return _jobs(select(Job), campaign_id, after, limit).where(in_states(*states))
    first, *others = (select(one.c.id, one.c.line) for one in each)
    ids = first.union_all(*others).subquery("merged")
    nearest = select(ids.c.id).order_by(ids.c.line).limit(limit)
    return select(Job).where(Job.id.in_(nearest)).order_by(Job.line)


def _jobs(statement: Any, campaign_id: str, after: int, limit: int) -> Any:
    return (
        statement.where(Job.campaign_id == campaign_id, Job.line > after, Job.deleted_at.is_(None))
        .order_by(Job.line)
        .limit(limit)
    )


def bad_lines_from(campaign_id: str, *, after: int, limit: int) -> Select[CampaignLineError]:
    """The first lines behind another one that could not become jobs, in their order."""
    return (
        select(CampaignLineError)
        .where(CampaignLineError.campaign_id == campaign_id, CampaignLineError.line > after)
        .order_by(CampaignLineError.line)
        .limit(limit)
    )


def retryable(campaign_id: str, *, codes: Collection[str] | None, include_cancelled: bool) -> Select[bool]:
    """Whether there is a job that a retry of the whole campaign would queue again."""
    failed = in_states(JobState.FAILED)
    if codes is not None:
        failed = and_(failed, Job.error["code"].as_string().in_(codes))
    kinds = [failed]
    if include_cancelled:
        kinds += [in_states(JobState.CANCELLED), in_states(JobState.EXPIRED)]
    found: list[ColumnElement[bool]] = [
        select(literal_column("1", Integer))
        .where(Job.campaign_id == campaign_id, Job.deleted_at.is_(None), kind)
        .exists()
        for kind in kinds
    ]
    return select(or_(*found))


def ask_retry(
    campaign_id: str, *, codes: Collection[str] | None, include_cancelled: bool, new_seeds: bool, before: float
) -> ReturningUpdate[Campaign]:
    """Note which of its ended jobs are to be queued again. `retry_some` does it.

    Args:
        before: Unix seconds by the database's clock: what ended later is not meant.
    """
    wanted: dict[str, Any] = {"include_cancelled": include_cancelled, "new_seeds": new_seeds, "before": before}
    if codes is not None:
        wanted["codes"] = list(codes)
    return change(campaign_id, retry=wanted)


def retry_some(campaign_id: str) -> TextClause:
    """Queue some of the jobs again that `ask_retry` asked for; how many. Fewer than `CHANGED_AT_ONCE`: it was the last
    of them, and `retry_done` belongs into the same transaction.
    """
    return text("SELECT retry_campaign_jobs(:id, :at_most)").bindparams(id=campaign_id, at_most=CHANGED_AT_ONCE)


def retry_done(campaign_id: str) -> Update:
    """Nothing is left of what `ask_retry` asked for."""
    return _update().where(Campaign.id == campaign_id).values(retry=None)


def wanting_retry(*, limit: int = 20) -> Select[str]:
    """Campaigns with jobs that are to be queued again, locked: those of other transactions are passed over."""
    return (
        select(Campaign.id)
        .where(Campaign.retry.is_not(None), Campaign.deleted_at.is_(None))
        .order_by(Campaign.id)
        .limit(limit)
        .with_for_update(skip_locked=True, key_share=True)
    )


def delete(campaign_id: str) -> ReturningUpdate[Campaign]:
    """Hide a campaign for good. `delete_some` deletes its jobs."""
    statement = _update().where(Campaign.id == campaign_id, Campaign.deleted_at.is_(None))
    return statement.values(deleted_at=func.now()).returning(Campaign)


_IS_TO_BE_READ = and_(Campaign.state.in_(ACTIVE_STATES), Campaign.loaded_at.is_(None), Campaign.deleted_at.is_(None))


def reading(file_id: str, *, project: str) -> Select[str]:
    """A campaign whose file this is and that is not read yet."""
    is_so = and_(Campaign.input_file_id == file_id, Campaign.project == project, _IS_TO_BE_READ)
    return select(Campaign.id).where(is_so).order_by(Campaign.id).limit(1)


def is_to_be_read_from() -> ColumnElement[bool]:
    """Of a file: whether a campaign is still to read it."""
    return exists().where(Campaign.input_file_id == File.id, _IS_TO_BE_READ)


def delete_input(campaign_id: str) -> Update:
    """Make a tombstone of the file that came with a campaign, unless another one is still to be read from it."""
    own = select(Campaign.input_file_id).where(Campaign.id == campaign_id, Campaign.owns_input).scalar_subquery()
    is_wanted = exists().where(Campaign.input_file_id == File.id, Campaign.id != campaign_id, _IS_TO_BE_READ)
    return (
        update(File)
        .where(File.id == own, File.deleted_at.is_(None), ~is_wanted)
        .values(deleted_at=func.now())
        .execution_options(synchronize_session=False)
    )


def forget_dry_runs() -> ReturningUpdate[str]:
    """Delete dry runs that ended over `DRY_RUN_HOURS` ago."""
    ended = func.coalesce(Campaign.completed_at, Campaign.failed_at, Campaign.cancelled_at)
    before = func.now() - timedelta(hours=DRY_RUN_HOURS)
    return (
        _update()
        .where(Campaign.dry_run, Campaign.deleted_at.is_(None), Campaign.state.not_in(ACTIVE_STATES), ended < before)
        .values(deleted_at=func.now(), purged_at=func.now())
        .returning(Campaign.id)
    )


def delete_some(campaign_id: str, *, after: int = 0) -> ReturningUpdate[int | None]:
    """Delete the first jobs of a deleted campaign behind a line, as a client would: the sweeper removes their objects.
    Those that others hold are passed over.

    Their lines. None: `purged` belongs into the same transaction.
    """
    some = (
        select(Job.id)
        .where(Job.campaign_id == campaign_id, Job.line > after, Job.deleted_at.is_(None))
        .order_by(Job.line)
        .limit(CHANGED_AT_ONCE)
        .with_for_update(key_share=True, skip_locked=True)
        .cte("some")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    is_open = in_states(JobState.QUEUED, JobState.CLAIMED, JobState.RUNNING)
    asked = func.coalesce(Job.cancel_requested_at, func.now())
    return (
        update(Job)
        .where(Job.id == some.c.id)
        .values(deleted_at=func.now(), cancel_requested_at=case((is_open, asked), else_=Job.cancel_requested_at))
        .returning(Job.line)
        .execution_options(synchronize_session=False)
    )


def purged(campaign_id: str) -> Update:
    """Nothing is left of a deleted campaign but its row. No change while there is a job that is not deleted."""
    is_left = exists().where(Job.campaign_id == campaign_id, Job.deleted_at.is_(None))
    return _update().where(Campaign.id == campaign_id, ~is_left).values(purged_at=func.now())


def unpurged(*, limit: int = 20) -> Select[str]:
    """Deleted campaigns with jobs that may not be, locked as those of `wanting_retry` are. Those that have to be closed
    first are left out."""
    return (
        select(Campaign.id)
        .where(Campaign.deleted_at.is_not(None), Campaign.purged_at.is_(None), Campaign.state.not_in(ACTIVE_STATES))
        .order_by(Campaign.id)
        .limit(limit)
        .with_for_update(skip_locked=True, key_share=True)
    )


COUNTED_AT_ONCE = 2_000
"""Jobs of a campaign that `would_delete` counts."""
_NUM_SAMPLED = 100


def would_delete(campaign_id: str) -> Select[int, int, int]:
    """What goes with a campaign: jobs, clips, and their bytes as far as they are known. For one that has at most
    `COUNTED_AT_ONCE` jobs: it reads them all."""
    is_clip = and_(in_states(JobState.COMPLETED), ~Job.result.has_key("deleted_at"))
    num_bytes = func.sum(Job.result["bytes"].as_string().cast(BigInteger)).filter(is_clip)
    return select(func.count(), func.count().filter(is_clip), func.coalesce(num_bytes, 0).cast(BigInteger)).where(
        Job.campaign_id == campaign_id, Job.deleted_at.is_(None)
    )


def spread(number: str, first: str, last: str) -> str:
    """SQL for a line between two others, one for each `number` from 0: not in even steps, for the lines of a file often
    take turns."""
    return f"{first} + floor((0.6180339887498949 * {number}) % 1 * ({last} - {first} + 1))"


_SAMPLE_CLIPS = text(f"""
WITH bounds AS (
    SELECT
        (SELECT line FROM jobs WHERE campaign_id = :id AND state = 'completed' ORDER BY line LIMIT 1) AS first,
        (SELECT line FROM jobs WHERE campaign_id = :id AND state = 'completed' ORDER BY line DESC LIMIT 1) AS last
), sampled AS (
    SELECT result, deleted_at IS NULL AND NOT jsonb_exists(result, 'deleted_at') AS has_clip
    FROM bounds, generate_series(0, {_NUM_SAMPLED - 1}) AS number, LATERAL (
        SELECT result, deleted_at FROM jobs
        WHERE campaign_id = :id AND state = 'completed' AND line >= {spread("number", "first", "last")}
        ORDER BY line LIMIT 1
    ) AS completed
)
SELECT coalesce(avg(has_clip::int), 0)::float AS clips,
    coalesce(avg(CASE WHEN has_clip THEN (result ->> 'bytes')::bigint ELSE 0 END), 0)::float AS bytes
FROM sampled
""").columns(clips=Double, bytes=Double)


def sample_clips(campaign_id: str) -> TextualSelect:
    """Of some of its completed jobs, spread over its file: `clips`, the part of them that has one, and `bytes` of each
    on average. It takes the same time for any number of jobs."""
    return _SAMPLE_CLIPS.bindparams(id=campaign_id)
