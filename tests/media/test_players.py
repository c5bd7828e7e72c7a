"""What every player relies on, for every length that there is, as independent readers see it."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from rushes_core.canvas import CANVASES, Canvas
from rushes_core.clip import ADMISSIBLE_FRAMES
from support.media import (
    SAMPLE_RATE,
    box_order,
    decode_audio,
    frame_times,
    grey_frames,
    make_clip,
    num_samples,
    tone,
)

AAC_FRAME = 1024


@contextmanager
def ffmpeg_log() -> Iterator[list[tuple[int, str, str]]]:
    """What FFmpeg says at the level of warnings or above, in any thread."""
    av.logging.set_level(av.logging.WARNING)
    try:
        with av.logging.Capture(local=False) as lines:
            yield lines
    finally:
        av.logging.set_level(None)


def onset(num_frames: int) -> int:
    """The sample at which the sound of a clip sets in."""
    return num_samples(num_frames) // 3


@pytest.fixture(scope="module", params=ADMISSIBLE_FRAMES)
def num_frames(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, num_frames: int) -> Path:
    """A clip of so many frames, silent at first."""
    audio = tone(num_frames)
    audio[:, : onset(num_frames)] = 0
    return make_clip(tmp_path_factory.mktemp("length") / "clip.mp4", grey_frames(num_frames), audio)


class TestEveryLength:
    def test_counts_times_and_tags(self, path: Path, num_frames: int) -> None:
        assert frame_times(path) == [Fraction(i, 24) for i in range(num_frames)]
        with av.open(str(path)) as container:
            video, sound = container.streams.video[0], container.streams.audio[0]
            context = video.codec_context
            assert (video.average_rate, video.frames) == (24, num_frames)
            assert (context.pix_fmt, context.codec_tag, context.profile) == ("yuv420p", "avc1", "High")
            tags = (context.color_range, context.colorspace, context.color_primaries, context.color_trc)
            assert tags == (1, 1, 1, 1)
            assert context.has_b_frames is False
            assert (video.start_time, sound.start_time) == (0, 0)
            assert sound.duration is not None
            assert sound.time_base is not None
            difference = sound.duration * sound.time_base - Fraction(num_frames, 24)
            assert abs(difference) <= Fraction(AAC_FRAME, SAMPLE_RATE)
            first = next(container.decode(sound))
            assert first.pts == 0
        decoded = decode_audio(path)
        assert abs(decoded.shape[1] - num_samples(num_frames)) <= AAC_FRAME
        heard = int((np.abs(decoded[0]) > 0.05).argmax())
        assert abs(heard - onset(num_frames)) <= SAMPLE_RATE * 0.005

    def test_decodes_in_full_without_a_warning(self, path: Path, num_frames: int) -> None:
        with ffmpeg_log() as lines, av.open(str(path)) as container:
            frames = sum(isinstance(frame, av.VideoFrame) for frame in container.decode())
        assert frames == num_frames
        assert lines == []

    def test_ffprobe_and_ffmpeg_are_silent(self, path: Path, num_frames: int) -> None:
        for tool in ("ffprobe", "ffmpeg"):
            if shutil.which(tool) is None:
                pytest.skip(f"{tool} is not installed")
        entries = "stream=nb_read_frames,r_frame_rate,start_time"
        probe = ["ffprobe", "-v", "error", "-count_frames", "-show_entries", entries, "-of", "csv=p=0", str(path)]
        probed = subprocess.run(probe, capture_output=True, text=True, check=True)
        assert probed.stderr == ""
        video, sound = probed.stdout.split()
        assert video == f"24/1,0.000000,{num_frames}"
        assert sound.startswith("0/0,0.000000,")
        decode = ["ffmpeg", "-v", "warning", "-xerror", "-i", str(path), "-f", "null", "-"]
        decoded = subprocess.run(decode, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        assert decoded.stderr == ""


@pytest.mark.parametrize("canvas", CANVASES, ids=lambda canvas: canvas.size)
def test_level_fits_every_canvas(tmp_path: Path, canvas: Canvas) -> None:
    frames = np.zeros((23, canvas.height, canvas.width, 3), np.uint8)
    frames[1:] = 200
    path = make_clip(tmp_path / "clip.mp4", frames, tone(23))
    with av.open(str(path)) as container:
        level = container.streams.video[0].codec_context.extradata[3]  # pyright: ignore[reportOptionalSubscript]
    assert level <= 40
    kinds = box_order(path.read_bytes())
    assert kinds.index("moov") < kinds.index("mdat")


def test_warnings_about_a_damaged_file_would_be_seen(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", grey_frames(107))
    data = bytearray(path.read_bytes())
    start = data.index(b"mdat")
    data[start + 2_000 : start + 3_000] = bytes(1_000)
    path.write_bytes(data)
    with ffmpeg_log() as lines, suppress(av.FFmpegError), av.open(str(path)) as container:
        for _ in container.decode():
            pass
    assert lines != []
