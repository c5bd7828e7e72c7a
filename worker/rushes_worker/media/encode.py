"""From frames and float samples to one MP4: H.264 High in BT.709, AAC-LC, `moov` first.

Shapes: f frames of one call, F frames of the clip, H height, W width, N samples per channel.

The picture is encoded in segments, several at once and beside the sound. The same input gives the same bytes on one
machine, however many there are at once: what a segment is depends on the clip alone, codecs and muxer run bit-exact
with a fixed number of threads, and compressed packets wait in memory until the last one exists. The file therefore
appears in one go, under a temporary name, and gets its own name only after validation. For that the picture is decoded
again while it is encoded, a few frames behind, and the sound once it is encoded: little is left to do after the last
frame.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Self

import av
import numpy as np
from av.codec.context import Flags
from av.container import OutputContainer
from av.error import FFmpegError
from rushes_core.clip import AUDIO_SAMPLE_RATE, FPS

from rushes_worker.media.errors import MediaError, require_equal
from rushes_worker.media.fast_start import moov_first
from rushes_worker.media.picture import Picture, parameter_sets
from rushes_worker.media.segment import TICK, SegmentEncoder, plan_segments, set_up
from rushes_worker.media.segments import Segments
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.media.sound import Sound, decoded_sound
from rushes_worker.media.times import Spans
from rushes_worker.media.validate import ClipFacts, validate_clip
from rushes_worker.pixels import PixelFormat

MIN_EDGE, MAX_EDGE = 16, 4096


# 96,000 ticks a second hold every frame and every sample exactly, so edit lists are exact too
_TICKS = 96_000
_MUXER = {"fflags": "+bitexact", "movie_timescale": str(_TICKS)}


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
    """One clip on its way to a file. Nothing exists on disk before `finish`, and nothing after `abort`, unless `finish`
    succeeded. Used as a context manager it aborts.
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
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            path: the finished file; its directory must exist.
            width, height: pixels, even.
            num_frames: frames of the whole clip.
            comment: what the file says of itself, for whoever looks at its metadata.
            on_failure: told once, from a thread, that the picture could not be encoded: `check` tells why.

        Raises:
            ValueError: a size, a count or the directory cannot be used.
            MediaError: the encoder cannot be opened.
        """
        check_frame_size(width, height)
        if type(num_frames) is not int or num_frames < 1:
            raise ValueError(f"num_frames must be a whole number of at least 1, got {num_frames!r}")
        if not path.parent.is_dir():
            raise ValueError(f"path: the directory {path.parent} does not exist")
        self.path = path
        self.facts: ClipFacts | None = None
        """What the finished file is; None until `finish` returned."""
        self.spans = Spans()
        """When frames and sound were encoded, the file written and checked."""
        self._height, self._width = height, width
        self._num_frames = num_frames
        self._frames_in = 0
        self._settings = settings = settings or EncoderSettings()
        self._sound: Future[tuple[list[av.Packet], Sound]] | None = None
        self._open, self._released = True, False
        self._file = BytesIO()
        try:
            self._container = self._begin(comment)
        except (FFmpegError, OSError) as error:
            message = f"{settings.encoder} cannot encode {width}x{height} here: {error.strerror}"
            raise MediaError(message) from error
        plan = plan_segments(num_frames, settings)
        self._segments = Segments(
            plan,
            lambda first: SegmentEncoder(first, settings, width=width, height=height, is_last=first == plan[-1].start),
            encoders=settings.encoders,
            on_failure=on_failure,
            spans=self.spans,
        )
        self._sound_thread = ThreadPoolExecutor(1, thread_name_prefix="sound")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def add_frames(self, frames: np.ndarray, pixels: PixelFormat = PixelFormat.RGB24) -> None:
        """Have the next frames of the clip encoded. They must not change before `finish`.

        Args:
            frames: C-contiguous uint8, [f, H, W, 3] of RGB or [f, 3 H / 2, W] of 4:2:0; RGB may be float32 in [0, 1],
                which is clipped and rounded.
            pixels: which of these they are.

        Raises:
            ValueError: shape, dtype or layout is wrong, a value is not finite, or the clip would get too many frames.
            MediaError: frames that came before could not be encoded.
        """
        self._check_open()
        self._check_frames(frames, pixels)
        self.check()
        self._segments.add(frames)
        self._frames_in += len(frames)

    def add_audio(self, audio: np.ndarray) -> None:
        """Have the whole soundtrack encoded, trimmed or padded with silence to the length of the picture.

        Args:
            audio: [2, N] float32 at 32 kHz, left channel first; values outside [-1, 1] are clipped.

        Raises:
            ValueError: shape or dtype is wrong, a sample is not finite, or the clip has its sound already.
        """
        self._check_open()
        self._check_audio(audio)
        samples = np.zeros((2, round(self._num_frames * AUDIO_SAMPLE_RATE / FPS)), np.float32)
        kept = min(samples.shape[1], audio.shape[1])
        np.clip(audio[:, :kept], -1.0, 1.0, out=samples[:, :kept])
        self._sound = self._sound_thread.submit(self._encode_sound, samples)

    def check(self) -> None:
        """Return if the picture is all right so far.

        Raises:
            MediaError: it could not be encoded.
        """
        if self._segments.failure is not None:
            raise self._segments.failure

    def finish(self, audio: np.ndarray | None = None, *, on_written: Callable[[Path], None] = lambda _: None) -> Path:
        """Complete the clip: write it beside `path`, validate it, and give it its name. What it took of memory and
        threads is free after `abort`, which may take as long as the check.

        Args:
            audio: the soundtrack, as for `add_audio`, unless that was called.
            on_written: told, from a thread, where the file is while it is validated; it keeps its name until both are
                done.

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
        if self._sound is None:
            raise ValueError("the clip has no audio")
        partial = partial_path(self.path)
        try:
            sound, heard = self._sound.result()
            decoded = self._mux(sound)
            with self.spans.note("file"):
                self._write()
            beside = self._sound_thread.submit(on_written, partial)
            with self.spans.note("check"):
                facts = validate_clip(
                    partial,
                    width=self._width,
                    height=self._height,
                    num_frames=self._num_frames,
                    refuse_flaws=self._settings.refuse_flaws,
                    decoded=decoded,
                    heard=heard,
                )
            beside.result()
            # not synced to the disk: a clip is made anew when its machine goes down before it is stored
            partial.replace(self.path)
            self.facts, self._open = facts, False
        except (FFmpegError, OSError) as exc:
            raise MediaError(f"{self.path.name} could not be written: {exc}") from exc
        finally:
            if self.facts is None:
                self.abort()
        return self.path

    def abort(self) -> None:
        """Give the clip up and leave no file behind; a finished one stays. Nothing of it is in memory any more."""
        self._open = False
        if self._released:
            return
        self._released = True
        self._segments.close()
        self._sound_thread.shutdown(cancel_futures=True)
        # nobody will read it if it is not complete
        with suppress(FFmpegError, OSError):
            self._container.close()
        partial_path(self.path).unlink(missing_ok=True)

    def _begin(self, comment: str) -> OutputContainer:
        """The file with its header, in memory."""
        container = av.open(self._file, "w", format="mp4", options=_MUXER)
        if comment:
            container.metadata["comment"] = comment
        # this encoder makes the parameter sets of the file, and no packet
        self._video = container.add_stream(self._settings.encoder, rate=FPS)
        # a stream of a name that is not a literal could be of any kind
        assert isinstance(self._video.codec_context, av.VideoCodecContext)
        set_up(self._video.codec_context, self._settings, width=self._width, height=self._height)
        self._video.codec_context.thread_count = 1
        self._video.time_base = TICK
        self._audio = container.add_stream("aac", rate=AUDIO_SAMPLE_RATE)
        sound = self._audio.codec_context
        sound.layout, sound.format = "stereo", "fltp"
        sound.bit_rate = self._settings.audio_bitrate
        sound.flags |= Flags.bitexact
        container.start_encoding()
        return container

    def _encode_sound(self, samples: np.ndarray) -> tuple[list[av.Packet], Sound]:
        """`samples` [2, N] as packets, and what is heard of them.

        Raises:
            InvalidClip: they cannot be decoded.
            MediaError: the encoder failed.
        """
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        frame.sample_rate = AUDIO_SAMPLE_RATE
        frame.pts = 0
        frame.time_base = Fraction(1, AUDIO_SAMPLE_RATE)
        try:
            with self.spans.note("sound"):
                packets = [*self._audio.encode(frame), *self._audio.encode(None)]
                # before the muxer changes them
                return packets, decoded_sound(packets, self._audio.codec_context.extradata or b"")
        except FFmpegError as error:
            raise MediaError(f"the audio encoder failed: {error}") from error

    def _mux(self, sound: list[av.Packet]) -> Picture:
        """Mux every packet in order of decoding time, those of a segment as soon as it is there; the whole picture.

        Raises:
            InvalidClip: a segment does not follow the one before, or is not what the file's header says.
            MediaError, ValueError: a segment could not be made.
            av.FFmpegError
        """
        whole: list[Picture] = []
        for packet in heapq.merge(self._picture_packets(whole), sound, key=_decoding_time):
            self._container.mux(packet)
        return whole[0]

    def _picture_packets(self, whole: list[Picture]) -> Iterator[av.Packet]:
        """Packets of segment after segment; the picture is left in `whole`."""
        header = parameter_sets(self._video.codec_context.extradata or b"")
        for segment in self._segments.in_order():
            if whole:
                whole[0].append(segment.picture)
            else:
                require_equal("parameter sets of a segment", segment.picture.parameter_sets, header)
                whole.append(segment.picture)
            for packet in segment.packets:
                packet.stream = self._video
                yield packet

    def _write(self) -> None:
        """
        Raises:
            av.FFmpegError, OSError
        """
        self._container.close()
        with self._file.getbuffer() as data, partial_path(self.path).open("wb") as file:
            file.writelines(moov_first(data))

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"{self.path.name} is finished or aborted already")

    def _check_frames(self, frames: np.ndarray, pixels: PixelFormat) -> None:
        is_rgb, shape = pixels is PixelFormat.RGB24, pixels.shape(self._height, self._width)
        if frames.dtype != np.uint8 and not (is_rgb and frames.dtype == np.float32):
            raise ValueError(f"{pixels} frames must be uint8{' or float32' if is_rgb else ''}, got {frames.dtype}")
        if frames.ndim != 1 + len(shape) or frames.shape[1:] != shape:
            raise ValueError(f"{pixels} frames must have the shape [f, {_dims(shape)}], got [{_dims(frames.shape)}]")
        if not frames.flags.c_contiguous:
            raise ValueError(f"frames must be C-contiguous, got strides {frames.strides}")
        if frames.dtype == np.float32 and not np.isfinite(frames).all():
            raise ValueError("frames hold a value that is not finite")
        if self._frames_in + len(frames) > self._num_frames:
            raise ValueError(f"num_frames={self._num_frames}, but {len(frames)} frames were added to {self._frames_in}")

    def _check_audio(self, audio: np.ndarray) -> None:
        if self._sound is not None:
            raise ValueError("the clip has its audio already")
        if audio.dtype != np.float32:
            raise ValueError(f"audio must be float32, got {audio.dtype}")
        if audio.ndim != 2 or audio.shape[0] != 2 or audio.shape[1] == 0:
            raise ValueError(f"audio must have the shape [2, N] with N >= 1, got [{_dims(audio.shape)}]")
        if not np.isfinite(audio).all():
            raise ValueError("audio holds a sample that is not finite")


def _decoding_time(packet: av.Packet) -> int:
    """In ticks of the film, which hold those of either track."""
    assert packet.dts is not None
    assert packet.time_base is not None
    return packet.dts * packet.time_base.numerator * (_TICKS // packet.time_base.denominator)


def _dims(shape: Iterable[int]) -> str:
    return ", ".join(map(str, shape))
