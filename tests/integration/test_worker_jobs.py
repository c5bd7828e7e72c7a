"""A worker on real servers with the scripted pipeline: what becomes of jobs, and that nothing is left behind."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rushes_core.models import Job
from rushes_core.object_keys import job_prefix
from rushes_core.settings import Settings
from rushes_core.states import FINAL_STATES, JobState
from rushes_core.storage import ObjectStore
from rushes_core.sweeper import Sweeper
from support.processes import children, is_alive
from support.stack import SharedStack, s3_client, settings_env, settings_of
from support.worker import NUM_FRAMES, SCRIPTED, SIZE, Jobs, Worker, eventually, keys_of, write_contract

OTHER_BUCKET = "other-clips"


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("worker")
    env = stack.env()
    s3_client(env).create_bucket(Bucket=OTHER_BUCKET)
    return settings_of(
        env,
        s3_output_buckets=OTHER_BUCKET,
        provenance="off",
        checkpoint=write_contract(folder / "checkpoint"),
        pipeline=SCRIPTED,
        scratch=folder / "scratch",
        poll_seconds=0.1,
        stage_timeout_seconds=6,
        drain_after_crashes=100,
    )


@pytest.fixture(scope="module")
def jobs(settings: Settings) -> Iterator[Jobs]:
    jobs = Jobs(settings)
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def worker(settings: Settings, jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(settings, tmp_path_factory.mktemp("log") / "worker.log") as worker:
        jobs.wait_ready()
        yield worker


@pytest.fixture(autouse=True)
def _leaves_no_file(worker: Worker, jobs: Jobs, settings: Settings) -> Iterator[None]:
    """After every test the worker becomes idle and its scratch directory holds no attempt."""
    yield
    jobs.wait_ready()
    eventually(lambda: not list(settings.scratch.glob("*/attempt-*")))


def ranks(jobs: Jobs) -> list[int]:
    """Process numbers of the only replica's ranks."""
    (replica,) = jobs.replicas()
    pids: list[int] = replica.detail["ranks"]
    return pids


def stored_keys(settings: Settings, job: Job) -> list[str]:
    client = s3_client(settings_env(settings))
    prefix = job_prefix(job.project, job.id)
    return [
        item["Key"] for item in client.list_objects_v2(Bucket=settings.s3_bucket, Prefix=prefix).get("Contents", ())
    ]


def test_job_becomes_completed_with_its_clip_in_the_bucket(worker: Worker, jobs: Jobs, settings: Settings) -> None:
    job = jobs.wait_completed(jobs.add())

    assert job.result is not None
    assert set(job.result) == {
        *("bucket", "key", "bytes", "sha256", "content_type", "num_frames", "width", "height", "fps"),
        *("duration_seconds", "has_audio", "audio_sample_rate", "variants", "warnings"),
    }
    assert (job.result["num_frames"], job.result["width"], job.result["height"]) == (NUM_FRAMES, SIZE, SIZE)
    stored = ObjectStore(settings).head(job.result["key"])
    assert stored is not None
    assert (stored.num_bytes, stored.sha256) == (job.result["bytes"], job.result["sha256"])
    assert job.result["key"].startswith(f"results/default/{job.id}/1-{job.fence}/")
    assert (job.progress, job.completed_steps, job.attempt, job.phase) == (100, 8, 1, None)
    assert set(job.timings) == {"encoding", "denoising", "decoding", "muxing", "uploading", "total"}
    assert jobs.states(job.id) == ["queued", "claimed", "running", "completed"]


def test_same_seed_gives_the_same_file_and_another_seed_another(worker: Worker, jobs: Jobs) -> None:
    same = [jobs.wait_completed(jobs.add(seed=11)) for _ in range(2)]
    other = jobs.wait_completed(jobs.add(seed=12))
    hashes = [job.result["sha256"] for job in (*same, other) if job.result]
    assert hashes[0] == hashes[1] != hashes[2]


def test_progress_is_written_while_the_job_runs(worker: Worker, jobs: Jobs) -> None:
    # of a shape that nothing was measured of: the steps of the other tests take no time
    job_id = jobs.add("[step 0.8]", num_frames=141)
    seen = [jobs.wait_for_step(job_id, step) for step in (1, 4)]
    jobs.cancel(job_id)
    jobs.wait_for(job_id, *FINAL_STATES)
    assert all(job.phase == "denoising" and 0 < job.progress < 100 for job in seen)
    assert seen[0].progress < seen[1].progress


