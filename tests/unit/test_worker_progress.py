from rushes_core.states import Phase
from rushes_worker.progress import Progress


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
    assert seen[-1] == 97


def test_report_that_comes_late_takes_nothing_back() -> None:
    progress = Progress(num_steps=8, num_units=6)
    progress.enter(Phase.DECODING)
    percent = progress.percent
    progress.enter(Phase.DENOISING, 8)
    assert (progress.phase, progress.completed_steps, progress.percent) == (Phase.DECODING, 8, percent)


def test_steps_beyond_the_schedule_are_not_counted() -> None:
    progress = Progress(num_steps=8, num_units=6)
    progress.enter(Phase.DENOISING, 99)
    assert (progress.completed_steps, progress.percent) == (8, 70)
