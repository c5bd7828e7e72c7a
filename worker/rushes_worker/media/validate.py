"""Is this file the clip it should be? A strict check of container, streams, every frame and the sound.

Box order and sizes are read from the bytes themselves, tags from the H.264 stream rather than from the container, and
both tracks are decoded to the end. An encoder may have had its picture decoded before there was a file: then the file
must hold exactly the units that were decoded. So may the sound.
"""

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, NamedTuple

import av
from av.container import InputContainer
from av.error import FFmpegError
from rushes_core.clip import AUDIO_SAMPLE_RATE, FPS

from rushes_worker.media.errors import InvalidClip, require, require_equal
from rushes_worker.media.picture import Picture, parameter_sets
from rushes_worker.media.sound import SAMPLE, Sound

AAC_FRAME_SAMPLES = 1024

SILENCE_RMS = 2.0**-17
"""Half a step of 16-bit sound: below it every sample is played as zero."""

UNPROBED = {"probesize": "32"}
"""Options to open a file whose picture was decoded already without decoding the start of it once more."""

MAX_LEVEL = 40
"""H.264 level 4.0, which every player of the last decade decodes; only a larger frame may need more."""

_PROFILES = {
    66: "Baseline",
    77: "Main",
    88: "Extended",
    100: "High",
    110: "High 10",
    122: "High 4:2:2",
    244: "High 4:4:4",
}

# level_idc: most macroblocks a second, most macroblocks a frame (H.264 table A-1)
_LEVELS = {
    10: (1_485, 99),
    11: (3_000, 396),
    12: (6_000, 396),
    13: (11_880, 396),
    20: (11_880, 396),
    21: (19_800, 792),
    22: (20_250, 1_620),
    30: (40_500, 1_620),
    31: (108_000, 3_600),
    32: (216_000, 5_120),
    40: (245_760, 8_192),
    41: (245_760, 8_192),
    42: (522_240, 8_704),
    50: (589_824, 22_080),
    51: (983_040, 36_864),
    52: (2_073_600, 36_864),
}


class Flaw(StrEnum):
    """What may be wanted, but is more often a model that went astray."""

    BLANK_PICTURE = "blank_picture"
    FROZEN_PICTURE = "frozen_picture"
    SILENT_SOUND = "silent_sound"

    @property
    def message(self) -> str:
        """For the client."""
        return _FLAW_MESSAGES[self]


_FLAW_MESSAGES = {
    Flaw.BLANK_PICTURE: "The picture is one flat colour from the first frame to the last.",
    Flaw.FROZEN_PICTURE: "The picture does not move from the first frame to the last.",
    Flaw.SILENT_SOUND: "The sound is silent from the first frame to the last.",
}


@dataclass(frozen=True, slots=True)
class ClipFacts:
    """What a valid clip is, as measured on the file."""

    width: int
    height: int
    num_frames: int
    fps: int
    duration_seconds: float
    has_audio: bool
    audio_sample_rate: int
    audio_channels: int
    audio_duration_seconds: float
    """Length of the sound as presented: after priming is cut off, padding included."""
    bytes: int
    sha256: str
    """Hexadecimal digest of the whole file."""
    pixel_variance: float
    """Variance of Y, Cb and Cr over every fourth row of all frames, added up; 0 is one flat colour all along."""
    audio_rms: float
    """Root mean square of all samples of both channels; full scale is 1."""
    video_codec: str
    profile: str
    level: str
    audio_codec: str
    flaws: tuple[Flaw, ...]


class Box(NamedTuple):
    """One top-level box of an MP4 file."""

    kind: str
    offset: int
    size: int


