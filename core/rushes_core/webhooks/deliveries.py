"""Statements on deliveries: claim, settle, give up, and what clients ask for. Nothing here executes.

A delivery is leased like a job: its fence rises with every claim, and what a sender with an older one reports matches
no row. Nothing is held open while a request is under way.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Select, TextClause, literal, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningInsert
from sqlalchemy.sql.elements import ColumnElement

from rushes_core.webhooks.events import END_TYPES, PASSING_TYPES
from rushes_core.webhooks.schedule import DELAYS, JITTER, MAX_AGE_DAYS, MAX_ATTEMPTS
from rushes_core.webhooks.tables import WebhookAttempt, WebhookDelivery, WebhookEndpoint

BREAKER_FAILURES = 10
"""Failures in a row after which an endpoint is tried with one delivery at a time, with pauses between."""
BREAKER_SECONDS = (60, 300)
"""The first pause and the longest."""
FAILING_DAYS = 5
"""An endpoint that was probed in vain for so long is disabled."""
MAX_HOLD_SECONDS = 300
"""How long an answer 429 or 503 with `Retry-After` holds up the other deliveries to its endpoint at most."""
RETENTION_DAYS = 30
"""How long deliveries that ended are kept, and at least their events."""
MAX_PROJECT_TESTS = 16
"""Tests of a project's endpoints that one sender makes at once."""
MAX_AT_ONCE = 5_000
"""Rows that a statement touches at most; one that touched so many is to be repeated."""

BY_REQUEST = "request"
NOT_TOLD_YET: dict[str, Any] = {"state": "pending", "attempts": 0, "last_status": None}
"""What a job with a `webhook_url` says of it until its end was to be told."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A delivery that this sender holds, and what it needs to make the request."""

    id: str
    fence: int
    kind: str
    project: str
    endpoint_id: str
    is_failing: bool
    """Whether the last attempt at the endpoint failed."""
    event_id: str
    job_id: str | None
    """Id of the job, or of the campaign, that it tells of."""
    type: str
    url: str | None
    number: int
    """Of this attempt, from 1."""
    step: int
    secret: bytes | None
    previous_secret: bytes | None
    data: dict[str, Any] | None
    """Null for a test, and for an event that is no longer kept."""
    metadata: dict[str, Any] | None
    """The job's."""
    custom_id: str | None
    campaign_id: str | None
    """Of which the job is."""
    event_at: datetime
    sequence: int
    """Of the event; rises with the events of a job or campaign."""
    created_at: datetime
    claimed_at: float
    """In Unix seconds by the clock of the database."""
    is_deleted: bool
    """Whether the job or campaign was deleted: it tells nothing any more."""
    is_superseded: bool
    """Whether the endpoint took the end of what this tells of while it waited."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt went, and what is to become of its delivery."""

    id: str
    fence: int
    state: str
    """`delivered`, `pending` to be tried again, `failed` or `cancelled`."""
    status: int | None = None
    error: str | None = None
    duration_ms: int | None = None
    sent_to: str | None = None
    """The URL, without its query, which may hold secrets."""
    excerpt: str | None = None
    delay: float = 0.0
    """Seconds until the next attempt."""
    step: int = 0
    hold: float | None = None
    """Seconds for which the endpoint asked not to be sent anything."""
    gone_url: str | None = None
    """Where it was said that the endpoint is no more."""


_LOCK = text("SELECT pg_advisory_xact_lock(738764376)")

