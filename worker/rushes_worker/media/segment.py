"""One run of a clip's frames as H.264 that needs no other: it begins with a keyframe and refers to nothing before it.

Segments of one clip are made by encoders that are set up alike, so their packets can be joined without encoding again:
the parameter sets are the same, and every packet carries its place in the clip.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.codec.context import Flags
from av.error import FFmpegError
from av.video.reformatter import (
    ColorPrimaries,
    ColorRange,
    Colorspace,
    ColorTrc,
    Interpolation,
    VideoReformatter,
)
from rushes_core.clip import FPS, UNIT_FRAMES, units_of

from rushes_worker.media.errors import MediaError
from rushes_worker.media.picture import Picture, PictureBehind
from rushes_worker.media.settings import EncoderSettings

TICK = Fraction(1, FPS)
"""What the time stamps of the picture count."""


# with AVX-512 what x264's macroblock tree finds, and so the bytes, changes from run to run on a busy machine
_INSTRUCTIONS = ":asm=avx2" if "avx512f" in Path("/proc/cpuinfo").read_text().split() else ""

_SEARCH = {"veryfast": ":me=dia"}
"""By preset: what x264 finds as well with less work."""
_HURRIED = {"veryfast": ":subme=1"}
"""By preset: what spares x264 a quarter of its time for some more bits. Nobody waits for any unit but the last."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of frames, encoded, and the same decoded again."""

    packets: list[av.Packet]
    """In order; pts and dts are numbers of frames of the clip."""
    picture: Picture


