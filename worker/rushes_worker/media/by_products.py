"""Small files made beside a clip from what is in memory anyway: a poster frame, a sheet of frames to scrub through, and
the sound alone.

Shapes: f frames of one call, F frames of the clip, H height, W width. A frame is uint8, [H, W, 3] of RGB or
[3 H / 2, W] of BT.709 limited-range 4:2:0.

Each may fail by itself: then it is missing, and the clip is none the worse. The same frames give the same bytes, in
whatever calls they come.
"""

import hashlib
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from io import BytesIO
from math import ceil, sqrt
from pathlib import Path
from typing import Any, TypeVar

import av
import numpy as np
from av.codec.context import Flags
from av.video.reformatter import ColorRange, Colorspace, Interpolation, VideoReformatter
from rushes_core.clip import FPS
from rushes_core.variants import AUDIO, SPRITESHEET, THUMBNAIL, VARIANTS, Variant

from rushes_worker.media.errors import MediaError
from rushes_worker.media.fast_start import moov_first
from rushes_worker.media.segment import yuv420_frame
from rushes_worker.media.validate import UNPROBED

T = TypeVar("T")

THUMBNAIL_EDGE = 672
"""Long edge of the poster frame in pixels at most: half of the 16:9 canvas."""
TILE_EDGE = 240
"""Long edge of one frame of the sheet in pixels at most."""
MAX_TILES = 25

NEAR_BLACK = 20
"""Mean of R, G and B, of 255, below which a frame is a poor poster: a fade or a cut to black."""

_SAMPLE_STEP = 8
_AREA_FROM_YUV = Interpolation.AREA | Interpolation.FULL_CHR_H_INT | Interpolation.ACCURATE_RND
"""swscale's shorter ways from 4:2:0 to RGB come out one or two levels darker."""
_JPEG_QUALITY = "3"
"""Quantiser, 2 to 31: at 3 a frame has the size that libjpeg gives it at quality 85."""


@dataclass(frozen=True, slots=True)
class ByProduct:
    """A file beside the clip."""

    variant: Variant
    path: Path
    bytes: int
    sha256: str
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    """What a client needs to use it, as it is stored with the job."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A by-product that could not be made."""

    variant: Variant
    reason: str