def test_no_transaction_is_open_while_a_job_runs(worker: Worker, jobs: Jobs) -> None:
    job_id = jobs.add("[step 0.2]")
    jobs.wait_for(job_id, JobState.RUNNING)
    while jobs.get(job_id).state == JobState.RUNNING:
        assert jobs.seconds_in_open_transactions() < 1
    jobs.wait_completed(job_id)


def test_broken_database_connections_cost_a_running_job_nothing(worker: Worker, jobs: Jobs) -> None:
    job_id = jobs.add("[step 0.2]")
    jobs.wait_for(job_id, JobState.RUNNING)
    while jobs.get(job_id).state == JobState.RUNNING:
        jobs.break_connections()
        time.sleep(0.3)
    assert jobs.wait_completed(job_id).attempt == 1


class TestByProducts:
    def test_are_stored_beside_the_clip_with_their_checksums(
        self, worker: Worker, jobs: Jobs, settings: Settings
    ) -> None:
        job = jobs.wait_completed(jobs.add())
        assert job.result is not None
        assert job.result["warnings"] == []
        variants = job.result["variants"]
        assert set(variants) == {"thumbnail", "spritesheet", "audio"}
        folder = job.result["key"].removesuffix("video.mp4")
        assert set(stored_keys(settings, job)) == keys_of(job)
        for variant in variants.values():
            stored = ObjectStore(settings).head(variant["key"])
            assert stored is not None
            assert (stored.num_bytes, stored.sha256) == (variant["bytes"], variant["sha256"])
            assert variant["key"].startswith(folder)
        assert [variants[name]["content_type"] for name in ("thumbnail", "audio")] == ["image/jpeg", "audio/mp4"]
        assert variants["spritesheet"]["tiles"] == {"columns": 5, "count": 25, "width": SIZE, "height": SIZE}

    def test_pictures_are_not_made_for_who_does_not_want_them(self, worker: Worker, jobs: Jobs) -> None:
        job = jobs.wait_completed(jobs.add(request={"output": {"thumbnail": False}}))
        assert job.result is not None
        assert set(job.result["variants"]) == {"audio"}

    def test_same_seed_gives_the_same_by_products(self, worker: Worker, jobs: Jobs) -> None:
        first, second = (jobs.wait_completed(jobs.add(seed=11)).result for _ in range(2))
        assert first is not None
        assert second is not None
        for name, variant in first["variants"].items():
            assert variant["sha256"] == second["variants"][name]["sha256"]


def test_blank_clip_is_stored_with_a_warning(worker: Worker, jobs: Jobs) -> None:
    job = jobs.wait_completed(jobs.add("[blank]"))
    assert job.attempt == 1
    assert job.result is not None
    assert [warning["code"] for warning in job.result["warnings"]] == ["blank_picture", "silent_sound"]


class TestDestination:
    def test_keys_have_the_prefix_that_was_asked_for(self, worker: Worker, jobs: Jobs, settings: Settings) -> None:
        job = jobs.wait_completed(jobs.add(request={"output": {"key_prefix": "acme/spring"}}))
        prefix = f"results/default/acme/spring/{job.id}/1-{job.fence}/"
        assert {key.removeprefix(prefix) for key in keys_of(job)} == {
            *("video.mp4", "thumbnail.jpg", "spritesheet.jpg", "audio.m4a")
        }
        store = ObjectStore(settings)
        assert all(store.head(key) for key in keys_of(job))

    def test_a_bucket_of_the_list_takes_everything(self, worker: Worker, jobs: Jobs, settings: Settings) -> None:
        job = jobs.wait_completed(jobs.add(request={"output": {"bucket": OTHER_BUCKET}}))
        assert job.result is not None
        assert job.result["bucket"] == OTHER_BUCKET
        assert stored_keys(settings, job) == []
        other = ObjectStore(settings).in_bucket(OTHER_BUCKET)
        assert all(other.head(key) for key in keys_of(job))

    def test_a_bucket_that_is_no_longer_on_the_list_is_refused(
        self, worker: Worker, jobs: Jobs, settings: Settings
    ) -> None:
        job = jobs.wait_for(jobs.add(request={"output": {"bucket": "removed"}}), *FINAL_STATES)
        assert job.state is JobState.FAILED
        assert job.error is not None
        assert job.error["code"] == "invalid_request"
        assert "removed" in job.error["message"]


