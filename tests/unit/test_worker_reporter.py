import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from rushes_core.errors import GenerationError, InvalidOutput
from rushes_worker.commands import Advanced, AudioReady, Render, Stop, UnitReady
from rushes_worker.idle import IdleClock
from rushes_worker.pipeline.base import Cancelled, RenderRequest
from rushes_worker.pixels import PixelFormat
from rushes_worker.rank_line import RankLine
from rushes_worker.reporter import Agreement, RankReporter, alone

REQUEST = RenderRequest("video_1", 1, "a wave", seed=7, width=64, height=48, num_frames=107)


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = socket.socketpair()
    with Connection(ours.detach()) as mine, Connection(theirs.detach()) as other:
        yield mine, other


@pytest.fixture
def supervisor(pipe: tuple[Connection, Connection]) -> Connection:
    return pipe[0]


def reporter_of(line: RankLine, directory: Path, *, rank: int = 0, agree: Agreement = alone) -> RankReporter:
    return RankReporter(Render(5, REQUEST, directory), rank=rank, line=line, agree=agree, idle=IdleClock("cpu"))


@pytest.fixture
def reporter(pipe: tuple[Connection, Connection], tmp_path: Path) -> RankReporter:
    return reporter_of(RankLine(pipe[1]), tmp_path)


def test_frames_are_left_as_raw_bytes(reporter: RankReporter, supervisor: Connection) -> None:
    frames = np.arange(2 * 48 * 64 * 3, dtype=np.uint8).reshape(2, 48, 64, 3)
    reporter.frames(3, frames[:, ::-1])
    report = supervisor.recv()
    assert report == UnitReady(5, 3, report.path, 2)
    assert report.path.read_bytes() == frames[:, ::-1].tobytes()


def test_frames_of_420_are_told_to_be_that(reporter: RankReporter, supervisor: Connection) -> None:
    frames = np.arange(2 * 72 * 64, dtype=np.uint8).reshape(2, 72, 64)
    reporter.frames(3, frames, PixelFormat.YUV420P)
    report = supervisor.recv()
    assert report == UnitReady(5, 3, report.path, 2, PixelFormat.YUV420P)
    assert report.path.read_bytes() == frames.tobytes()
    with pytest.raises(InvalidOutput, match=r"uint8 \(2, 72, 64\), expected uint8 \(f, 48, 64, 3\) of rgb24"):
        reporter.frames(3, frames)
    with pytest.raises(InvalidOutput, match=r"expected uint8 \(f, 72, 64\) of yuv420p"):
        reporter.frames(3, np.zeros((2, 48, 64, 3), np.uint8), PixelFormat.YUV420P)


def test_sound_is_left_as_an_array(reporter: RankReporter, supervisor: Connection) -> None:
    samples = np.linspace(-1, 1, 10, dtype=np.float32).reshape(2, 5)
    reporter.audio(samples)
    report = supervisor.recv()
    assert isinstance(report, AudioReady)
    assert np.array_equal(np.load(report.path), samples)


@pytest.mark.parametrize(
    "frames",
    [np.zeros((1, 64, 48, 3), np.uint8), np.zeros((48, 64, 3), np.uint8), np.zeros((1, 48, 64, 3), np.float32)],
    ids=["transposed", "no-frame-axis", "float"],
)
def test_frames_of_another_kind_are_refused(reporter: RankReporter, frames: np.ndarray) -> None:
    with pytest.raises(InvalidOutput, match=r"expected uint8 \(f, 48, 64, 3\)"):
        reporter.frames(0, frames)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sound_that_is_not_finite_is_refused(reporter: RankReporter, bad: float) -> None:
    samples = np.zeros((2, 5), np.float32)
    samples[1, 4] = bad
    with pytest.raises(InvalidOutput, match="not finite"):
        reporter.audio(samples)


def test_full_disk_is_an_error_of_the_attempt(reporter: RankReporter, tmp_path: Path) -> None:
    tmp_path.joinpath("unit-000.raw").symlink_to("/dev/full")
    tmp_path.joinpath("audio.npy").symlink_to("/dev/full")
    with pytest.raises(GenerationError, match="unit 0 could not be written: No space left on device"):
        reporter.frames(0, np.zeros((9, 48, 64, 3), np.uint8))
    with pytest.raises(GenerationError, match="the sound could not be written: No space left on device"):
        reporter.audio(np.zeros((2, 5), np.float32))


def test_boundary_stops_after_the_supervisor_said_so(reporter: RankReporter, supervisor: Connection) -> None:
    reporter.checkpoint()
    supervisor.send(Stop(4))  # of an earlier render
    reporter.checkpoint()
    supervisor.send(Stop(5))
    with pytest.raises(Cancelled):
        reporter.checkpoint()


def test_other_ranks_stop_when_rank_0_does(pipe: tuple[Connection, Connection], tmp_path: Path) -> None:
    reporter = reporter_of(RankLine(pipe[1]), tmp_path, rank=1, agree=lambda number: 1)
    with pytest.raises(Cancelled):
        reporter.checkpoint()


def test_only_rank_0_tells_progress(pipe: tuple[Connection, Connection], tmp_path: Path) -> None:
    for rank in (0, 1):
        reporter = reporter_of(RankLine(pipe[1]), tmp_path, rank=rank)
        reporter.progress("denoising", 3)
    assert pipe[0].recv() == Advanced(5, "denoising", 3)
    assert not pipe[0].poll()
