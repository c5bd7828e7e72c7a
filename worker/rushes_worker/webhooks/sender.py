"""Delivers webhooks: claims what is due, makes the requests, writes down how they went. Any number may run.

One turn is short transactions that settle what has finished, and then one that claims what there is room for: nothing
that fails or takes long has what was settled done again. None is open while a request is under way.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any

from rushes_core import beats
from rushes_core.database import create_api_engine
from rushes_core.log import get_logger
from rushes_core.settings import Settings
from rushes_core.time_limit import within
from rushes_core.webhooks import deliveries
from rushes_core.webhooks.deliveries import Claimed, Outcome
from rushes_core.webhooks.events import (
    BATCH_TYPES,
    END_TYPES,
    SAMPLE_BATCH,
    SAMPLE_VIDEO,
    Subject,
    event_body,
    sample_data,
)
from rushes_core.webhooks.guard import Guard, Lookup, look_up
from rushes_core.webhooks.schedule import JITTER, MAX_AGE_DAYS, MAX_ATTEMPTS, delay_after, retry_after
from rushes_core.webhooks.signing import PublicKeys, SecretUnreadable, SigningSecret, Vault, sign
from sqlalchemy import Executable, Row
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection

from rushes_worker.webhooks.transport import Answer, Transport

log = get_logger(__name__)

MAX_UNDER_WAY = 512
"""Requests of one process at once."""
MAX_FAILING_UNDER_WAY = 256
"""Of these, to endpoints whose last attempt failed: they may all hang until the deadline."""
MAX_PROJECT_UNDER_WAY = 128
"""Of these, of one project, and half as many to its endpoints that fail: others have room while all of it hangs."""
MAX_SETTLED = 500
"""Outcomes that are written in one transaction; fewer after one that failed, which may have been too many."""
LEASE_MARGIN_SECONDS = 30.0
"""How much longer than a request a delivery is held: for the database to take the outcome."""
FRESH_SECONDS = 1.0
"""How long what was claimed together with another delivery of its job is sent without asking again."""
TURN_SECONDS = 20.0
"""How long a transaction may take: a connection may fall silent for ever, and each statement ends after ten seconds."""
POLL_SECONDS = 0.5
GATHER_SECONDS = 0.005
"""How long finished requests wait for others to be settled with."""
REAP_SECONDS = 5.0
TIDY_SECONDS = 60.0
STOP_SECONDS = 10.0
"""How long requests that are under way may go on after a stop was asked for."""
FINISH_SECONDS = 20.0
"""How long it may be until then that all outcomes are written, too."""
_OUTAGE_SECONDS = 1.0


class Sender:
    """Runs between `run` and `stop`, in one event loop.

    Args:
        lookup: addresses of a name; blocks.
        max_under_way: requests at once.
        max_per_project: requests at once of one project.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        lookup: Lookup = look_up,
        max_under_way: int = MAX_UNDER_WAY,
        max_per_project: int = MAX_PROJECT_UNDER_WAY,
    ) -> None:
        """
        Raises:
            WebhooksNotConfigured: there is no key to decrypt secrets with.
        """
        self._vault = Vault(settings)
        self._vault.check()
        self._public_keys = PublicKeys(settings)
        self._transport = Transport(settings, Guard(settings), lookup=lookup)
        self._engine = create_api_engine(settings, pool_size=2)
        self._timeout_seconds = settings.webhook_timeout_seconds
        self._lease_seconds = settings.webhook_timeout_seconds + LEASE_MARGIN_SECONDS
        self._concurrency = settings.webhook_concurrency
        self._max_under_way = max_under_way
        self._max_per_project = max_per_project
        self._under_way: dict[asyncio.Task[None], list[Claimed]] = {}
        self._done: list[Outcome] = []
        self._max_settled = MAX_SETTLED
        self._told_ends: set[str] = set()
        self._told_unreadable: set[str] = set()
        """Endpoints whose secret of before cannot be read, as the log has said."""
        self._unsent: list[tuple[str, int]] = []
        self._turned_at = float("-inf")
        self._wake = asyncio.Event()
        self._stopping = False

    def wake(self) -> None:
        """Look for work now. To be called in the event loop."""
        self._wake.set()

    def stop(self) -> None:
        """Claim nothing more, and return from `run` when what is under way has ended."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Deliver until `stop`. A database that is away is waited for, not an error."""
        async with self._transport:
            chores = [
                asyncio.create_task(self._repeat("webhook_beat", beats.BEAT_SECONDS, self._beat)),
                asyncio.create_task(self._repeat("webhook_reap", REAP_SECONDS, self._reap)),
                asyncio.create_task(self._repeat("webhook_tidy", TIDY_SECONDS, self._tidy)),
            ]
            failing = False
            while not self._stopping:
                self._wake.clear()
                try:
                    while (self._done or self._unsent) and not self._stopping:
                        await self._settle_some(TURN_SECONDS)
                    # leases run from the beginning of the transaction, however long it waits
                    began = time.monotonic()
                    claimed = await within(self._claim(), TURN_SECONDS)
                except (DBAPIError, PoolTimeout, OSError) as error:
                    if not failing:
                        log.warning("webhook_turn_failed", error=str(error).splitlines()[0])
                    failing = True
                    await self._pause(_OUTAGE_SECONDS)
                    continue
                if failing:
                    log.info("webhook_turn_recovered")
                failing = False
                self._turned_at = time.monotonic()
                for group in _by_job(claimed):
                    task = asyncio.create_task(self._deliver(group, began, time.monotonic()))
                    self._under_way[task] = group
                    task.add_done_callback(self._ended)
                if not claimed and not self._done:
                    await self._pause(POLL_SECONDS)
                # those that finish together are settled together
                await asyncio.sleep(GATHER_SECONDS)
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            await self._finish()
        await self._engine.dispose()

    async def _settle_some(self, seconds: float) -> None:
        """Write down how some of the requests went that have ended, and give back what was not sent: what was
        committed stays so, and is not made again."""
        outcomes, unsent = self._done[: self._max_settled], list(self._unsent)
        try:
            await within(self._write(outcomes, unsent), seconds)
        except (DBAPIError, PoolTimeout, OSError):
            self._max_settled = max(1, len(outcomes) // 4)
            raise
        # slow is not silent
        self._turned_at = time.monotonic()
        self._max_settled = min(MAX_SETTLED, 2 * self._max_settled)
        del self._done[: len(outcomes)]
        self._unsent = [one for one in self._unsent if one not in unsent]
        self._told_ends.difference_update(outcome.id for outcome in outcomes)

    async def _write(self, outcomes: list[Outcome], unsent: list[tuple[str, int]]) -> None:
        async with self._engine.begin() as connection:
            # given back first: an endpoint that is disabled by one of the outcomes is told none of them
            if unsent:
                await connection.execute(deliveries.release(unsent))
            if outcomes:
                await self._settle(connection, outcomes)

    async def _claim(self) -> list[Claimed]:
        under_way = [one for group in self._under_way.values() for one in group]
        room = self._max_under_way - len(under_way)
        if room <= 0 or self._stopping:
            return []
        statement = deliveries.claim(
            limit=room,
            limit_failing=max(0, MAX_FAILING_UNDER_WAY - sum(one.is_failing for one in under_way)),
            concurrency=self._concurrency,
            lease_seconds=self._lease_seconds,
            per_project=self._max_per_project,
            held=under_way,
        )
        async with self._engine.begin() as connection:
            await connection.execute(deliveries.lock_claims())
            return [Claimed(**row) for row in (await connection.execute(statement)).mappings()]

    async def _settle(self, connection: AsyncConnection, outcomes: list[Outcome]) -> None:
        changed = (await connection.execute(deliveries.settle(outcomes))).all()
        told = [outcome.id for outcome in outcomes if outcome.id in self._told_ends]
        if told:
            await connection.execute(deliveries.supersede(told))
        for endpoint in changed:
            if endpoint.state == "disabled":
                log.warning("webhook_endpoint_disabled", endpoint_id=endpoint.id, reason=endpoint.reason)
                await connection.execute(deliveries.cancel_pending([endpoint.id], reason=endpoint.reason))
            elif endpoint.failures == deliveries.BREAKER_FAILURES:
                log.warning("webhook_endpoint_paused", endpoint_id=endpoint.id, failures=endpoint.failures)

    async def _deliver(self, group: list[Claimed], leased_at: float, claimed_at: float) -> None:
        """Make the requests of one job's or campaign's deliveries to one endpoint, earlier events first.

        What is left when one of them takes long, or ends or holds up the endpoint, is given back: the next claim says
        whether it is still to be told.

        Args:
            leased_at: when their leases began at the earliest, in monotonic seconds.
            claimed_at: when they were heard of, in monotonic seconds.
        """
        is_off = False
        for place, claimed in enumerate(group):
            began = time.monotonic()
            # the lease must outlast the request: another sender would make the same one
            outlasts = began <= leased_at + self._lease_seconds - self._timeout_seconds - 1
            is_fresh = began <= claimed_at + FRESH_SECONDS and not is_off
            if not outlasts or (place > 0 and not is_fresh):
                self._give_back(group[place:])
                return
            try:
                # receivers refuse what is minutes off, and the clock of this machine may be
                outcome = await self._attempt(claimed, int(claimed.claimed_at + began - claimed_at))
            except asyncio.CancelledError:
                self._give_back(group[place + 1 :])
                raise
            except Exception:
                # it is tried again by the schedule: one that was only left to its lease would be for ever
                log.exception("webhook_attempt_crashed", delivery_id=claimed.id)
                outcome = _after(claimed, Answer(None, "internal_error", 0))
            if outcome.state == "delivered" and claimed.type in END_TYPES and claimed.job_id is not None:
                self._told_ends.add(outcome.id)
            self._done.append(outcome)
            is_off = outcome.hold is not None or outcome.gone_url is not None
            if outcome.error is not None:
                log.info(
                    "webhook_attempt_failed",
                    delivery_id=claimed.id,
                    endpoint_id=claimed.endpoint_id,
                    attempt=claimed.number,
                    status=outcome.status,
                    error=outcome.error,
                )

    def _give_back(self, claimed: Iterable[Claimed]) -> None:
        self._unsent += [(one.id, one.fence) for one in claimed]

    async def _attempt(self, claimed: Claimed, timestamp: int) -> Outcome:
        ended = Outcome(claimed.id, claimed.fence, "cancelled")
        is_of_batch = claimed.type in BATCH_TYPES
        if claimed.is_deleted:
            return replace(ended, error="batch_deleted" if is_of_batch else "video_deleted")
        if claimed.is_superseded:
            return replace(ended, error="superseded")
        if claimed.data is None and claimed.kind != "test":
            return replace(ended, error="event_forgotten")
        if claimed.secret is None or claimed.url is None:
            return replace(ended, error="secret_missing")
        try:
            secrets = self._secrets(claimed.secret, claimed.previous_secret, endpoint_id=claimed.endpoint_id)
        except SecretUnreadable:
            log.error("webhook_secret_unreadable", endpoint_id=claimed.endpoint_id)
            return _after(claimed, Answer(None, SecretUnreadable.code, 0))
        body = event_body(
            event_id=claimed.event_id,
            type=claimed.type,
            created_at=claimed.event_at,
            subject=Subject(
                claimed.job_id or (SAMPLE_BATCH if is_of_batch else SAMPLE_VIDEO),
                metadata=claimed.metadata or {},
                custom_id=claimed.custom_id,
                campaign_id=claimed.campaign_id,
            ),
            data=sample_data(claimed.type) if claimed.data is None else claimed.data,
        )
        headers = sign(claimed.event_id, timestamp, body, secrets, self._public_keys)
        return _after(claimed, await self._transport.post(claimed.url, body, headers))

    def _secrets(self, current: bytes, previous: bytes | None, *, endpoint_id: str) -> list[SigningSecret]:
        """What signs: without the secret of before, if that is unreadable, whoever has the current one is still told.

        Raises:
            SecretUnreadable: the current one is.
        """
        secrets = [self._vault.unlock(current)]
        if previous is not None:
            try:
                secrets.append(self._vault.unlock(previous))
            except SecretUnreadable:
                if endpoint_id not in self._told_unreadable:
                    self._told_unreadable.add(endpoint_id)
                    log.warning("webhook_previous_secret_unreadable", endpoint_id=endpoint_id)
        return secrets

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            # its deliveries come back when their leases run out
            log.error("webhook_delivery_crashed", exc_info=error)

    async def _finish(self) -> None:
        """Let requests that are under way end, and settle them. Others' outcome is unknown: they are made again."""
        finished_by = time.monotonic() + FINISH_SECONDS
        if self._under_way:
            await asyncio.wait(list(self._under_way), timeout=STOP_SECONDS)
        cut_off = list(self._under_way)
        for task in cut_off:
            task.cancel()
        await asyncio.gather(*cut_off, return_exceptions=True)
        fewest = self._max_settled
        while self._done or self._unsent:
            try:
                # what takes too long leaves time for fewer
                await self._settle_some((finished_by - time.monotonic()) / 2)
            except (DBAPIError, PoolTimeout, OSError) as error:
                # once more with fewer, if it may have been too many
                if self._max_settled >= fewest:
                    log.warning("webhook_turn_failed", error=str(error).splitlines()[0])
                    return
                fewest = self._max_settled
            else:
                # the next ones are more again: that those fail is no reason to give up
                fewest = MAX_SETTLED

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _repeat(self, name: str, seconds: float, action: Callable[[], Awaitable[bool | None]]) -> None:
        failing = False
        while True:
            try:
                has_acted = await action()
            except (DBAPIError, PoolTimeout, OSError) as error:
                # once for an outage
                if not failing:
                    log.warning(f"{name}_failed", error=str(error).splitlines()[0])
                failing = True
            else:
                # what was left out did not go well either
                failing = failing and has_acted is False
            await asyncio.sleep(seconds)

    async def _beat(self) -> bool:
        """Say that this sender works, if it does; whether it does."""
        works = time.monotonic() < self._turned_at + 2 * beats.BEAT_SECONDS
        if works:
            await self._execute(beats.beat(beats.SENDER))
        return works

    async def _reap(self) -> None:
        for lost in await self._execute(deliveries.reap()):
            log.warning("webhook_sender_lost", delivery_id=lost.delivery_id, attempt=lost.number)

    async def _tidy(self) -> None:
        for statement in (deliveries.give_up(), deliveries.cancel_left_over()):
            count = deliveries.MAX_AT_ONCE
            while count >= deliveries.MAX_AT_ONCE:
                count = len(await self._execute(statement))
                if count:
                    log.info("webhook_rows_tidied", count=count)
        unused = [row.id for row in await self._execute(deliveries.unused_endpoints())]
        if unused:
            await self._execute(*deliveries.forget_endpoints(unused))

    async def _execute(self, *statements: Executable) -> Sequence[Row[Any]]:
        """Run them in one transaction; the rows of the last one."""

        async def execute() -> Sequence[Row[Any]]:
            rows: Sequence[Row[Any]] = []
            async with self._engine.begin() as connection:
                for statement in statements:
                    result = await connection.execute(statement)
                    rows = result.all() if result.returns_rows else []
            return rows

        return await within(execute(), TURN_SECONDS)


def _by_job(claimed: Iterable[Claimed]) -> list[list[Claimed]]:
    """Deliveries in groups that are made one after the other: no receiver is first told of an end and then, for the
    first time, of what came before it."""
    groups: dict[tuple[str, str], list[Claimed]] = {}
    for one in claimed:
        groups.setdefault((one.endpoint_id, one.job_id or one.id), []).append(one)
    return [sorted(group, key=_order) for group in groups.values()]


def _order(claimed: Claimed) -> tuple[int, datetime]:
    return claimed.sequence, claimed.event_at


def _after(claimed: Claimed, answer: Answer) -> Outcome:
    """What is to become of a delivery after this answer."""
    outcome = Outcome(
        claimed.id,
        claimed.fence,
        "delivered" if answer.error is None else "failed",
        status=answer.status,
        error=answer.error,
        duration_ms=answer.duration_ms,
        sent_to=None if claimed.url is None else claimed.url.partition("?")[0],
        excerpt=answer.excerpt,
        step=claimed.step,
    )
    if answer.error is None or claimed.kind == "test":
        return outcome
    if answer.status == HTTPStatus.GONE:
        return replace(outcome, gone_url=claimed.url)
    if claimed.number >= MAX_ATTEMPTS or claimed.created_at < datetime.now(UTC) - timedelta(days=MAX_AGE_DAYS):
        return outcome
    wanted = retry_after(answer.retry_after)
    if wanted is not None:
        hold = None
        if answer.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            hold = min(wanted, deliveries.MAX_HOLD_SECONDS)
        # a receiver that was told when to come back to is not asked before
        return replace(outcome, state="pending", delay=wanted * random.uniform(1, 1 + JITTER), hold=hold)
    delay = delay_after(claimed.step)
    return outcome if delay is None else replace(outcome, state="pending", delay=delay, step=claimed.step + 1)
