"""What is told of campaigns and of their jobs: which events, to whom, in which words, and how often."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from openai import OpenAI
from rushes_api.app import create_app
from rushes_core import jobs
from rushes_core.campaigns import events
from rushes_core.campaigns.tables import Campaign
from rushes_core.dispatcher import Dispatcher
from rushes_core.ids import new_campaign_id
from rushes_core.models import Job
from rushes_core.settings import Settings
from rushes_core.webhooks import endpoints
from rushes_core.webhooks.events import BATCH_TYPES, DEFAULT_BATCH_TYPES
from sqlalchemy import func, insert, text, update
from standardwebhooks import Webhook
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED
from support.checkpoints import tiny_checkpoint
from support.receiver import Receiver
from support.stack import SharedStack
from support.unwrapping import unwrapped
from support.waiting import wait_until
from support.webhooks import LOCAL, Hooks, SenderThread

URL = "https://8.8.8.8/hook"
OPEN: dict[str, Any] = {"state": "in_progress", "loaded_at": func.now()}


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("events"))
    return stack.settings(**LOCAL, webhook_timeout_seconds=30, checkpoint=checkpoint, api_key=API_KEY)


class Campaigns:
    """Campaigns and their jobs as rows, with what is told of them."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def add(self, *events: str, url: str | None = URL, project: str = "default", **values: Any) -> str:
        """A campaign, which tells `url` of its ends unless events are named."""
        webhook = None
        if url is not None:
            target = self.hooks.guard.check_url(url)
            webhook = endpoints.job_webhook(target, list(events or DEFAULT_BATCH_TYPES), project=project)
        campaign_id = new_campaign_id()
        row = {"model": "tiny", "input_file_id": "file_x", "project": project, "webhook": webhook} | OPEN | values
        with self.hooks.engine.begin() as connection:
            connection.execute(insert(Campaign).values(id=campaign_id, **row))
        return campaign_id

    def jobs(self, campaign_id: str, count: int, **values: Any) -> list[Job]:
        """Queued jobs of it, open to claims."""
        return [
            self.hooks.jobs.add(campaign_id=campaign_id, line=line, custom_id=f"shot-{line}", **values)
            for line in range(1, count + 1)
        ]

    def cancel(self, some: list[Job]) -> None:
        for job in some:
            self.hooks.jobs.run(jobs.cancel(job.id, project="default"))

    def change(self, campaign_id: str, **values: Any) -> None:
        with self.hooks.engine.begin() as connection:
            connection.execute(update(Campaign).where(Campaign.id == campaign_id).values(**values))

    def tell(self, campaign_id: str, type: str, data: Mapping[str, Any] | None = None) -> str | None:
        return self.hooks.jobs.run(events.tell(campaign_id, type, data))

    def tell_progress(self) -> list[str]:
        """Ids of the campaigns that a pass of a dispatcher tells of."""
        with self.hooks.engine.begin() as connection:
            return list(connection.execute(events.tell_progress()).scalars())

    def make_progress_due(self) -> None:
        with self.hooks.engine.begin() as connection:
            connection.execute(text("UPDATE campaigns SET told_progress_at = told_progress_at - interval '61 s'"))

    def told(self, **where: Any) -> list[str]:
        """Types of the events that are delivered, in the order in which they happened."""
        order = {one.event_id: one.id for one in self.hooks.events()}
        return [one.type for one in sorted(self.hooks.deliveries(**where), key=lambda one: order[one.event_id])]


@pytest.fixture
def campaigns(hooks: Hooks) -> Campaigns:
    return Campaigns(hooks)