def validate_clip(
    path: Path,
    *,
    width: int,
    height: int,
    num_frames: int,
    refuse_flaws: bool = False,
    decoded: Picture | None = None,
    heard: Sound | None = None,
) -> ClipFacts:
    """Check that `path` is a finished clip of that size and length, and say what it is.

    Args:
        refuse_flaws: a clip with flaws is no clip.
        decoded, heard: the whole picture and the whole sound that the file must hold, if they have been decoded
            already.

    Raises:
        InvalidClip: the file is missing, cut short, or differs from what a clip must be; names what, and both values.
    """
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            _check_boxes(list(top_level_boxes(file)))
        with (
            ThreadPoolExecutor(1, thread_name_prefix="sha256") as beside,
            av.open(str(path), options=None if decoded is None else UNPROBED) as container,
        ):
            sha256 = beside.submit(_sha256, path)
            video, audio = _streams(container)
            profile, level = _check_video_stream(video, width, height, num_frames)
            _check_audio_stream(audio, num_frames)
            picture, sound = _read(container, video, audio, width, height, decoded, heard)
            require_equal("number of frames", picture.num_frames, num_frames)
            _check_sound_length("decoding gives", sound.num_samples, num_frames)
            flaws = _flaws(picture, sound)
            require(not (refuse_flaws and flaws), " ".join(flaw.message for flaw in flaws))
            return ClipFacts(
                width=width,
                height=height,
                num_frames=num_frames,
                fps=FPS,
                duration_seconds=num_frames / FPS,
                has_audio=True,
                audio_sample_rate=audio.rate,
                audio_channels=audio.channels,
                audio_duration_seconds=float(_duration(audio)),
                bytes=num_bytes,
                sha256=sha256.result(),
                pixel_variance=picture.variance(),
                audio_rms=sound.rms(),
                video_codec=video.codec_context.name,
                profile=profile,
                level=f"{level // 10}.{level % 10}",
                audio_codec=audio.codec_context.name,
                flaws=flaws,
            )
    except (FFmpegError, OSError) as exc:
        raise InvalidClip(f"{path.name} cannot be read as MP4: {exc}") from exc


def top_level_boxes(file: BinaryIO) -> Iterator[Box]:
    """The top-level boxes of an MP4 file in file order.

    Raises:
        InvalidClip: the file is empty, or a box is cut short or has an impossible size.
    """
    end = file.seek(0, os.SEEK_END)
    require(end > 0, "the file is empty")
    offset = 0
    while offset < end:
        file.seek(offset)
        header = file.read(16)
        require(len(header) >= 8, f"a box header at byte {offset} is cut short")
        size, kind = struct.unpack(">I4s", header[:8])
        name = kind.decode("latin-1")
        require(name.isascii() and name.isprintable(), f"byte {offset} does not start a box")
        smallest = 8
        if size == 1:
            require(len(header) == 16, f"the box {name} at byte {offset} is cut short")
            (size,) = struct.unpack(">Q", header[8:])
            smallest = 16
        elif size == 0:
            size = end - offset
        require(size >= smallest, f"the box {name} at byte {offset} has the impossible size {size}")
        require(
            offset + size <= end,
            f"the box {name} at byte {offset} is cut short: {size} bytes announced, {end - offset} present",
        )
        yield Box(name, offset, size)
        offset += size


def _check_boxes(boxes: list[Box]) -> None:
    kinds = [box.kind for box in boxes]
    require(kinds[0] == "ftyp", f"the first box must be ftyp, got {kinds[0]}")
    for kind in ("moov", "mdat"):
        require(kinds.count(kind) == 1, f"the file must have one {kind} box, got {kinds.count(kind)}")
    require(kinds.index("moov") < kinds.index("mdat"), f"moov must come before mdat, got {' '.join(kinds)}")


def _streams(container: InputContainer) -> tuple[av.VideoStream, av.AudioStream]:
    videos, audios = container.streams.video, container.streams.audio
    counts = f"{len(videos)} video and {len(audios)} audio of {len(container.streams)} streams"
    require(
        (len(videos), len(audios), len(container.streams)) == (1, 1, 2),
        f"the file must have one video and one audio stream, got {counts}",
    )
    return videos[0], audios[0]


def _check_video_stream(video: av.VideoStream, width: int, height: int, num_frames: int) -> tuple[str, int]:
    """The stream's profile, and its level times ten."""
    context = video.codec_context
    require_equal("video codec", context.name, "h264")
    require_equal("video codec tag", context.codec_tag, "avc1")
    # not known before a frame was decoded; then every frame is asked
    require_equal("pixel format", context.pix_fmt or "yuv420p", "yuv420p")
    require_equal("frame size", f"{context.width}x{context.height}", f"{width}x{height}")
    require(context.sample_aspect_ratio in (None, 0, 1), f"pixels must be square, got {context.sample_aspect_ratio}")
    require_equal("frame rate", video.average_rate, Fraction(FPS))
    require_equal("picture length in seconds", _duration(video), Fraction(num_frames, FPS))
    avcc = context.extradata or b""
    require(len(avcc) > 4 and avcc[0] == 1, "the video stream has no avcC record")
    profile = _PROFILES.get(avcc[1], str(avcc[1]))
    require(profile in ("High", "Main"), f"the profile must be High or Main, got {profile}")
    return profile, _checked_level(avcc[3], width, height)


