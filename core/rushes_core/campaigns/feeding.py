"""Opens the jobs of campaigns a few at a time, and closes what is not to start any more; `feeder` says how."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Double, Engine, Select, column, exists, func, literal_column, select, text, true
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from rushes_core import holds, keys, replicas
from rushes_core.campaigns import closing, events, opening
from rushes_core.campaigns.closing import Limit
from rushes_core.campaigns.feeder import close_open, live
from rushes_core.campaigns.opening import Budget, Line, Opened, Standing
from rushes_core.campaigns.tables import BUDGET, FAILURES, Campaign
from rushes_core.log import get_logger
from rushes_core.measured import RunTimes, measured
from rushes_core.models import MeasuredTime, Replica

log = get_logger(__name__)

_LOOK_AGAIN_SECONDS = 1.0
"""How long a campaign of which nothing could be opened is let be while nothing about it changes, and one that could not
be tended at all."""
_EARLIER = timedelta(milliseconds=1)
_STEP = timedelta(microseconds=1)


# what somebody holds for longer is looked at again later: the other campaigns are not to wait for it
_SHORT_WAIT = text("SET LOCAL lock_timeout = '200ms'")
_SET_STOP = text(f"""
UPDATE jobs SET stop_at = :stop_at WHERE {live("claimed", "running")} AND stop_at IS DISTINCT FROM :stop_at
""")
# whoever changes the campaign locks its row first, and waits for the other lock: this one must not wait for the row
_TRY_LOCK = text("""
SELECT pg_try_advisory_xact_lock(738764376, hashtext(:campaign))
    AND EXISTS (SELECT FROM campaigns WHERE id = :campaign FOR NO KEY UPDATE SKIP LOCKED)