class TestWhoIsTold:
    def test_a_campaign_tells_its_own_url_and_endpoints_that_ask(self, hooks: Hooks, campaigns: Campaigns) -> None:
        keen, _ = hooks.register(URL, "batch.completed")
        hooks.register(URL, "video.completed", "batch.failed")
        hooks.register(URL, "batch.completed", project="other")
        campaign_id = campaigns.add(url="https://8.8.4.4/own?night=7")
        event_id = campaigns.tell(campaign_id, "batch.completed")
        registered, own = sorted(hooks.deliveries(), key=lambda one: one.url or "")
        assert (registered.endpoint_id, registered.url) == (keen, None)
        assert own.url == "https://8.8.4.4/own?night=7"
        assert hooks.endpoint(own.endpoint_id).origin == "https://8.8.4.4:443"
        assert {one.event_id for one in (registered, own)} == {event_id}
        assert {one.job_id for one in (registered, own)} == {campaign_id}

    def test_only_the_ends_are_told_unless_more_is_asked_for(self, hooks: Hooks, campaigns: Campaigns) -> None:
        plain, keen = campaigns.add(), campaigns.add(*BATCH_TYPES)
        for campaign_id in (plain, keen):
            for type in BATCH_TYPES:
                campaigns.tell(campaign_id, type)
        assert campaigns.told(job_id=plain) == list(DEFAULT_BATCH_TYPES)
        assert campaigns.told(job_id=keen) == list(BATCH_TYPES)

    def test_its_jobs_tell_nobody_by_themselves(self, hooks: Hooks, campaigns: Campaigns) -> None:
        everything, _ = hooks.register(URL, "video.started", "video.progress", "video.completed", "video.cancelled")
        campaign_id = campaigns.add()
        first, second = campaigns.jobs(campaign_id, 2)
        running = hooks.run()
        hooks.report(running, 40)
        hooks.complete(running)
        campaigns.cancel([second if running.id == first.id else first])
        alone = hooks.completed()
        assert {one.job_id for one in hooks.events()} == {alone.id}
        assert campaigns.told(endpoint_id=everything) == ["video.started", "video.completed"]

    def test_its_jobs_tell_what_it_names_to_its_url_and_to_endpoints(self, hooks: Hooks, campaigns: Campaigns) -> None:
        registered, _ = hooks.register(URL, "video.started", "video.completed", "video.failed")
        campaign_id = campaigns.add("batch.completed", "video.started", "video.failed")
        campaigns.jobs(campaign_id, 2)
        hooks.complete(hooks.run())
        hooks.fail(hooks.run())
        wanted = ["video.started", "video.started", "video.failed"]
        assert campaigns.told(endpoint_id=registered) == wanted
        assert campaigns.told(url=URL) == wanted

    def test_endpoints_are_told_of_all_its_jobs_if_it_says_so(self, hooks: Hooks, campaigns: Campaigns) -> None:
        registered, _ = hooks.register(URL, "video.started", "video.completed")
        campaigns.jobs(campaigns.add(tell_items=True), 1)
        hooks.complete(hooks.run())
        assert campaigns.told() == ["video.started", "video.completed"]
        assert {one.endpoint_id for one in hooks.deliveries()} == {registered}

    def test_a_line_with_an_url_of_its_own_is_told_there(self, hooks: Hooks, campaigns: Campaigns) -> None:
        registered, _ = hooks.register(URL)
        webhook = endpoints.job_webhook(
            hooks.guard.check_url("https://8.8.4.4/line"), ["video.completed"], project="default"
        )
        campaigns.jobs(campaigns.add(), 1, request={"seconds": "4", "metadata": {}, "webhook": webhook})
        hooks.complete(hooks.run())
        assert hooks.delivery().url == "https://8.8.4.4/line"
        assert campaigns.told(endpoint_id=registered) == []

    def test_an_url_that_both_name_is_told_once(self, hooks: Hooks, campaigns: Campaigns) -> None:
        campaign_id = campaigns.add("video.completed")
        webhook = endpoints.job_webhook(hooks.guard.check_url(URL), ["video.completed"], project="default")
        campaigns.jobs(campaign_id, 1, request={"seconds": "4", "metadata": {}, "webhook": webhook})
        hooks.complete(hooks.run())
        assert campaigns.told() == ["video.completed"]

    def test_a_deleted_campaign_tells_nothing(self, hooks: Hooks, campaigns: Campaigns) -> None:
        campaign_id = campaigns.add(deleted_at=func.now())
        assert campaigns.tell(campaign_id, "batch.completed") is None
        assert list(hooks.events()) == []

    def test_an_event_is_written_with_what_it_tells_or_not_at_all(self, hooks: Hooks, campaigns: Campaigns) -> None:
        campaign_id = campaigns.add()
        with hooks.engine.connect() as connection:
            connection.execute(events.tell(campaign_id, "batch.completed"))
            connection.rollback()
        assert list(hooks.events()) == []
        assert campaigns.tell(campaign_id, "batch.completed") == f"evt_{campaign_id.removeprefix('batch_')}_1"

    def test_what_is_no_event_of_a_campaign_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"video\.completed"):
            events.tell("batch_x", "video.completed")