# every endpoint with pending deliveries costs one probe of the index, however many there are of it
_WAITING = """
WITH RECURSIVE waiting AS (
    (SELECT endpoint_id FROM webhook_deliveries WHERE state = 'pending' ORDER BY endpoint_id LIMIT 1)
    UNION ALL
    SELECT (
        SELECT d.endpoint_id FROM webhook_deliveries AS d
        WHERE d.state = 'pending' AND d.endpoint_id > waiting.endpoint_id ORDER BY d.endpoint_id LIMIT 1
    ) FROM waiting WHERE waiting.endpoint_id IS NOT NULL
)"""
_CLAIM = text(
    _WAITING
    + """, busy AS (
    SELECT endpoint_id, count(*) AS count FROM webhook_deliveries WHERE state = 'delivering' GROUP BY endpoint_id
), held AS (
    SELECT * FROM jsonb_to_recordset(CAST(:held AS jsonb)) AS held (
        project text, under_way bigint, failing bigint, tests bigint
    )
), ready AS (
    SELECT e.id, e.project, e.failures > 0 AS fails,
        greatest(0, CASE WHEN e.failures >= :breaker THEN 1 ELSE :concurrency END - coalesce(busy.count, 0)) AS slots
    FROM waiting JOIN webhook_endpoints AS e ON e.id = waiting.endpoint_id
        LEFT JOIN busy ON busy.endpoint_id = e.id
    WHERE e.state = 'enabled' AND e.deleted_at IS NULL AND (e.open_until IS NULL OR e.open_until <= now())
), picked AS MATERIALIZED (
    SELECT next.id, next.next_at, ready.fails, ready.project FROM ready, LATERAL (
        SELECT d.id, d.next_at FROM webhook_deliveries AS d
        WHERE d.endpoint_id = ready.id AND d.state = 'pending' AND d.next_at <= now()
        ORDER BY d.next_at, d.id LIMIT ready.slots FOR NO KEY UPDATE SKIP LOCKED
    ) AS next
), by_project AS (
    SELECT id, next_at, fails,
        coalesce(under_way, 0) + row_number() OVER (PARTITION BY project ORDER BY fails, next_at) AS place,
        coalesce(failing, 0) + row_number() OVER (PARTITION BY project, fails ORDER BY next_at) AS place_failing
    FROM picked LEFT JOIN held USING (project)
), fair AS (
    SELECT id, next_at, fails, row_number() OVER (PARTITION BY fails ORDER BY next_at) AS turn FROM by_project
    WHERE place <= :per_project AND (NOT fails OR place_failing <= :per_project / 2)
), chosen AS (
    SELECT id FROM fair WHERE NOT fails OR turn <= :limit_failing ORDER BY fails, next_at LIMIT :limit
), asked AS MATERIALIZED (  -- somebody waits for these, whatever the state of the endpoint
    SELECT d.id, e.project FROM webhook_deliveries AS d JOIN webhook_endpoints AS e ON e.id = d.endpoint_id
    WHERE d.state = 'pending' AND d.kind = 'test' AND e.deleted_at IS NULL
    ORDER BY d.id LIMIT :max_rows FOR NO KEY UPDATE OF d SKIP LOCKED
), tests AS (
    SELECT id FROM (
        SELECT id, coalesce(tests, 0) + row_number() OVER (PARTITION BY project ORDER BY id) AS place
        FROM asked LEFT JOIN held USING (project)
    ) AS placed WHERE place <= :tests_per_project ORDER BY id LIMIT :limit
), claimed AS (
    UPDATE webhook_deliveries AS d
    SET state = 'delivering', attempts = attempts + 1, fence = nextval('webhook_fence'),
        lease_until = now() + make_interval(secs => :lease_seconds)
    WHERE d.id IN (SELECT id FROM chosen UNION SELECT id FROM tests) AND d.state = 'pending'
    RETURNING d.*
)
SELECT claimed.id, claimed.fence, claimed.kind, claimed.project, claimed.endpoint_id, e.failures > 0 AS is_failing,
    claimed.event_id, claimed.job_id, claimed.type, coalesce(claimed.url, e.url) AS url, claimed.attempts AS number,
    claimed.step, coalesce(e.secret, s.secret) AS secret,
    CASE WHEN e.secret IS NULL THEN CASE WHEN s.previous_until > now() THEN s.previous_secret END
        WHEN e.previous_until > now() THEN e.previous_secret END AS previous_secret,
    o.data, j.request -> 'metadata' AS metadata, j.custom_id, j.campaign_id,
    coalesce(o.created_at, claimed.created_at) AS event_at, claimed.sequence, claimed.created_at,
    extract(epoch FROM clock_timestamp())::float AS claimed_at,
    j.deleted_at IS NOT NULL OR c.deleted_at IS NOT NULL AS is_deleted,
    claimed.type = ANY (:passing_types) AND EXISTS (
        SELECT FROM webhook_deliveries AS told
        WHERE told.job_id = claimed.job_id AND told.endpoint_id = claimed.endpoint_id AND told.state = 'delivered'
            AND told.type = ANY (:end_types) AND told.sequence > claimed.sequence
            AND told.finished_at >= claimed.created_at
    ) AS is_superseded
FROM claimed JOIN webhook_endpoints AS e ON e.id = claimed.endpoint_id
    LEFT JOIN webhook_secrets AS s ON e.secret IS NULL AND s.project = e.project
    LEFT JOIN outbox AS o ON o.event_id = claimed.event_id
    LEFT JOIN jobs AS j ON j.id = claimed.job_id
    LEFT JOIN campaigns AS c ON c.id = claimed.job_id AND j.id IS NULL
ORDER BY claimed.next_at
"""
)


