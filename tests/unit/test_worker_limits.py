"""When a replica takes no more work, and how long it waits for what it has."""

from pathlib import Path
from threading import Event

import pytest
from rushes_core.settings import Settings
from rushes_core.states import Phase
from rushes_worker.crashes import Crashes
from rushes_worker.deadlines import MAX_SCALE, Deadlines
from rushes_worker.scratch import Scratch
from rushes_worker.spool import Spool
from support.waiting import wait_until

WHOLE = {"num_frames": 124, "width": 1344, "height": 768}
SMALL = {"num_frames": 107, "width": 480, "height": 480}


def settings(**values: float) -> Settings:
    return Settings(
        database_url="postgresql+psycopg://u:p@127.0.0.1/d",
        redis_url="redis://127.0.0.1/0",
        s3_bucket="media",
        checkpoint=Path("checkpoint"),
        **values,  # pyright: ignore[reportArgumentType]
    )


class TestDeadlines:
    def test_stage_without_a_deadline_of_its_own_has_the_common_one(self) -> None:
        deadlines = Deadlines.of(settings(stage_timeout_seconds=50, step_timeout_seconds=20))
        seconds = {phase.value: deadlines.seconds(phase, **WHOLE) for phase in Phase}
        assert seconds == {"encoding": 50, "denoising": 20, "decoding": 50, "muxing": 50, "uploading": 600}

    def test_larger_clips_have_more_time_where_their_work_is(self) -> None:
        deadlines = Deadlines.of(settings(stage_timeout_seconds=50))
        double = WHOLE | {"num_frames": 248}
        seconds = {phase.value: deadlines.seconds(phase, **double) for phase in Phase}
        assert seconds == {"encoding": 50, "denoising": 100, "decoding": 100, "muxing": 100, "uploading": 600}
        assert deadlines.seconds(Phase.DENOISING, **SMALL) == 50

    def test_longest_covers_the_largest_clip(self) -> None:
        deadlines = Deadlines.of(settings(stage_timeout_seconds=50))
        largest = WHOLE | {"num_frames": 362}
        assert deadlines.seconds(Phase.DENOISING, **largest) == pytest.approx(deadlines.longest)
        assert pytest.approx(362 / 124) == MAX_SCALE


class TestCrashes:
    def test_one_job_that_crashes_again_and_again_blames_itself(self) -> None:
        seen = Crashes(2)
        for _ in range(5):
            seen.note("a")
        assert not seen.too_many
        seen.note("b")
        assert seen.too_many

    def test_crashes_are_forgotten_after_half_an_hour(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 0.0
        monkeypatch.setattr("time.monotonic", lambda: now)
        seen = Crashes(2)
        seen.note("a")
        now = 1_801.0
        seen.note("b")
        assert seen.jobs == ["b"]


class TestSpool:
    def test_room_is_counted_in_jobs_and_in_bytes(self) -> None:
        go_on, ended = Event(), Event()

        def wait() -> None:
            go_on.wait()

        spool = Spool(max_jobs=2, max_bytes=100, on_change=ended.set)
        assert spool.has_room(on_ranks=1)
        spool.end(7, wait)
        assert spool.has_room(on_ranks=0)
        assert not spool.has_room(on_ranks=1)
        spool.weigh(7, 101)
        assert not spool.has_room(on_ranks=0)
        go_on.set()
        spool.close()
        assert ended.is_set()
        assert spool.has_room(on_ranks=1)

    def test_bug_at_the_end_of_an_attempt_takes_no_room_for_good(self) -> None:
        def fail() -> None:
            raise RuntimeError("a bug")

        spool = Spool(max_jobs=1, max_bytes=0, on_change=lambda: None)
        spool.end(1, fail)
        wait_until(lambda: spool.has_room(on_ranks=0))


def test_full_scratch_directory_has_no_room(tmp_path: Path) -> None:
    for free_bytes, has_room in ((0, True), (2**62, False)):
        scratch = Scratch(tmp_path, free_bytes=free_bytes)
        assert scratch.has_room == has_room
        scratch.remove()