class TestWhatIsTold:
    def test_the_event_says_how_the_campaign_stood(self, hooks: Hooks, campaigns: Campaigns) -> None:
        campaign_id = campaigns.add(name="Night", metadata_={"client": "acme"})
        some = campaigns.jobs(campaign_id, 4)
        hooks.complete(hooks.run())
        campaigns.cancel([job for job in some if hooks.jobs.read(job.id).state == "queued"][:1])
        with hooks.engine.begin() as connection:
            connection.execute(text("UPDATE campaign_counts SET invalid = 1 WHERE shard = 0"))
        campaigns.tell(campaign_id, "batch.paused", {"pause_reason": "failures"})
        campaigns.change(campaign_id, name="renamed", metadata_={})
        (event,) = hooks.events()
        assert event.data == {
            "status": "in_progress",
            "progress": 60,
            "request_counts": {
                "total": 5,
                "completed": 1,
                "failed": 1,
                "queued": 2,
                "in_progress": 0,
                "cancelled": 1,
                "expired": 0,
                "invalid": 1,
            },
            "name": "Night",
            "metadata": {"client": "acme"},
            "output_file_id": None,
            "error_file_id": None,
            "error": None,
            "sequence": 1,
            "pause_reason": "failures",
        }

    def test_a_campaign_that_failed_says_why(self, hooks: Hooks, campaigns: Campaigns) -> None:
        why = {"code": "invalid_file", "message": "no UTF-8", "param": None, "line": 3}
        campaign_id = campaigns.add(state="failed", errors={"object": "list", "data": [why]})
        campaigns.tell(campaign_id, "batch.failed")
        (event,) = hooks.events()
        assert event.data is not None
        assert (event.data["status"], event.data["error"]) == ("failed", why)

    def test_sequences_rise_and_ids_differ(self, hooks: Hooks, campaigns: Campaigns) -> None:
        campaign_id = campaigns.add(*BATCH_TYPES)
        for type in ("batch.paused", "batch.completed", "batch.completed"):
            campaigns.tell(campaign_id, type)
        assert sorted(one.sequence for one in hooks.deliveries()) == [1, 2, 3]
        assert len({one.event_id for one in hooks.deliveries()}) == 3

    def test_openai_and_standard_webhooks_take_what_is_sent(
        self, hooks: Hooks, campaigns: Campaigns, receiver: Receiver, sender: SenderThread
    ) -> None:
        _, secret = hooks.register(receiver.url(), *BATCH_TYPES)
        name = 'Nächte "7" 夜\n🎬'
        campaign_id = campaigns.add(url=None, name=name)
        event_ids = {campaigns.tell(campaign_id, type): type for type in BATCH_TYPES}
        wait_until(lambda: len(hooks.deliveries(state="delivered")) == len(BATCH_TYPES))
        for one in receiver.received:
            verified = Webhook(secret.text).verify(one.body, one.signed)
            assert (verified["data"]["name"], verified["data"]["id"]) == (name, campaign_id)
        for line in (2, 3):
            said = unwrapped(receiver.received, secret.text, line=line)
            assert {one["id"]: one["type"] for one in said} == event_ids
            assert {one["subject_id"] for one in said} == {campaign_id}
            assert all(one["openai"].startswith(f"{line}.") and one["is_checked"] for one in said)

    def test_events_of_its_videos_name_line_and_campaign(
        self, hooks: Hooks, campaigns: Campaigns, receiver: Receiver, sender: SenderThread
    ) -> None:
        hooks.project_secret()
        campaign_id = campaigns.add("video.completed", url=receiver.url("/items"))
        (job,) = campaigns.jobs(campaign_id, 1)
        hooks.complete(hooks.run())
        hooks.wait_for("delivered")
        (received,) = receiver.at("/items")
        data = json.loads(received.body)["data"]
        assert (data["id"], data["custom_id"], data["campaign_id"]) == (job.id, "shot-1", campaign_id)


