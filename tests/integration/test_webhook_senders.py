"""Several senders that write down at once how deliveries went."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from rushes_core.database import create_sync_engine
from rushes_core.webhooks import deliveries
from rushes_core.webhooks.deliveries import Outcome
from sqlalchemy import text
from support.stack import SharedStack
from support.webhooks import LOCAL, Hooks

NUM_JOBS = 40
NUM_SENDERS = 4
NUM_TURNS = 10


@pytest.mark.parametrize(("state", "error"), [("delivered", None), ("pending", "timeout")])
def test_senders_that_tell_the_same_jobs_and_endpoints_never_wait_for_each_other_in_a_circle(
    stack: SharedStack, state: str, error: str | None
) -> None:
    settings = stack.settings(**LOCAL)
    hooks = Hooks(settings)
    hooks.project_secret()
    jobs = [hooks.add("https://127.0.0.1/").id for _ in range(NUM_JOBS)]
    endpoints = [hooks.register(f"https://127.0.0.1/{number}")[0] for number in range(NUM_JOBS)]
    rounds = range(NUM_SENDERS * NUM_TURNS)
    with hooks.engine.begin() as connection:
        connection.execute(
            text("""
INSERT INTO outbox (event_id, job_id, project, generation, type)
SELECT 'evt_' || place, job_id, 'default', 1, 'video.completed'
FROM unnest(CAST(:jobs AS text[])) WITH ORDINALITY AS told (job_id, place)
"""),
            {"jobs": jobs},
        )
        connection.execute(
            text("""
INSERT INTO webhook_deliveries (
    id, project, endpoint_id, event_id, job_id, type, url, state, attempts, fence, lease_until
)
SELECT 'whd_' || place || '_' || round, 'default', endpoint_id, 'evt_' || place, job_id, 'video.completed',
    'https://127.0.0.1/', 'delivering', 1, 1, now()
FROM unnest(CAST(:jobs AS text[]), CAST(:endpoints AS text[])) WITH ORDINALITY AS told (job_id, endpoint_id, place),
    generate_series(0, :last) AS round
"""),
            {"jobs": jobs, "endpoints": endpoints, "last": rounds[-1]},
        )
    engine = create_sync_engine(settings, pool_size=NUM_SENDERS)

    def settle(sender: int) -> None:
        drawn = random.Random(sender)
        for turn in range(sender * NUM_TURNS, (sender + 1) * NUM_TURNS):
            places = drawn.sample(range(1, NUM_JOBS + 1), NUM_JOBS)
            outcomes = [Outcome(f"whd_{place}_{turn}", 1, state, error=error, delay=60.0) for place in places]
            with engine.begin() as connection:
                connection.execute(deliveries.settle(outcomes))

    with ThreadPoolExecutor(NUM_SENDERS) as pool:
        list(pool.map(settle, range(NUM_SENDERS)))
    assert {hooks.endpoint(one).failures for one in endpoints} == {0 if error is None else len(rounds)}
    summary = {"state": state, "attempts": 1, "last_status": None}
    assert all(hooks.jobs.read(one).webhook == summary for one in jobs)
    engine.dispose()
    hooks.close()
