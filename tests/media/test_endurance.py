"""What clips leave behind when they end, well or badly: nothing, however many there are."""

import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from rushes_worker.media.errors import MediaError, MediaProcessLost
from rushes_worker.media.process import ClipSpec, MediaProcess
from rushes_worker.media.settings import EncoderSettings
from support.media import moving_frames, tone, write_units
from support.waiting import wait_until

SIZES = [17, 17, 22]
NUM_FRAMES = sum(SIZES)
BY_PRODUCTS = ("thumbnail", "spritesheet", "audio")


@pytest.fixture
def media(tmp_path: Path) -> Iterator[MediaProcess]:
    """A process that has made a clip."""
    with MediaProcess(EncoderSettings(encoders=2)) as process:
        begin(process, tmp_path, moving_frames(NUM_FRAMES))
        process.finish(timeout=60)
        # it answers before it has ended what worked on the clip
        wait_until(lambda: status(process.pid, "Threads") == 1)
        for path in tmp_path.iterdir():
            path.unlink()
        yield process


def begin(
    media: MediaProcess, folder: Path, frames: np.ndarray, *, units: int = len(SIZES), clip: Path | None = None
) -> None:
    """Start a clip and hand over its sound and so many of its units."""
    _, height, width, _ = frames.shape
    np.save(folder / "sound.npy", tone(len(frames)))
    paths = write_units(folder, frames, SIZES)
    media.start_clip(ClipSpec(clip or folder / "video.mp4", width, height, len(frames), by_products=BY_PRODUCTS))
    media.set_audio(folder / "sound.npy")
    for index, path in enumerate(paths[:units]):
        media.add_unit(index, path, SIZES[index])
    for path in paths[units:]:
        path.unlink()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def status(pid: int, field: str) -> int:
    """A number of `/proc/PID/status`; memory in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def held(media: MediaProcess) -> tuple[int, int]:
    """Open files and threads of the process."""
    return open_files(media.pid), status(media.pid, "Threads")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_clip_after_clip_takes_no_more_memory_files_or_threads(media: MediaProcess, tmp_path: Path) -> None:
    """One of each six is given up, one fails half-way, and one in its sound."""
    frames = moving_frames(NUM_FRAMES)
    idle = held(media)
    memory: list[int] = []
    for number in range(66):
        if number % 6 == 3:
            begin(media, tmp_path, frames, units=2)
            media.abort()
        elif number % 6 == 4:
            begin(media, tmp_path, frames, units=2)
            with pytest.raises(MediaError, match="num_frames=56, but 34 frames were added"):
                media.finish(timeout=60)
        elif number % 6 == 5:
            begin(media, tmp_path, frames)
            (tmp_path / "again.npy").write_bytes(b"no sound")
            media.set_audio(tmp_path / "again.npy")
            with pytest.raises(MediaError):
                media.finish(timeout=60)
        else:
            begin(media, tmp_path, frames)
            media.finish(timeout=60)
            assert names(tmp_path) == {"video.mp4", "thumbnail.jpg", "spritesheet.jpg", "audio.m4a"}
            for path in tmp_path.iterdir():
                path.unlink()
        assert names(tmp_path) == set()
        # it answers before it has tidied up after an error
        wait_until(lambda: held(media) == idle)
        memory.append(status(media.pid, "VmRSS"))
    # on a busy machine a clip may find the process up to 8 MiB above its least, by what its threads are at; the frames
    # of the 42 clips between take 27 MiB
    assert min(memory[-12:]) - min(memory[12:24]) < 6_144


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what it sets is glibc's")
def test_what_a_large_clip_took_goes_back_to_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where glibc itself would give nothing back, and would make an arena for every thread."""
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_test=256")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**30))
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**25))
    large = moving_frames(NUM_FRAMES, 1344, 768)
    with MediaProcess(EncoderSettings(encoders=2)) as media:
        begin(media, tmp_path, moving_frames(NUM_FRAMES))
        media.finish(timeout=60)
        small = status(media.pid, "VmRSS")
        for _ in range(2):
            begin(media, tmp_path, large)
            media.finish(timeout=60)
        wait_until(lambda: status(media.pid, "VmRSS") < small + 49_152)
        begin(media, tmp_path, large)
        media.abort()
        wait_until(lambda: status(media.pid, "VmRSS") < small + 49_152)


@pytest.mark.parametrize("own", [None, "7"])
def test_an_operators_own_number_of_arenas_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if own is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", own)
    with MediaProcess() as media:
        begin(media, tmp_path, moving_frames(NUM_FRAMES))
        media.finish(timeout=60)
        variables = Path(f"/proc/{media.pid}/environ").read_bytes().split(b"\0")
    assert f"MALLOC_ARENA_MAX={own or 2}".encode() in variables


def test_a_process_killed_while_it_encodes_leaves_nothing(media: MediaProcess, tmp_path: Path) -> None:
    here = open_files(os.getpid())
    noise = np.random.default_rng(0).integers(0, 256, (NUM_FRAMES, 768, 1344, 3), np.uint8)
    begin(media, tmp_path, noise)
    # mapped by now, and being encoded
    wait_until(lambda: not list(tmp_path.glob("frames_*")))
    os.kill(media.pid, signal.SIGKILL)
    with pytest.raises(MediaProcessLost, match="status -9"):
        media.finish(timeout=60)
    assert names(tmp_path) == set()
    begin(media, tmp_path, moving_frames(NUM_FRAMES))
    assert media.finish(timeout=60).facts.num_frames == NUM_FRAMES
    assert open_files(os.getpid()) == here


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_is_a_clear_error_and_the_next_clip_is_made(
    media: MediaProcess, tmp_path: Path, small_disk: Path
) -> None:
    frames = moving_frames(NUM_FRAMES)
    idle = held(media)
    for _ in range(3):
        fill(small_disk)
        begin(media, tmp_path, frames, clip=small_disk / "video.mp4")
        with pytest.raises(MediaError, match=r"video\.mp4 could not be written.*No space left on device"):
            media.finish(timeout=60)
        assert names(small_disk) == {"filler"}
        (small_disk / "filler").unlink()
        wait_until(lambda: held(media) == idle)
    begin(media, tmp_path, frames, clip=small_disk / "video.mp4")
    assert media.finish(timeout=60).facts.num_frames == NUM_FRAMES
    assert names(tmp_path) == {"disk"}


def fill(disk: Path) -> None:
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4_096)):
            pass
    assert os.statvfs(disk).f_bfree == 0
