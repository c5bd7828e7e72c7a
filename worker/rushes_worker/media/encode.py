"""From uint8 frames and float samples to one MP4: H.264 High in BT.709, AAC-LC, `moov` first.

Shapes: f frames of one call, F frames of the clip, H height, W width, N samples per channel.

The same input gives the same bytes on one machine: codecs and muxer run bit-exact with a fixed number of threads, and
compressed packets wait in memory until the last one exists, so the order in which picture and sound arrive cannot show.
The file therefore appears in one go, under a temporary name, and gets its own name only after validation. For that the
picture is decoded again while it is encoded, a few frames behind: little of it is left to do after the last frame.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

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
from rushes_core.clip import AUDIO_SAMPLE_RATE, FPS

from rushes_worker.media.errors import MediaError
from rushes_worker.media.picture import Picture, PictureBehind
from rushes_worker.media.validate import ClipFacts, validate_clip

PRESETS = ("ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow")
"""libx264 presets whose reference frames fit level 4.0 at every canvas."""

MIN_EDGE, MAX_EDGE = 16, 4096


# 96,000 ticks a second hold every frame and every sample exactly, so edit lists are exact too
_MUXER = {"movflags": "+faststart", "fflags": "+bitexact", "movie_timescale": "96000"}


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """How clips are compressed.

    Defaults are measured on two cores, 124 frames at 1344x768: superfast costs the time of ultrafast with CABAC, and
    keeps deblocking and adaptive quantisation; veryfast takes 1.4 times as long for a file a quarter smaller. CRF 20
    gives about 7 Mbit/s and 40 dB on textured motion.
    """

    preset: str = "superfast"
    crf: int = 20
    """Constant rate factor; lower is better and larger. 0 would be lossless, which is not High profile."""
    audio_bitrate: int = 144_000
    """Bits per second of the AAC track."""
    threads: int = 8
    """Fixed, never the number of cores: the encoder's output depends on it. With 16 cores the last 22 frames of a clip
    take 0.19 s with four and 0.11 s with eight; with two cores it makes no difference."""
    keyframe_interval: int = 48
    """Frames between keyframes at most: how far a seek has to decode."""
    refuse_flaws: bool = False
    """A clip that is blank, frozen or silent all along is no clip."""

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"preset={self.preset!r} is not one of {', '.join(PRESETS)}")
        for field, low, high in (
            ("crf", 1, 51),
            ("audio_bitrate", 32_000, 320_000),
            ("threads", 1, 64),
            ("keyframe_interval", 1, 240),
        ):
            value = getattr(self, field)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{field} must be a whole number from {low} to {high}, got {value!r}")


def check_frame_size(width: int, height: int) -> None:
    """Refuse a frame size that 4:2:0 H.264 cannot hold.

    Raises:
        ValueError: an edge is odd or outside 16..4096.
    """
    for field, value in (("width", width), ("height", height)):
        if type(value) is not int or not MIN_EDGE <= value <= MAX_EDGE or value % 2:
            raise ValueError(f"{field} must be an even number from {MIN_EDGE} to {MAX_EDGE}, got {value!r}")


def partial_path(path: Path) -> Path:
    """Where the file for `path` is written until it is complete and valid."""
    return path.with_name(f".{path.name}.partial")


class ClipEncoder:
    """One clip on its way to a file. Nothing exists on disk before `finish`, and nothing after `abort`.

    Used as a context manager it aborts unless `finish` succeeded.
    """

    def __init__(
        self,
        path: Path,
        *,
        width: int,
        height: int,
        num_frames: int,
        settings: EncoderSettings | None = None,
        comment: str = "",
    ) -> None:
        """
        Args:
            path: the finished file; its directory must exist.
            width, height: pixels, even.
            num_frames: frames of the whole clip.
            comment: what the file says of itself, for whoever looks at its metadata.

        Raises:
            ValueError: a size, a count or the directory cannot be used.
        """
        check_frame_size(width, height)
        if type(num_frames) is not int or num_frames < 1:
            raise ValueError(f"num_frames must be a whole number of at least 1, got {num_frames!r}")
        if not path.parent.is_dir():
            raise ValueError(f"path: the directory {path.parent} does not exist")
        self.path = path
        self.facts: ClipFacts | None = None
        """What the finished file is; None until `finish` returned."""
        self._shape = (height, width, 3)
        self._num_frames = num_frames
        self._frames_in = 0
        self._audio_in = False
        self._settings = settings or EncoderSettings()
        self._packets: list[av.Packet] = []
        self._picture: PictureBehind | None = None
        self._reformatter = VideoReformatter()
        self._open = True
        self._container = av.open(str(partial_path(path)), "w", format="mp4", options=_MUXER)
        if comment:
            self._container.metadata["comment"] = comment
        self._video = self._add_video_stream(width, height)
        self._audio = self._add_audio_stream()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def add_frames(self, frames: np.ndarray) -> None:
        """Encode the next frames of the clip.

        Args:
            frames: [f, H, W, 3] RGB, C-contiguous; uint8, or float32 in [0, 1], which is clipped and rounded.

        Raises:
            ValueError: shape, dtype or layout is wrong, a value is not finite, or the clip would get too many frames.
            MediaError: the encoder failed.
        """
        self._check_open()
        self._check_frames(frames)
        try:
            for frame in frames:
                self._keep(self._video.encode(self._yuv(frame, self._frames_in)))
                self._frames_in += 1
        except FFmpegError as exc:
            raise MediaError(f"the video encoder failed at frame {self._frames_in}: {exc}") from exc

    def add_audio(self, audio: np.ndarray) -> None:
        """Encode the whole soundtrack, trimmed or padded with silence to the length of the picture.

        Args:
            audio: [2, N] float32 at 32 kHz, left channel first; values outside [-1, 1] are clipped.

        Raises:
            ValueError: shape or dtype is wrong, a sample is not finite, or the clip has its sound already.
            MediaError: the encoder failed.
        """
        self._check_open()
        self._check_audio(audio)
        samples = np.zeros((2, round(self._num_frames * AUDIO_SAMPLE_RATE / FPS)), np.float32)
        kept = min(samples.shape[1], audio.shape[1])
        np.clip(audio[:, :kept], -1.0, 1.0, out=samples[:, :kept])
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        frame.sample_rate = AUDIO_SAMPLE_RATE
        frame.pts = 0
        frame.time_base = Fraction(1, AUDIO_SAMPLE_RATE)
        self._audio_in = True
        try:
            self._packets += self._audio.encode(frame)
            self._packets += self._audio.encode(None)
        except FFmpegError as exc:
            raise MediaError(f"the audio encoder failed: {exc}") from exc

    def finish(self, audio: np.ndarray | None = None) -> Path:
        """Complete the clip: write it beside `path`, validate it, make it durable and give it its name.

        Args:
            audio: the soundtrack, as for `add_audio`, unless that was called.

        Returns:
            `path`. `facts` tells what the file is.

        Raises:
            ValueError: frames or sound are missing.
            InvalidClip: the file is not the clip that was asked for, or has flaws that the settings refuse.
            MediaError: encoder, muxer or disk failed.
        """
        self._check_open()
        if self._frames_in != self._num_frames:
            raise ValueError(f"num_frames={self._num_frames}, but {self._frames_in} frames were added")
        if audio is not None:
            self.add_audio(audio)
        if not self._audio_in:
            raise ValueError("the clip has no audio")
        partial = partial_path(self.path)
        height, width, _ = self._shape
        try:
            self._keep(self._video.encode(None))
            assert self._picture is not None
            decoded = self._picture.finish()
            self._write()
            self.facts = validate_clip(
                partial,
                width=width,
                height=height,
                num_frames=self._num_frames,
                refuse_flaws=self._settings.refuse_flaws,
                decoded=decoded,
            )
            _sync(partial)
            partial.replace(self.path)
            _sync(self.path.parent)
        except (FFmpegError, OSError) as exc:
            self.facts = None
            raise MediaError(f"{self.path.name} could not be written: {exc}") from exc
        finally:
            self.abort()
        return self.path

    def abort(self) -> None:
        """Give the clip up and leave no file behind; after `finish` it does nothing."""
        if not self._open:
            return
        self._open = False
        if self._picture is not None:
            self._picture.close()
        self._packets.clear()
        # a file that cannot be completed is deleted anyway
        with suppress(FFmpegError, OSError):
            self._container.close()
        partial_path(self.path).unlink(missing_ok=True)

    def _add_video_stream(self, width: int, height: int) -> av.VideoStream:
        stream = self._container.add_stream("libx264", rate=FPS)
        stream.time_base = Fraction(1, FPS)
        context = stream.codec_context
        context.width, context.height, context.pix_fmt = width, height, "yuv420p"
        context.thread_count = self._settings.threads
        context.gop_size = self._settings.keyframe_interval
        context.flags |= Flags.bitexact | Flags.closed_gop
        context.color_range = ColorRange.MPEG
        context.colorspace = Colorspace.ITU709
        context.color_primaries = ColorPrimaries.BT709
        context.color_trc = ColorTrc.BT709
        # no maxrate: x264 keeps to it by timing its threads, and the bytes would change from run to run
        context.options = {
            "preset": self._settings.preset,
            "crf": str(self._settings.crf),
            # without B-frames the first frame is shown at 0 even by players that ignore edit lists
            "bf": "0",
            # ultrafast turns both off and would fall back to Baseline
            "x264-params": "cabac=1:8x8dct=1",
            "profile": "high",
        }
        return stream

    def _add_audio_stream(self) -> av.AudioStream:
        stream = self._container.add_stream("aac", rate=AUDIO_SAMPLE_RATE)
        context = stream.codec_context
        context.layout = "stereo"
        context.format = "fltp"
        context.bit_rate = self._settings.audio_bitrate
        context.flags |= Flags.bitexact
        return stream

    def _yuv(self, frame: np.ndarray, index: int) -> av.VideoFrame:
        """`frame` [H, W, 3] as BT.709 limited-range 4:2:0 with its place in time."""
        if frame.dtype != np.uint8:
            frame = np.rint(np.clip(frame, 0.0, 1.0) * 255.0).astype(np.uint8)
        yuv = self._reformatter.reformat(
            av.VideoFrame.from_numpy_buffer(frame, format="rgb24"),
            format="yuv420p",
            src_color_range=ColorRange.JPEG,
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            interpolation=Interpolation.BILINEAR,
            threads=self._settings.threads,
        )
        yuv.color_primaries = ColorPrimaries.BT709
        yuv.color_trc = ColorTrc.BT709
        yuv.pts = index
        yuv.time_base = Fraction(1, FPS)
        return yuv

    def _keep(self, packets: list[av.Packet]) -> None:
        """Packets of the picture: they wait to be written, and are decoded meanwhile."""
        self._packets += packets
        for packet in packets:
            if self._picture is None:
                # the encoder knows its parameter sets once it runs
                height, width, _ = self._shape
                extradata = self._video.codec_context.extradata or b""
                self._picture = PictureBehind(
                    Picture(extradata, width=width, height=height, time_base=Fraction(1, FPS))
                )
            self._picture.add(packet)

    def _write(self) -> None:
        """Mux every packet in order of decoding time."""
        for packet in sorted(self._packets, key=_decoding_time):
            self._container.mux(packet)
        self._container.close()

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"{self.path.name} is finished or aborted already")

    def _check_frames(self, frames: np.ndarray) -> None:
        if frames.dtype not in (np.uint8, np.float32):
            raise ValueError(f"frames must be uint8 or float32, got {frames.dtype}")
        if frames.ndim != 4 or frames.shape[1:] != self._shape:
            raise ValueError(f"frames must have the shape [f, {_dims(self._shape)}], got [{_dims(frames.shape)}]")
        if not frames.flags.c_contiguous:
            raise ValueError(f"frames must be C-contiguous, got strides {frames.strides}")
        if frames.dtype == np.float32 and not np.isfinite(frames).all():
            raise ValueError("frames hold a value that is not finite")
        if self._frames_in + len(frames) > self._num_frames:
            raise ValueError(f"num_frames={self._num_frames}, but {len(frames)} frames were added to {self._frames_in}")

    def _check_audio(self, audio: np.ndarray) -> None:
        if self._audio_in:
            raise ValueError("the clip has its audio already")
        if audio.dtype != np.float32:
            raise ValueError(f"audio must be float32, got {audio.dtype}")
        if audio.ndim != 2 or audio.shape[0] != 2 or audio.shape[1] == 0:
            raise ValueError(f"audio must have the shape [2, N] with N >= 1, got [{_dims(audio.shape)}]")
        if not np.isfinite(audio).all():
            raise ValueError("audio holds a sample that is not finite")


def _decoding_time(packet: av.Packet) -> Fraction:
    assert packet.dts is not None
    assert packet.time_base is not None
    return packet.dts * packet.time_base


def _dims(shape: Iterable[int]) -> str:
    return ", ".join(map(str, shape))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
