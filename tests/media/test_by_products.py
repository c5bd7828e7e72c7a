"""What is made beside a clip: pictures show the right frames, the sound is the clip's, and a clip is never harmed."""

import hashlib
import io
import os
import signal
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from rushes_core.clip import Clip
from rushes_core.variants import AUDIO, BY_PRODUCTS, SPRITESHEET, THUMBNAIL, Variant
from rushes_worker.media import by_products
from rushes_worker.media.by_products import ByProduct, ByProducts, encode_jpeg, extract_audio
from rushes_worker.media.errors import MediaProcessLost
from rushes_worker.media.process import ClipSpec, MediaProcess
from support.media import (
    box_order,
    decode_audio,
    flat_frames,
    grey_frames,
    grey_level,
    make_clip,
    moving_frames,
    num_samples,
    tone,
    write_units,
)

NAMES = tuple(variant.name for variant in BY_PRODUCTS)


def pictures(path: Path, frames: np.ndarray, calls: list[int] | None = None) -> dict[Variant, ByProduct]:
    """The pictures of a clip with these frames, which come in calls of so many."""
    count, height, width, _ = frames.shape
    products = ByProducts(("thumbnail", "spritesheet"), path, width=width, height=height, num_frames=count)
    for chunk in np.split(frames, np.cumsum(calls or [count])[:-1]):
        products.add_frames(np.ascontiguousarray(chunk))
    made, missing = products.write()
    assert missing == ()
    return {product.variant: product for product in made}


def decoded(product: ByProduct) -> np.ndarray:
    with Image.open(product.path) as image:
        assert (image.format, image.size) == ("JPEG", (product.details["width"], product.details["height"]))
        return np.asarray(image.convert("RGB")).astype(int)


class TestThumbnail:
    def test_is_the_first_frame_after_the_opening_third(self, tmp_path: Path) -> None:
        product = pictures(tmp_path / "video.mp4", grey_frames(90))[THUMBNAIL]
        np.testing.assert_allclose(decoded(product), grey_level(30), atol=3)
        assert product.details["time_seconds"] == 1.25

    def test_passes_over_what_is_nearly_black(self, tmp_path: Path) -> None:
        frames = grey_frames(90)
        frames[20:47] = 5
        product = pictures(tmp_path / "video.mp4", frames)[THUMBNAIL]
        np.testing.assert_allclose(decoded(product), grey_level(47), atol=3)

    def test_of_a_dark_clip_is_its_brightest_frame(self, tmp_path: Path) -> None:
        frames = flat_frames(90, (2, 2, 2))
        frames[70] = 15
        np.testing.assert_allclose(decoded(pictures(tmp_path / "video.mp4", frames)[THUMBNAIL]), 15, atol=3)

    @pytest.mark.parametrize(
        ("width", "height", "size"),
        [(1344, 768, (672, 384)), (768, 1344, (384, 672)), (768, 768, (672, 672)), (64, 64, (64, 64))],
    )
    def test_keeps_the_shape_and_is_never_enlarged(
        self, tmp_path: Path, width: int, height: int, size: tuple[int, int]
    ) -> None:
        frames = np.full((3, height, width, 3), 90, np.uint8)
        details = pictures(tmp_path / "video.mp4", frames)[THUMBNAIL].details
        assert (details["width"], details["height"]) == size

    @pytest.mark.parametrize("color", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128)], ids=str)
    def test_has_the_colors_of_the_frame(self, tmp_path: Path, color: tuple[int, int, int]) -> None:
        product = pictures(tmp_path / "video.mp4", flat_frames(9, color))[THUMBNAIL]
        np.testing.assert_allclose(decoded(product).mean((0, 1)), color, atol=4)