def _checked_level(level: int, width: int, height: int) -> int:
    require(level in _LEVELS, f"the H.264 level {level / 10:g} is unknown")
    macroblocks = -(-width // 16) * -(-height // 16)
    fitting = [idc for idc, (rate, size) in _LEVELS.items() if macroblocks <= size and macroblocks * FPS <= rate]
    require(level in fitting, f"level {level / 10:g} does not fit {width}x{height} at {FPS} frames a second")
    highest = max(MAX_LEVEL, fitting[0])
    require(level <= highest, f"the level must be at most {highest / 10:g}, got {level / 10:g}")
    return level


def _check_audio_stream(audio: av.AudioStream, num_frames: int) -> None:
    context = audio.codec_context
    require_equal("audio codec", context.name, "aac")
    require_equal("AAC profile", context.profile, "LC")
    require_equal("sample rate", context.sample_rate, AUDIO_SAMPLE_RATE)
    require_equal("channel layout", context.layout.name, "stereo")
    _check_sound_length("the track says", round(_duration(audio) * AUDIO_SAMPLE_RATE), num_frames)


def _check_sound_length(what: str, num_samples: int, num_frames: int) -> None:
    expected = round(num_frames * AUDIO_SAMPLE_RATE / FPS)
    require(
        abs(num_samples - expected) <= AAC_FRAME_SAMPLES,
        f"the sound must last {expected} samples within {AAC_FRAME_SAMPLES}, but {what} {num_samples}",
    )


def _read(
    container: InputContainer,
    video: av.VideoStream,
    audio: av.AudioStream,
    width: int,
    height: int,
    decoded: Picture | None,
    heard: Sound | None,
) -> tuple[Picture, Sound]:
    """Decode both tracks to the end, or find in the file what was decoded of them."""
    extradata, time_base = video.codec_context.extradata or b"", _time_base(video)
    picture = decoded or Picture(extradata, width=width, height=height, time_base=time_base)
    sound = heard or Sound(audio.codec_context.extradata or b"")
    same_picture, same_sound = _Same("picture", _expected(picture, time_base)), _Same("sound", sound.packets)
    for packet in container.demux(video, audio):
        if packet.stream is audio and heard is None:
            sound.add(packet, audio.codec_context.decode(packet))
        elif packet.size and packet.stream is audio:
            same_sound.add(packet)
        elif packet.size and decoded is None:
            picture.add(packet)
        elif packet.size:
            same_picture.add(packet)
    if decoded is None:
        picture.finish()
    else:
        same_picture.finish()
        require_equal("parameter sets of the picture", parameter_sets(extradata), picture.parameter_sets)
    if heard is not None:
        same_sound.finish()
        require_equal("tick of the sound in seconds", _time_base(audio), SAMPLE)
        require_equal("configuration of the sound", audio.codec_context.extradata, sound.extradata)
    return picture, sound


def _expected(picture: Picture, time_base: Fraction) -> list[tuple[Fraction | int | None, bytes]]:
    """When each packet of `picture` is to be shown, in ticks of the file, and what it holds."""
    tick = 1 / (FPS * time_base)
    # whole numbers compare faster
    step = tick.numerator if tick.denominator == 1 else tick
    return [(number * step, data) for number, data in enumerate(picture.packets)]


class _Same:
    """Whether a track has just the packets that were decoded."""

    def __init__(self, what: str, expected: Sequence[tuple[Fraction | int | None, bytes]]) -> None:
        self._what, self._expected = what, expected
        self._found = 0

    def add(self, packet: av.Packet) -> None:
        if self._found == len(self._expected):
            raise InvalidClip(f"the {self._what} must have {len(self._expected)} packets, the file has more")
        time, data = self._expected[self._found]
        # a message costs more than to compare
        if bytes(packet) != data:
            raise InvalidClip(f"packet {self._found} of the {self._what} is not the one that was decoded")
        if packet.pts != time:
            which = f"packet {self._found} of the {self._what}"
            raise InvalidClip(f"{which} must be due at {time} x {packet.time_base} s, got {packet.pts}")
        self._found += 1

    def finish(self) -> None:
        require_equal(f"number of packets of the {self._what}", self._found, len(self._expected))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flaws(picture: Picture, sound: Sound) -> tuple[Flaw, ...]:
    flaws: list[Flaw] = []
    if picture.variance() == 0:
        flaws.append(Flaw.BLANK_PICTURE)
    elif not picture.moves:
        flaws.append(Flaw.FROZEN_PICTURE)
    if sound.rms() <= SILENCE_RMS:
        flaws.append(Flaw.SILENT_SOUND)
    return tuple(flaws)


def _duration(stream: av.VideoStream | av.AudioStream) -> Fraction:
    """Length of the track in seconds; 0 if it says none."""
    return (stream.duration or 0) * _time_base(stream)


def _time_base(stream: av.VideoStream | av.AudioStream) -> Fraction:
    assert stream.time_base is not None
    return stream.time_base