class TestErrors:
    def test_user_errors_never_count_against_the_worker(self, worker: Worker, jobs: Jobs) -> None:
        pids = ranks(jobs)
        wrong = [jobs.add("[invalid]") for _ in range(10)]
        failed = [jobs.wait_for(job_id, *FINAL_STATES) for job_id in wrong]
        assert {job.state for job in failed} == {JobState.FAILED}
        assert failed[0].error == {"code": "invalid_request", "message": "the prompt asks for a refusal"}
        assert {(job.attempt, job.crash_count) for job in failed} == {(1, 0)}
        jobs.wait_completed(jobs.add())
        assert ranks(jobs) == pids

    @pytest.mark.parametrize(
        ("prompt", "code"),
        [
            ("[value error on attempt 1]", "generation_failed"),
            ("[generation error on attempt 1]", "generation_failed"),
            ("[odd phase on attempt 1]", "generation_failed"),
            ("[odd words on attempt 1]", "generation_failed"),
            ("[nan on attempt 1]", "not_finite"),
            ("[missing unit on attempt 1]", "media_failed"),
        ],
    )
    def test_error_on_purpose_is_tried_again_on_the_same_ranks(
        self, worker: Worker, jobs: Jobs, prompt: str, code: str
    ) -> None:
        pids = ranks(jobs)
        job = jobs.wait_completed(jobs.add(prompt))
        assert (job.attempt, job.error_count, job.crash_count) == (2, 1, 0)
        (first, _) = jobs.attempts(job.id)
        assert first.error is not None
        assert first.error["code"] == code
        assert ranks(jobs) == pids

    def test_bug_is_tried_again_on_new_ranks_and_tells_clients_nothing(self, worker: Worker, jobs: Jobs) -> None:
        pids = ranks(jobs)
        job = jobs.wait_for(jobs.add("[raise]", max_attempts=1), *FINAL_STATES)
        assert (job.state, job.error_count, job.crash_count) == (JobState.FAILED, 1, 0)
        assert job.error == {
            "code": "generation_failed",
            "message": "The pipeline failed (RuntimeError).",
            "stage": "encoding",
        }
        jobs.wait_completed(jobs.add())
        assert ranks(jobs) != pids

    def test_rank_that_dies_costs_one_attempt_and_its_group(self, worker: Worker, jobs: Jobs) -> None:
        pids = ranks(jobs)
        job = jobs.wait_completed(jobs.add("[die at step 3 on attempt 1]"))
        assert (job.attempt, job.crash_count, job.error_count) == (2, 1, 0)
        (first, second) = jobs.attempts(job.id)
        assert first.error is not None
        assert first.error["code"] == "worker_lost"
        assert (first.outcome, second.outcome) == ("queued", "completed")
        assert not is_alive(pids[0])

    def test_hanging_job_is_ended_at_its_deadline(self, worker: Worker, jobs: Jobs) -> None:
        job = jobs.wait_completed(jobs.add("[hang at step 2 on attempt 1]"))
        assert (job.attempt, job.crash_count) == (2, 1)
        (first, _) = jobs.attempts(job.id)
        assert first.error == {
            "code": "worker_lost",
            "message": "The ranks of the worker were silent for 6 s of denoising.",
            "stage": "denoising",
        }

    def test_job_that_kills_every_worker_fails(self, worker: Worker, jobs: Jobs) -> None:
        job = jobs.wait_for(jobs.add("[die at step 1]", max_attempts=2), *FINAL_STATES)
        assert (job.state, job.attempt, job.crash_count) == (JobState.FAILED, 2, 2)
        jobs.wait_completed(jobs.add())

    @pytest.mark.parametrize(
        ("prompt", "stage"),
        [
            ("[out of memory encoding]", "encoding"),
            ("[out of memory at step 3]", "denoising"),
            ("[out of memory decoding]", "decoding"),
        ],
    )
    def test_job_without_enough_memory_is_rendered_twice_and_not_more(
        self, worker: Worker, jobs: Jobs, prompt: str, stage: str
    ) -> None:
        pids = ranks(jobs)
        job = jobs.wait_for(jobs.add(prompt), *FINAL_STATES)
        assert (job.state, job.attempt, job.crash_count) == (JobState.FAILED, 2, 0)
        assert job.error is not None
        assert (job.error["code"], job.error["stage"]) == ("out_of_memory", stage)
        assert ranks(jobs) == pids

    def test_second_attempt_takes_the_plan_that_needs_less_memory(self, worker: Worker, jobs: Jobs) -> None:
        job = jobs.wait_completed(jobs.add("[large]"))
        assert (job.attempt, job.low_memory, job.error_count, job.crash_count) == (2, True, 1, 0)

    def test_media_process_that_dies_costs_one_attempt(self, worker: Worker, jobs: Jobs) -> None:
        pids = ranks(jobs)
        job_id = jobs.add("[step 0.6 on attempt 1]")
        jobs.wait_for(job_id, JobState.RUNNING)
        (supervisor,) = worker.supervisors
        (media,) = set(children(supervisor)) - set(pids)
        os.kill(media, signal.SIGKILL)
        job = jobs.wait_completed(job_id)
        assert (job.attempt, job.error_count) == (2, 1)
        assert ranks(jobs) == pids


