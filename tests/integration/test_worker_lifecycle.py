"""Workers that start, stop and lose something: processes, servers, time."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest
from pydantic import SecretStr
from redis import Redis
from rushes_core.contract import CONTRACT_FILE
from rushes_core.object_keys import RESULTS
from rushes_core.queue import HintQueue
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_core.storage import ObjectStore
from sqlalchemy import make_url
from support.forwarder import Forwarder
from support.media import box_order
from support.processes import children, hangup_is, is_alive
from support.stack import SharedStack
from support.worker import (
    NUM_FRAMES,
    SCRIPTED,
    Jobs,
    StartWorker,
    Worker,
    eventually,
    keys_of,
    write_contract,
)

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_contract(tmp_path_factory.mktemp("contract") / "checkpoint")


def settings_in(folder: Path, stack: SharedStack, checkpoint: Path) -> Settings:
    return stack.settings(
        checkpoint=checkpoint,
        pipeline=SCRIPTED,
        scratch=folder / "scratch",
        poll_seconds=0.1,
        heartbeat_seconds=0.5,
    )


@pytest.fixture
def settings(stack: SharedStack, checkpoint: Path, tmp_path: Path) -> Settings:
    """A database of the test's own: a worker that another test left a job for is no use."""
    return settings_in(tmp_path, stack, checkpoint)