class TestSpritesheet:
    @pytest.mark.parametrize("num_frames", [24, 107, 124, 362])
    def test_each_tile_is_the_middle_of_its_part_of_the_clip(self, tmp_path: Path, num_frames: int) -> None:
        product = pictures(tmp_path / "video.mp4", grey_frames(num_frames, 480, 272))[SPRITESHEET]
        details, sheet = product.details, decoded(product)
        tiles = details["tiles"]
        width, height = tiles["width"], tiles["height"]
        assert (width, height) == (240, 136)
        assert tiles["count"] == min(25, num_frames)
        for tile in range(tiles["count"]):
            row, column = divmod(tile, tiles["columns"])
            shown = sheet[row * height : (row + 1) * height, column * width : (column + 1) * width]
            middle = int((tile + 0.5) * num_frames / tiles["count"])
            np.testing.assert_allclose(shown[16:-16, 16:-16].mean(), grey_level(middle), atol=3)

    def test_a_clip_of_one_frame_has_one_tile(self, tmp_path: Path) -> None:
        details = pictures(tmp_path / "video.mp4", grey_frames(1))[SPRITESHEET].details
        assert (details["tiles"]["columns"], details["tiles"]["count"]) == (1, 1)

    def test_the_longest_clip_in_the_widest_canvas_stays_small(self, tmp_path: Path) -> None:
        products = ByProducts(
            NAMES, tmp_path / "video.mp4", width=1536, height=672, num_frames=Clip.for_seconds(15).num_frames
        )
        assert products._sheet.picture.nbytes < 3_000_000


class TestAudio:
    @pytest.mark.parametrize("num_frames", [24, 124, 362])
    def test_is_the_sound_of_the_clip_packet_by_packet(self, tmp_path: Path, num_frames: int) -> None:
        noise = np.random.default_rng(0).uniform(-0.5, 0.5, (2, num_samples(num_frames))).astype(np.float32)
        clip = make_clip(tmp_path / "video.mp4", moving_frames(num_frames), noise)
        seconds = extract_audio(clip, tmp_path / "audio.m4a")
        assert seconds == pytest.approx(num_frames / 24, abs=1 / 32_000)
        assert np.array_equal(decode_audio(tmp_path / "audio.m4a"), decode_audio(clip))
        kinds = box_order((tmp_path / "audio.m4a").read_bytes())
        assert kinds.index("moov") < kinds.index("mdat")
        with av.open(str(tmp_path / "audio.m4a")) as copy:
            assert [stream.type for stream in copy.streams] == ["audio"]
            assert copy.metadata["major_brand"].strip() == "M4A"


class TestBytes:
    def test_do_not_depend_on_how_the_frames_came(self, tmp_path: Path) -> None:
        frames = moving_frames(56, 320, 192)
        seen = []
        for number, calls in enumerate(([56], [17, 17, 22], [1] * 56)):
            folder = tmp_path / str(number)
            folder.mkdir()
            products = pictures(folder / "video.mp4", frames, calls)
            seen.append([(p.sha256, p.path.read_bytes(), p.details) for p in products.values()])
        assert seen[0] == seen[1] == seen[2]

    def test_are_described_as_they_lie_there(self, tmp_path: Path) -> None:
        clip = make_clip(tmp_path / "video.mp4")
        products = ByProducts(NAMES, clip, width=64, height=64, num_frames=24)
        products.add_frames(moving_frames(24))
        made, _ = products.write()
        assert [product.variant for product in made] == list(BY_PRODUCTS)
        for product in made:
            data = product.path.read_bytes()
            assert product.path == tmp_path / product.variant.filename
            assert (product.bytes, product.sha256) == (len(data), hashlib.sha256(data).hexdigest())

    def test_a_picture_is_jpeg_with_a_jfif_header(self) -> None:
        data = encode_jpeg(moving_frames(1, 200, 130)[0])
        assert data[:2] == b"\xff\xd8"
        assert data[-2:] == b"\xff\xd9"
        with Image.open(io.BytesIO(data)) as image:
            assert image.size == (200, 130)
            assert image.info["jfif_version"] == (1, 2)


