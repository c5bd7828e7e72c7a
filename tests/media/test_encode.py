"""Frames and samples given are frames and samples found in the file."""

import resource
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from time import sleep

import av
import numpy as np
import pytest
from rushes_worker.media.encode import ClipEncoder, partial_path
from rushes_worker.media.errors import InvalidClip, MediaError
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.media.validate import validate_clip
from support.media import (
    SAMPLE_RATE,
    box_order,
    clicks,
    decode_audio,
    decode_rgb,
    flat_frames,
    frame_times,
    grey_frames,
    grey_level,
    make_clip,
    moving_frames,
    num_samples,
    tone,
)


def encoder(path: Path, *, width: int = 64, height: int = 64, num_frames: int = 24) -> ClipEncoder:
    return ClipEncoder(path, width=width, height=height, num_frames=num_frames)


class TestWritten:
    def test_who_is_told_of_the_file_has_it_under_that_name_until_it_is_done(self, tmp_path: Path) -> None:
        seen: list[tuple[bool, bytes, bool]] = []

        def read(partial: Path) -> None:
            # the check takes less than that
            sleep(0.3)
            seen.append((partial == partial_path(path), partial.read_bytes(), path.exists()))

        path = tmp_path / "clip.mp4"
        with encoder(path) as clip:
            clip.add_frames(moving_frames(24))
            clip.finish(tone(24), on_written=read)
            assert seen == [(True, path.read_bytes(), False)]

    def test_nothing_is_left_if_that_fails(self, tmp_path: Path) -> None:
        def fail(partial: Path) -> None:
            raise RuntimeError(partial.name)

        with encoder(tmp_path / "clip.mp4") as clip:
            clip.add_frames(moving_frames(24))
            with pytest.raises(RuntimeError, match=r"clip\.mp4"):
                clip.finish(tone(24), on_written=fail)
            assert clip.facts is None
        assert list(tmp_path.iterdir()) == []


