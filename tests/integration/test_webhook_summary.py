"""What a job says of how its own `webhook_url` was told of its end: of the end that it has, and of no earlier one."""

from datetime import UTC, datetime, timedelta

import pytest
from rushes_core import jobs
from rushes_core.campaigns.tables import Campaign
from rushes_core.ids import new_campaign_id
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.webhooks import deliveries, endpoints
from rushes_core.webhooks.deliveries import NOT_TOLD_YET, Claimed, Outcome
from rushes_core.webhooks.tables import WebhookDelivery
from sqlalchemy import func, insert, update
from support.stack import SharedStack
from support.webhooks import LOCAL, Hooks

URL = "https://8.8.8.8/hook"


@pytest.fixture(scope="module")
def settings(stack: SharedStack) -> Settings:
    return stack.settings(**LOCAL)


def claim(hooks: Hooks) -> dict[str, Claimed]:
    """What is due, leased, by the id of its event."""
    with hooks.engine.begin() as connection:
        connection.execute(deliveries.lock_claims())
        statement = deliveries.claim(limit=10, limit_failing=10, concurrency=10, lease_seconds=30, per_project=10)
        return {row["event_id"]: Claimed(**row) for row in connection.execute(statement).mappings()}


def settle(hooks: Hooks, *told: tuple[Claimed, int]) -> None:
    """Write down which status was answered."""
    outcomes = [
        Outcome(one.id, one.fence, "delivered", status=status)
        if status == 200
        else Outcome(one.id, one.fence, "failed", status=status, error="http_error")
        for one, status in told
    ]
    with hooks.engine.begin() as connection:
        connection.execute(deliveries.settle(outcomes))


def failed_and_retried(hooks: Hooks) -> Job:
    """A job whose first end is to be told, queued again."""
    hooks.project_secret()
    hooks.add(URL)
    job = hooks.fail(hooks.run())
    return hooks.jobs.run(jobs.retry(job.id, project="default"))


def event_id(job: Job, generation: int) -> str:
    return f"evt_{job.id.removeprefix('video_')}_{generation}"


def test_a_retry_begins_anew(hooks: Hooks) -> None:
    hooks.project_secret()
    hooks.add(URL)
    job = hooks.fail(hooks.run())
    settle(hooks, (claim(hooks)[event_id(job, 1)], 200))
    assert hooks.jobs.read(job.id).webhook == {"state": "delivered", "attempts": 1, "last_status": 200}
    hooks.jobs.run(jobs.retry(job.id, project="default"))
    assert hooks.jobs.read(job.id).webhook == NOT_TOLD_YET
    hooks.complete(hooks.run())
    assert hooks.jobs.read(job.id).webhook == NOT_TOLD_YET
    settle(hooks, (claim(hooks)[event_id(job, 2)], 404))
    assert hooks.jobs.read(job.id).webhook == {"state": "failed", "attempts": 1, "last_status": 404}


def test_a_retry_of_a_job_without_a_url_leaves_it_without_a_summary(hooks: Hooks) -> None:
    hooks.add()
    job = hooks.fail(hooks.run())
    hooks.jobs.run(jobs.retry(job.id, project="default"))
    assert hooks.jobs.read(job.id).webhook is None


@pytest.mark.parametrize("status", [200, 500])
def test_an_outcome_of_an_earlier_end_says_nothing_of_a_job_that_runs_again(hooks: Hooks, status: int) -> None:
    job = failed_and_retried(hooks)
    late = claim(hooks)[event_id(job, 1)]
    hooks.run()
    settle(hooks, (late, status))
    assert hooks.jobs.read(job.id).webhook == NOT_TOLD_YET


def test_an_outcome_of_an_earlier_end_does_not_replace_that_of_the_latest(hooks: Hooks) -> None:
    job = failed_and_retried(hooks)
    late = claim(hooks)[event_id(job, 1)]
    hooks.complete(hooks.run())
    settle(hooks, (claim(hooks)[event_id(job, 2)], 200))
    settle(hooks, (late, 500))
    assert hooks.jobs.read(job.id).webhook == {"state": "delivered", "attempts": 1, "last_status": 200}


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_ends_that_are_settled_together_the_latest_counts(hooks: Hooks, order: tuple[int, int]) -> None:
    job = failed_and_retried(hooks)
    hooks.complete(hooks.run())
    ends = claim(hooks)
    settle(hooks, *((ends[event_id(job, generation)], {1: 200, 2: 404}[generation]) for generation in order))
    assert hooks.jobs.read(job.id).webhook == {"state": "failed", "attempts": 1, "last_status": 404}