def lock_claims() -> TextClause:
    """To be run before `claim` in its transaction: what it counts then stays true until the end."""
    return _LOCK


def claim(
    *,
    limit: int,
    limit_failing: int,
    concurrency: int,
    lease_seconds: float,
    per_project: int,
    held: Iterable[Claimed] = (),
) -> TextClause:
    """Lease deliveries that are due: the members of `Claimed`.

    At most `concurrency` of an endpoint are under way, whoever holds them; one of an endpoint that keeps failing.
    Endpoints that do not fail come first, and of the others there are `limit_failing` at most. With what is `held`,
    the sender has at most `per_project` of a project, half of them at endpoints that fail, beside a few tests.
    """
    counts: dict[str, dict[str, int]] = {}
    for one in held:
        of_project = counts.setdefault(one.project, {"under_way": 0, "failing": 0, "tests": 0})
        if one.kind == "test":
            of_project["tests"] += 1
        else:
            of_project["under_way"] += 1
            of_project["failing"] += one.is_failing
    return _CLAIM.bindparams(
        held=json.dumps([{"project": project, **of_project} for project, of_project in counts.items()]),
        per_project=per_project,
        tests_per_project=MAX_PROJECT_TESTS,
        max_rows=MAX_AT_ONCE,
        limit=limit,
        limit_failing=limit_failing,
        concurrency=concurrency,
        lease_seconds=lease_seconds,
        breaker=BREAKER_FAILURES,
        passing_types=list(PASSING_TYPES),
        end_types=list(END_TYPES),
    )


_WHY_OFF = """CASE WHEN e.deleted_at IS NOT NULL THEN 'endpoint_deleted'
    WHEN e.disabled_reason = 'request' THEN 'endpoint_disabled' ELSE e.disabled_reason END"""

_PASSING = ", ".join(f"'{one}'" for one in PASSING_TYPES)
_SETTLED = "CASE settled.state WHEN 'delivered' THEN 'delivered' WHEN 'pending' THEN 'pending' ELSE 'failed' END"


