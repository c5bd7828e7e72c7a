"""A right file passes whoever wrote it; a file that is wrong in one respect is refused, and the respect is named."""

import hashlib
import re
from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from rushes_core.errors import RushesError
from rushes_worker.media.errors import InvalidClip
from rushes_worker.media.validate import ClipFacts, Flaw, top_level_boxes, validate_clip
from support.media import flat_frames, grey_frames, make_clip, moving_frames, mux, num_samples, tone

NUM_FRAMES = 24
X264 = {"preset": "veryfast", "bf": "0"}


def validate(
    path: Path, num_frames: int = NUM_FRAMES, width: int = 64, height: int = 64, *, refuse_flaws: bool = False
) -> ClipFacts:
    return validate_clip(path, width=width, height=height, num_frames=num_frames, refuse_flaws=refuse_flaws)


def options(**changes: str) -> tuple[tuple[str, str], ...]:
    return tuple((X264 | changes).items())


class TestRightFiles:
    def test_facts_are_measured_on_the_file(self, tmp_path: Path) -> None:
        path = make_clip(tmp_path / "clip.mp4", audio=tone(NUM_FRAMES, amplitude=0.3))
        facts = validate(path)
        assert (facts.width, facts.height, facts.num_frames, facts.fps) == (64, 64, NUM_FRAMES, 24)
        assert facts.duration_seconds == 1.0
        assert (facts.has_audio, facts.audio_sample_rate, facts.audio_channels) == (True, 32_000, 2)
        assert facts.audio_duration_seconds == 1.0
        assert facts.bytes == path.stat().st_size
        assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert facts.audio_rms == pytest.approx(0.3 / np.sqrt(2), rel=0.05)
        assert (facts.video_codec, facts.profile, facts.audio_codec) == ("h264", "High", "aac")

    def test_pixel_variance_is_that_of_the_picture(self, tmp_path: Path) -> None:
        frames = grey_frames(NUM_FRAMES)
        luma = 16 + frames[:, 0, 0, 0].astype(float) * 219 / 255
        assert validate(make_clip(tmp_path / "clip.mp4", frames)).pixel_variance == pytest.approx(luma.var(), rel=0.03)

    def test_a_clip_with_b_frames_is_right_once_its_edit_list_is_applied(self, tmp_path: Path) -> None:
        path = mux(tmp_path / "clip.mp4", moving_frames(24), tone(24), video_options=options(bf="3"))
        assert validate(path).num_frames == NUM_FRAMES

    def test_main_profile_is_right(self, tmp_path: Path) -> None:
        path = mux(tmp_path / "clip.mp4", moving_frames(24), tone(24), video_options=options(profile="main"))
        assert validate(path).profile == "Main"


