"""The picture of a clip, decoded packet by packet: every frame is looked at, and what was decoded is known again.

An encoder hands over NAL units behind start codes; a file holds the same units behind their lengths. Both are brought
to one form, so that a file can be shown to hold what was decoded before it was written.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction

import av
import numpy as np
from av.codec.context import ThreadType
from av.error import FFmpegError
from av.video.plane import VideoPlane
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc
from rushes_core.clip import FPS

from rushes_worker.media.errors import InvalidClip, require, require_equal

_ROW_STEP = 4
_BLOCK_ROWS, _BLOCK_COLUMNS = 4, 16
"""Of the rows that are looked at."""
_MOVED_LEVELS = 4.0
"""How much the mean of a block must differ from the first frame's to have moved: encoding the same picture anew changes
it by about one."""

_DECODER_THREADS = 2
"""Of one segment. Each more takes a twentieth more processor time, and two keep up with the encoder."""
_LENGTH_BYTES = 4
_PARAMETER_SETS = (7, 8)


class Picture:
    """Decodes a run of frames of an H.264 stream, checks them as they come and adds up their samples.

    Args:
        extradata: parameter sets, as an encoder or a file gives them.
        width, height: of every frame, in pixels.
        time_base: seconds of a tick of the packets.
        first: number of the run's first frame in the stream.
    """

    def __init__(self, extradata: bytes, *, width: int, height: int, time_base: Fraction, first: int = 0) -> None:
        self.num_frames = 0
        self._first = first
        self.parameter_sets = parameter_sets(extradata)
        self._start_codes = _has_start_codes(extradata)
        self.packets: list[bytes] = []
        """Their NAL units behind lengths, as a file holds them, in the order they came."""
        self._blocks: _Blocks | None = None
        self._time_base = time_base
        self._size = f"{width}x{height}"
        self._sums = [[0, 0, 0] for _ in range(3)]
        # a decoder of its own takes the colour tags from the H.264 stream alone, not from the container
        self._decoder = av.CodecContext.create("h264", "r")
        self._decoder.extradata = extradata
        self._decoder.thread_type = ThreadType.FRAME
        self._decoder.thread_count = _DECODER_THREADS
        self._decoder.options = {"err_detect": "explode"}

    def add(self, packet: av.Packet) -> None:
        """Decode the next packet.

        Raises:
            InvalidClip: a frame is not as it should be.
            av.FFmpegError: the packet cannot be decoded.
        """
        data = bytes(packet)
        self.packets.append(_behind_lengths(data) if self._start_codes else data)
        self._take(self._decoder.decode(packet))

    def finish(self) -> None:
        """Decode what is still under way.

        Raises:
            InvalidClip, av.FFmpegError: as `add`.
        """
        self._take(self._decoder.decode(None))

    def append(self, other: "Picture") -> None:
        """Take what was decoded of the next run of the same stream.

        Raises:
            InvalidClip: it is not the next one, or has other parameter sets.
        """
        require_equal("parameter sets of a segment", other.parameter_sets, self.parameter_sets)
        require_equal("first frame of a segment", other._first, self._first + self.num_frames)
        self.num_frames += other.num_frames
        self.packets += other.packets
        for sums, more in zip(self._sums, other._sums, strict=True):
            sums[:] = map(sum, zip(sums, more, strict=True))
        if self._blocks is not None and other._blocks is not None:
            self._blocks.append(other._blocks)

    @property
    def moves(self) -> bool:
        """Whether any part of any frame differs from the first."""
        return self._blocks is not None and self._blocks.have_moved

    def variance(self) -> float:
        """Variance of Y, Cb and Cr over the clip, added up; exactly 0 if each is constant."""
        return sum((count * squares - total * total) / count**2 for count, total, squares in self._sums if count)

    def _take(self, frames: list[av.VideoFrame]) -> None:
        for frame in frames:
            self._check(frame)
            for plane, sums in zip(frame.planes, self._sums, strict=True):
                rows = np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)
                # the squares of a row of 4096 samples add up to less than 2**32
                values = rows[::_ROW_STEP, : plane.width].astype(np.uint32)
                sums[0] += values.size
                sums[1] += int(values.sum())
                # no BLAS: its threads and the decoder's would wait for each other
                sums[2] += int(np.einsum("ij,ij->i", values, values).sum())
            if self._blocks is None:
                self._blocks = _Blocks(_means(frame.planes[0]))
            elif not self._blocks.have_moved_for_certain:
                self._blocks.add(_means(frame.planes[0]))
            self.num_frames += 1

    def _check(self, frame: av.VideoFrame) -> None:
        number = self._first + self.num_frames
        where = f"frame {number}"
        require(not frame.is_corrupt, f"{where} is corrupt")
        require(
            frame.pts is not None and frame.pts * self._time_base == Fraction(number, FPS),
            f"{where} must be shown at {number}/{FPS} s, got {frame.pts} x {self._time_base} s",
        )
        require_equal(f"size of {where}", f"{frame.width}x{frame.height}", self._size)
        require_equal(f"pixel format of {where}", frame.format.name, "yuv420p")
        tags = (frame.color_range, frame.colorspace, frame.color_primaries, frame.color_trc)
        wanted = (ColorRange.MPEG, Colorspace.ITU709, ColorPrimaries.BT709, ColorTrc.BT709)
        for name, tag, want in zip(("range", "matrix", "primaries", "transfer"), tags, wanted, strict=True):
            require(tag == want, f"the colour {name} of {where} must be tagged {int(want)} (BT.709, tv), got {tag}")


class _Blocks:
    """Means of the blocks of a run of frames: those of its first frame, the least and the largest of all.

    Whether a picture moves is a question about its first frame, which another run may have.
    """

    def __init__(self, first: np.ndarray) -> None:
        self.first = self.least = self.largest = first

    def add(self, means: np.ndarray) -> None:
        self.least, self.largest = np.minimum(self.least, means), np.maximum(self.largest, means)

    def append(self, other: "_Blocks") -> None:
        self.add(other.least)
        self.add(other.largest)

    @property
    def have_moved(self) -> bool:
        return bool((np.maximum(self.largest - self.first, self.first - self.least) > _MOVED_LEVELS).any())

    @property
    def have_moved_for_certain(self) -> bool:
        """Whether they have, whatever frame is the first of the picture."""
        return bool((self.largest - self.least > 2 * _MOVED_LEVELS).any())


def _means(luma: VideoPlane) -> np.ndarray:
    """Of every block of a frame."""
    rows = np.frombuffer(memoryview(luma), np.uint8).reshape(luma.height, luma.line_size)[::_ROW_STEP]
    height, width = rows.shape[0] // _BLOCK_ROWS, luma.width // _BLOCK_COLUMNS
    whole = rows[: height * _BLOCK_ROWS, : width * _BLOCK_COLUMNS]
    return whole.reshape(height, _BLOCK_ROWS, width, _BLOCK_COLUMNS).mean((1, 3))


class PictureBehind:
    """A `Picture` in a thread of its own, behind the one that makes the packets."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="picture")
        self._results: list[Future[None]] = []

    def add(self, packet: av.Packet) -> None:
        """Have the next packet decoded; it must not be changed before `finish`."""
        self._results.append(self._thread.submit(self._picture.add, packet))

    def finish(self) -> Picture:
        """The picture, once everything is decoded.

        Raises:
            InvalidClip: what the encoder made cannot be decoded, or a frame is not as it should be.
        """
        self._results.append(self._thread.submit(self._picture.finish))
        try:
            for result in self._results:
                result.result()
        except FFmpegError as exc:
            raise InvalidClip(f"the picture cannot be decoded: {exc}") from exc
        return self._picture

    def close(self) -> None:
        """Give up what was not decoded yet, and end the thread."""
        self._thread.shutdown(cancel_futures=True)