class TestProgress:
    def test_it_is_told_in_steps_and_at_most_once_a_minute(self, hooks: Hooks, campaigns: Campaigns) -> None:
        campaign_id = campaigns.add(*BATCH_TYPES)
        some = campaigns.jobs(campaign_id, 20)
        assert campaigns.tell_progress() == []
        campaigns.cancel(some[:1])
        assert campaigns.tell_progress() == [], "5 % is no step"
        campaigns.cancel(some[1:5])
        assert campaigns.tell_progress() == [campaign_id]
        campaigns.cancel(some[5:9])
        assert campaigns.tell_progress() == [], "not again within the minute"
        campaigns.make_progress_due()
        assert campaigns.tell_progress() == [campaign_id]
        campaigns.make_progress_due()
        assert campaigns.tell_progress() == [], "nothing has changed"
        assert [one.data and one.data["progress"] for one in hooks.events()] == [25, 45]
        assert campaigns.told() == ["batch.progress", "batch.progress"]

    def test_nothing_is_written_for_nobody(self, hooks: Hooks, campaigns: Campaigns) -> None:
        campaigns.cancel(campaigns.jobs(campaigns.add(), 4)[:2])
        assert campaigns.tell_progress() == []
        hooks.register(URL, "batch.progress")
        assert len(campaigns.tell_progress()) == 1

    def test_what_is_not_whole_or_not_under_way_has_no_progress(self, campaigns: Campaigns) -> None:
        quiet: tuple[dict[str, Any], ...] = (
            {"loaded_at": None},
            {"state": "cancelling"},
            {"state": "finalizing"},
            {"deleted_at": func.now()},
        )
        for values in quiet:
            campaigns.cancel(campaigns.jobs(campaigns.add(*BATCH_TYPES, **values), 2)[:1])
        campaigns.cancel(campaigns.jobs(campaigns.add(*BATCH_TYPES), 1))
        assert campaigns.tell_progress() == []

    def test_two_dispatchers_tell_it_once(self, hooks: Hooks, campaigns: Campaigns, settings: Settings) -> None:
        campaigns.cancel(campaigns.jobs(campaigns.add(*BATCH_TYPES), 2)[:1])
        with hooks.engine.connect() as first:
            assert len(first.execute(events.tell_progress()).all()) == 1
            dispatcher = Dispatcher(settings)
            dispatcher.tell_progress()
            first.commit()
            dispatcher.tell_progress()
            dispatcher.close()
        assert len(hooks.events()) == 1

    def test_it_begins_anew_when_an_ended_campaign_goes_on(self, hooks: Hooks, campaigns: Campaigns) -> None:
        campaign_id = campaigns.add(*BATCH_TYPES)
        some = campaigns.jobs(campaign_id, 4)
        campaigns.cancel(some)
        campaigns.change(campaign_id, state="completed", told_progress=90)
        hooks.jobs.run(jobs.retry(some[0].id, project="default"))
        assert campaigns.tell_progress() == [campaign_id]
        (event,) = hooks.events()
        assert event.data is not None
        assert (event.data["status"], event.data["progress"]) == ("in_progress", 75)

    def test_it_is_not_told_after_the_end_was(
        self, hooks: Hooks, campaigns: Campaigns, receiver: Receiver, settings: Settings
    ) -> None:
        hooks.register(receiver.url(), *BATCH_TYPES)
        campaign_id = campaigns.add(url=None)
        campaigns.tell(campaign_id, "batch.progress")
        with hooks.engine.begin() as connection:
            connection.execute(text("UPDATE webhook_deliveries SET next_at = now() + interval '1 hour'"))
        campaigns.tell(campaign_id, "batch.completed")
        with SenderThread(settings):
            hooks.wait_for("delivered", type="batch.completed")
            assert hooks.wait_for("cancelled", type="batch.progress").last_error == "superseded"