def plan_segments(num_frames: int, settings: EncoderSettings) -> list[range]:
    """The runs of frames of a clip that are encoded apart: as many whole temporal units as the keyframe interval holds.

    They depend on nothing but the arguments, so that the file does not either.
    """
    if settings.encoder != "libx264":
        # a session of a hardware encoder costs more to open than a clip to encode
        return [range(num_frames)]
    together = max(1, settings.keyframe_interval // UNIT_FRAMES)
    # the last unit decides when the clip is complete: it waits for no other
    *body, last = units_of(num_frames)
    groups = [body[i : i + together] for i in range(0, len(body), together)]
    return [range(group[0].start, group[-1].stop) for group in groups] + [last]


def set_up(
    context: av.VideoCodecContext, settings: EncoderSettings, *, width: int, height: int, is_last: bool = False
) -> None:
    """Have an encoder that is not open yet make what every segment of a clip of this size is made of, or the last one:
    its frames are found in more of a hurry, under the same parameter sets.
    """
    context.width, context.height, context.pix_fmt = width, height, "yuv420p"
    context.time_base, context.framerate = TICK, Fraction(FPS)
    context.thread_count = settings.threads
    context.gop_size = settings.keyframe_interval
    # with its parameter sets apart from the packets, as an MP4 holds them
    context.flags |= Flags.bitexact | Flags.closed_gop | Flags.global_header
    context.color_range = ColorRange.MPEG
    context.colorspace = Colorspace.ITU709
    context.color_primaries = ColorPrimaries.BT709
    context.color_trc = ColorTrc.BT709
    # without B-frames the first frame is shown at 0 even by players that ignore edit lists
    options = {"preset": settings.preset, "profile": "high", "bf": "0"}
    if settings.encoder == "libx264":
        # no maxrate: x264 keeps to it by timing its threads, and the bytes would change from run to run
        # ultrafast turns CABAC and 8x8 transforms off and would fall back to Baseline
        parameters = f"cabac=1:8x8dct=1{_INSTRUCTIONS}{_SEARCH.get(settings.preset, '')}"
        if is_last:
            parameters += _HURRIED.get(settings.preset, "")
        context.options = options | {"crf": str(settings.crf), "x264-params": parameters}
    else:
        context.bit_rate = 0
        context.options = options | {"rc": "vbr", "cq": str(settings.crf), "forced-idr": "1"}


class SegmentEncoder:
    """Encodes the frames of one segment, and decodes them a few frames behind. One thread at a time uses it.

    Args:
        first: number of its first frame in the clip.
        width, height: pixels, even.
        is_last: whether the clip is complete with it.
    """

    def __init__(
        self, first: int, settings: EncoderSettings, *, width: int, height: int, is_last: bool = False
    ) -> None:
        self._next = self._first = first
        self._settings = settings
        self._size = {"width": width, "height": height}
        context = av.CodecContext.create(settings.encoder, "w")
        assert isinstance(context, av.VideoCodecContext)
        self._context = context
        set_up(context, settings, **self._size, is_last=is_last)
        self._reformatter = VideoReformatter()
        self._packets: list[av.Packet] = []
        self._picture: PictureBehind | None = None

    def add(self, frame: np.ndarray) -> None:
        """Encode the next frame: [H, W, 3] of RGB, uint8 or float32 in [0, 1], which is clipped and rounded; or
        [3 H / 2, W] uint8 of 4:2:0, which is encoded as it lies there.

        Raises:
            MediaError: the encoder failed.
        """
        try:
            self._keep(self._context.encode(self._yuv(frame)))
        except FFmpegError as error:
            raise MediaError(f"the video encoder failed at frame {self._next}: {error}") from error
        self._next += 1

    def finish(self) -> Segment:
        """The whole segment, once all of its frames were added.

        Raises:
            InvalidClip: what the encoder made cannot be decoded, or a frame is not as it should be.
            MediaError: the encoder failed.
        """
        try:
            # one by one: they are decoded while the next is encoded
            self._keep(self._context.encode_lazy(None))
        except FFmpegError as error:
            raise MediaError(f"the video encoder failed after frame {self._next - 1}: {error}") from error
        if self._picture is None:
            raise MediaError(f"the video encoder made nothing of frames {self._first} to {self._next - 1}")
        return Segment(self._packets, self._picture.finish())

    def close(self) -> None:
        """Give up what was not decoded yet."""
        if self._picture is not None:
            self._picture.close()

    def _keep(self, packets: Iterable[av.Packet]) -> None:
        for packet in packets:
            if self._picture is None:
                # the encoder knows its parameter sets once it runs
                extradata = self._context.extradata or b""
                picture = Picture(extradata, **self._size, time_base=TICK, first=self._first)
                self._picture = PictureBehind(picture)
            self._packets.append(packet)
            self._picture.add(packet)

    def _yuv(self, frame: np.ndarray) -> av.VideoFrame:
        """`frame` as BT.709 limited-range 4:2:0 with its place in time."""
        yuv = yuv420_frame(frame) if frame.ndim == 2 else self._converted(frame)
        yuv.color_primaries = ColorPrimaries.BT709
        yuv.color_trc = ColorTrc.BT709
        yuv.pts = self._next
        yuv.time_base = TICK
        return yuv

    def _converted(self, rgb: np.ndarray) -> av.VideoFrame:
        if rgb.dtype != np.uint8:
            rgb = np.rint(np.clip(rgb, 0.0, 1.0) * 255.0).astype(np.uint8)
        # a sample of U and V comes to lie in the middle of its pixels, as `to_yuv420` of the kernels has it
        return self._reformatter.reformat(
            av.VideoFrame.from_numpy_buffer(rgb, format="rgb24"),
            format="yuv420p",
            src_color_range=ColorRange.JPEG,
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=Interpolation.BILINEAR,
            threads=self._settings.threads,
        )


def yuv420_frame(frame: np.ndarray) -> av.VideoFrame:
    """[3 H / 2, W] uint8 of BT.709 limited-range 4:2:0, where it lies."""
    # PyAV finds the height of what it does not copy only where that is a multiple of 4
    wrap = av.VideoFrame.from_ndarray if frame.shape[0] % 6 else av.VideoFrame.from_numpy_buffer
    yuv = wrap(frame, format="yuv420p")
    yuv.colorspace, yuv.color_range = Colorspace.ITU709, ColorRange.MPEG
    return yuv