""")
_CLOSE_SOME = """
WITH surplus AS MATERIALIZED (
    SELECT id FROM jobs WHERE {live} {which} FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE jobs SET hold = 'campaign', start_by = NULL, stop_at = NULL FROM surplus WHERE jobs.id = surplus.id
"""
_CLOSE_LATE = text(_CLOSE_SOME.format(live=live("queued"), which="AND start_by <= now()"))
_CLOSE_LATEST = text(_CLOSE_SOME.format(live=live("queued"), which="ORDER BY run_at DESC, id DESC LIMIT :count"))
WAITING = text("""
SELECT id, line, width, height, num_frames FROM jobs
WHERE campaign_id = :campaign AND state = 'queued' AND hold = 'campaign' AND line <= :last_line
    AND run_at <= now() AND cancel_requested_at IS NULL AND (deadline_at IS NULL OR deadline_at > now())
ORDER BY line LIMIT :count FOR NO KEY UPDATE SKIP LOCKED
""")
_OPEN = text("""
WITH opened AS (
    UPDATE jobs SET run_at = wanted.run_at, start_by = wanted.start_by, stop_at = :stop_at,
        priority = CASE WHEN :overrides THEN :priority ELSE priority END,
        hold = (SELECT CASE WHEN max_running IS NOT NULL THEN 'concurrency' END FROM api_keys WHERE id = jobs.api_key)
    FROM unnest(CAST(:ids AS text[]), CAST(:run_at AS timestamptz[]), CAST(:start_by AS timestamptz[]))
        AS wanted (id, run_at, start_by) WHERE jobs.id = wanted.id
    RETURNING project, hold
), shares AS (  -- the claim finds projects there
    INSERT INTO project_shares (project) SELECT DISTINCT project FROM opened ON CONFLICT DO NOTHING
)
SELECT coalesce(bool_or(hold IS NOT NULL), false) FROM opened
""")
_LIVE_JOBS = text(f"""
SELECT width, height, num_frames, coalesce(extract(epoch FROM now() - started_at)::float, 0)
    * (state = 'running')::int AS seconds
FROM jobs WHERE {live("queued", "claimed", "running")}
""")
_PROOF = text("""
SELECT count(*) AS num_jobs, count(*) FILTER (WHERE state IN ('queued', 'claimed', 'running')) AS num_left,
    max(line) AS last_line
FROM (SELECT line, state FROM jobs WHERE campaign_id = :campaign ORDER BY line LIMIT :count) AS proof
""")
_FIRST_OPEN = text("""
SELECT run_at FROM jobs
WHERE state = 'queued' AND hold IS NULL AND model = :model AND priority = :priority AND project = :project
ORDER BY run_at LIMIT 1
""")
_NEWEST_OPEN = text(f"SELECT max(run_at) FROM jobs WHERE {live('queued')}")
_ALL_LINES = 2**62
_COUNTED = ("queued", "in_progress", "ended", "failed", "remaining_cost", "gpu_seconds")
_LIVE_NUMBERS = ("num_open", "num_leased", "num_late", "num_ahead")
_NUMBERS = (*_COUNTED, *_LIVE_NUMBERS)
_COUNTS = (
    text("""
SELECT coalesce(sum(queued), 0) AS queued, coalesce(sum(in_progress), 0) AS in_progress,
    coalesce(sum(completed + failed), 0) AS ended, coalesce(sum(failed), 0) AS failed,
    coalesce(sum(remaining_cost), 0) AS remaining_cost, coalesce(sum(gpu_seconds), 0) AS gpu_seconds
FROM campaign_counts WHERE campaign_id = campaigns.id
""")
    .columns(*(column(name, Double) for name in _COUNTED))
    .lateral("counts")
)
_LIVE = (
    text(f"""
SELECT count(*) FILTER (WHERE state = 'queued') AS num_open, count(*) FILTER (WHERE state <> 'queued') AS num_leased,
    count(*) FILTER (WHERE state = 'queued' AND start_by <= now()) AS num_late,
    count(*) FILTER (WHERE state = 'claimed' AND (start_by IS NULL OR start_by > now())) AS num_ahead
FROM jobs WHERE {live("queued", "claimed", "running", campaign="campaigns.id")}
""")
    .columns(*(column(name, Double) for name in _LIVE_NUMBERS))
    .lateral("live")
)


_IS_FED = text("campaigns.state IN ('in_progress', 'cancelling')")


def is_any_fed() -> Select[bool]:
    """Whether `standings` has a row."""
    return select(exists(select(Campaign.id).where(_IS_FED)))


def standings() -> Select[*tuple[Any, ...]]:
    """Every campaign of which jobs may be open, with what `Standing` is made of; `now` is the same in all rows."""
    return (
        select(
            Campaign,
            *(literal_column(name, Double) for name in _NUMBERS),
            keys.has_used_its_day(Campaign.api_key).label("has_used_its_day"),
            func.now().label("now"),
        )
        .join_from(Campaign, _COUNTS, true())
        .join(_LIVE, true())
        .where(_IS_FED)
        .order_by(Campaign.id)
        .execution_options(populate_existing=True)
    )


def _standing(row: Any) -> Standing:
    numbers = {name: int(getattr(row, name)) for name in _NUMBERS if name != "gpu_seconds"}
    return Standing(row.Campaign, **numbers, gpu_seconds=float(row.gpu_seconds), has_used_its_day=row.has_used_its_day)


@dataclass(frozen=True, slots=True)
class _Served:
    """What a model is served by, and how fast."""

    num_replicas: int
    gpus: int
    """Of its largest replica."""
    times: RunTimes


class Feeder:
    """One pass over all campaigns; whoever holds it repeats that. Any number may run at once.

    Args:
        seen_within_seconds: how long a replica may be silent and still be counted on.
        patience_seconds: after which a claim looks for jobs that were passed over.
    """

    def __init__(self, engine: Engine, *, seen_within_seconds: float, patience_seconds: float) -> None:
        self._engine = engine
        self._standings = standings()
        self._patience = timedelta(seconds=patience_seconds)
        self._seen_within_seconds = seen_within_seconds
        self._was_open: dict[str, int] = {}
        self._claimed: dict[tuple[str, str, int], float] = {}
        self._in_vain: dict[str, tuple[float, object]] = {}
        self._failing: dict[str, float] = {}
        """When a campaign could last not be tended."""

    def feed(self) -> None:
        """Open and close what is due of every campaign, each in a transaction of its own."""
        with Session(self._engine, expire_on_commit=False) as session:
            rows = session.execute(self._standings).all()
        if not rows:
            self._was_open.clear()
            self._claimed.clear()
            self._in_vain.clear()
            self._failing.clear()
            return
        now: datetime = rows[0].now
        active = [_standing(row) for row in rows]
        served: dict[str, _Served] = {}
        for place, (standing, target) in enumerate(self._targets(active, now, served)):
            num_open: int | None = standing.num_open
            try:
                if self._is_due(standing, target, now):
                    model = standing.campaign.model
                    tending = _Tending(
                        served.get(model) or self._serve(model),
                        target,
                        opened_at=now + place * _STEP,
                        num_campaigns=len(rows),
                        patience=self._patience,
                    )
                    with Session(self._engine, expire_on_commit=False) as session, session.begin():
                        num_open = tending.tend(session, standing.campaign.id)
                    self._failing.pop(standing.campaign.id, None)
                    if target and num_open == 0:
                        self._in_vain[standing.campaign.id] = (time.monotonic(), standing.limits)
            except Exception as error:
                self._note_failure(standing.campaign.id, error)
            self._was_open[standing.campaign.id] = standing.num_open if num_open is None else num_open

    def _note_failure(self, campaign_id: str, error: Exception) -> None:
        """What goes wrong with one campaign must not hold up the others; an outage is of all of them, and raised."""
        is_answer = isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) is not None
        if isinstance(error, DBAPIError) and (error.connection_invalidated or not is_answer):
            raise error
        if isinstance(error, (PoolTimeout, OSError)):
            raise error
        # once for what may go wrong in hours of passes
        if campaign_id not in self._failing:
            log.warning("campaign_not_tended", campaign_id=campaign_id, error=str(error), exc_info=not is_answer)
        self._failing[campaign_id] = time.monotonic()

    def _targets(
        self, active: Sequence[Standing], now: datetime, served: dict[str, _Served]
    ) -> list[tuple[Standing, int]]:
        """Each campaign and how many of its jobs are to be open; those with first items to show come first."""
        lanes: dict[tuple[str, str, int], list[Standing]] = defaultdict(list)
        found: list[tuple[Standing, int]] = []
        for standing in active:
            campaign = standing.campaign
            try:
                opens = standing.queued and not standing.is_over(now) and standing.reason_to_wait(now) is None
            except Exception as error:
                self._note_failure(campaign.id, error)
                opens = False
            if not opens:
                found.append((standing, 0))
            else:
                lanes[campaign.model, campaign.project, campaign.priority].append(standing)
        claimed: dict[tuple[str, str, int], float] = {}
        for lane, members in lanes.items():
            if lane[0] not in served:
                served[lane[0]] = self._serve(lane[0])
            lately = sum(max(0, self._was_open.get(one.campaign.id, 0) - one.num_open) for one in members)
            claimed[lane] = max(float(lately), 0.8 * self._claimed.get(lane, 0.0))
            target = opening.lane_target(num_replicas=served[lane[0]].num_replicas, num_claimed=claimed[lane])
            found += zip(members, opening.shares(members, target), strict=True)
        self._claimed = claimed
        known = {standing.campaign.id for standing in active}
        self._was_open = {campaign: count for campaign, count in self._was_open.items() if campaign in known}
        self._in_vain = {campaign: when for campaign, when in self._in_vain.items() if campaign in known}
        self._failing = {campaign: when for campaign, when in self._failing.items() if campaign in known}
        return sorted(found, key=lambda one: one[0].num_first, reverse=True)

    def _serve(self, model: str) -> _Served:
        serving = replicas.up(seen_within_seconds=self._seen_within_seconds).where(
            Replica.model == model, Replica.state.in_(("ready", "busy")), Replica.drain_requested_at.is_(None)
        )
        with Session(self._engine) as session:
            sizes = [int(replica.layout.rpartition("s")[2]) for replica in session.scalars(serving)]
            times: Sequence[MeasuredTime] = session.scalars(measured(model)).all()
            return _Served(len(sizes), max(sizes, default=1), RunTimes.of(times))

    def _is_due(self, standing: Standing, target: int, now: datetime) -> bool:
        campaign = standing.campaign
        if time.monotonic() - self._failing.get(campaign.id, -_LOOK_AGAIN_SECONDS) < _LOOK_AGAIN_SECONDS:
            return False
        # also what was claimed in the moment in which somebody closed the others
        may_start = standing.num_open + standing.num_ahead > 0
        if standing.is_over(now):
            return may_start
        reason = standing.reason_to_wait(now)
        if reason is not None:
            return reason != campaign.hold_reason or may_start
        if standing.num_late:
            return True
        if standing.has_failed_too_often or campaign.hold_reason not in (None, "budget", "window"):
            return True
        if campaign.proof_count is not None and campaign.proof_state != "approved" and not standing.num_live:
            return True
        if campaign.max_parallel is not None and standing.num_live > campaign.max_parallel and standing.num_open:
            return True
        looked_at, limits = self._in_vain.get(campaign.id, (0.0, None))
        if limits == standing.limits and time.monotonic() - looked_at < _LOOK_AGAIN_SECONDS:
            return False
        # few transactions that open several jobs rather than one for each, but where every place counts
        is_low = standing.num_open <= target * 3 // 4 or campaign.max_parallel is not None
        return is_low and standing.num_waiting > 0 and standing.room(target) > 0


class _Tending:
    """What is done in one pass for one campaign.

    Args:
        opened_at: what its first job is opened as of; jobs of several campaigns take turns from there.
        num_campaigns: how many campaigns do.
        patience: when open jobs have waited for longer, what follows them has waited as long.
    """

    def __init__(
        self, served: _Served, target: int, *, opened_at: datetime, num_campaigns: int, patience: timedelta
    ) -> None:
        self._served = served
        self._patience = patience
        self._target = target
        self._opened_at = opened_at
        self._step = num_campaigns * _STEP

    def tend(self, session: Session, campaign_id: str) -> int | None:
        """Do what is due; how many of its jobs are open then. None: somebody else is at it, or it has ended."""
        session.execute(_SHORT_WAIT)
        if not session.execute(_TRY_LOCK, {"campaign": campaign_id}).scalar_one():
            return None
        row = session.execute(standings().where(Campaign.id == campaign_id)).one_or_none()
        if row is None:
            return None
        standing, now = _standing(row), row.now
        if standing.is_over(now):
            self._close(session, standing)
            return 0
        if standing.has_failed_too_often and standing.campaign.paused_at is None:
            self._stop_for_failures(session, standing, now)
            return 0
        reason = standing.reason_to_wait(now)
        if reason is not None:
            self._close(session, standing)
            self._note(session, standing, {"hold_reason": reason})
            return 0
        return self._open(session, standing, now)

    def _open(self, session: Session, standing: Standing, now: datetime) -> int:
        campaign = standing.campaign
        # failed jobs that were retried are not excused a second time
        changes: dict[str, Any] = {"failures_excused": min(campaign.failures_excused, standing.failed)}
        last_line = _ALL_LINES
        if standing.is_to_go_on(now):
            changes["proof_state"] = "approved"
        elif campaign.proof_count is not None and campaign.proof_state not in ("approved", "awaiting_approval"):
            values = {"campaign": campaign.id, "count": campaign.proof_count}
            proof = session.execute(_PROOF, values).one()
            is_whole = proof.num_jobs == campaign.proof_count or campaign.loaded_at is not None
            if is_whole and not proof.num_left:
                return self._end_proof(session, standing, now)
            last_line = proof.last_line or 0
            changes["proof_state"] = "running"
        if standing.num_late:
            session.execute(_CLOSE_LATE, {"campaign": campaign.id})
            standing = replace(standing, num_open=standing.num_open - standing.num_late, num_late=0)
        surplus = standing.num_live - (campaign.max_parallel or standing.num_live)
        if surplus > 0:
            session.execute(_CLOSE_LATEST, {"campaign": campaign.id, "count": surplus})
        opening_now = standing.opening(now)
        stop_at = standing.stop_at(opening_now)
        session.execute(_SET_STOP, {"campaign": campaign.id, "stop_at": stop_at})
        room = 0 if surplus > 0 else standing.room(self._target)
        waiting: list[Line] = []
        if room:
            values = {"campaign": campaign.id, "last_line": last_line, "count": opening.num_ahead(room)}
            waiting = [
                Line(one.id, one.line, (one.width, one.height, one.num_frames))
                for one in session.execute(WAITING, values)
            ]
        budget = self._budget(session, standing)
        choice = opening.choose(
            waiting,
            room=room,
            times=self._served.times,
            budget=budget,
            closes=opening_now.until,
            expires=campaign.expires_at,
            now=now,
        )
        if choice.opened:
            self._open_jobs(session, standing, choice.opened, stop_at)
        num_live = standing.num_live + len(choice.opened)
        reason = None
        if choice.is_spent and (not num_live or (budget.left or 0) <= 0):
            reason = "budget"
        elif choice.num_too_long and not num_live:
            reason = "window"
        elif not waiting and not num_live:
            # nothing to open as yet: what it was held for may still be so
            reason = campaign.hold_reason if campaign.hold_reason in ("budget", "window") else None
        is_used_up = standing.has_used_its_budget(can_begin=bool(num_live) or not choice.is_spent)
        if is_used_up:
            reason = "budget"
        self._note(session, standing, changes | {"hold_reason": reason})
        if is_used_up and campaign.on_budget == "cancel":
            self._cancel(session, campaign, Limit(BUDGET, opening.spent(standing)))
            return 0
        return standing.num_open + len(choice.opened)

    def _budget(self, session: Session, standing: Standing) -> Budget:
        """What is left when everything that runs or may be claimed has run as long as nine of ten such clips."""
        campaign, served = standing.campaign, self._served
        if campaign.budget_gpu_seconds is None:
            return Budget(None, served.gpus, standing.num_live)
        left = campaign.budget_gpu_seconds - standing.gpu_seconds
        for job in session.execute(_LIVE_JOBS, {"campaign": campaign.id}):
            run = served.times.run((job.width, job.height, job.num_frames))
            left -= served.gpus * max(job.seconds, 0.0 if run is None else run.p90)
        return Budget(left, served.gpus, standing.num_live)

    def _open_jobs(
        self, session: Session, standing: Standing, opened: Sequence[Opened], stop_at: datetime | None
    ) -> None:
        campaign = standing.campaign
        begins = self._opened_at
        if standing.num_first:
            lane = {"model": campaign.model, "priority": campaign.priority, "project": campaign.project}
            oldest: datetime | None = session.execute(_FIRST_OPEN, lane).scalar_one_or_none()
            begins = begins if oldest is None else min(begins, oldest - _EARLIER)
        follows = self._opened_at
        newest: datetime | None = session.execute(_NEWEST_OPEN, {"campaign": campaign.id}).scalar_one()
        if newest is not None and newest < self._opened_at - self._patience:
            # claims pass this campaign over: what is opened now would else be let wait from the beginning
            begins = follows = newest + _STEP
        run_at = [
            (begins if number < standing.num_first else follows) + number * self._step for number in range(len(opened))
        ]
        values = {
            "ids": [one.id for one in opened],
            "run_at": run_at,
            "start_by": [one.start_by for one in opened],
            "stop_at": stop_at,
            "priority": campaign.priority,
            "overrides": campaign.overrides_priority,
        }
        if session.execute(_OPEN, values).scalar_one():
            assert campaign.api_key is not None, "only a key's limit holds a job"
            session.execute(holds.open_holds(campaign.api_key))
        log.debug("jobs_opened", campaign_id=campaign.id, count=len(opened))

    def _close(self, session: Session, standing: Standing) -> None:
        if standing.num_open or standing.num_leased:
            session.execute(close_open(standing.campaign.id))

    def _end_proof(self, session: Session, standing: Standing, now: datetime) -> int:
        """The proof is done: what is left waits for approval, if anything is."""
        campaign = standing.campaign
        if campaign.loaded_at is not None and not standing.queued:
            self._note(session, standing, {"proof_state": "approved", "proof_done_at": now})
            return 0
        changes = {"proof_state": "awaiting_approval", "proof_done_at": now, "hold_reason": "approval"}
        self._close(session, standing)
        if self._note(session, standing, changes):
            session.execute(events.tell(campaign.id, "batch.awaiting_approval"))
        return 0

    def _stop_for_failures(self, session: Session, standing: Standing, now: datetime) -> None:
        campaign = standing.campaign
        self._close(session, standing)
        excused: dict[str, Any] = {"failures_excused": standing.failed}
        if campaign.on_failure == "cancel":
            if self._note(session, standing, excused):
                self._cancel(session, campaign, Limit(FAILURES, opening.failed_too_often(standing)))
            return
        paused = {"paused_at": now, "pause_reason": "failures", "hold_reason": "paused"}
        if self._note(session, standing, excused | paused):
            session.execute(events.tell(campaign.id, "batch.paused", {"reason": "failures"}))

    def _cancel(self, session: Session, campaign: Campaign, limit: Limit) -> None:
        for statement in closing.request_stop(campaign.id, limit=limit):
            session.execute(statement)

    def _note(self, session: Session, standing: Standing, changes: Mapping[str, Any]) -> bool:
        """Write what of `changes` is new; False: nothing was, or somebody else changes the campaign now, and the next
        pass comes soon. Who waits here with the campaign's lock might wait for one who waits for that."""
        campaign = standing.campaign
        new = {name: value for name, value in changes.items() if getattr(campaign, name) != value}
        if not new:
            return False
        row = session.scalars(
            select(Campaign)
            .where(Campaign.id == campaign.id, Campaign.state == "in_progress")
            .with_for_update(key_share=True, skip_locked=True)
        ).one_or_none()
        if row is None:
            return False
        for name, value in new.items():
            setattr(row, name, value)
        session.flush()
        if new.get("hold_reason") == "budget":
            session.execute(events.tell(campaign.id, "batch.budget_reached"))
        log.info("campaign_changed", campaign_id=campaign.id, **{name: str(value) for name, value in new.items()})
        return True