class TestPicture:
    @pytest.mark.parametrize("num_frames", [124, 141, 362])
    def test_every_frame_given_is_in_the_file(self, tmp_path: Path, num_frames: int) -> None:
        path = make_clip(tmp_path / "clip.mp4", grey_frames(num_frames))
        frames = decode_rgb(path)
        assert len(frames) == num_frames
        for index in (0, num_frames // 2, num_frames - 1):
            np.testing.assert_allclose(frames[index], grey_level(index), atol=3)

    def test_every_frame_is_shown_at_its_place_in_24ths(self, tmp_path: Path) -> None:
        path = make_clip(tmp_path / "clip.mp4", grey_frames(50))
        assert frame_times(path) == [Fraction(i, 24) for i in range(50)]

    @pytest.mark.parametrize("call_sizes", [(1,) * 24, (17, 7), (5, 0, 19)])
    def test_frames_may_come_in_any_number_of_calls(self, tmp_path: Path, call_sizes: tuple[int, ...]) -> None:
        frames = moving_frames(24)
        whole = make_clip(tmp_path / "whole.mp4", frames)
        with encoder(tmp_path / "parts.mp4") as parts:
            for chunk in np.split(frames, np.cumsum(call_sizes)[:-1]):
                parts.add_frames(chunk)
            assert parts.finish(tone(24)).read_bytes() == whole.read_bytes()

    @pytest.mark.parametrize("color", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128), (200, 30, 90)], ids=str)
    def test_flat_colors_come_back_through_the_tags(self, tmp_path: Path, color: tuple[int, int, int]) -> None:
        frames = flat_frames(24, color)
        frames[12:] = 255 - frames[12:]  # a second colour, so that the picture is not blank
        decoded = decode_rgb(make_clip(tmp_path / "clip.mp4", frames))
        np.testing.assert_allclose(decoded[6].mean((0, 1)), color, atol=5)

    def test_a_grey_ramp_stays_monotone(self, tmp_path: Path) -> None:
        ramp = np.arange(256, dtype=np.uint8)[None, None, :, None]
        frames = np.ascontiguousarray(np.broadcast_to(ramp, (8, 64, 256, 3)))
        rows = decode_rgb(make_clip(tmp_path / "clip.mp4", frames))[..., 1].mean((0, 1))
        assert np.all(np.diff(rows.reshape(-1, 4).mean(1)) > 0)

    def test_float_frames_are_clipped_and_rounded_not_wrapped(self, tmp_path: Path) -> None:
        frames = np.full((24, 64, 64, 3), 1.2, np.float32)
        frames[:, :, 32:] = -0.2
        decoded = decode_rgb(make_clip(tmp_path / "clip.mp4", frames))
        assert decoded[:, 8:-8, 4:24].min() >= 250
        assert decoded[:, 8:-8, 40:60].max() <= 20

    @pytest.mark.parametrize("preset", ["ultrafast", "superfast", "veryfast", "medium"])
    @pytest.mark.parametrize(("width", "height"), [(1344, 768), (768, 1344), (768, 768)])
    def test_stream_is_what_every_player_takes(self, tmp_path: Path, preset: str, width: int, height: int) -> None:
        frames = np.zeros((2, height, width, 3), np.uint8)
        frames[1] = 200
        path = make_clip(tmp_path / "clip.mp4", frames, tone(2), EncoderSettings(preset=preset))
        with av.open(str(path)) as container:
            context = container.streams.video[0].codec_context
            assert (context.pix_fmt, context.color_range, context.codec_tag) == ("yuv420p", 1, "avc1")
            assert (context.colorspace, context.color_primaries, context.color_trc) == (1, 1, 1)
            assert context.profile in ("High", "Main")
            assert context.level <= 40
            sound = container.streams.audio[0].codec_context
            assert (sound.name, sound.profile, sound.sample_rate, sound.channels) == ("aac", "LC", SAMPLE_RATE, 2)

    @pytest.mark.parametrize("interval", [1, 12, 17, 30, 51, 240])
    def test_a_keyframe_comes_at_least_every_interval(self, tmp_path: Path, interval: int) -> None:
        settings = EncoderSettings(keyframe_interval=interval)
        path = make_clip(tmp_path / "clip.mp4", moving_frames(141), settings=settings)
        with av.open(str(path)) as container:
            keys = [i for i, frame in enumerate(container.decode(video=0)) if frame.key_frame]
        assert keys[0] == 0
        assert max(after - before for before, after in pairwise([*keys, 141])) <= interval


class TestSound:
    def test_clicks_are_heard_with_their_frames(self, tmp_path: Path) -> None:
        at = [0, 17, 48, 100, 121]
        frames = flat_frames(124, (20, 20, 20))
        frames[at] = 235
        path = make_clip(tmp_path / "clip.mp4", frames, clicks(at, 124))
        flashes = [time for time, frame in zip(frame_times(path), decode_rgb(path), strict=True) if frame.mean() > 128]
        assert flashes == [Fraction(i, 24) for i in at]
        loudness = np.abs(decode_audio(path)).max(0)
        for time in flashes:
            start = round(time * SAMPLE_RATE)
            window = slice(max(0, start - 600), start + 600)
            heard = window.start + int(loudness[window].argmax())
            assert abs(heard - start) <= SAMPLE_RATE * 0.005

    @pytest.mark.parametrize("surplus", [-267, 0, 267, 20_000, -5_000])
    def test_sound_is_cut_or_padded_to_the_picture(self, tmp_path: Path, surplus: int) -> None:
        length = num_samples(24)
        audio = np.tile(tone(24), (1, 2))[:, : length + surplus]
        path = make_clip(tmp_path / "clip.mp4", audio=audio)
        with av.open(str(path)) as container:
            stream = container.streams.audio[0]
            assert stream.duration * stream.time_base == Fraction(length, SAMPLE_RATE)
        decoded = decode_audio(path)
        assert abs(decoded.shape[1] - length) <= 1024
        if surplus == -5_000:
            assert np.abs(decoded[:, length - 2_000 : length]).max() < 1e-3

    def test_channels_keep_their_sides(self, tmp_path: Path) -> None:
        audio = tone(24)
        audio[1] = 0
        decoded = decode_audio(make_clip(tmp_path / "clip.mp4", audio=audio))
        assert np.abs(decoded[0]).max() > 0.2
        assert np.abs(decoded[1]).max() < 0.01

    def test_samples_out_of_range_are_clipped_not_wrapped(self, tmp_path: Path) -> None:
        audio = tone(24, amplitude=1.5, hertz=100)
        decoded = decode_audio(make_clip(tmp_path / "clip.mp4", audio=audio))[:, : audio.shape[1]]
        peaks = np.abs(audio) > 1.3
        assert np.array_equal(np.sign(decoded[peaks]), np.sign(audio[peaks]))
        assert np.abs(decoded[peaks]).min() > 0.8


