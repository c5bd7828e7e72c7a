"""The main job: a prompt posted over HTTP becomes a clip in the bucket, and everybody tells the truth meanwhile."""

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rushes_core.models import Job
from rushes_core.states import JobState, Phase
from rushes_worker.media.validate import validate_clip
from support.service import NUM_FRAMES, REQUEST, Rendered, Service
from support.worker import eventually, keys_of

STATUSES = ("queued", "in_progress", "completed")
PHASES = tuple(Phase)
AAC_FRAME_SECONDS = 1024 / 32_000

Moment = tuple[int, int, int, int]


def moment(status: str, phase: str | None, progress: int, completed_steps: int) -> Moment:
    """Where a job is: four numbers that never fall while nothing goes wrong."""
    when = STATUSES.index(status)
    in_phase = -1 if phase is None else PHASES.index(Phase(phase))
    return when, len(PHASES) if status == "completed" else in_phase, progress, completed_steps


def moment_of_row(job: Job) -> Moment:
    return moment(job.state.public_status, job.phase, job.progress, job.completed_steps)


def moment_of_video(video: dict[str, Any]) -> Moment:
    steps = video["progress_detail"]["completed_steps"]
    return moment(video["status"], video["phase"], video["progress"], steps)


class TestOneJob:
    def test_is_accepted_as_it_was_posted(self, reference: Rendered) -> None:
        posted = reference.posted
        assert (posted["object"], posted["status"], posted["progress"]) == ("video", "queued", 0)
        assert {name: posted[name] for name in REQUEST} == REQUEST
        assert posted["output"]["num_frames"] == NUM_FRAMES
        assert posted["output"]["sha256"] is None

    def test_api_and_row_agree_and_never_go_back(self, reference: Rendered) -> None:
        # the API was asked between two looks at the row, so all three are one series in time
        moments = [
            seen
            for sample in reference.samples
            for seen in (moment_of_row(sample.before), moment_of_video(sample.video), moment_of_row(sample.after))
        ]
        for earlier, later in pairwise(moments):
            assert all(a <= b for a, b in zip(earlier, later, strict=True)), (earlier, later)

    def test_progress_is_100_only_when_it_is_completed(self, reference: Rendered) -> None:
        for sample in reference.samples:
            assert (sample.video["progress"] == 100) == (sample.video["status"] == "completed")
            assert (sample.video["completed_at"] is not None) == (sample.video["status"] == "completed")
            assert (sample.video["output"]["bytes"] is not None) == (sample.video["status"] == "completed")

    def test_denoise_steps_are_counted(self, reference: Rendered) -> None:
        details = [(sample.video["phase"], sample.video["progress_detail"]) for sample in reference.samples]
        assert {detail["total_steps"] for _, detail in details} == {8}
        counts = {phase: {detail["completed_steps"] for seen, detail in details if seen == phase} for phase in PHASES}
        assert counts[Phase.DENOISING] & set(range(1, 8))
        assert counts[Phase.ENCODING] <= {0}
        # which may be over between two looks
        assert counts[Phase.DECODING] <= {8}

    def test_history_says_what_happened(self, service: Service, reference: Rendered) -> None:
        assert service.jobs.states(reference.id) == ["queued", "claimed", "running", "completed"]
        (attempt,) = service.jobs.attempts(reference.id)
        assert (attempt.attempt, attempt.outcome, attempt.error) == (1, "completed", None)
        assert attempt.started_at is not None
        assert attempt.finished_at is not None
        assert attempt.claimed_at <= attempt.started_at < attempt.finished_at
        phases = reference.video["timing"]["phases"]
        assert set(phases) == {*PHASES, "total"}
        assert sum(phases[phase] for phase in PHASES) == pytest.approx(phases["total"], abs=0.05)

    def test_replica_is_busy_with_it_and_ready_again(self, service: Service, reference: Rendered) -> None:
        (attempt,) = service.jobs.attempts(reference.id)
        replicas = [replica for sample in reference.samples for replica in sample.replicas]
        seen = {(one.state, one.job_id) for one in replicas if one.id == attempt.lease_owner}
        assert ("busy", reference.id) in seen
        assert seen <= {("ready", None), ("busy", reference.id)}
        eventually(lambda: {(one.state, one.job_id) for one in service.jobs.all_replicas()[-1:]} == {("ready", None)})

    def test_clip_is_the_object_in_the_bucket(self, service: Service, reference: Rendered) -> None:
        result = service.jobs.get(reference.id).result
        assert result is not None
        stored = service.stored(reference.id)
        assert set(stored) == keys_of(service.jobs.get(reference.id))
        assert stored[result["key"]] == reference.data
        output = reference.video["output"]
        assert output["sha256"] == result["sha256"] == hashlib.sha256(reference.data).hexdigest()
        assert output["bytes"] == result["bytes"] == len(reference.data)

    def test_nothing_of_it_is_left_on_the_worker(self, service: Service, reference: Rendered) -> None:
        eventually(lambda: not list(service.settings.scratch.glob("*/attempt-*")))


class TestClip:
    def test_four_seconds_are_107_frames_with_sound_as_long(self, reference: Rendered, tmp_path: Path) -> None:
        check_clip(reference, tmp_path / "clip.mp4", num_frames=107)

    def test_a_fraction_of_a_second_is_rendered_and_rounded_up(self, service: Service, tmp_path: Path) -> None:
        rendered = service.render(seconds="4.5")
        assert rendered.video["seconds"] == "4.5"
        check_clip(rendered, tmp_path / "clip.mp4", num_frames=124)


def check_clip(rendered: Rendered, path: Path, *, num_frames: int) -> None:
    """The file is a valid clip of `num_frames` with sound in sync, and the job says so."""
    path.write_bytes(rendered.data)
    facts = validate_clip(path, width=480, height=480, num_frames=num_frames)
    assert facts.duration_seconds == pytest.approx(num_frames / 24, abs=1e-6)
    assert facts.audio_duration_seconds == pytest.approx(num_frames / 24, abs=AAC_FRAME_SECONDS)
    assert (facts.audio_channels, facts.audio_sample_rate) == (2, 32_000)
    assert facts.pixel_variance > 1
    assert facts.audio_rms > 1e-3
    output = rendered.video["output"]
    assert (output["num_frames"], output["fps"], output["has_audio"]) == (num_frames, 24, True)
    assert output["duration_seconds"] == pytest.approx(num_frames / 24, abs=1e-3)


class TestSeed:
    def test_drawn_seed_is_shown_and_reproduces_its_clip(self, service: Service, reference: Rendered) -> None:
        drawn = service.render(seed=None)
        seed = drawn.posted["seed"]
        assert isinstance(seed, int)
        assert drawn.video["seed"] == service.jobs.get(drawn.id).seed == seed
        assert drawn.data != reference.data
        again = service.render(seed=seed)
        assert again.id != drawn.id
        assert again.data == drawn.data


def test_a_job_that_waits_shows_its_place(quick_service: Service) -> None:
    service = quick_service
    # a replica holds two: the one that it renders and the one that it takes next
    first, second, third = service.post(prompt="A wave [step 5]"), service.post(), service.post()
    try:
        eventually(lambda: service.get(second["id"])["status"] == "in_progress")
        waiting = service.get(third["id"])
        assert (waiting["status"], waiting["progress"], waiting["queue"]["ahead"]) == ("queued", 0, 0)
        assert service.jobs.get(second["id"]).state is JobState.CLAIMED
        assert service.jobs.get(third["id"]).state is JobState.QUEUED
    finally:
        for video in (third, second, first):
            service.http.delete(f"/v1/videos/{video['id']}")