def test_an_earlier_end_that_was_given_up_is_not_told_of_with_the_latest(hooks: Hooks) -> None:
    job = failed_and_retried(hooks)
    with hooks.engine.begin() as connection:
        connection.execute(update(WebhookDelivery).values(created_at=func.now() - timedelta(days=6)))
    hooks.complete(hooks.run())
    latest = hooks.delivery(event_id=event_id(job, 2))
    hooks.set_endpoint(latest.endpoint_id, failures=12, open_until=datetime.now(UTC) + timedelta(hours=1))
    with hooks.engine.begin() as connection:
        connection.execute(deliveries.give_up())
    assert hooks.delivery(event_id=event_id(job, 1)).state == "failed"
    assert hooks.jobs.read(job.id).webhook == NOT_TOLD_YET


def test_an_earlier_end_that_lost_its_sender_is_not_told_of_with_the_latest(hooks: Hooks) -> None:
    job = failed_and_retried(hooks)
    claim(hooks)
    with hooks.engine.begin() as connection:
        connection.execute(update(WebhookDelivery).values(created_at=func.now() - timedelta(days=6)))
    hooks.complete(hooks.run())
    hooks.end_leases()
    with hooks.engine.begin() as connection:
        connection.execute(deliveries.reap())
    assert hooks.delivery(event_id=event_id(job, 1)).state == "failed"
    assert hooks.jobs.read(job.id).webhook == NOT_TOLD_YET


def test_a_redelivery_that_fails_does_not_take_back_that_the_end_was_told(hooks: Hooks) -> None:
    hooks.project_secret()
    job = hooks.completed(URL)
    settle(hooks, (claim(hooks)[event_id(job, 1)], 200))
    told = hooks.delivery()
    hooks.jobs.run(deliveries.redeliver(told, new_id=f"{told.id[:-1]}x"))
    settle(hooks, (claim(hooks)[event_id(job, 1)], 500))
    assert hooks.delivery(kind="redelivery").state == "failed"
    assert hooks.jobs.read(job.id).webhook == {"state": "delivered", "attempts": 1, "last_status": 200}


def test_a_redelivery_tells_what_the_first_delivery_could_not(hooks: Hooks) -> None:
    hooks.project_secret()
    job = hooks.completed(URL)
    settle(hooks, (claim(hooks)[event_id(job, 1)], 500))
    failed = hooks.delivery()
    hooks.jobs.run(deliveries.redeliver(failed, new_id=f"{failed.id[:-1]}x"))
    settle(hooks, (claim(hooks)[event_id(job, 1)], 200))
    assert hooks.jobs.read(job.id).webhook == {"state": "delivered", "attempts": 1, "last_status": 200}


@pytest.mark.parametrize("statuses", [(200, 500), (500, 200)])
def test_of_two_deliveries_of_an_end_that_are_settled_together_the_one_that_was_taken_counts(
    hooks: Hooks, statuses: tuple[int, int]
) -> None:
    hooks.project_secret()
    job = hooks.completed(URL)
    (first,) = claim(hooks).values()
    waiting = hooks.delivery()
    hooks.jobs.run(deliveries.redeliver(waiting, new_id=f"{waiting.id[:-1]}x"))
    (second,) = claim(hooks).values()
    settle(hooks, (first, statuses[0]), (second, statuses[1]))
    assert hooks.jobs.read(job.id).webhook == {"state": "delivered", "attempts": 1, "last_status": 200}


def test_a_video_that_only_its_campaign_tells_of_has_no_summary(hooks: Hooks) -> None:
    hooks.project_secret()
    target = hooks.guard.check_url(URL)
    webhook = endpoints.job_webhook(target, ["video.completed"], project="default")
    campaign = {"id": new_campaign_id(), "model": "tiny", "input_file_id": "file_x", "project": "default"}
    hooks.jobs.run(insert(Campaign).values(**campaign, webhook=webhook, state="in_progress").returning(Campaign))
    added = hooks.jobs.add(campaign_id=campaign["id"], line=1)
    job = hooks.complete(hooks.run())
    assert job.id == added.id
    settle(hooks, (claim(hooks)[event_id(job, 1)], 200))
    assert hooks.delivery().state == "delivered"
    assert hooks.jobs.read(job.id).webhook is None