def _told(rows: str, *, state: str = "'failed'", where: str = "true") -> str:
    """Common table expressions by which jobs say how it went to tell of their end, as `rows` of deliveries do.

    Args:
        state: of the job's webhook, by a row.
        where: a row counts.
    """
    its_end = f"{rows}.url IS NOT NULL AND {rows}.type NOT IN ({_PASSING}) AND {where}"
    # in one order, whoever does it: a job may be told of by several at once. What was taken once stays told, whatever
    # becomes of a redelivery
    return f"""ended AS MATERIALIZED (
    SELECT id, generation FROM jobs WHERE id IN (SELECT job_id FROM {rows} WHERE {its_end})
        AND webhook IS NOT NULL  -- without one it was its campaign's URL that was told
    ORDER BY id FOR NO KEY UPDATE
), latest AS (  -- not the ends of before a retry
    SELECT DISTINCT ON (ended.id) ended.id, {state} AS state, {rows}.attempts, {rows}.last_status
    FROM {rows} JOIN ended ON ended.id = {rows}.job_id
        JOIN outbox AS o ON o.event_id = {rows}.event_id AND o.generation = ended.generation
    WHERE {its_end} ORDER BY ended.id, {state} = 'delivered' DESC, {rows}.id DESC
), told AS (
    UPDATE jobs SET webhook = jsonb_build_object(
        'state', latest.state, 'attempts', latest.attempts, 'last_status', latest.last_status
    ) FROM latest
    WHERE jobs.id = latest.id AND (latest.state = 'delivered' OR jobs.webhook ->> 'state' IS DISTINCT FROM 'delivered')
)"""


_SETTLE = text(
    f"""
WITH outcomes AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(CAST(:outcomes AS jsonb)) AS outcome (
        id text, fence bigint, state text, status smallint, error text, duration_ms bigint, sent_to text, excerpt text,
        delay float8, step smallint, hold float8, gone_url text
    )
), settled AS (
    UPDATE webhook_deliveries AS d
    SET state = o.state, step = o.step, lease_until = NULL,
        attempts = CASE WHEN o.state = 'cancelled' THEN d.attempts - 1 ELSE d.attempts END,
        last_status = CASE WHEN o.state = 'cancelled' THEN d.last_status ELSE o.status END,
        last_error = o.error,
        next_at = CASE o.state WHEN 'pending' THEN now() + make_interval(secs => o.delay) ELSE d.next_at END,
        finished_at = CASE WHEN o.state <> 'pending' THEN now() END
    FROM outcomes AS o WHERE d.id = o.id AND d.fence = o.fence AND d.state = 'delivering'
    RETURNING d.id, d.endpoint_id, d.kind, d.event_id, d.job_id, d.url, d.state, d.attempts, d.sequence, d.type,
        d.last_status, o.status, o.error, o.duration_ms, o.sent_to, o.excerpt, o.hold, o.gone_url
), logged AS (
    INSERT INTO webhook_attempts (delivery_id, number, status, error, duration_ms, url, excerpt)
    SELECT id, attempts, status, error, duration_ms, sent_to, excerpt FROM settled WHERE state <> 'cancelled'
), {_told("settled", state=_SETTLED)}, sums AS (
    SELECT endpoint_id, bool_or(state = 'delivered') AS succeeded,
        count(*) FILTER (WHERE error IS NOT NULL AND gone_url IS NULL) AS failed,
        max(hold) AS hold, array_agg(gone_url) FILTER (WHERE url IS NULL AND gone_url IS NOT NULL) AS gone
    FROM settled WHERE kind <> 'test' AND state <> 'cancelled' GROUP BY endpoint_id
), locked AS MATERIALIZED (  -- in one order, whoever settles; most endpoints are well and stay as they are
    SELECT e.id FROM webhook_endpoints AS e JOIN sums ON sums.endpoint_id = e.id
    WHERE NOT (succeeded AND e.failures = 0 AND e.open_until IS NULL AND hold IS NULL AND gone IS NULL)
    ORDER BY e.id FOR NO KEY UPDATE OF e
)
UPDATE webhook_endpoints AS e
SET failures = CASE WHEN succeeded THEN 0 ELSE failures + failed END,
    -- from the first pause on: a failure of long ago is no days of failing
    failing_since = CASE WHEN NOT succeeded AND failures + failed >= :breaker
        THEN CASE WHEN failures >= :breaker THEN coalesce(failing_since, now()) ELSE now() END END,
    -- one success ends the pauses of an endpoint that is probed, and no wait that another one asked for
    open_until = greatest(
        CASE WHEN open_until > now() AND (failures < :breaker OR NOT succeeded) THEN open_until END,
        CASE WHEN held_until > now() THEN held_until END,
        CASE WHEN NOT succeeded AND failures + failed >= :breaker THEN now() + make_interval(secs => (
            least(:longest, :first * power(2, least(failures + failed - :breaker, 10))) * (0.8 + 0.4 * random())
        )) END,
        now() + make_interval(secs => hold)
    ),
    held_until = greatest(
        CASE WHEN held_until > now() THEN held_until END, now() + make_interval(secs => hold)
    ),
    state = CASE WHEN e.url = ANY (gone) OR e.origin IS NULL AND NOT succeeded AND failures >= :breaker
        AND failing_since < now() - make_interval(days => :days) THEN 'disabled' ELSE state END,
    disabled_reason = CASE WHEN e.url = ANY (gone) THEN 'gone' WHEN e.origin IS NULL AND NOT succeeded
        AND failures >= :breaker AND failing_since < now() - make_interval(days => :days) THEN 'failing'
        ELSE disabled_reason END
FROM sums JOIN locked ON locked.id = sums.endpoint_id WHERE e.id = sums.endpoint_id
RETURNING e.id, e.state, e.failures, """
    + _WHY_OFF
    + """ AS reason
"""
)