class TestLog:
    @pytest.fixture
    def client(self, settings: Settings) -> Any:
        with TestClient(create_app(settings), headers=AUTHORIZED) as client:
            yield client

    def test_the_log_lists_redelivers_and_replays_them(
        self, hooks: Hooks, campaigns: Campaigns, receiver: Receiver, sender: SenderThread, client: TestClient
    ) -> None:
        hooks.register(receiver.url(), "batch.completed", "video.completed")
        campaign_id, other = campaigns.add(url=None), campaigns.add(url=None)
        campaigns.tell(campaign_id, "batch.completed")
        campaigns.tell(other, "batch.completed")
        delivery = hooks.wait_for("delivered", job_id=campaign_id)
        hooks.wait_for("delivered", job_id=other)
        listed = client.get("/v1/webhook_deliveries", params={"batch_id": campaign_id}).json()["data"]
        assert [(one["id"], one["batch_id"], one["video_id"]) for one in listed] == [(delivery.id, campaign_id, None)]
        again = client.post(f"/v1/webhook_deliveries/{delivery.id}/redeliver").raise_for_status().json()
        hooks.wait_for("delivered", id=again["id"])
        replayed = client.post(
            "/v1/webhook_deliveries/replay", json={"since": 0, "event_types": ["batch.completed"]}
        ).json()
        assert replayed["count"] == 2
        hooks.wait_for("delivered", kind="replay", job_id=campaign_id)
        hooks.wait_for("delivered", kind="replay", job_id=other)
        bodies = [one.body for one in receiver.received if json.loads(one.body)["data"]["id"] == campaign_id]
        assert len(bodies) == 3
        assert len(set(bodies)) == 1

    def test_a_deleted_campaign_is_not_told_again(
        self, hooks: Hooks, campaigns: Campaigns, receiver: Receiver, settings: Settings, client: TestClient
    ) -> None:
        hooks.register(receiver.url(), "batch.completed")
        campaign_id = campaigns.add(url=None)
        campaigns.tell(campaign_id, "batch.completed")
        campaigns.change(campaign_id, deleted_at=func.now())
        with SenderThread(settings):
            delivery = hooks.wait_for("cancelled")
        assert delivery.last_error == "batch_deleted"
        assert not receiver.received
        refused = client.post(f"/v1/webhook_deliveries/{delivery.id}/redeliver")
        assert refused.status_code == 409
        replayed = client.post("/v1/webhook_deliveries/replay", json={"since": 0})
        assert replayed.json()["count"] == 0

    @pytest.mark.parametrize("type", ["batch.failed", "batch.progress"])
    def test_a_test_event_of_a_campaign_is_one_that_openai_takes(
        self, type: str, hooks: Hooks, receiver: Receiver, sender: SenderThread, client: TestClient
    ) -> None:
        endpoint_id, secret = hooks.register(receiver.url(), type)
        answer = client.post(f"/v1/webhook_endpoints/{endpoint_id}/test", json={"event_type": type})
        assert answer.json()["success"]
        (received,) = receiver.received
        event = OpenAI(api_key="none").webhooks.unwrap(received.body, received.headers, secret=secret.text)
        assert event.type == type
        assert json.loads(received.body)["data"]["id"].startswith("batch_0")

    def test_a_video_alone_cannot_ask_for_events_of_campaigns(self, client: TestClient) -> None:
        body = {"prompt": "x", "webhook_url": URL, "webhook_events": ["batch.completed"]}
        refused = client.post("/v1/videos", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "webhook_events"
