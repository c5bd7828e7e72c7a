"""Frames that come as 4:2:0 make the clip that they make as RGB."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rushes_core.clip import ADMISSIBLE_FRAMES, units_of
from rushes_core.variants import SPRITESHEET, THUMBNAIL
from rushes_worker.media.by_products import ByProducts
from rushes_worker.media.encode import ClipEncoder
from rushes_worker.media.errors import InvalidClip, MediaError
from rushes_worker.media.process import ClipSpec, MediaProcess
from rushes_worker.media.segment import SegmentEncoder
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.media.validate import Flaw, validate_clip
from rushes_worker.pixels import PixelFormat
from support.media import (
    decode_rgb,
    flat_frames,
    grey_frames,
    grey_level,
    make_clip,
    moving_frames,
    tone,
    yuv420,
)

YUV = PixelFormat.YUV420P


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / np.square(a - b).mean()))


class TestConversion:
    @pytest.mark.parametrize(("width", "height"), [(64, 48), (96, 66), (18, 16)])
    def test_swscale_makes_the_same_bytes_of_rgb_within_one(self, width: int, height: int) -> None:
        frames = np.random.default_rng(0).integers(0, 256, (2, height, width, 3), np.uint8)
        encoder = SegmentEncoder(0, EncoderSettings(), width=width, height=height)
        for frame, expected in zip(frames, yuv420(frames), strict=True):
            # swscale has 8 bits of fraction, the reference rounds once
            difference = encoder._yuv(frame).to_ndarray().astype(int) - expected
            assert np.abs(difference).max() <= 1
            assert np.abs(difference).mean() < 0.1

    @pytest.mark.parametrize("height", [64, 66])
    def test_encoder_is_given_the_bytes_as_they_are(self, height: int) -> None:
        (frame,) = yuv420(moving_frames(1, 96, height))
        encoder = SegmentEncoder(0, EncoderSettings(), width=96, height=height)
        assert np.array_equal(encoder._yuv(frame).to_ndarray(), frame)


class TestPicture:
    @pytest.mark.parametrize(("width", "height"), [(128, 96), (96, 66)])
    def test_is_that_of_rgb_but_for_rounding(self, tmp_path: Path, width: int, height: int) -> None:
        frames = moving_frames(39, width, height)
        settings = EncoderSettings(crf=10)
        decoded = decode_rgb(make_clip(tmp_path / "yuv.mp4", yuv420(frames), settings=settings))
        reference = decode_rgb(make_clip(tmp_path / "rgb.mp4", frames, settings=settings))
        # a level more or less makes other blocks: 41.6 dB at this CRF, 45.9 at 1
        assert psnr(decoded, reference) > 40
        # and it is no further from what went in, 35.4 dB away
        assert psnr(decoded, frames) > psnr(reference, frames) - 0.1

    @pytest.mark.parametrize("color", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128), (200, 30, 90)], ids=str)
    def test_flat_colors_come_back_through_the_tags(self, tmp_path: Path, color: tuple[int, int, int]) -> None:
        frames = flat_frames(24, color)
        frames[12:] = 255 - frames[12:]
        decoded = decode_rgb(make_clip(tmp_path / "clip.mp4", yuv420(frames)))
        np.testing.assert_allclose(decoded[6].mean((0, 1)), color, atol=5)

    def test_a_grey_ramp_stays_monotone(self, tmp_path: Path) -> None:
        ramp = np.arange(256, dtype=np.uint8)[None, None, :, None]
        frames = np.ascontiguousarray(np.broadcast_to(ramp, (8, 64, 256, 3)))
        rows = decode_rgb(make_clip(tmp_path / "clip.mp4", yuv420(frames)))[..., 1].mean((0, 1))
        assert np.all(np.diff(rows.reshape(-1, 4).mean(1)) > 0)

    def test_colours_keep_to_their_blocks_of_2_by_2(self, tmp_path: Path) -> None:
        blocks = np.random.default_rng(1).integers(0, 2, (32, 32), np.uint8)
        # of equal luma: what tells them apart is U and V alone
        palette = np.array([(230, 60, 40), (20, 120, 110)], np.uint8)
        frames = np.repeat(palette[blocks].repeat(2, 0).repeat(2, 1)[None], 4, axis=0)
        decoded = decode_rgb(make_clip(tmp_path / "clip.mp4", yuv420(frames), settings=EncoderSettings(crf=1)))
        is_red = decoded[2][..., 0] - decoded[2][..., 2] > 90
        interior = np.s_[1:-1, 1:-1]
        # rows above and below weigh a quarter in all, columns beside a block nothing
        assert np.array_equal(is_red[::2, ::2][interior], blocks[interior] == 0)
        assert np.array_equal(is_red[1::2, 1::2][interior], blocks[interior] == 0)

    def test_units_of_either_kind_make_one_clip(self, tmp_path: Path) -> None:
        frames = moving_frames(56)
        with ClipEncoder(tmp_path / "clip.mp4", width=64, height=64, num_frames=56) as clip:
            clip.add_frames(frames[:17])
            clip.add_frames(yuv420(frames[17:34]), YUV)
            clip.add_frames(frames[34:])
            mixed = decode_rgb(clip.finish(tone(56)))
        assert psnr(mixed, decode_rgb(make_clip(tmp_path / "rgb.mp4", frames))) > 40

    @pytest.mark.parametrize("encoders", [1, 3])
    def test_bytes_are_the_same_however_many_are_encoded_at_once(self, tmp_path: Path, encoders: int) -> None:
        frames = yuv420(moving_frames(124))
        path = make_clip(tmp_path / "clip.mp4", frames, settings=EncoderSettings(encoders=encoders))
        assert path.read_bytes() == make_clip(tmp_path / "again.mp4", frames).read_bytes()

    @pytest.mark.parametrize(
        ("frames", "message"),
        [
            (
                np.zeros((1, 64, 64, 3), np.uint8),
                r"yuv420p frames must have the shape \[f, 96, 64\], got \[1, 64, 64, 3\]",
            ),
            (np.zeros((1, 64, 64), np.uint8), "shape"),
            (np.zeros((1, 96, 64), np.float32), "yuv420p frames must be uint8, got float32"),
            (np.zeros((1, 64, 96), np.uint8).transpose(0, 2, 1), "C-contiguous"),
        ],
    )
    def test_frames_of_another_kind_are_refused(self, tmp_path: Path, frames: np.ndarray, message: str) -> None:
        with (
            ClipEncoder(tmp_path / "clip.mp4", width=64, height=64, num_frames=24) as clip,
            pytest.raises(ValueError, match=message),
        ):
            clip.add_frames(frames, YUV)


class TestFlaws:
    @pytest.mark.parametrize(
        ("frames", "flaw"),
        [
            (flat_frames(24, (200, 30, 90)), Flaw.BLANK_PICTURE),
            (np.repeat(moving_frames(1), 24, axis=0), Flaw.FROZEN_PICTURE),
        ],
        ids=["blank", "frozen"],
    )
    def test_are_found_and_refused_as_in_rgb(self, tmp_path: Path, frames: np.ndarray, flaw: Flaw) -> None:
        path = make_clip(tmp_path / "clip.mp4", yuv420(frames))
        assert flaw in validate_clip(path, width=64, height=64, num_frames=24).flaws
        with pytest.raises(InvalidClip):
            make_clip(tmp_path / "refused.mp4", yuv420(frames), settings=EncoderSettings(refuse_flaws=True))


class TestByProducts:
    def pictures(self, path: Path, frames: np.ndarray, size: tuple[int, int]) -> tuple[dict[str, np.ndarray], float]:
        """Both, decoded, and the second that the poster is of."""
        products = ByProducts(("thumbnail", "spritesheet"), path, width=size[0], height=size[1], num_frames=len(frames))
        for unit in units_of(len(frames)):
            products.add_frames(frames[unit.start : unit.stop])
        made, missing = products.write()
        assert missing == ()
        seconds = next(one.details["time_seconds"] for one in made if one.variant is THUMBNAIL)
        pictures = {}
        for one in made:
            with Image.open(one.path) as image:
                pictures[one.variant.name] = np.asarray(image.convert("RGB")).astype(float)
        return pictures, seconds

    @pytest.mark.parametrize("size", [(320, 192), (688, 400), (96, 66)], ids=str)
    def test_show_the_same_frames_in_the_same_colours(self, tmp_path: Path, size: tuple[int, int]) -> None:
        frames = moving_frames(39, *size)
        frames[:20] //= 9
        expected, when = self.pictures(tmp_path / "rgb.mp4", frames, size)
        found, seconds = self.pictures(tmp_path / "yuv.mp4", yuv420(frames), size)
        assert seconds == when
        for name in (THUMBNAIL.name, SPRITESHEET.name):
            assert found[name].shape == expected[name].shape
            assert psnr(found[name], expected[name]) > 34
            np.testing.assert_allclose(found[name].mean((0, 1)), expected[name].mean((0, 1)), atol=1)

    @pytest.mark.parametrize(
        "color", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (128, 128, 128)], ids=str
    )
    def test_have_the_colors_of_the_frame(self, tmp_path: Path, color: tuple[int, int, int]) -> None:
        found, _ = self.pictures(tmp_path / "video.mp4", yuv420(flat_frames(22, color, 688, 400)), (688, 400))
        np.testing.assert_allclose(found[THUMBNAIL.name].mean((0, 1)), color, atol=4)

    @pytest.mark.parametrize("color", [(0, 0, 255), (255, 0, 0)], ids=str)
    def test_a_saturated_frame_is_not_nearly_black(self, tmp_path: Path, color: tuple[int, int, int]) -> None:
        frames = flat_frames(90, color)
        frames[60] = 200
        _, seconds = self.pictures(tmp_path / "video.mp4", yuv420(frames), (64, 64))
        assert seconds == 1.25

    def test_of_a_dark_clip_the_brightest_frame_is_the_poster(self, tmp_path: Path) -> None:
        frames = flat_frames(90, (2, 2, 2))
        frames[70] = 15
        _, seconds = self.pictures(tmp_path / "video.mp4", yuv420(frames), (64, 64))
        assert seconds == round(70 / 24, 3)


class TestProcess:
    def render(self, media: MediaProcess, folder: Path, num_frames: int) -> Path:
        frames = yuv420(grey_frames(num_frames, 32, 32))
        sound = folder / "sound.npy"
        np.save(sound, tone(num_frames))
        path = folder / f"{num_frames}.mp4"
        media.start_clip(ClipSpec(path, 32, 32, num_frames, by_products=("thumbnail",)))
        media.set_audio(sound)
        for number, unit in enumerate(units_of(num_frames)):
            raw = folder / f"unit-{number}.raw"
            frames[unit.start : unit.stop].tofile(raw)
            media.add_unit(number, raw, len(unit), YUV)
        made = media.finish(timeout=60)
        assert made.missing == ()
        assert made.facts.num_frames == num_frames
        return path

    def test_makes_clips_of_every_length(self, tmp_path: Path) -> None:
        with MediaProcess(EncoderSettings(encoders=2)) as media:
            for num_frames in ADMISSIBLE_FRAMES:
                frames = decode_rgb(self.render(media, tmp_path, num_frames))
                assert len(frames) == num_frames
                for index in (0, num_frames // 2, num_frames - 1):
                    np.testing.assert_allclose(frames[index], grey_level(index), atol=3)
        assert not list(tmp_path.glob("*.raw"))

    @pytest.mark.parametrize("pixels", list(PixelFormat))
    def test_refuses_a_unit_of_another_size_than_its_format_has(self, tmp_path: Path, pixels: PixelFormat) -> None:
        frames = moving_frames(17)
        other = frames if pixels is YUV else yuv420(frames)
        raw = tmp_path / "unit-000.raw"
        other.tofile(raw)
        size = int(np.prod((17, *pixels.shape(64, 64))))
        with MediaProcess() as media:
            media.start_clip(ClipSpec(tmp_path / "clip.mp4", 64, 64, 56))
            media.add_unit(0, raw, 17, pixels)
            assert media.wait(timeout=120)
            message = f"unit-000.raw: 17 frames of {pixels} are {size} bytes, got {other.nbytes}"
            with pytest.raises(MediaError, match=message):
                media.check()
        assert not raw.exists()