def settle(outcomes: Sequence[Outcome]) -> TextClause:
    """Write down how attempts went. Those that are no longer this sender's are passed over.

    The endpoints that changed: `id`, `state`, `failures`, `reason`. For a disabled one `cancel_pending` is to follow
    in the same transaction, and `supersede` for the jobs whose end was told.
    """
    return _SETTLE.bindparams(
        outcomes=json.dumps([asdict(outcome) for outcome in outcomes]),
        breaker=BREAKER_FAILURES,
        first=BREAKER_SECONDS[0],
        longest=BREAKER_SECONDS[1],
        days=FAILING_DAYS,
    )


def supersede(delivery_ids: Collection[str]) -> TextClause:
    """Cancel what earlier states of a job or campaign have to tell an endpoint that was told of its end."""
    return text("""
UPDATE webhook_deliveries AS d
SET state = 'cancelled', last_error = 'superseded', finished_at = now()
FROM webhook_deliveries AS told
WHERE told.id = ANY (:ids) AND told.state = 'delivered' AND d.job_id = told.job_id
    AND d.endpoint_id = told.endpoint_id AND d.state = 'pending' AND d.sequence < told.sequence
    AND d.type = ANY (:passing_types)
""").bindparams(ids=list(delivery_ids), passing_types=list(PASSING_TYPES))


def cancel_pending(endpoint_ids: Collection[str], *, reason: str) -> TextClause:
    """Cancel what waits for endpoints that are disabled or deleted. The ids of what was cancelled."""
    return text("""
WITH waiting AS MATERIALIZED (
    SELECT id FROM webhook_deliveries WHERE endpoint_id = ANY (:ids) AND state = 'pending'
    LIMIT :limit FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE webhook_deliveries AS d SET state = 'cancelled', last_error = :reason, finished_at = now()
FROM waiting WHERE d.id = waiting.id RETURNING d.id
""").bindparams(ids=list(endpoint_ids), reason=reason, limit=MAX_AT_ONCE)


def cancel_left_over() -> TextClause:
    """Cancel what was under way while its endpoint was disabled or deleted, and waits again since. Ids."""
    return text(
        """
WITH waiting AS MATERIALIZED (
    SELECT d.id, """
        + _WHY_OFF
        + """ AS reason FROM webhook_endpoints AS e JOIN webhook_deliveries AS d ON d.endpoint_id = e.id
    WHERE (e.state = 'disabled' AND d.kind <> 'test' OR e.deleted_at IS NOT NULL) AND d.state = 'pending'
    LIMIT :limit FOR NO KEY UPDATE OF d SKIP LOCKED
)
UPDATE webhook_deliveries AS d SET state = 'cancelled', finished_at = now(), last_error = waiting.reason
FROM waiting WHERE d.id = waiting.id RETURNING d.id
"""
    ).bindparams(limit=MAX_AT_ONCE)


