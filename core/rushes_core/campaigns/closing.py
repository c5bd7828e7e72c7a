"""Statements that end campaigns: stop what is left of their jobs, and close them when nothing is left. Nothing here
executes.

Whoever changes a campaign and its jobs locks the campaign first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    Boolean,
    Executable,
    Select,
    TextClause,
    Update,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal_column,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.dml import ReturningUpdate
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.selectable import TextualSelect

from rushes_core import jobs
from rushes_core.campaigns import feeder
from rushes_core.campaigns.loading import Lease, is_held, lease_end, leased
from rushes_core.campaigns.tables import ACTIVE_STATES, CANCEL_ERROR, Campaign, CampaignCount
from rushes_core.models import Job
from rushes_core.predicates import IS_LEASED

CLOSED_AT_ONCE = 2_000
"""Jobs that `close_some` closes at most: others that move jobs of the campaign wait for its end, some of them."""
EXPIRED: dict[str, Any] = {
    "code": "batch_expired",
    "message": "The job did not start before the completion window of its campaign was over.",
}
"""With OpenAI's code for it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Why a campaign is cancelled that nobody cancelled."""

    name: str
    """`BUDGET` or `FAILURES`."""
    error: Mapping[str, Any]
    """An entry of its `errors`, which its jobs get as well."""


def request_stop(campaign_id: str, *, limit: Limit | None = None) -> tuple[Executable, ...]:
    """What cancels a campaign, in this order and one transaction: from its end on none of its jobs is started.

    The first returns the campaign; no row: it has ended, or is being cancelled. A process then closes what waits
    (`close_some`), and the replicas what they hold.

    Args:
        limit: what it reached, if nobody asked for it.
    """
    why: dict[str, Any] = {"hold_reason": None}
    if limit is not None:
        why = {"hold_reason": limit.name, "errors": {"object": "list", "data": [dict(limit.error)]}}
    stop = (
        update(Campaign)
        .where(Campaign.id == campaign_id, Campaign.state.in_(("validating", "in_progress", "finalizing")))
        .values(state="cancelling", cancelling_at=func.now(), retry=None, **why)
        .execution_options(synchronize_session=False, populate_existing=True)
        .returning(Campaign)
    )
    return stop, feeder.close_open(campaign_id), _ask_leased(Job.campaign_id == campaign_id)


_IS_TO_CLOSE = """(state = 'cancelling' OR state = 'in_progress' AND expires_at <= now())
    AND (SELECT sum(queued) FROM campaign_counts WHERE campaign_id = campaigns.id) > 0"""
_TO_CLOSE = text(f"""
SELECT id, CASE state WHEN 'cancelling' THEN 'cancelled' ELSE 'expired' END AS target,
    {CANCEL_ERROR} AS why
FROM campaigns
WHERE {_IS_TO_CLOSE}
ORDER BY id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
""").columns(id=Campaign.id.type, target=Campaign.state.type, why=JSONB)


def to_close() -> TextualSelect:
    """A campaign with queued jobs that nobody will run, what they become, and the error that they get; null: the usual
    one. It is locked, and one that another transaction has locked is passed over."""
    return _TO_CLOSE


def close_some(campaign_id: str, target: str, why: Mapping[str, Any] | None = None) -> TextClause:
    """QUEUED -> CANCELLED or EXPIRED for up to `CLOSED_AT_ONCE` jobs; how many. Others may do it at the same time.

    Args:
        why: their error, if not the usual one.
    """
    why = why or (jobs.CANCELLED_BY_USER if target == "cancelled" else EXPIRED)
    statement = text("SELECT close_campaign_jobs(:id, :target, :why, :at_most)").bindparams(
        bindparam("why", type_=JSONB)
    )
    return statement.bindparams(id=campaign_id, target=target, why=why, at_most=CLOSED_AT_ONCE)


def ask_leased() -> Update:
    """Ask for the cancel of what replicas hold of cancelled campaigns: also of what they took in that moment."""
    return _ask_leased(Job.campaign_id.in_(select(Campaign.id).where(Campaign.state == "cancelling")))


def _ask_leased(condition: ColumnElement[bool]) -> Update:
    return (
        update(Job)
        .where(condition, IS_LEASED, Job.cancel_requested_at.is_(None))
        .values(cancel_requested_at=func.now())
        .execution_options(synchronize_session=False)
    )