class TestCancel:
    def test_cancelled_job_frees_the_ranks_between_steps(self, worker: Worker, jobs: Jobs, settings: Settings) -> None:
        pids = ranks(jobs)
        job_id = jobs.add("[step 0.6]")
        jobs.wait_for_step(job_id, 1)
        jobs.cancel(job_id)
        following = jobs.add()
        job = jobs.wait_for(job_id, *FINAL_STATES)
        assert (job.state, job.error_count, job.crash_count) == (JobState.CANCELLED, 0, 0)
        assert job.completed_steps < 8
        assert stored_keys(settings, job) == []
        jobs.wait_completed(following)
        assert ranks(jobs) == pids

    def test_deleted_job_leaves_no_object(self, worker: Worker, jobs: Jobs, settings: Settings) -> None:
        job_id = jobs.add("[step 0.6]")
        jobs.wait_for(job_id, JobState.RUNNING)
        jobs.delete(job_id)
        job = jobs.wait_for(job_id, *FINAL_STATES)
        assert job.state == JobState.CANCELLED
        sweeper = Sweeper(settings)
        sweeper.purge()
        sweeper.close()
        assert jobs.get(job_id).purged_at is not None
        assert stored_keys(settings, job) == []

    def test_cancel_that_comes_after_the_last_step_still_wins(
        self, worker: Worker, jobs: Jobs, settings: Settings
    ) -> None:
        job_id = jobs.add("[step 0.1]")
        jobs.wait_for_step(job_id, 8)
        jobs.cancel(job_id)
        job = jobs.wait_for(job_id, *FINAL_STATES)
        if job.state == JobState.CANCELLED:
            assert stored_keys(settings, job) == []
        else:
            assert set(stored_keys(settings, job)) == keys_of(job)


def test_attempt_whose_lease_ran_out_changes_nothing(worker: Worker, jobs: Jobs, settings: Settings) -> None:
    job_id = jobs.add("[step 0.6 on attempt 1]")
    jobs.wait_for_step(job_id, 1)
    jobs.end_lease(job_id)
    job = jobs.wait_completed(job_id)
    assert job.attempt == 2
    assert job.result is not None
    assert set(stored_keys(settings, job)) == keys_of(job)
    assert f"/2-{job.fence}/" in job.result["key"]
    assert worker.events("lease_lost")


def test_job_of_another_model_is_left_alone(worker: Worker, jobs: Jobs) -> None:
    job_id = jobs.add(model="another")
    jobs.wait_completed(jobs.add())
    assert jobs.get(job_id).state == JobState.QUEUED


def test_supervisor_never_loads_torch(worker: Worker) -> None:
    (supervisor,) = worker.supervisors
    assert "torch" not in Path(f"/proc/{supervisor}/maps").read_text()


def test_row_that_no_clip_can_be_made_of_fails_and_harms_nobody(worker: Worker, jobs: Jobs) -> None:
    supervisors = worker.supervisors
    for columns in ({"num_frames": 100}, {"width": 63}):
        job = jobs.wait_for(jobs.add("a wave", **columns), *FINAL_STATES)
        assert job.state == JobState.FAILED
        assert job.error is not None
        assert job.error["code"] == "invalid_request"
    assert worker.supervisors == supervisors