def reap() -> TextClause:
    """Take back what a sender held too long: it died, and the attempt may have been made. Ids and attempts.

    It is made again at once. One that takes its sender along time and again goes on by the schedule, and fails at
    its end.
    """
    return text(f"""
WITH dead AS MATERIALIZED (
    SELECT id, coalesce(last_error = 'sender_lost', false) AS again FROM webhook_deliveries
    WHERE state = 'delivering' AND lease_until < now()
    ORDER BY lease_until LIMIT 500 FOR NO KEY UPDATE SKIP LOCKED
), judged AS (
    SELECT dead.*, d.kind = 'test' OR d.attempts >= :max_attempts OR again AND d.step >= cardinality(delays)
        OR d.created_at < now() - make_interval(days => :max_days) AS is_over,
        CASE WHEN again THEN delays[d.step + 1] ELSE 0 END AS delay
    FROM dead JOIN webhook_deliveries AS d ON d.id = dead.id, CAST(:delays AS float8[]) AS delays
), back AS (
    UPDATE webhook_deliveries AS d
    SET state = CASE WHEN is_over THEN 'failed' ELSE 'pending' END,
        finished_at = CASE WHEN is_over THEN now() END,
        step = CASE WHEN again AND NOT is_over THEN step + 1 ELSE step END,
        lease_until = NULL, last_error = 'sender_lost',
        next_at = now() + make_interval(secs => coalesce(delay, 0) * (1 + :jitter * (2 * random() - 1)))
    FROM judged WHERE d.id = judged.id RETURNING d.id, d.attempts, d.event_id, d.job_id, d.url, d.type, d.state,
        d.last_status
), {_told("back", where="back.state = 'failed'")}
INSERT INTO webhook_attempts (delivery_id, number, error) SELECT id, attempts, 'sender_lost' FROM back
RETURNING delivery_id, number
""").bindparams(max_attempts=MAX_ATTEMPTS, max_days=MAX_AGE_DAYS, delays=list(DELAYS), jitter=JITTER)


def release(held: Collection[tuple[str, int]]) -> TextClause:
    """Give back what was claimed and not sent, with nothing counted."""
    return text("""
UPDATE webhook_deliveries AS d SET state = 'pending', lease_until = NULL, attempts = attempts - 1
FROM jsonb_to_recordset(CAST(:held AS jsonb)) AS held (id text, fence bigint)
WHERE d.id = held.id AND d.fence = held.fence AND d.state = 'delivering'
""").bindparams(held=json.dumps([{"id": id, "fence": fence} for id, fence in held]))


def give_up() -> TextClause:
    """Fail what has waited too long, for an endpoint that was never well enough. Ids."""
    return text(f"""
WITH old AS MATERIALIZED (
    SELECT d.id FROM webhook_endpoints AS e JOIN webhook_deliveries AS d ON d.endpoint_id = e.id
    WHERE e.failures > 0 AND d.state = 'pending' AND d.created_at < now() - make_interval(days => :days)
    LIMIT :limit FOR NO KEY UPDATE OF d SKIP LOCKED
), given_up AS (
    UPDATE webhook_deliveries AS d SET state = 'failed', last_error = coalesce(d.last_error, 'too_old'),
        finished_at = now()
    FROM old WHERE d.id = old.id RETURNING d.id, d.event_id, d.job_id, d.url, d.type, d.attempts,
        d.last_status
), {_told("given_up")}
SELECT id FROM given_up
""").bindparams(days=MAX_AGE_DAYS, limit=MAX_AT_ONCE)


