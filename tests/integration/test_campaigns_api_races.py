"""Everything that may be done to a campaign, done at the same time: nothing dies of it, and no job is lost or counted
twice."""

import random
import threading
from collections.abc import Callable, Iterator

import pytest
from rushes_api.app import create_app
from rushes_core import claims, jobs
from rushes_core.campaigns.feeding import Feeder
from rushes_core.settings import Settings
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED
from support.campaigns import Campaigns, jsonl, openai_line
from support.checkpoints import tiny_checkpoint
from support.job_rows import ERROR, RESULT
from support.stack import SharedStack

NUM_JOBS = 150
ROUNDS = 12


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return stack.settings(checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("races")), api_key=API_KEY)


@pytest.fixture(scope="module")
def client(api_settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(api_settings), headers=AUTHORIZED) as client:
        yield client


@pytest.fixture(scope="module")
def campaigns(api_settings: Settings) -> Iterator[Campaigns]:
    campaigns = Campaigns(api_settings)
    yield campaigns
    campaigns.close()


def test_changes_at_the_same_time(client: TestClient, campaigns: Campaigns) -> None:
    campaign_id = campaigns.loaded(jsonl(*(openai_line(number) for number in range(1, NUM_JOBS + 1))))
    path = f"/v1/campaigns/{campaign_id}"
    ids = [job.id for job in campaigns.items(campaign_id)]
    feeder = Feeder(campaigns.engine, seen_within_seconds=60, patience_seconds=60)
    is_over = threading.Event()
    failures: list[str] = []

    def asked(method: str, url: str, **body: object) -> None:
        response = client.request(method, url, **({"json": body} if body else {}))
        # a move may come too late for the state; nothing else may go wrong
        if response.status_code not in (200, 409):
            failures.append(f"{method} {url}: {response.text}")

    def feed(_: random.Random) -> None:
        feeder.feed()

    def work(dice: random.Random) -> None:
        job = campaigns.jobs.run(claims.claim(model=campaigns.model.name, owner="worker", lease_seconds=60))
        if job is None or job.fence is None:
            return
        started = campaigns.jobs.run(jobs.start(job.id, fence=job.fence, lease_seconds=60))
        if started is None:
            campaigns.jobs.run(jobs.confirm_cancel(job.id, fence=job.fence))
        elif dice.random() < 0.3:
            campaigns.jobs.run(jobs.fail(job.id, fence=job.fence, error=ERROR))
        elif campaigns.jobs.run(jobs.complete(job.id, fence=job.fence, result=RESULT, timings={})) is None:
            campaigns.jobs.run(jobs.confirm_cancel(job.id, fence=job.fence))

    def end(_: random.Random) -> None:
        campaigns.end()

    def repeated(act: Callable[[random.Random], None], seed: int) -> None:
        dice = random.Random(seed)
        try:
            while not is_over.is_set():
                act(dice)
        except Exception as error:  # what ends a thread is told by the test
            failures.append(repr(error))

    def pause_and_resume(dice: random.Random) -> None:
        asked("POST", f"{path}/pause", drain=dice.random() < 0.5)
        asked("POST", f"{path}/resume")

    def change(dice: random.Random) -> None:
        asked("PATCH", path, priority=dice.choice(["interactive", "normal", "bulk"]), max_parallel=dice.randrange(1, 9))

    def retry(_: random.Random) -> None:
        asked("POST", f"{path}/retry_failed", include_cancelled=True, new_seeds=True)

    def single(dice: random.Random) -> None:
        asked("POST", f"/v1/videos/{dice.choice(ids)}/{dice.choice(['cancel', 'retry'])}")

    def rounds(act: Callable[[random.Random], None], seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(ROUNDS):
            act(dice)

    lasting = [threading.Thread(target=repeated, args=(act, n)) for n, act in enumerate((feed, work, work, end))]
    changing = [
        threading.Thread(target=rounds, args=(act, n))
        for n, act in enumerate((pause_and_resume, change, retry, single, single))
    ]
    for thread in (*lasting, *changing):
        thread.start()
    for thread in changing:
        thread.join()
    asked("POST", f"{path}/cancel")
    is_over.set()
    for thread in lasting:
        thread.join()
    assert failures == []

    # counters are what is counted, which `counts` looks at, and every line is one job
    campaigns.counts(campaign_id)
    campaigns.end()
    counts = campaigns.counts(campaign_id)
    assert [job.line for job in campaigns.items(campaign_id)] == list(range(1, NUM_JOBS + 1))
    assert sum(counts.values()) == NUM_JOBS
    shown = client.get(path).json()
    assert shown["status"] in ("cancelled", "completed")
    assert shown["request_counts"]["queued"] == shown["request_counts"]["in_progress"] == 0