class TestFailure:
    def test_one_that_fails_leaves_the_others(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(path: Path, data: bytes) -> int:
            if path.name == SPRITESHEET.filename:
                path.touch()
                raise OSError(28, "No space left on device")
            with path.open("wb") as file:
                return file.write(data)

        monkeypatch.setattr(Path, "write_bytes", full)
        clip = make_clip(tmp_path / "video.mp4")
        products = ByProducts(NAMES, clip, width=64, height=64, num_frames=24)
        products.add_frames(moving_frames(24))
        made, missing = products.write()
        assert [product.variant for product in made] == [THUMBNAIL, AUDIO]
        assert [one.variant for one in missing] == [SPRITESHEET]
        assert "No space left" in missing[0].reason
        assert not (tmp_path / SPRITESHEET.filename).exists()

    def test_one_that_fails_on_a_frame_is_not_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*arguments: object) -> np.ndarray:
            raise MemoryError

        products = ByProducts(("thumbnail",), tmp_path / "video.mp4", width=64, height=64, num_frames=24)
        with monkeypatch.context() as patched:
            patched.setattr(by_products, "_scaled", refuse)
            products.add_frames(moving_frames(24))
        made, missing = products.write()
        assert made == ()
        assert [one.variant for one in missing] == [THUMBNAIL]

    def test_sound_that_cannot_be_read_is_missing_and_leaves_no_file(self, tmp_path: Path) -> None:
        (tmp_path / "video.mp4").write_bytes(b"no clip")
        made, missing = ByProducts(("audio",), tmp_path / "video.mp4", width=64, height=64, num_frames=1).write()
        assert (made, [one.variant for one in missing]) == ((), [AUDIO])
        assert [path.name for path in tmp_path.iterdir()] == ["video.mp4"]


class TestProcess:
    """The media process makes them while it encodes."""

    SIZES = (17, 17, 22)

    def render(self, media: MediaProcess, folder: Path, by_products: tuple[str, ...] = NAMES) -> ClipSpec:
        frames = moving_frames(sum(self.SIZES))
        paths = write_units(folder, frames, list(self.SIZES))
        sound = folder / "sound.npy"
        np.save(sound, tone(len(frames)))
        spec = ClipSpec(folder / "video.mp4", width=64, height=64, num_frames=len(frames), by_products=by_products)
        media.start_clip(spec)
        for index in (1, 2, 0):
            media.add_unit(index, paths[index], self.SIZES[index])
        media.set_audio(sound)
        return spec

    def test_they_lie_beside_the_clip_and_leave_its_bytes_alone(self, tmp_path: Path) -> None:
        with MediaProcess() as media:
            self.render(media, tmp_path)
            made = media.finish(timeout=120)
        assert made.missing == ()
        assert {product.variant for product in made.by_products} == set(BY_PRODUCTS)
        names = {"video.mp4", *(variant.filename for variant in BY_PRODUCTS)}
        assert {path.name for path in tmp_path.iterdir()} == names
        alone = make_clip(tmp_path / "alone.mp4", moving_frames(sum(self.SIZES)))
        assert (tmp_path / "video.mp4").read_bytes() == alone.read_bytes()

    def test_only_those_asked_for_are_made(self, tmp_path: Path) -> None:
        with MediaProcess() as media:
            self.render(media, tmp_path, ("audio",))
            made = media.finish(timeout=120)
        assert [product.variant for product in made.by_products] == [AUDIO]
        assert {path.name for path in tmp_path.iterdir()} == {"video.mp4", "audio.m4a"}

    def test_one_that_cannot_be_written_does_not_fail_the_clip(self, tmp_path: Path) -> None:
        (tmp_path / THUMBNAIL.filename).mkdir()
        with MediaProcess() as media:
            self.render(media, tmp_path)
            made = media.finish(timeout=120)
        assert [one.variant for one in made.missing] == [THUMBNAIL]
        assert {product.variant for product in made.by_products} == {SPRITESHEET, AUDIO}

    def test_a_process_that_is_lost_leaves_none_of_them(self, tmp_path: Path) -> None:
        with MediaProcess() as media:
            self.render(media, tmp_path)
            os.kill(media.pid, signal.SIGSTOP)
            for variant in BY_PRODUCTS:
                (tmp_path / variant.filename).write_bytes(b"half")
            with pytest.raises(MediaProcessLost):
                media.finish(timeout=0.1)
        assert list(tmp_path.iterdir()) == []