def forget() -> TextClause:
    """Remove deliveries that ended, after `RETENTION_DAYS`. Ids of what was removed."""
    return text("""
DELETE FROM webhook_deliveries WHERE id IN (
    SELECT id FROM webhook_deliveries WHERE finished_at < now() - make_interval(days => :days)
    ORDER BY finished_at LIMIT :limit FOR UPDATE SKIP LOCKED
) RETURNING id
""").bindparams(days=RETENTION_DAYS, limit=MAX_AT_ONCE)


_IS_UNUSED = """(e.origin IS NOT NULL OR e.deleted_at < now() - interval '1 day')
    AND e.created_at < now() - interval '1 day'
    AND NOT EXISTS (SELECT FROM webhook_deliveries AS d WHERE d.endpoint_id = e.id)"""


def unused_endpoints() -> TextClause:
    """Ids of some origins of jobs' own URLs and deleted endpoints that nothing in the log is of."""
    return text(f"SELECT e.id FROM webhook_endpoints AS e WHERE {_IS_UNUSED} LIMIT 1000")


def forget_endpoints(endpoint_ids: Collection[str]) -> tuple[TextClause, TextClause, TextClause]:
    """Remove those of these that are still unused, in one transaction. Fails when the table is too busy.

    An event that finds its origin there must find it still when its delivery is written: the lock keeps events out.
    """
    return (
        text("SET LOCAL lock_timeout = '100ms'"),
        text("LOCK TABLE webhook_endpoints IN SHARE ROW EXCLUSIVE MODE"),
        text(f"DELETE FROM webhook_endpoints AS e WHERE e.id = ANY (:ids) AND {_IS_UNUSED}").bindparams(
            ids=list(endpoint_ids)
        ),
    )


_FIRST = (
    _WAITING
    + """, first AS (
    SELECT next.next_at FROM waiting JOIN webhook_endpoints AS e ON e.id = waiting.endpoint_id, LATERAL (
        SELECT next_at FROM webhook_deliveries AS d
        WHERE d.endpoint_id = e.id AND d.state = 'pending' ORDER BY next_at LIMIT 1
    ) AS next
    WHERE next.next_at <= now() AND e.state = 'enabled' AND e.deleted_at IS NULL
        AND (e.open_until IS NULL OR e.open_until <= now())
)
"""
)


def is_any_due() -> TextClause:
    """Whether a sender would find something to do."""
    return text(f"{_FIRST} SELECT EXISTS (SELECT FROM first)")


MAX_COUNTED = 100_000


def standing() -> TextClause:
    """`num_waiting`, up to `MAX_COUNTED`, and `lag`: seconds since the first that is due might have been sent."""
    return text(
        f"""{_FIRST}
SELECT coalesce((SELECT extract(epoch FROM now() - min(next_at)) FROM first), 0)::float AS lag,
    (SELECT count(*) FROM (SELECT FROM webhook_deliveries WHERE state = 'pending' LIMIT :most) AS d) AS num_waiting
"""
    ).bindparams(most=MAX_COUNTED)


def get(delivery_id: str, *, project: str) -> Select[WebhookDelivery]:
    return select(WebhookDelivery).where(WebhookDelivery.id == delivery_id, WebhookDelivery.project == project)


def listed(*, project: str) -> Select[WebhookDelivery, WebhookEndpoint]:
    """The deliveries of a project and where each goes, in no order."""
    is_to = WebhookEndpoint.id == WebhookDelivery.endpoint_id
    return (
        select(WebhookDelivery, WebhookEndpoint).join(WebhookEndpoint, is_to).where(WebhookDelivery.project == project)
    )


def in_state(state: str) -> ColumnElement[bool]:
    """Whether a delivery is in one of the known states; written out, as conditions of indexes are."""
    return WebhookDelivery.state == literal(state, literal_execute=True)


def attempts(delivery_id: str) -> Select[WebhookAttempt]:
    """Every attempt of a delivery, in order."""
    return select(WebhookAttempt).where(WebhookAttempt.delivery_id == delivery_id).order_by(WebhookAttempt.number)


