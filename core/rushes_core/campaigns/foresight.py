"""Keeps the forecasts of campaigns up to date, and what became of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, Select, delete, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from sqlalchemy.sql.dml import ReturningInsert

from rushes_core.campaigns import statements
from rushes_core.campaigns.forecast import Left, Means, Seen, Work, ends_of
from rushes_core.campaigns.means import means_of
from rushes_core.campaigns.pace import Pace
from rushes_core.campaigns.statements import Counts, counts_of, spread
from rushes_core.campaigns.tables import ACTIVE_STATES, Campaign, CampaignForecast
from rushes_core.measured import Shape

FORESEE_SECONDS = 5.0
"""How often `Foresight.look` is run."""
MILESTONES = (10, 50)
"""Percent done at which it is noted what was foreseen."""
MAX_AT_ONCE = 200
"""Campaigns that one pass looks at: those whose forecast is oldest."""
NUM_SAMPLED = 32
"""Clips that wait of a campaign whose shapes are looked at, spread over its file."""
KEPT_DAYS = 30
"""How long it is kept what was foreseen of a completed campaign."""

_HELD_BY_SOMEBODY = ("paused", "approval", "budget", "quota", "not_before")
_AHEAD = text(f"""
WITH bounds AS (
    SELECT
        (SELECT line FROM jobs WHERE campaign_id = :id AND state = 'queued' ORDER BY line LIMIT 1) AS first,
        (SELECT line FROM jobs WHERE campaign_id = :id AND state = 'queued' ORDER BY line DESC LIMIT 1) AS last
)
SELECT false AS runs, width, height, num_frames, count(*) AS num_jobs, 0.0::float AS done
FROM bounds, generate_series(0, {NUM_SAMPLED - 1}) AS number, LATERAL (
    SELECT width, height, num_frames FROM jobs
    WHERE campaign_id = :id AND state = 'queued'
        AND line >= {spread("number", "first", "last")}
    ORDER BY line LIMIT 1
) AS waiting GROUP BY width, height, num_frames
UNION ALL
SELECT true, width, height, num_frames, count(*), sum(width * height * num_frames / 1e4 * progress / 100)::float
FROM jobs WHERE campaign_id = :id AND state = 'running' AND hold IS DISTINCT FROM 'campaign'
GROUP BY width, height, num_frames
""")


def current(ids: Sequence[str]) -> Select[CampaignForecast]:
    """What is foreseen of these campaigns, as far as something is."""
    return select(CampaignForecast).where(CampaignForecast.campaign_id.in_(ids), CampaignForecast.ended_at.is_(None))


def left_of(row: CampaignForecast) -> Left:
    """From a row of `current`."""
    return Left(row.gpu_seconds, row.seconds_p50, row.seconds_p90, row.basis)


def fulfilled(limit: int) -> Select[dict[str, Any], datetime | None]:
    """What was told of the last completed campaigns, as `CampaignForecast.told`, and when they were done."""
    ended = select(CampaignForecast.told, CampaignForecast.ended_at).where(CampaignForecast.ended_at.is_not(None))
    return ended.order_by(CampaignForecast.ended_at.desc()).limit(limit)


@dataclass(frozen=True, slots=True)
class _Looked:
    campaign: Campaign
    counts: Counts
    before: CampaignForecast | None
    now: datetime


class Foresight:
    """One pass over campaigns with each `look`. Any number may run: of two that look at the same time, one counts.

    Args:
        seen_within_seconds: how long a replica may be silent and still be counted on.
    """

    def __init__(self, engine: Engine, *, seen_within_seconds: float) -> None:
        self._engine = engine
        self._seen_within_seconds = seen_within_seconds

    def look(self) -> None:
        """Foresee the end of campaigns that go on, and settle what was foreseen of those that have ended."""
        with Session(self._engine, expire_on_commit=False) as session, session.begin():
            looked = self._read(session)
            campaigns = [one.campaign for one in looked]
            means = means_of(session, campaigns, seen_within_seconds=self._seen_within_seconds) if looked else {}
            found = [(one, _work(session, one), means[one.campaign.id]) for one in looked]
        for one, work, of_one in found:
            with self._engine.begin() as connection:
                connection.execute(_written(one, _foreseen(one, work, of_one)))
        with self._engine.begin() as connection:
            for statement in _settle():
                connection.execute(statement)

    def _read(self, session: Session) -> list[_Looked]:
        rows = session.execute(
            select(Campaign, CampaignForecast, func.now())
            .outerjoin(CampaignForecast, CampaignForecast.campaign_id == Campaign.id)
            .where(
                Campaign.state == "in_progress",
                Campaign.loaded_at.is_not(None),
                Campaign.deleted_at.is_(None),
            )
            .order_by(CampaignForecast.made_at.nulls_first(), Campaign.id)
            .limit(MAX_AT_ONCE)
        ).all()
        if not rows:
            return []
        counted = session.execute(statements.counts([campaign.id for campaign, _, _ in rows]))
        counts = {row.campaign_id: counts_of(row) for row in counted}
        return [_Looked(one, counts.get(one.id, Counts()), before, now) for one, before, now in rows]


def _work(session: Session, one: _Looked) -> Work:
    waiting, running = Counter[Shape](), Counter[Shape]()
    done = 0.0
    for row in session.execute(_AHEAD, {"id": one.campaign.id}):
        shapes = running if row.runs else waiting
        shapes[row.width, row.height, row.num_frames] = row.num_jobs
        done += row.done
    counts = one.counts
    return Work(counts.queued + counts.in_progress, counts.remaining_cost, done, waiting, running)


def _foreseen(one: _Looked, work: Work, means: Means) -> dict[str, Any]:
    """The columns of its forecast."""
    campaign, counts, row, now = one.campaign, one.counts, one.before, one.now
    dropped = counts.cancelled + counts.expired
    before: Seen | None = None
    if row is not None:
        pace = None if row.pace is None else Pace(**row.pace)
        before = Seen(row.made_at, row.num_ended, row.num_dropped, row.work_left, row.may_run, pace)
    may_run = campaign.paused_at is None and campaign.hold_reason is None
    num_ended = counts.completed + counts.failed + dropped
    seen = Seen(now, num_ended, dropped, work.left, may_run).follow(before, work, means)
    left = means.left(work, seen.pace)
    return {
        "made_at": now,
        "num_ended": seen.num_ended,
        "num_dropped": seen.num_dropped,
        "work_left": seen.left,
        "may_run": may_run,
        "pace": None if seen.pace is None else asdict(seen.pace),
        "gpu_seconds": left.gpu_seconds,
        "seconds_p50": left.p50,
        "seconds_p90": left.p90,
        "basis": left.basis,
        "told": _told(one, left),
        "ended_at": None,
    }


def _told(one: _Looked, left: Left) -> dict[str, Any]:
    campaign, counts, row = one.campaign, one.counts, one.before
    if campaign.paused_at is not None or campaign.hold_reason in _HELD_BY_SOMEBODY:
        return {}
    told: dict[str, Any] = {} if row is None or row.ended_at is not None else dict(row.told)
    percent = 100 * counts.ended // max(1, counts.total)
    ends = ends_of(campaign, left, used_gpu_seconds=counts.gpu_seconds, now=one.now)
    if ends.p50 is None or ends.p90 is None:
        return told
    reached = [milestone for milestone in MILESTONES if milestone <= percent]
    # what was missed is not told afterwards
    if reached and str(reached[-1]) not in told:
        times = {"at": one.now, "p50": ends.p50, "p90": ends.p90}
        told[str(reached[-1])] = {name: round(at.timestamp(), 3) for name, at in times.items()}
    return told


def _written(one: _Looked, columns: dict[str, Any]) -> ReturningInsert[str]:
    """Nothing is written over what somebody else has seen meanwhile."""
    statement = insert(CampaignForecast).values(campaign_id=one.campaign.id, **columns)
    seen_at = None if one.before is None else one.before.made_at
    return statement.on_conflict_do_update(
        index_elements=[CampaignForecast.campaign_id],
        set_={name: statement.excluded[name] for name in columns},
        where=CampaignForecast.made_at == seen_at,
    ).returning(CampaignForecast.campaign_id)


def _settle() -> Sequence[Any]:
    goes_on = Campaign.state.in_(ACTIVE_STATES)
    is_its = Campaign.id == CampaignForecast.campaign_id
    unsettled = CampaignForecast.ended_at.is_(None)
    completed = (
        update(CampaignForecast)
        .where(is_its, unsettled, Campaign.state == "completed", CampaignForecast.told != {})
        .values(ended_at=Campaign.completed_at)
        .execution_options(synchronize_session=False)
    )
    old = CampaignForecast.ended_at < func.now() - timedelta(days=KEPT_DAYS)
    forgotten = (
        delete(CampaignForecast)
        .where(is_its, ~goes_on, or_(unsettled, old))
        .execution_options(synchronize_session=False)
    )
    return completed, forgotten
