from dataclasses import replace

import pytest
from rushes_core.claims import ClaimedJob
from rushes_core.states import Phase
from rushes_worker.progress import DEFAULT_SECONDS, Progress
from rushes_worker.stage_times import StageTimes


def test_progress_rises_through_every_phase_and_stays_below_100() -> None:
    progress = Progress(num_steps=8, num_units=6)
    seen = [progress.percent]
    progress.enter(Phase.ENCODING)
    seen.append(progress.percent)
    for step in range(1, 9):
        progress.enter(Phase.DENOISING, step)
        seen.append(progress.percent)
    progress.enter(Phase.DECODING)
    for _ in range(6):
        progress.finish_unit()
        seen.append(progress.percent)
    for phase in (Phase.MUXING, Phase.UPLOADING):
        progress.enter(phase)
        seen.append(progress.percent)
    assert seen == sorted(seen)
    assert len(set(seen)) > 14
    assert seen[0] == 0
    assert 90 < seen[-1] < 100


def test_report_that_comes_late_takes_nothing_back() -> None:
    progress = Progress(num_steps=8, num_units=6)
    progress.enter(Phase.DECODING)
    percent = progress.percent
    progress.enter(Phase.DENOISING, 8)
    assert (progress.phase, progress.completed_steps, progress.percent) == (Phase.DECODING, 8, percent)


def test_steps_beyond_the_schedule_are_not_counted() -> None:
    progress = Progress(num_steps=8, num_units=6)
    progress.enter(Phase.DENOISING, 99)
    whole = Progress(num_steps=8, num_units=6)
    whole.enter(Phase.DENOISING, 8)
    assert (progress.completed_steps, progress.percent) == (8, whole.percent)


def test_each_phase_has_the_share_that_it_was_measured_to_take() -> None:
    seconds = {Phase.ENCODING: 1.0, Phase.DENOISING: 4.0, Phase.DECODING: 4.0, Phase.UPLOADING: 1.0}
    progress = Progress(num_steps=4, num_units=2, seconds=seconds)
    seen: list[int] = []
    for phase, step in ((Phase.DENOISING, 0), (Phase.DENOISING, 2), (Phase.DECODING, 4)):
        progress.enter(phase, step)
        seen.append(progress.percent)
    progress.finish_unit()
    seen.append(progress.percent)
    progress.enter(Phase.UPLOADING)
    assert [*seen, progress.percent] == [99 * tenths // 10 for tenths in (1, 3, 5, 7, 9)]


def test_phases_that_took_no_time_at_all_do_not_stop_it() -> None:
    progress = Progress(num_steps=8, seconds=dict.fromkeys(Phase, 0.0))
    progress.enter(Phase.UPLOADING)
    assert 0 < progress.percent < 100


class TestStageTimes:
    JOB = ClaimedJob(
        id="video_1",
        project="default",
        model="tiny",
        prompt="waves",
        seed=1,
        width=64,
        height=64,
        num_frames=107,
        request={},
        attempt=1,
        low_memory=False,
        fence=1,
    )
    OTHER = replace(JOB, num_frames=124)

    def test_a_shape_that_nobody_measured_has_the_usual_proportions(self) -> None:
        assert StageTimes(lambda job: None).expected(self.JOB) == DEFAULT_SECONDS

    def test_it_starts_from_what_the_deployment_measured_of_the_shape(self) -> None:
        known = {124: {"denoising": 3.0, "uploading": 1.0}}
        times = StageTimes(lambda job: known.get(job.num_frames))
        assert times.expected(self.OTHER)[Phase.DENOISING] == 3.0
        assert times.expected(self.JOB) == DEFAULT_SECONDS

    def test_it_follows_what_this_replica_measures(self) -> None:
        times = StageTimes(lambda job: {"denoising": 10.0, "decoding": 1.0})
        times.expected(self.JOB)
        times.note(self.JOB, {"denoising": 20.0, "decoding": 1.0, "total": 21.0})
        assert times.expected(self.JOB)[Phase.DENOISING] == pytest.approx(13.0)
        for _ in range(50):
            times.note(self.JOB, {"denoising": 20.0, "decoding": 1.0, "total": 21.0})
        assert times.expected(self.JOB)[Phase.DENOISING] == pytest.approx(20.0, abs=0.1)

    def test_the_plan_that_needs_less_memory_does_not_count(self) -> None:
        times = StageTimes(lambda job: None)
        times.note(replace(self.JOB, low_memory=True), {"denoising": 99.0})
        assert times.expected(self.JOB) == DEFAULT_SECONDS