_IS_KNOWN = """(
        EXISTS (SELECT FROM jobs AS j WHERE j.id = o.job_id AND j.deleted_at IS NULL)
        OR EXISTS (SELECT FROM campaigns AS c WHERE c.id = o.job_id AND c.deleted_at IS NULL)
    )"""


def event_of(event_id: str) -> TextClause:
    """Whether the event is still kept, and its job or campaign is not deleted."""
    return text(f"SELECT 1 FROM outbox AS o WHERE o.event_id = :event_id AND {_IS_KNOWN}").bindparams(event_id=event_id)


def redeliver(delivery: WebhookDelivery, *, new_id: str) -> ReturningInsert[WebhookDelivery]:
    """The same event once more, to where it went. No row: that was asked for already."""
    same = ("project", "endpoint_id", "event_id", "job_id", "type", "sequence", "url")
    return (
        insert(WebhookDelivery)
        .values(id=new_id, kind="redelivery", **{name: getattr(delivery, name) for name in same})
        .on_conflict_do_nothing(index_elements=[WebhookDelivery.id])
        .returning(WebhookDelivery)
    )


def test(endpoint: WebhookEndpoint, *, new_id: str, event_id: str, type: str) -> ReturningInsert[WebhookDelivery]:
    """An event that tells of nothing, sent once whatever the state of the endpoint. No row: it was made already."""
    return (
        insert(WebhookDelivery)
        .values(id=new_id, kind="test", project=endpoint.project, endpoint_id=endpoint.id, event_id=event_id, type=type)
        .on_conflict_do_nothing(index_elements=[WebhookDelivery.id])
        .returning(WebhookDelivery)
    )


def withdraw_test(delivery_id: str) -> TextClause:
    """Have a test that no sender has taken not be sent any more. Its id; no row: one has."""
    return text("""
UPDATE webhook_deliveries SET state = 'cancelled', last_error = 'sender_unavailable', finished_at = now()
WHERE id = :id AND state = 'pending' RETURNING id
""").bindparams(id=delivery_id)


def replay(
    *, project: str, since: datetime, until: datetime, endpoint_id: str | None, types: Collection[str], limit: int
) -> TextClause:
    """Deliver the events of a time once more to whoever is to be told of them now, the oldest first.

    Those that wait for delivery there anyway are passed over. `event_at` of each. There are more than `limit` of them
    if events of the last moment would be left otherwise.
    """
    return text(f"""
WITH told AS MATERIALIZED (
    SELECT o.event_id, o.job_id, o.type, o.created_at, coalesce((o.data ->> 'sequence')::bigint, 0) AS sequence,
        t.endpoint_id, t.url
    FROM outbox AS o, LATERAL webhook_targets(o) AS t
    WHERE o.project = :project AND o.created_at >= :since AND o.created_at < :until AND o.type = ANY (:types)
        AND {_IS_KNOWN}
        AND (CAST(:endpoint_id AS text) IS NULL OR t.endpoint_id = :endpoint_id)
        AND EXISTS (SELECT FROM webhook_endpoints AS e WHERE e.id = t.endpoint_id AND e.state = 'enabled')
        AND NOT EXISTS (
            SELECT FROM webhook_deliveries AS d WHERE d.endpoint_id = t.endpoint_id AND d.event_id = o.event_id
                AND d.state IN ('pending', 'delivering')
        )
    ORDER BY o.created_at FETCH FIRST (:limit) ROWS WITH TIES
), made AS (
    INSERT INTO webhook_deliveries (id, project, endpoint_id, kind, event_id, job_id, type, sequence, url)
    SELECT new_webhook_delivery_id(), :project, endpoint_id, 'replay', event_id, job_id, type, sequence, url FROM told
)
SELECT created_at AS event_at FROM told ORDER BY created_at
""").bindparams(project=project, since=since, until=until, endpoint_id=endpoint_id, types=list(types), limit=limit)