def _num_open() -> Any:
    """Jobs that wait or run, of the campaign of the row."""
    return (
        select(func.coalesce(func.sum(CampaignCount.queued + CampaignCount.in_progress), 0))
        .where(CampaignCount.campaign_id == Campaign.id)
        .correlate(Campaign)
        .scalar_subquery()
    )


def _has_ended() -> ColumnElement[bool]:
    return and_(
        Campaign.state.in_(("in_progress", "finalizing", "cancelling")),
        or_(Campaign.state == "cancelling", Campaign.loaded_at.is_not(None)),
        Campaign.retry.is_(None),
        or_(Campaign.lease_until.is_(None), Campaign.lease_until <= func.now()),
        _num_open() == 0,
    )


def claim_ended(*, owner: str) -> ReturningUpdate[Campaign]:
    """Take a campaign of which nothing is left to do but to write what became of it: -> finalizing, unless it was
    cancelled. No row: there is none."""
    ended = (
        select(Campaign.id)
        .where(_has_ended())
        .order_by(Campaign.lease_until.nulls_first(), Campaign.id)
        .limit(1)
        .with_for_update(skip_locked=True, key_share=True, of=Campaign)
        .cte("ended")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    is_cancelled = Campaign.state == "cancelling"
    return (
        update(Campaign)
        .where(Campaign.id == ended.c.id)
        .values(
            state=case((is_cancelled, Campaign.state), else_="finalizing"),
            finalizing_at=case((is_cancelled, Campaign.finalizing_at), else_=func.now()),
            **leased(owner),
        )
        .returning(Campaign)
    )


def renew_ended(lease: Lease) -> ReturningUpdate[str]:
    """No row: the lease is lost, or the campaign goes on."""
    return (
        update(Campaign)
        .where(is_held(lease), Campaign.state.in_(("finalizing", "cancelling")))
        .values(lease_until=lease_end())
        .returning(Campaign.id)
    )


def end(lease: Lease, *, has_expired: bool, files: Mapping[str, str | None]) -> ReturningUpdate[str]:
    """FINALIZING -> completed or expired, CANCELLING -> cancelled; the state. No row: the lease is lost, or one of its
    jobs was retried meanwhile.

    Args:
        has_expired: whether its completion window ended before its jobs.
        files: the columns `output_file_id` and `error_file_id`.
    """
    ended = "expired" if has_expired else "completed"
    is_cancelled = Campaign.state == "cancelling"
    times = {"cancelled_at": is_cancelled, f"{ended}_at": ~is_cancelled}
    return (
        update(Campaign)
        .where(
            is_held(lease),
            Campaign.state.in_(("finalizing", "cancelling")),
            Campaign.retry.is_(None),
            _num_open() == 0,
        )
        .values(
            state=case((is_cancelled, "cancelled"), else_=ended),
            # what was not read of its file is not read when a job is retried
            loaded_at=func.coalesce(Campaign.loaded_at, func.now()),
            hold_reason=None,
            lease_owner=None,
            lease_until=None,
            **{name: case((is_so, func.now()), else_=getattr(Campaign, name)) for name, is_so in times.items()},
            **files,
        )
        .returning(Campaign.state)
    )


def go_on() -> ReturningUpdate[str]:
    """FINALIZING -> in_progress for campaigns of which a job was retried in the moment in which they ended."""
    return (
        update(Campaign)
        .where(Campaign.state == "finalizing", _num_open() > 0)
        .values(state="in_progress")
        .returning(Campaign.id)
    )


def is_any_to_end() -> Select[bool]:
    """Whether something is to be done to campaigns that is not loading them."""
    reasons: list[ColumnElement[bool]] = [
        _has_ended(),
        and_(Campaign.retry.is_not(None), Campaign.deleted_at.is_(None)),
        and_(Campaign.deleted_at.is_not(None), Campaign.purged_at.is_(None), Campaign.state.not_in(ACTIVE_STATES)),
        literal_column(f"({_IS_TO_CLOSE})", Boolean()),
    ]
    return select(or_(*(exists(select(Campaign.id).where(reason)) for reason in reasons)))