class ByProducts:
    """Those that were asked for of one clip.

    Args:
        names: of variants.
        path: the clip; files are written beside it.
        width, height: of the clip, in pixels.
        num_frames: of the whole clip.
    """

    def __init__(self, names: Collection[str], path: Path, *, width: int, height: int, num_frames: int) -> None:
        self._path = path
        self._missing: dict[Variant, Missing] = {}
        self._wanted = [variant for variant in VARIANTS.values() if variant.name in names]
        self._poster = _Poster(width, height, num_frames)
        self._sheet = _Sheet(width, height, num_frames)
        self._drawn: dict[Variant, tuple[bytes, dict[str, Any]]] = {}
        self._next_frame = 0

    def add_frames(self, frames: np.ndarray) -> None:
        """Take from the next frames of the clip what pictures need of them."""
        for variant, picture in ((THUMBNAIL, self._poster), (SPRITESHEET, self._sheet)):
            if self._is_wanted(variant):
                self._attempt(variant, lambda picture=picture: picture.add(frames, self._next_frame))
        self._next_frame += len(frames)

    def draw(self) -> None:
        """Encode the pictures, once all frames were added: `write` has less to do then."""
        for variant in (THUMBNAIL, SPRITESHEET):
            if self._is_wanted(variant):
                self._attempt(variant, lambda variant=variant: self._drawn_picture(variant))

    def write(self, clip: Path | None = None) -> tuple[tuple[ByProduct, ...], tuple[Missing, ...]]:
        """Write the files, once the clip is written; what was made and what was not.

        Args:
            clip: where it is, unless it has its own name already.
        """
        made = [
            product
            for variant in self._wanted
            if self._is_wanted(variant)
            and (product := self._attempt(variant, lambda variant=variant: self._write(variant, clip or self._path)))
            is not None
        ]
        return tuple(made), tuple(self._missing.values())

    def _is_wanted(self, variant: Variant) -> bool:
        return variant in self._wanted and variant not in self._missing

    def _attempt(self, variant: Variant, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as error:
            self._missing[variant] = Missing(variant, f"{type(error).__name__}: {error}")
            with suppress(OSError):
                by_product_path(self._path, variant).unlink(missing_ok=True)
            return None

    def _write(self, variant: Variant, clip: Path) -> ByProduct:
        path = by_product_path(self._path, variant)
        if variant is AUDIO:
            seconds = extract_audio(clip, path)
            return _described(variant, path, {"duration_seconds": round(seconds, 3)})
        data, details = self._drawn_picture(variant)
        path.write_bytes(data)
        return _described(variant, path, details)

    def _drawn_picture(self, variant: Variant) -> tuple[bytes, dict[str, Any]]:
        """The JPEG and what a client needs to use it."""
        if variant not in self._drawn:
            picture, details = self._draw_poster() if variant is THUMBNAIL else self._draw_sheet()
            height, width, _ = picture.shape
            self._drawn[variant] = encode_jpeg(picture), {"width": width, "height": height, **details}
        return self._drawn[variant]

    def _draw_poster(self) -> tuple[np.ndarray, dict[str, Any]]:
        picture, index = self._poster.chosen()
        return picture, {"time_seconds": round(index / FPS, 3)}

    def _draw_sheet(self) -> tuple[np.ndarray, dict[str, Any]]:
        sheet = self._sheet
        tiles = {
            "columns": sheet.columns,
            "count": len(sheet.frames),
            "width": sheet.tile_width,
            "height": sheet.tile_height,
        }
        return sheet.picture, {"tiles": tiles}


def by_product_path(clip: Path, variant: Variant) -> Path:
    """Where the `variant` of the clip at this path is written."""
    return clip.with_name(variant.filename)


def encode_jpeg(picture: np.ndarray) -> bytes:
    """`picture`, uint8 [H, W, 3] RGB, as baseline JPEG with JFIF's colours."""
    height, width, _ = picture.shape
    frame = VideoReformatter().reformat(
        av.VideoFrame.from_numpy_buffer(picture, format="rgb24"),
        format="yuvj420p",
        src_color_range=ColorRange.JPEG,
        dst_colorspace=Colorspace.ITU601,
        dst_color_range=ColorRange.JPEG,
        threads=1,
    )
    frame.pts = 0
    context = av.CodecContext.create("mjpeg", "w")
    context.width, context.height, context.pix_fmt = width, height, "yuvj420p"
    context.color_range = ColorRange.JPEG
    context.time_base = frame.time_base = Fraction(1, FPS)
    # without an aspect ratio there would be no JFIF header
    context.sample_aspect_ratio = Fraction(1)
    context.thread_count = 1
    context.flags |= Flags.bitexact
    context.options = {"qmin": _JPEG_QUALITY, "qmax": _JPEG_QUALITY}
    return b"".join(bytes(packet) for packet in (*context.encode(frame), *context.encode(None)))


def extract_audio(clip: Path, path: Path) -> float:
    """Copy the sound of an MP4 to an M4A, packet by packet, `moov` first; its length in seconds.

    Raises:
        MediaError: the copy has another number of packets or another length.
        av.FFmpegError, OSError
    """
    options = {"fflags": "+bitexact", "movie_timescale": "96000"}
    data = BytesIO()
    with av.open(str(clip), options=UNPROBED) as source:
        given = source.streams.audio[0]
        expected = (given.frames, _seconds(given))
        with av.open(data, "w", format="ipod", options=options) as target:
            stream = target.add_stream_from_template(given)
            for packet in source.demux(given):
                if packet.dts is not None:
                    packet.stream = stream
                    target.mux(packet)
    with data.getbuffer() as written, path.open("wb") as file:
        file.writelines(moov_first(written))
    with av.open(str(path), options=UNPROBED) as copy:
        found = (copy.streams.audio[0].frames, _seconds(copy.streams.audio[0]))
    if found != expected:
        raise MediaError(
            f"{path.name} has {found[0]} packets, {found[1]} s; the clip has {expected[0]}, {expected[1]} s"
        )
    return float(found[1])


class _Poster:
    """The first frame after the opening third that is not nearly black, or the brightest one if all are."""

    def __init__(self, width: int, height: int, num_frames: int) -> None:
        self._first = num_frames // 3
        self._size = _fitting(width, height, THUMBNAIL_EDGE)
        self._picture: np.ndarray | None = None
        self._index = 0
        self._brightness = -1.0

    def add(self, frames: np.ndarray, start: int) -> None:
        for index, frame in enumerate(frames, start):
            if index < self._first or self._brightness >= NEAR_BLACK:
                continue
            brightness = _brightness(frame)
            if brightness > self._brightness:
                self._brightness, self._index = brightness, index
                # a frame that is small enough already would keep the file of its unit
                self._picture = _scaled(frame, *self._size).copy()

    def chosen(self) -> tuple[np.ndarray, int]:
        """The picture, and the number of its frame."""
        if self._picture is None:
            raise MediaError("no frame came")
        return self._picture, self._index


class _Sheet:
    """Evenly spaced frames, row by row: tile i of n shows the middle of the i-th n-th of the clip."""

    def __init__(self, width: int, height: int, num_frames: int) -> None:
        count = min(MAX_TILES, num_frames)
        self.columns = ceil(sqrt(count))
        self.tile_width, self.tile_height = _fitting(width, height, TILE_EDGE)
        self.frames = [(2 * tile + 1) * num_frames // (2 * count) for tile in range(count)]
        rows = ceil(count / self.columns)
        self.picture = np.zeros((rows * self.tile_height, self.columns * self.tile_width, 3), np.uint8)

    def add(self, frames: np.ndarray, start: int) -> None:
        for tile, index in enumerate(self.frames):
            if start <= index < start + len(frames):
                row, column = divmod(tile, self.columns)
                top, left = row * self.tile_height, column * self.tile_width
                scaled = _scaled(frames[index - start], self.tile_width, self.tile_height)
                self.picture[top : top + self.tile_height, left : left + self.tile_width] = scaled


def _fitting(width: int, height: int, edge: int) -> tuple[int, int]:
    """A size of this shape, in even numbers, whose long edge is `edge` at most."""
    scale = min(1.0, edge / max(width, height))
    return max(2, 2 * round(width * scale / 2)), max(2, 2 * round(height * scale / 2))


def _brightness(frame: np.ndarray) -> float:
    """Mean of R, G and B, of 255."""
    if frame.ndim == 3:
        return float(frame[::_SAMPLE_STEP, ::_SAMPLE_STEP].mean())
    height = len(frame) * 2 // 3
    step = _SAMPLE_STEP // 2
    luma = (float(frame[:height:_SAMPLE_STEP, ::_SAMPLE_STEP].mean()) - 16) / 219
    chroma = frame[height:].reshape(2, height // 2, -1)[:, ::step, ::step].mean((1, 2))
    blue, red = luma + (chroma - 128) / 224 * (1.8556, 1.5748)
    green = (luma - 0.2126 * red - 0.0722 * blue) / 0.7152
    return float(red + green + blue) / 3 * 255


def _scaled(frame: np.ndarray, width: int, height: int) -> np.ndarray:
    """[height, width, 3] uint8 of RGB."""
    is_rgb = frame.ndim == 3
    scaled = VideoReformatter().reformat(
        av.VideoFrame.from_numpy_buffer(frame, format="rgb24") if is_rgb else yuv420_frame(frame),
        width=width,
        height=height,
        format="rgb24",
        dst_color_range=ColorRange.JPEG,
        interpolation=Interpolation.AREA if is_rgb else _AREA_FROM_YUV,
        threads=1,
    )
    return scaled.to_ndarray()


def _described(variant: Variant, path: Path, details: dict[str, Any]) -> ByProduct:
    data = path.read_bytes()
    return ByProduct(variant, path, len(data), hashlib.sha256(data).hexdigest(), details)


def _seconds(stream: av.AudioStream) -> Fraction:
    assert stream.time_base is not None
    return (stream.duration or 0) * stream.time_base