class TestWrongStreams:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"faststart": False}, "moov must come before mdat"),
            ({"fps": Fraction(25)}, "frame rate must be 24, got 25"),
            ({"fps": Fraction(24_000, 1_001)}, "frame rate must be 24, got 24000/1001"),
            ({"late_frame": 5}, "frame 5 must be shown at 5/24 s"),
            ({"late_frame": 23}, "24"),
            ({"audio_streams": 0}, "one video and one audio stream, got 1 video and 0 audio of 1"),
            ({"audio_streams": 2}, "one video and one audio stream, got 1 video and 2 audio of 3"),
            ({"layout": "mono"}, "channel layout must be stereo, got mono"),
            ({"sample_rate": 48_000}, "sample rate must be 32000, got 48000"),
            ({"audio_codec": "mp3"}, "audio codec must be aac, got mp3"),
            ({"audio_delay": 3_200}, "first sound must be heard at 0|must last"),
            ({"video_codec": "mpeg4", "codec_tag": "mp4v", "video_options": ()}, "video codec must be h264, got mpeg4"),
            ({"codec_tag": "avc3"}, "video codec tag must be avc1, got avc3"),
            ({"pix_fmt": "yuv444p"}, "pixel format must be yuv420p, got yuv444p"),
            ({"pix_fmt": "yuv422p"}, "pixel format must be yuv420p, got yuv422p"),
            ({"pix_fmt": "yuvj420p", "color_range": 2}, "yuv420p"),
            ({"color_range": 2}, "yuv420p|colour range"),
            ({"color_tag": None}, "colour range of frame 0 must be tagged 1"),
            ({"color_tag": 6}, "colour matrix of frame 0 must be tagged 1 .*got 6"),
            ({"video_options": options(profile="baseline")}, "profile must be High or Main, got Baseline"),
            ({"video_options": options(level="5.1")}, "level must be at most 4, got 5.1"),
        ],
        ids=str,
    )
    def test_is_refused_by_name(self, tmp_path: Path, changes: dict[str, object], message: str) -> None:
        path = mux(tmp_path / "clip.mp4", moving_frames(NUM_FRAMES), tone(NUM_FRAMES), **changes)
        with pytest.raises(InvalidClip, match=message):
            validate(path)

    def test_a_level_too_low_for_the_size_is_refused(self, tmp_path: Path) -> None:
        frames = moving_frames(NUM_FRAMES, 320, 240)
        path = mux(tmp_path / "clip.mp4", frames, tone(NUM_FRAMES), video_options=options(level="1"))
        with pytest.raises(InvalidClip, match="level 1 does not fit 320x240"):
            validate(path, width=320, height=240)

    @pytest.mark.parametrize(("given", "wanted"), [(23, 24), (25, 24), (123, 124)])
    def test_a_frame_too_few_or_too_many_is_refused(self, tmp_path: Path, given: int, wanted: int) -> None:
        path = make_clip(tmp_path / "clip.mp4", moving_frames(given))
        with pytest.raises(InvalidClip, match=f"picture length in seconds must be {Fraction(wanted, 24)}"):
            validate(path, wanted)

    def test_another_size_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidClip, match="frame size must be 64x80, got 64x64"):
            validate(make_clip(tmp_path / "clip.mp4"), height=80)

    @pytest.mark.parametrize("difference", [-2_000, 2_000])
    def test_sound_shorter_or_longer_than_the_picture_is_refused(self, tmp_path: Path, difference: int) -> None:
        audio = np.tile(tone(NUM_FRAMES), 2)[:, : num_samples(NUM_FRAMES) + difference]
        path = mux(tmp_path / "clip.mp4", moving_frames(NUM_FRAMES), audio)
        with pytest.raises(InvalidClip, match="sound must last 32000 samples within 1024"):
            validate(path)

    @pytest.mark.parametrize("color", [(0, 0, 0), (255, 255, 255), (13, 200, 77)], ids=str)
    def test_a_flat_picture_is_a_flaw(self, tmp_path: Path, color: tuple[int, int, int]) -> None:
        path = mux(tmp_path / "clip.mp4", flat_frames(NUM_FRAMES, color), tone(NUM_FRAMES))
        assert validate(path).flaws == (Flaw.BLANK_PICTURE,)
        with pytest.raises(InvalidClip, match="one flat colour"):
            validate(path, refuse_flaws=True)

    @pytest.mark.parametrize("kind", ["texture", "noise"])
    def test_a_picture_that_does_not_move_is_a_flaw(self, tmp_path: Path, kind: str) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), np.uint8)
        picture = moving_frames(1) if kind == "texture" else noise
        # several keyframes: each encodes the picture anew
        frames = np.ascontiguousarray(np.broadcast_to(picture, (124, 64, 64, 3)))
        path = make_clip(tmp_path / "clip.mp4", frames)
        assert validate(path, num_frames=124).flaws == (Flaw.FROZEN_PICTURE,)
        with pytest.raises(InvalidClip, match="does not move"):
            validate(path, num_frames=124, refuse_flaws=True)

    def test_one_small_thing_that_moves_is_motion(self, tmp_path: Path) -> None:
        frames = flat_frames(NUM_FRAMES, (90, 90, 90), 256, 256)
        frames[-1, 100:116, 100:116] = 200
        path = make_clip(tmp_path / "clip.mp4", frames)
        assert validate(path, width=256, height=256).flaws == ()

    @pytest.mark.parametrize("amplitude", [0.0, 1e-7])
    def test_silence_is_a_flaw(self, tmp_path: Path, amplitude: float) -> None:
        path = mux(tmp_path / "clip.mp4", moving_frames(NUM_FRAMES), tone(NUM_FRAMES, amplitude))
        assert validate(path).flaws == (Flaw.SILENT_SOUND,)
        with pytest.raises(InvalidClip, match="silent"):
            validate(path, refuse_flaws=True)