def parameter_sets(extradata: bytes) -> list[bytes]:
    """The sequence and picture parameter sets of a stream, from start codes or from an avcC record.

    Raises:
        InvalidClip: the record is cut short, or its lengths have another number of bytes than four.
    """
    if _has_start_codes(extradata):
        return [unit for unit in _units(extradata) if unit[0] & 31 in _PARAMETER_SETS]
    require(len(extradata) > 6 and extradata[0] == 1, "the video stream has no avcC record")
    require_equal("bytes of a NAL unit's length", (extradata[4] & 3) + 1, _LENGTH_BYTES)
    found: list[bytes] = []
    at = 5
    for mask in (31, 255):
        require(at < len(extradata), "the avcC record is cut short")
        count, at = extradata[at] & mask, at + 1
        for _ in range(count):
            size = int.from_bytes(extradata[at : at + 2], "big")
            found.append(extradata[at + 2 : at + 2 + size])
            at += 2 + size
            require(at <= len(extradata), "the avcC record is cut short")
    return found


def _has_start_codes(extradata: bytes) -> bool:
    """Whether a stream with these parameter sets has start codes, and no lengths, in front of its NAL units."""
    return extradata.startswith((b"\0\0\1", b"\0\0\0\1"))


def _behind_lengths(data: bytes) -> bytes:
    return b"".join(len(unit).to_bytes(_LENGTH_BYTES, "big") + unit for unit in _units(data))


def _units(data: bytes) -> list[bytes]:
    """NAL units behind start codes: inside them two zeros are never followed by a third or by a one."""
    return [unit for piece in data.split(b"\0\0\1") if (unit := piece.rstrip(b"\0"))]
