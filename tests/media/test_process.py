"""The media process: units in any order, errors that end one clip only, and nothing left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
from rushes_core.errors import RushesError
from rushes_core.signals import ENDING
from rushes_worker.media.errors import InvalidClip, MediaError, MediaProcessLost
from rushes_worker.media.process import ClipSpec, MediaProcess
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.media.validate import validate_clip
from support.media import make_clip, moving_frames, tone, write_units

NUM_FRAMES = 56
SIZES = [17, 17, 22]


@pytest.fixture(scope="module")
def shared_process() -> Iterator[MediaProcess]:
    with MediaProcess() as process:
        yield process


@pytest.fixture
def media(shared_process: MediaProcess) -> Iterator[MediaProcess]:
    yield shared_process
    shared_process.abort()


@pytest.fixture
def spec(tmp_path: Path) -> ClipSpec:
    return ClipSpec(tmp_path / "clip.mp4", width=64, height=64, num_frames=NUM_FRAMES)


def units(spec: ClipSpec) -> list[Path]:
    return write_units(spec.path.parent, moving_frames(spec.num_frames), SIZES)


def sound(spec: ClipSpec) -> Path:
    path = spec.path.with_name("audio.npy")
    np.save(path, tone(spec.num_frames))
    return path


def render(media: MediaProcess, spec: ClipSpec, order: tuple[int, ...] = (0, 1, 2)) -> None:
    paths = units(spec)
    media.start_clip(spec)
    for index in order:
        media.add_unit(index, paths[index], SIZES[index])
    media.set_audio(sound(spec))


def files(spec: ClipSpec) -> list[str]:
    return sorted(path.name for path in spec.path.parent.iterdir())


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def wait_until_gone(pid: int) -> None:
    deadline = monotonic() + 120
    while is_running(pid):
        assert monotonic() < deadline, f"process {pid} did not end"
        sleep(0.01)


class TestClip:
    @pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
    def test_units_in_any_order_give_the_same_file(
        self, media: MediaProcess, spec: ClipSpec, order: tuple[int, ...]
    ) -> None:
        render(media, spec, order)
        facts = media.finish(timeout=120).facts
        whole = make_clip(spec.path.with_name("whole.mp4"), moving_frames(NUM_FRAMES))
        assert spec.path.read_bytes() == whole.read_bytes()
        assert facts == validate_clip(spec.path, width=64, height=64, num_frames=NUM_FRAMES)

    def test_raw_files_are_deleted_once_used(self, media: MediaProcess, spec: ClipSpec) -> None:
        render(media, spec)
        media.finish(timeout=120)
        assert files(spec) == ["clip.mp4"]

    def test_sound_may_come_before_the_picture(self, media: MediaProcess, spec: ClipSpec) -> None:
        media.start_clip(spec)
        media.set_audio(sound(spec))
        for index, path in enumerate(units(spec)):
            media.add_unit(index, path, SIZES[index])
        assert media.finish(timeout=120).facts.num_frames == NUM_FRAMES

    def test_one_process_makes_clip_after_clip(self, media: MediaProcess, spec: ClipSpec) -> None:
        pid = media.pid
        for _ in range(3):
            render(media, spec)
            assert media.finish(timeout=120).facts.num_frames == NUM_FRAMES
        assert media.pid == pid

    def test_settings_reach_the_encoder(self, spec: ClipSpec) -> None:
        settings = EncoderSettings(preset="veryfast", crf=35, threads=1)
        with MediaProcess(settings) as media:
            render(media, spec)
            media.finish(timeout=120)
        whole = make_clip(spec.path.with_name("whole.mp4"), moving_frames(NUM_FRAMES), settings=settings)
        assert spec.path.read_bytes() == whole.read_bytes()


class TestFailure:
    @pytest.fixture(autouse=True)
    def next_clip_works(self, media: MediaProcess, spec: ClipSpec) -> Iterator[None]:
        """Whatever a test does to a clip, it leaves no file, and the same process makes the next clip."""
        pid = media.pid
        yield
        assert files(spec) == []
        render(media, spec)
        assert media.finish(timeout=120).facts.num_frames == NUM_FRAMES
        assert media.pid == pid

    def test_missing_unit(self, media: MediaProcess, spec: ClipSpec) -> None:
        render(media, spec, order=(0, 2))
        spec.path.with_name("frames_001.rgb").unlink()
        with pytest.raises(MediaError, match=r"unit 1 is missing; \[2\] wait for it"):
            media.finish(timeout=120)

    def test_missing_last_unit(self, media: MediaProcess, spec: ClipSpec) -> None:
        render(media, spec, order=(0, 1))
        spec.path.with_name("frames_002.rgb").unlink()
        with pytest.raises(MediaError, match="num_frames=56, but 34 frames were added"):
            media.finish(timeout=120)

    def test_doubled_unit(self, media: MediaProcess, spec: ClipSpec) -> None:
        first, second, third = units(spec)
        media.start_clip(spec)
        for index, path in ((0, first), (1, second), (1, third)):
            media.add_unit(index, path, 17)
        with pytest.raises(MediaError, match="unit 1 was added twice") as caught:
            media.finish(timeout=120)
        assert caught.value.kind == "ValueError"

    def test_unit_file_of_another_size(self, media: MediaProcess, spec: ClipSpec) -> None:
        path = spec.path.with_name("frames_000.rgb")
        path.write_bytes(bytes(17 * 64 * 64 * 3 - 1))
        media.start_clip(spec)
        media.add_unit(0, path, 17)
        with pytest.raises(MediaError, match=r"frames_000\.rgb: 17 frames of rgb24 are 208896 bytes, got 208895"):
            media.finish(timeout=120)

    def test_unit_file_that_is_not_there(self, media: MediaProcess, spec: ClipSpec) -> None:
        media.start_clip(spec)
        media.add_unit(0, spec.path.with_name("frames_000.rgb"), 17)
        with pytest.raises(MediaError, match=r"frames_000\.rgb") as caught:
            media.finish(timeout=120)
        assert caught.value.kind == "FileNotFoundError"

    def test_sound_that_is_not_finite(self, media: MediaProcess, spec: ClipSpec) -> None:
        media.start_clip(spec)
        for index, path in enumerate(units(spec)):
            media.add_unit(index, path, SIZES[index])
        path = spec.path.with_name("audio.npy")
        np.save(path, np.full((2, 99), np.nan, np.float32))
        media.set_audio(path)
        with pytest.raises(MediaError, match="not finite") as caught:
            media.finish(timeout=120)
        assert isinstance(caught.value, RushesError)

    def test_a_clip_of_another_length_than_was_asked_for(self, media: MediaProcess, spec: ClipSpec) -> None:
        media.start_clip(spec)
        with pytest.raises(MediaError, match="but 0 frames were added"):
            media.finish(timeout=120)

    @pytest.mark.parametrize("data", [b"", b"\x93NUMPY", b"not an array"])
    def test_sound_file_that_is_no_array(self, media: MediaProcess, spec: ClipSpec, data: bytes) -> None:
        media.start_clip(spec)
        path = spec.path.with_name("audio.npy")
        path.write_bytes(data)
        media.set_audio(path)
        with pytest.raises(MediaError):
            media.finish(timeout=120)

    def test_a_failed_clip_is_noticed_before_finish_and_later_units_are_deleted(
        self, media: MediaProcess, spec: ClipSpec
    ) -> None:
        first, second, third = units(spec)
        media.start_clip(spec)
        media.add_unit(0, first, 16)
        assert media.wait(timeout=120)
        with pytest.raises(MediaError, match="16 frames of rgb24 are"):
            media.add_unit(1, second, 17)
        with pytest.raises(MediaError, match="no clip is in progress"):
            media.add_unit(2, third, 22)

    def test_abort(self, media: MediaProcess, spec: ClipSpec) -> None:
        render(media, spec, order=(2, 0))
        spec.path.with_name("frames_001.rgb").unlink()
        media.abort()
        assert files(spec) == []

    def test_a_new_clip_replaces_an_unfinished_one(self, media: MediaProcess, spec: ClipSpec) -> None:
        render(media, spec, order=(1,))
        media.start_clip(ClipSpec(spec.path, width=128, height=96, num_frames=5))
        media.abort()
        for index in (0, 2):
            spec.path.with_name(f"frames_{index:03d}.rgb").unlink()

    def test_a_size_that_cannot_be_encoded_is_refused_at_once(self, media: MediaProcess, spec: ClipSpec) -> None:
        with pytest.raises(ValueError, match="width must be an even number"):
            media.start_clip(ClipSpec(spec.path, width=129, height=97, num_frames=5))

    def test_a_directory_that_is_not_there(self, media: MediaProcess, spec: ClipSpec) -> None:
        media.start_clip(ClipSpec(spec.path.parent / "missing" / "clip.mp4", width=64, height=64, num_frames=5))
        with pytest.raises(MediaError, match="does not exist"):
            media.finish(timeout=120)


class TestProcess:
    def test_a_flaw_that_the_settings_refuse_is_an_invalid_clip(self, spec: ClipSpec) -> None:
        with MediaProcess(EncoderSettings(refuse_flaws=True)) as media:
            media.start_clip(replace(spec, by_products=("thumbnail", "spritesheet", "audio")))
            for index, path in enumerate(units(spec)):
                media.add_unit(index, path, SIZES[index])
            path = spec.path.with_name("audio.npy")
            np.save(path, np.zeros((2, 99), np.float32))
            media.set_audio(path)
            with pytest.raises(InvalidClip, match="silent"):
                media.finish(timeout=120)
        assert files(spec) == []

    def test_a_killed_process_is_noticed_and_replaced(self, spec: ClipSpec) -> None:
        with MediaProcess() as media:
            render(media, spec, order=(0, 2, 1))
            pid = media.pid
            os.kill(pid, signal.SIGKILL)
            wait_until_gone(pid)
            with pytest.raises(MediaProcessLost, match="status -9"):
                media.finish(timeout=120)
            assert not media.is_alive
            assert files(spec) == []
            render(media, spec)
            assert media.finish(timeout=120).facts.num_frames == NUM_FRAMES
            assert media.pid != pid

    def test_it_leaves_signals_to_its_parent_from_the_start(self, spec: ClipSpec) -> None:
        with MediaProcess() as media:
            pid = media.pid
            for number in ENDING:
                os.kill(pid, number)
            render(media, spec)
            assert media.finish(timeout=120).facts.num_frames == NUM_FRAMES
            assert media.pid == pid

    def test_a_process_killed_between_clips_is_replaced(self, spec: ClipSpec) -> None:
        with MediaProcess() as media:
            os.kill(media.pid, signal.SIGKILL)
            wait_until_gone(media.pid)
            render(media, spec)
            assert media.finish(timeout=120).facts.num_frames == NUM_FRAMES

    def test_a_process_that_hangs_is_killed(self, spec: ClipSpec) -> None:
        with MediaProcess() as media:
            os.kill(media.pid, signal.SIGSTOP)
            render(media, spec)
            with pytest.raises(MediaProcessLost, match=r"did not finish the clip within 0\.1 s"):
                media.finish(timeout=0.1)
            assert not media.is_alive
            assert files(spec) == []

    def test_closing_ends_the_process_and_leaves_nothing(self, spec: ClipSpec) -> None:
        with MediaProcess() as media:
            pid = media.pid
            render(media, spec)
        assert not is_running(pid)
        assert files(spec) == []

    def test_interrupt_from_the_terminal_does_not_end_it(self, spec: ClipSpec) -> None:
        with MediaProcess() as media:
            render(media, spec)
            media.finish(timeout=120)
            os.kill(media.pid, signal.SIGINT)
            render(media, spec)
            assert media.finish(timeout=120).facts.num_frames == NUM_FRAMES

    @pytest.mark.parametrize("stopped", [False, True], ids=["idle", "unable to notice"])
    def test_it_ends_with_its_parent(self, tmp_path: Path, stopped: bool) -> None:
        script = (
            "import os, pathlib, signal\n"
            "from rushes_worker.media.process import ClipSpec, MediaProcess\n"
            "media = MediaProcess()\n"
            f"media.start_clip(ClipSpec(pathlib.Path({str(tmp_path / 'missing' / 'clip.mp4')!r}), 64, 64, 1))\n"
            "assert media.wait(30)\n"
            f"os.kill(media.pid, {int(signal.SIGSTOP if stopped else 0)})\n"
            "print(media.pid, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        parent = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
        assert parent.returncode == -signal.SIGKILL
        wait_until_gone(int(parent.stdout))

    def test_it_never_loads_torch(self) -> None:
        script = "import sys, rushes_worker.media.process, rushes_worker.media.child; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
        assert done.stdout == "False\n"