class TestFile:
    def test_moov_comes_before_mdat(self, tmp_path: Path) -> None:
        kinds = box_order(make_clip(tmp_path / "clip.mp4").read_bytes())
        assert kinds.index("moov") < kinds.index("mdat")

    def test_same_input_gives_the_same_bytes(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        frames = moving_frames(24, 512, 512) ^ rng.integers(0, 16, (24, 512, 512, 3), np.uint8)
        audio = rng.uniform(-0.5, 0.5, (2, num_samples(24))).astype(np.float32)
        files = {make_clip(tmp_path / f"{i}.mp4", frames, audio).read_bytes() for i in range(3)}
        assert len(files) == 1

    def test_x264_runs_without_the_rate_control_that_races(self, tmp_path: Path) -> None:
        # with vbv_maxrate the bytes depend on how x264's threads overlap, in some runs only; x264 lists its options
        data = make_clip(tmp_path / "clip.mp4").read_bytes()
        assert b"rc=crf" in data
        assert b"vbv_maxrate" not in data

    def test_x264_runs_without_avx_512(self, tmp_path: Path) -> None:
        # with it the bytes change from run to run on a busy machine; x264 says what it uses
        before = av.logging.get_level()
        av.logging.set_level(av.logging.INFO)
        try:
            with av.logging.Capture(local=False) as lines:
                make_clip(tmp_path / "clip.mp4")
        finally:
            av.logging.set_level(before)
        used = [text for _, _, text in lines if "cpu capabilities" in text]
        assert used
        assert not any("AVX512" in text for text in used)

    def test_bytes_do_not_depend_on_when_the_sound_arrives(self, tmp_path: Path) -> None:
        frames = moving_frames(362)  # longer than the muxer's patience for a stream without packets
        last = make_clip(tmp_path / "last.mp4", frames)
        with encoder(tmp_path / "first.mp4", num_frames=362) as first:
            first.add_audio(tone(362))
            first.add_frames(frames)
            assert first.finish().read_bytes() == last.read_bytes()

    def test_file_holds_no_date_and_no_encoder_version(self, tmp_path: Path) -> None:
        with av.open(str(make_clip(tmp_path / "clip.mp4"))) as container:
            assert not {"comment", "creation_time", "encoder"} & container.metadata.keys()

    @pytest.mark.parametrize("comment", ["made by a model", '{"prompt": "雪 \\"x\\"\\n😀"}', "word " * 13_000], ids=len)
    def test_file_holds_the_comment_that_it_is_given(self, tmp_path: Path, comment: str) -> None:
        path = tmp_path / "clip.mp4"
        with ClipEncoder(path, width=64, height=64, num_frames=24, comment=comment) as clip:
            clip.add_frames(moving_frames(24))
            clip.finish(tone(24))
        with av.open(str(path)) as container:
            assert container.metadata["comment"] == comment
        kinds = box_order(path.read_bytes())
        assert kinds.index("moov") < kinds.index("mdat")
        assert np.array_equal(decode_rgb(path), decode_rgb(make_clip(tmp_path / "plain.mp4")))

    def test_nothing_has_the_final_name_until_the_clip_is_valid(self, tmp_path: Path) -> None:
        path = tmp_path / "clip.mp4"
        with encoder(path) as clip:
            clip.add_frames(moving_frames(24))
            clip.add_audio(tone(24))
            assert not path.exists()
            clip.finish()
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize("delay", [0.0, 0.002, 0.005, 0.01, 0.03])
    def test_a_writer_killed_at_any_moment_leaves_a_valid_clip_or_none(self, tmp_path: Path, delay: float) -> None:
        path = tmp_path / "clip.mp4"
        frames, audio = tmp_path / "frames.npy", tmp_path / "audio.npy"
        np.save(frames, moving_frames(124, 128, 128))
        np.save(audio, tone(124))
        script = (
            "import sys, pathlib, numpy\n"
            "from rushes_worker.media.encode import ClipEncoder\n"
            "path, frames, audio = map(pathlib.Path, sys.argv[1:])\n"
            "encoder = ClipEncoder(path, width=128, height=128, num_frames=124)\n"
            "encoder.add_frames(numpy.load(frames))\n"
            "encoder.finish(numpy.load(audio))\n"
        )
        writer = subprocess.Popen([sys.executable, "-c", script, str(path), str(frames), str(audio)])
        while not partial_path(path).exists() and writer.poll() is None:
            sleep(0.0005)
        sleep(delay)
        writer.kill()
        writer.wait()
        if path.exists():
            validate_clip(path, width=128, height=128, num_frames=124)

    def test_facts_are_known_after_finish(self, tmp_path: Path) -> None:
        with encoder(tmp_path / "clip.mp4") as clip:
            clip.add_frames(moving_frames(24))
            assert clip.facts is None
            path = clip.finish(tone(24))
            assert clip.facts is not None
            assert clip.facts.bytes == path.stat().st_size

    @pytest.mark.parametrize("silent", [True, False], ids=["silent", "black"])
    def test_a_blank_clip_never_gets_its_name_where_that_is_refused(self, tmp_path: Path, silent: bool) -> None:
        frames = moving_frames(24) if silent else flat_frames(24, (0, 0, 0))
        audio = tone(24, amplitude=0.0 if silent else 0.3)
        with pytest.raises(InvalidClip, match="silent" if silent else "flat colour"):
            make_clip(tmp_path / "clip.mp4", frames, audio, EncoderSettings(refuse_flaws=True))
        assert list(tmp_path.iterdir()) == []

    def test_a_clip_given_up_leaves_nothing(self, tmp_path: Path) -> None:
        with encoder(tmp_path / "clip.mp4") as clip:
            clip.add_frames(moving_frames(20))
            clip.add_audio(tone(24))
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(ValueError, match="aborted"):
            clip.add_frames(moving_frames(4))

    def test_an_error_half_way_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="not finite"), encoder(tmp_path / "clip.mp4") as clip:
            clip.add_audio(np.full((2, 32_000), np.nan, np.float32))
        assert list(tmp_path.iterdir()) == []

    def test_a_file_that_cannot_be_written_is_a_clear_error_and_leaves_nothing(self, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with encoder(tmp_path / "clip.mp4") as clip:
            clip.add_frames(moving_frames(24))
            clip.add_audio(tone(24))
            resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
            try:
                with pytest.raises(MediaError, match=r"clip\.mp4 could not be written"):
                    clip.finish()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert list(tmp_path.iterdir()) == []


class TestRefusals:
    @pytest.mark.parametrize(
        ("width", "height", "field"), [(129, 97, "width"), (128, 97, "height"), (0, 64, "width"), (64, 8192, "height")]
    )
    def test_a_size_that_cannot_be_encoded_is_refused_before_a_file_exists(
        self, tmp_path: Path, width: int, height: int, field: str
    ) -> None:
        with pytest.raises(ValueError, match=f"{field} must be an even number"):
            encoder(tmp_path / "clip.mp4", width=width, height=height)
        assert list(tmp_path.iterdir()) == []

    def test_a_missing_directory_is_refused_at_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="does not exist"):
            encoder(tmp_path / "missing" / "clip.mp4")

    @pytest.mark.parametrize("num_frames", [0, -1, 1.0, True])
    def test_a_frame_count_that_is_none_is_refused(self, tmp_path: Path, num_frames: int) -> None:
        with pytest.raises(ValueError, match="num_frames"):
            encoder(tmp_path / "clip.mp4", num_frames=num_frames)

    @pytest.mark.parametrize(
        ("frames", "message"),
        [
            (np.zeros((1, 64, 64, 3), np.int16), "int16"),
            (np.zeros((1, 64, 64, 3), np.float64), "float64"),
            (np.zeros((64, 64, 3), np.uint8), r"shape \[f, 64, 64, 3\], got \[64, 64, 3\]"),
            (np.zeros((1, 64, 64, 4), np.uint8), "shape"),
            (np.zeros((1, 62, 64, 3), np.uint8), "shape"),
            (np.zeros((1, 3, 64, 64), np.uint8).transpose(0, 2, 3, 1), "C-contiguous"),
            (np.full((1, 64, 64, 3), np.nan, np.float32), "not finite"),
            (np.zeros((25, 64, 64, 3), np.uint8), "num_frames=24, but 25 frames were added to 0"),
        ],
    )
    def test_wrong_frames_are_refused(self, tmp_path: Path, frames: np.ndarray, message: str) -> None:
        with encoder(tmp_path / "clip.mp4") as clip, pytest.raises(ValueError, match=message):
            clip.add_frames(frames)

    @pytest.mark.parametrize(
        ("audio", "message"),
        [
            (np.zeros((2, 99), np.float64), "float64"),
            (np.zeros((2, 99), np.int16), "int16"),
            (np.zeros((1, 99), np.float32), r"shape \[2, N\]"),
            (np.zeros((99, 2), np.float32), r"shape \[2, N\]"),
            (np.zeros((2, 0), np.float32), r"shape \[2, N\]"),
            (np.zeros(99, np.float32), r"shape \[2, N\]"),
            (np.array([[0, np.nan], [0, 0]], np.float32), "not finite"),
            (np.array([[0, 0], [-np.inf, 0]], np.float32), "not finite"),
        ],
    )
    def test_wrong_sound_is_refused(self, tmp_path: Path, audio: np.ndarray, message: str) -> None:
        with encoder(tmp_path / "clip.mp4") as clip, pytest.raises(ValueError, match=message):
            clip.add_audio(audio)

    def test_missing_frames_are_counted(self, tmp_path: Path) -> None:
        with encoder(tmp_path / "clip.mp4") as clip:
            clip.add_frames(moving_frames(23))
            with pytest.raises(ValueError, match="num_frames=24, but 23 frames were added"):
                clip.finish(tone(24))

    def test_missing_or_doubled_sound_is_refused(self, tmp_path: Path) -> None:
        with encoder(tmp_path / "clip.mp4") as clip:
            clip.add_frames(moving_frames(24))
            with pytest.raises(ValueError, match="no audio"):
                clip.finish()
            clip.add_audio(tone(24))
            with pytest.raises(ValueError, match="already"):
                clip.finish(tone(24))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("preset", "placebo"),
            ("crf", 0),
            ("crf", 52),
            ("crf", 20.5),
            ("audio_bitrate", 8_000),
            ("audio_bitrate", 1_000_000),
            ("threads", 0),
            ("threads", True),
            ("keyframe_interval", 0),
            ("encoders", 0),
            ("encoder", "mpeg4"),
        ],
    )
    def test_settings_name_the_field_and_the_value(self, field: str, value: object) -> None:
        with pytest.raises(ValueError, match=f"(?is){field}.*{value}"):
            EncoderSettings(**{field: value})  # pyright: ignore[reportArgumentType]