@pytest.fixture(scope="class")
def jobs_of_two_ranks(stack: SharedStack, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The jobs of a worker that renders each on two ranks."""
    folder = tmp_path_factory.mktemp("two-ranks")
    settings = settings_in(folder, stack, checkpoint).model_copy(update={"provenance": "off"})
    jobs = Jobs(settings)
    with Worker(settings, folder / "worker.log", layout="r1s2"):
        yield jobs
    jobs.close()


class TestRedis:
    def test_hint_wakes_an_idle_worker(self, settings: Settings, jobs: Jobs, start_worker: StartWorker) -> None:
        worker = start_worker(poll_seconds=3600)
        jobs.wait_ready()
        job_id = jobs.add()
        hints = HintQueue(settings)
        hints.top_up(1)
        jobs.wait_completed(job_id)

        # every connection is cut: the next hint arrives all the same
        redis = Redis.from_url(settings.redis_url)
        redis.client_kill_filter(_type="normal", skipme=True)
        job_id = jobs.add()
        eventually(lambda: hints.top_up(1) or jobs.get(job_id).state == JobState.COMPLETED)
        jobs.wait_completed(job_id)
        eventually(lambda: redis.llen(settings.gpu_queue) == 0)
        hints.close()
        redis.close()
        assert len(worker.supervisors) == 1

    def test_worker_without_redis_polls(self, jobs: Jobs, start_worker: StartWorker) -> None:
        start_worker(redis_url=NOWHERE)
        jobs.wait_ready()
        jobs.wait_completed(jobs.add())


class TestLayouts:
    def test_two_ranks_render_one_job(self, jobs_of_two_ranks: Jobs) -> None:
        jobs = jobs_of_two_ranks
        (replica,) = jobs.wait_ready()
        pids = replica.detail["ranks"]
        assert (replica.layout, len(pids)) == ("r1s2", 2)
        alone = jobs.wait_completed(jobs.add())

        # one of them dies in the middle: the other one ends too, and the job runs again
        job = jobs.wait_completed(jobs.add("[die rank 1 at step 3 on attempt 1]"))
        assert (job.attempt, job.crash_count) == (2, 1)
        assert not any(is_alive(pid) for pid in pids)
        assert job.result is not None
        assert alone.result is not None
        assert job.result["sha256"] == alone.result["sha256"]

        # one of them fails alone: the other one would wait for it for good
        job = jobs.wait_completed(jobs.add("[raise rank 1 at step 3 on attempt 1]"))
        assert (job.attempt, job.crash_count, job.error_count) == (2, 0, 1)

        # one of them has no memory left: the same, and the job runs again with the plan that needs less
        job = jobs.wait_completed(jobs.add("[out of memory rank 1 at step 3 on attempt 1]"))
        assert (job.attempt, job.crash_count, job.low_memory) == (2, 0, True)

    def test_rank_of_several_without_memory_has_all_of_them_take_the_plan_that_needs_less_once(
        self, jobs_of_two_ranks: Jobs
    ) -> None:
        jobs = jobs_of_two_ranks
        # a rank that had not been told of that plan would refuse again
        for prompt in ("[large]", "[large rank 1]"):
            job = jobs.wait_completed(jobs.add(prompt))
            assert (job.attempt, job.low_memory, job.error_count, job.crash_count) == (2, True, 1, 0)
        failed = jobs.wait_for(jobs.add("[out of memory rank 1 at step 3]"), JobState.FAILED)
        assert (failed.attempt, failed.crash_count) == (2, 0)
        errors = [attempt.error or {} for attempt in jobs.attempts(failed.id)]
        assert [(error["code"], error["stage"]) for error in errors] == [("out_of_memory", "denoising")] * 2
        assert failed.error == errors[1]

    def test_two_replicas_run_two_jobs_at_once(self, jobs: Jobs, start_worker: StartWorker) -> None:
        worker = start_worker(layout="r2s1")
        jobs.wait_ready(2)
        long, short = jobs.add("[step 2]"), jobs.add()
        jobs.wait_completed(short)
        assert jobs.get(long).state == JobState.RUNNING
        jobs.cancel(long)
        jobs.wait_for(long, JobState.CANCELLED)
        owners = {jobs.attempts(job_id)[0].lease_owner for job_id in (long, short)}
        assert len(owners) == 2
        assert len(worker.supervisors) == 2


class TestRefusals:
    @pytest.mark.parametrize("layout", ["r1s3", "r0s1", "two"])
    def test_bad_layout_is_refused(self, start_worker: StartWorker, layout: str) -> None:
        worker = start_worker(layout=layout)
        assert worker.wait() == 2
        assert f"rushes worker: layout '{layout}': " in worker.log.read_text()

    def test_device_that_is_missing_is_refused(self, settings: Settings, tmp_path: Path) -> None:
        with Worker(settings, tmp_path / "worker.log", device="cuda", env={"CUDA_VISIBLE_DEVICES": ""}) as worker:
            assert worker.wait() == 2
        assert "rushes worker: " in worker.log.read_text()

    def test_missing_checkpoint_is_refused(self, start_worker: StartWorker, tmp_path: Path) -> None:
        worker = start_worker(checkpoint=tmp_path / "nothing")
        assert worker.wait() == 1
        assert f"rushes worker: RUSHES_CHECKPOINT: {tmp_path}/nothing: no such directory" in worker.log.read_text()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"s3_bucket": "absent"}, "RUSHES_S3_BUCKET: bucket absent does not exist"),
            ({"s3_output_buckets": "absent-too"}, "RUSHES_S3_OUTPUT_BUCKETS: bucket absent-too does not exist"),
            (
                {"s3_secret_access_key": SecretStr("wrong")},
                "RUSHES_S3_BUCKET: the credentials of the object store do not open bucket",
            ),
        ],
        ids=["usual", "output", "credentials"],
    )
    def test_bucket_that_cannot_be_used_is_refused(
        self, start_worker: StartWorker, changes: dict[str, Any], message: str
    ) -> None:
        worker = start_worker(**changes)
        assert worker.wait() == 1
        assert f"rushes worker: {message}" in worker.log.read_text()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"encoder_preset": "placebo"},
                "RUSHES_ENCODER_PRESET='placebo' is not one of libx264's: ultrafast, superfast",
            ),
            (
                {"encoder": "h264_nvenc"},
                "RUSHES_ENCODER=h264_nvenc with RUSHES_ENCODER_PRESET=p4, RUSHES_ENCODER_CRF=18, ",
            ),
        ],
        ids=["preset", "nvenc"],
    )
    def test_encoder_that_makes_no_clip_is_refused(
        self, jobs: Jobs, start_worker: StartWorker, changes: dict[str, Any], message: str
    ) -> None:
        if "encoder" in changes and Path("/dev/nvidia0").exists():
            pytest.skip("this machine has an NVIDIA device")
        job_id = jobs.add()
        worker = start_worker(**changes)
        assert worker.wait() == 2
        assert f"rushes worker: {message}" in worker.log.read_text()
        assert jobs.states(job_id) == ["queued"]

    def test_store_that_is_away_is_waited_for(self, jobs: Jobs, start_worker: StartWorker) -> None:
        worker = start_worker(s3_endpoint_url="http://127.0.0.1:1")
        jobs.wait_ready()
        assert worker.events("store_unreachable")

    def test_checkpoint_that_ranks_refuse_ends_the_worker_before_it_claims_and_is_told_once(
        self, settings: Settings, jobs: Jobs, start_worker: StartWorker
    ) -> None:
        job_id = jobs.add()
        worker = start_worker(layout="r2s1", env={"SCRIPTED_LOAD_ERROR": "a tensor is missing"})
        assert worker.wait() == 1
        assert worker.log.read_text().count("a tensor is missing") == 1
        told = [line for line in worker.log.read_text().splitlines() if not line.startswith("{")]
        assert told == [f"rushes worker: RUSHES_CHECKPOINT: {settings.checkpoint}: a tensor is missing"]
        assert jobs.states(job_id) == ["queued"]
        assert jobs.replicas() == []

    @pytest.mark.parametrize("pipeline", ["support.no_such_module:Pipeline", "support.scripted_pipeline:NoSuchClass"])
    def test_pipeline_that_cannot_be_imported_ends_the_worker(self, start_worker: StartWorker, pipeline: str) -> None:
        worker = start_worker(pipeline=pipeline)
        assert worker.wait() == 2
        assert f"RUSHES_PIPELINE={pipeline} cannot be imported" in worker.log.read_text()

    @pytest.mark.parametrize("pipeline", ["os:getcwd", "rushes_worker.rank:log"])
    def test_pipeline_that_cannot_be_called_ends_the_worker(self, start_worker: StartWorker, pipeline: str) -> None:
        worker = start_worker(pipeline=pipeline)
        assert worker.wait() == 1
        assert f"RUSHES_PIPELINE={pipeline} cannot be called as a pipeline is" in worker.log.read_text()


class TestStop:
    def test_idle_worker_leaves_at_once_and_leaves_nothing(
        self, settings: Settings, jobs: Jobs, start_worker: StartWorker
    ) -> None:
        worker = start_worker(layout="r2s1")
        jobs.wait_ready(2)
        processes = worker.descendants
        assert len(processes) == 6  # two supervisors with a rank and a media process each
        worker.terminate()
        assert worker.wait() == 0
        assert not any(is_alive(pid) for pid in processes)
        assert {replica.state for replica in jobs.all_replicas()} == {"stopped"}
        assert not list(settings.scratch.iterdir())

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_worker_that_still_tries_its_encoder_leaves_nothing(
        self, settings: Settings, start_worker: StartWorker, number: signal.Signals
    ) -> None:
        with hangup_is(signal.SIG_DFL):
            worker = start_worker()
        # it tries no longer than this one lets it
        (media,) = eventually(lambda: worker.descendants)
        os.kill(media, signal.SIGSTOP)
        eventually(lambda: list(settings.scratch.iterdir()))
        processes = worker.descendants
        os.kill(worker.pid, number)
        os.kill(media, signal.SIGCONT)
        assert worker.wait() == 128 + number
        assert not any(is_alive(pid) for pid in processes)
        assert not list(settings.scratch.iterdir())
        assert not worker.events("worker_started")

    def test_worker_that_still_loads_can_be_stopped(self, jobs: Jobs, start_worker: StartWorker) -> None:
        worker = start_worker(env={"SCRIPTED_LOAD_SECONDS": "600"})
        eventually(lambda: worker.events("group_starting"))
        worker.terminate()
        assert worker.wait() == 0

    def test_running_job_is_finished_within_the_grace_period(self, jobs: Jobs, start_worker: StartWorker) -> None:
        worker = start_worker()
        job_id, waiting = jobs.add("[step 0.5]"), jobs.add()
        jobs.wait_for_step(job_id, 1)
        jobs.wait_for(waiting, JobState.CLAIMED)
        worker.terminate()
        worker.terminate()
        # what was claimed ahead goes back at once
        given_back = jobs.wait_for(waiting, JobState.QUEUED)
        assert jobs.get(job_id).state == JobState.RUNNING
        assert (given_back.attempt, given_back.error_count, given_back.crash_count) == (0, 0, 0)
        assert worker.wait() == 0
        assert jobs.get(job_id).state == JobState.COMPLETED
        assert jobs.states(waiting) == ["queued", "claimed", "queued"]

    def test_running_job_is_given_back_when_the_grace_period_is_over(
        self, settings: Settings, jobs: Jobs, start_worker: StartWorker
    ) -> None:
        worker = start_worker(shutdown_grace_seconds=0.5)
        job_id = jobs.add("[step 60]")
        jobs.wait_for(job_id, JobState.RUNNING)
        worker.terminate()
        assert worker.wait() == 0
        job = jobs.get(job_id)
        assert (job.state, job.attempt, job.crash_count, job.error_count) == (JobState.QUEUED, 0, 0, 0)
        assert not list(settings.scratch.iterdir())


@pytest.mark.parametrize(
    ("provenance", "members"),
    [("on", {"id", "model", "revision", "seed"}), ("prompt", {"id", "model", "revision", "seed", "prompt"})],
)
def test_file_says_how_it_was_made(
    settings: Settings, jobs: Jobs, start_worker: StartWorker, tmp_path: Path, provenance: str, members: set[str]
) -> None:
    checkpoint = write_contract(tmp_path / "checkpoint")
    contract = checkpoint / CONTRACT_FILE
    contract.write_text(json.dumps(json.loads(contract.read_text()) | {"checkpoint_content_sha256": "ab" * 32}))
    start_worker(provenance=provenance, checkpoint=checkpoint)
    job = jobs.wait_completed(jobs.add('a wave, <d>"Wow" 雪</d>', seed=2**63 - 1))
    assert job.result is not None
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"".join(ObjectStore(settings).read(job.result["key"], 0, job.result["bytes"] - 1)))
    with av.open(str(path)) as container:
        said = json.loads(container.metadata["comment"])
    assert set(said) == members
    assert (said["id"], said["model"], said["seed"]) == (job.id, job.model, job.seed)
    assert said["revision"] == "ab" * 32
    assert said.get("prompt", job.prompt) == job.prompt


class TestKill:
    def test_whatever_lies_in_the_bucket_after_a_kill_while_a_clip_is_finished_is_whole(
        self, settings: Settings, jobs: Jobs, start_worker: StartWorker, tmp_path: Path
    ) -> None:
        worker = start_worker()
        job_id = jobs.add(width=480, height=480)
        eventually(lambda: jobs.get(job_id).phase == "muxing" or jobs.get(job_id).state == JobState.COMPLETED)
        (supervisor,) = worker.supervisors
        os.kill(supervisor, signal.SIGKILL)
        eventually(lambda: not is_alive(supervisor))
        if jobs.get(job_id).state == JobState.RUNNING:
            jobs.pass_lease(job_id)
        eventually(lambda: jobs.reap() or jobs.get(job_id).state == JobState.COMPLETED)
        job = jobs.get(job_id)
        store = ObjectStore(settings)
        items = [item for page in store.list_pages(RESULTS) for item in page]
        assert keys_of(job) <= {item.key for item in items}
        for item in items:
            path = tmp_path / item.key.replace("/", "-")
            path.write_bytes(b"".join(store.read(item.key, 0, item.num_bytes - 1)))
            with av.open(str(path)) as container:
                kind = container.streams[0].type
                num_frames = sum(1 for _ in container.decode(container.streams[0]))
            assert num_frames > 0
            if path.suffix == ".mp4":
                assert (kind, num_frames) == ("video", NUM_FRAMES)
                boxes = box_order(path.read_bytes())
                assert boxes.index("moov") < boxes.index("mdat")

    def test_nothing_survives_a_killed_supervisor_and_its_job_runs_again(
        self, settings: Settings, jobs: Jobs, start_worker: StartWorker
    ) -> None:
        worker = start_worker(worker_name="farm")
        job_id = jobs.add("[step 60 on attempt 1]")
        jobs.wait_for(job_id, JobState.RUNNING)
        (supervisor,) = worker.supervisors
        orphans = children(supervisor)
        assert len(orphans) == 2
        with jobs.namesake("farm-r0"):
            os.kill(supervisor, signal.SIGKILL)
            eventually(lambda: not any(is_alive(pid) for pid in orphans), seconds=30)

            # the launcher starts another one, whose name was taken meanwhile, and another when it is free
            eventually(lambda: worker.events("name_taken"))
        # that one finds no trace on disk; the lease gives the job back
        jobs.pass_lease(job_id)
        eventually(lambda: jobs.reap() or jobs.get(job_id).state == JobState.COMPLETED)
        job = jobs.get(job_id)
        assert (job.attempt, job.crash_count) == (2, 1)
        assert worker.supervisors != [supervisor]
        assert len(list(settings.scratch.iterdir())) == 1

    def test_nothing_survives_a_killed_launcher_and_its_name_is_free_at_once(
        self, jobs: Jobs, start_worker: StartWorker
    ) -> None:
        worker = start_worker(worker_name="farm", lease_seconds=600)
        (replica,) = jobs.wait_ready()
        namesake = start_worker(worker_name="farm", lease_seconds=600)
        assert namesake.wait() == 1
        refusal = "rushes worker: RUSHES_WORKER_NAME: the name farm is taken: replica farm-r0 is up on "
        assert refusal in worker.log.read_text()
        assert f" as process {replica.detail['pid']}, since " in worker.log.read_text()

        processes = worker.descendants
        os.kill(worker.pid, signal.SIGKILL)
        eventually(lambda: not any(is_alive(pid) for pid in processes), seconds=30)
        start_worker(worker_name="farm", lease_seconds=600)
        eventually(lambda: replica.id not in [one.id for one in jobs.wait_ready()])


class TestOutages:
    def test_job_waits_while_the_weights_load(self, jobs: Jobs, start_worker: StartWorker) -> None:
        job_id = jobs.add()
        start_worker(env={"SCRIPTED_LOAD_SECONDS": "1.5"})
        (replica,) = eventually(jobs.replicas)
        assert replica.state == "starting"
        assert jobs.states(job_id) == ["queued"]
        jobs.wait_completed(job_id)

    def test_database_that_is_away_for_less_than_the_lease_costs_nothing(
        self, settings: Settings, jobs: Jobs, start_worker: StartWorker
    ) -> None:
        with Forwarder(settings.database_url) as database:
            database.open()
            url = make_url(settings.database_url).set(port=database.port)
            start_worker(lease_seconds=14, database_url=url.render_as_string(hide_password=False))
            job_id = jobs.add("[step 1]")
            jobs.wait_for_step(job_id, 1)
            database.shut()
            time.sleep(5.5)
            database.open()
            assert jobs.wait_completed(job_id).attempt == 1

    def test_attempt_is_discarded_when_the_database_is_away_for_longer_than_the_lease(
        self, jobs: Jobs, start_worker: StartWorker
    ) -> None:
        worker = start_worker(lease_seconds=3)
        job_id = jobs.add("[step 1 on attempt 1]")
        jobs.wait_for_step(job_id, 1)
        with jobs.outage():
            eventually(lambda: worker.events("lease_lost"))
        eventually(lambda: jobs.reap() or jobs.get(job_id).state == JobState.COMPLETED)
        assert jobs.get(job_id).attempt == 2
        assert not worker.events("group_ended")

    def test_clip_waits_for_a_store_that_is_away(
        self, settings: Settings, jobs: Jobs, start_worker: StartWorker
    ) -> None:
        with Forwarder(settings.s3_endpoint_url) as store:
            worker = start_worker(s3_endpoint_url=store.url)
            cancelled = jobs.add()
            eventually(lambda: worker.events("upload_failed"))
            jobs.cancel(cancelled)
            jobs.wait_for(cancelled, JobState.CANCELLED)

            job_id = jobs.add()
            eventually(lambda: len(worker.events("upload_failed")) > 1)
            store.open()
            assert jobs.wait_completed(job_id).attempt == 1