class TestBrokenFiles:
    def test_a_file_cut_anywhere_is_refused(self, tmp_path: Path) -> None:
        whole = make_clip(tmp_path / "clip.mp4").read_bytes()
        cut = tmp_path / "cut.mp4"
        for length in {*range(1, len(whole), 997), 4, 8, 20, len(whole) - 1}:
            cut.write_bytes(whole[:length])
            with pytest.raises(InvalidClip, match=r"cut short|must have one (moov|mdat) box"):
                validate(cut)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "the file is empty"),
            (b"<!doctype html><p>not found</p>", "does not start a box|cut short"),
            (bytes(4096), "does not start a box"),
            (np.random.default_rng(0).bytes(4096), "does not start a box|cut short|impossible size"),
            (b"\0\0\0\x08free\0\0\0\x08mdat", "first box must be ftyp, got free"),
            (b"\0\0\0\x08ftyp\0\0\0\x08mdat", "one moov box, got 0"),
            (b"\0\0\0\x08ftyp\0\0\0\x08moov\0\0\0\x08mdat", "cannot be read as MP4|one video and one audio"),
            (b"\0\0\0\x04ftyp", "impossible size 4"),
        ],
        ids=["empty", "html", "zeros", "noise", "no ftyp", "no moov", "hollow", "tiny box"],
    )
    def test_what_is_no_clip_is_refused(self, tmp_path: Path, data: bytes, message: str) -> None:
        path = tmp_path / "clip.mp4"
        path.write_bytes(data)
        with pytest.raises(InvalidClip, match=message):
            validate(path)

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidClip, match=r"clip\.mp4 cannot be read"):
            validate(tmp_path / "clip.mp4")

    def test_overwritten_media_data_is_refused(self, tmp_path: Path) -> None:
        path = make_clip(tmp_path / "clip.mp4", moving_frames(NUM_FRAMES, 256, 256))
        data = bytearray(path.read_bytes())
        middle = data.index(b"mdat") + (len(data) - data.index(b"mdat")) // 2
        data[middle : middle + 4_096] = bytes(4_096)
        path.write_bytes(data)
        with pytest.raises(InvalidClip):
            validate(path, width=256, height=256)

    def test_error_is_one_that_operators_are_told(self) -> None:
        assert issubclass(InvalidClip, RushesError)
        assert InvalidClip("x").code == "invalid_output"


class TestTopLevelBoxes:
    def test_sizes_of_64_bits_and_to_the_end_are_understood(self) -> None:
        data = b"\0\0\0\x01ftyp" + (24).to_bytes(8, "big") + bytes(8) + b"\0\0\0\0mdat" + bytes(99)
        assert [tuple(box) for box in top_level_boxes(BytesIO(data))] == [("ftyp", 0, 24), ("mdat", 24, 107)]

    @pytest.mark.parametrize("size", [0, 15, 2**40])
    def test_a_64_bit_size_that_cannot_be_is_refused(self, size: int) -> None:
        with pytest.raises(InvalidClip):
            list(top_level_boxes(BytesIO(b"\0\0\0\x01ftyp" + size.to_bytes(8, "big"))))


def test_helper_writes_right_files_by_default(tmp_path: Path) -> None:
    writers: list[Callable[..., Path]] = [mux, make_clip]
    sizes = {validate(write(tmp_path / "clip.mp4", moving_frames(24), tone(24))).num_frames for write in writers}
    assert sizes == {NUM_FRAMES}
    assert re.fullmatch(r"\d\.\d", validate(tmp_path / "clip.mp4").level)
