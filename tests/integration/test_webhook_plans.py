"""What senders and sweepers do with a log of webhooks that has grown long."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from rushes_core.settings import Settings
from rushes_core.sweeper import Sweeper
from rushes_core.webhooks import deliveries
from rushes_core.webhooks.tables import WebhookDelivery
from sqlalchemy import Connection, text
from support.plans import executed_plan, rows_read, scans
from support.stack import SharedStack
from support.waiting import wait_until
from support.webhooks import LOCAL, Hooks, SenderThread

NUM_DELIVERIES = 20_000


@pytest.fixture(scope="module")
def settings(stack: SharedStack) -> Settings:
    return stack.settings(**LOCAL)


@pytest.fixture
def filled(settings: Settings) -> Iterator[Connection]:
    """One delivery that is due, among many that were made and many that wait for an endpoint that is paused."""
    hooks = Hooks(settings)
    paused, _ = hooks.register("https://127.0.0.1/paused")
    hooks.set_endpoint(paused, failures=20, open_until=text("now() + interval '1 hour'"))
    well, _ = hooks.register("https://127.0.0.1/well")
    with hooks.engine.begin() as connection:
        for endpoint, state, finished_at, count in (
            (paused, "pending", "NULL", NUM_DELIVERIES // 2),
            (well, "delivered", "now()", NUM_DELIVERIES // 2),
            (well, "pending", "NULL", 1),
        ):
            connection.execute(
                text(f"""
INSERT INTO webhook_deliveries (id, project, endpoint_id, event_id, type, state, finished_at)
SELECT new_webhook_delivery_id(), 'default', '{endpoint}', 'evt_' || n, 'video.completed', '{state}', {finished_at}
FROM generate_series(1, {count}) AS n
""")
            )
    with hooks.engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("VACUUM ANALYZE webhook_deliveries"))
    with hooks.engine.connect() as connection:
        yield connection
        connection.rollback()
    hooks.close()


def test_a_claim_reads_what_is_due_and_not_what_waits_for_others(filled: Connection) -> None:
    claim = deliveries.claim(limit=16, limit_failing=8, concurrency=8, lease_seconds=45, per_project=16)
    plan = executed_plan(filled, claim)
    assert [n for n in scans(plan) if n["Node Type"] == "Seq Scan" and n["Relation Name"] == "webhook_deliveries"] == []
    assert 0 < rows_read(plan, "webhook_deliveries") <= 20


def test_one_pass_forgets_all_that_is_old(stack: SharedStack) -> None:
    settings = stack.settings(**LOCAL)
    hooks = Hooks(settings)
    endpoint, _ = hooks.register("https://127.0.0.1/")
    with hooks.engine.begin() as connection:
        connection.execute(
            text(f"""
INSERT INTO webhook_deliveries (id, project, endpoint_id, event_id, type, state, finished_at)
SELECT new_webhook_delivery_id(), 'default', '{endpoint}', 'evt_' || n, 'video.completed', 'delivered',
    now() - interval '31 days' * least(1, n % {NUM_DELIVERIES}) FROM generate_series(0, {NUM_DELIVERIES}) AS n
""")
        )
    with closing(Sweeper(settings)) as sweeper:
        assert sweeper.tidy() == []
    assert len(hooks.deliveries()) == 2
    hooks.close()


def test_what_waits_for_an_endpoint_that_is_off_is_cancelled_in_parts(stack: SharedStack) -> None:
    hooks = Hooks(stack.settings(**LOCAL))
    endpoint, _ = hooks.register("https://127.0.0.1/")
    hooks.set_endpoint(endpoint, state="disabled", disabled_reason="failing")
    with hooks.engine.begin() as connection:
        connection.execute(
            text(f"""
INSERT INTO webhook_deliveries (id, project, endpoint_id, event_id, type)
SELECT new_webhook_delivery_id(), 'default', '{endpoint}', 'evt_' || n, 'video.completed'
FROM generate_series(1, {deliveries.MAX_AT_ONCE} + 1) AS n
""")
        )
    counts: list[int] = []
    for _ in range(3):
        with hooks.engine.begin() as connection:
            counts.append(len(connection.execute(deliveries.cancel_left_over()).all()))
    assert counts == [deliveries.MAX_AT_ONCE, 1, 0]
    assert {one.last_error for one in hooks.deliveries(state="cancelled")} == {"failing"}
    hooks.close()


@pytest.mark.parametrize("state", ["failed", "cancelled", "delivering"])
def test_a_list_of_a_state_that_nothing_is_in_reads_none_of_the_log(filled: Connection, state: str) -> None:
    log = deliveries.listed(project="default").where(deliveries.in_state(state))
    plan = executed_plan(filled, log.order_by(WebhookDelivery.id.desc()).limit(21))
    used = [node["Index Name"] for node in scans(plan) if "Index Name" in node]
    # what is being delivered is in an index of its own, which may be as small
    possible = {"ix_webhook_deliveries_project_state"} | (
        {"ix_webhook_deliveries_leased"} if state == "delivering" else set[str]()
    )
    assert used[0] in possible
    assert rows_read(plan, "webhook_deliveries") == 0


def test_origins_and_deleted_endpoints_are_forgotten_with_their_log(stack: SharedStack) -> None:
    settings = stack.settings(**LOCAL)
    hooks = Hooks(settings)
    hooks.clear()
    hooks.project_secret()
    deleted, _ = hooks.register("https://127.0.0.1/deleted")
    hooks.set_endpoint(deleted, state="disabled", deleted_at=text("now() - interval '2 days'"))
    registered, _ = hooks.register("https://127.0.0.1/")
    hooks.set_endpoint(registered, state="disabled")
    used, unused = (hooks.delivery(job_id=hooks.completed(f"https://127.0.0.{n}/").id).endpoint_id for n in (1, 2))
    with hooks.engine.begin() as connection:
        connection.execute(text("UPDATE webhook_deliveries SET next_at = now() + interval '1 hour'"))
        connection.execute(text("UPDATE webhook_endpoints SET created_at = now() - interval '2 days'"))
        connection.execute(text("DELETE FROM webhook_deliveries WHERE endpoint_id = :id"), {"id": unused})

    def kept() -> set[str]:
        with hooks.engine.connect() as connection:
            return set(connection.execute(text("SELECT id FROM webhook_endpoints")).scalars())

    assert kept() == {deleted, registered, used, unused}
    with SenderThread(settings):
        wait_until(lambda: kept() == {registered, used})
    job = hooks.completed("https://127.0.0.2/")
    assert hooks.delivery(job_id=job.id).endpoint_id == unused
    hooks.close()
