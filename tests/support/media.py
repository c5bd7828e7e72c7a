"""Synthetic pictures and sound, files that are right or wrong in one respect, and independent readers of MP4s."""

import hashlib
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from av.container import OutputContainer
from rushes_kernels.pictures import to_yuv420
from rushes_worker.media.encode import ClipEncoder
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.pixels import PixelFormat

FPS = 24
SAMPLE_RATE = 32_000


def grey_level(frame: int) -> int:
    """A level that differs from frame to frame and stays clear of black and white."""
    return frame * 7 % 200 + 20


def grey_frames(num_frames: int, width: int = 64, height: int = 64) -> np.ndarray:
    """[F, H, W, 3] uint8: frame i is a flat grey of `grey_level(i)`."""
    levels = np.array([grey_level(i) for i in range(num_frames)], np.uint8)
    return np.ascontiguousarray(np.broadcast_to(levels[:, None, None, None], (num_frames, height, width, 3)))


def flat_frames(num_frames: int, color: tuple[int, int, int], width: int = 64, height: int = 64) -> np.ndarray:
    """[F, H, W, 3] uint8: one colour all along."""
    return np.full((num_frames, height, width, 3), color, np.uint8)


def moving_frames(num_frames: int, width: int = 64, height: int = 64, seed: int = 0) -> np.ndarray:
    """[F, H, W, 3] uint8: a smooth coloured texture that drifts."""
    rng = np.random.default_rng(seed)
    phases, speeds = rng.uniform(0, 6.28, 3), rng.uniform(0.1, 0.4, 3)
    frame, y, x, channel = np.ogrid[:num_frames, :height, :width, :3]
    wave = np.sin(x / 9 + phases[channel] + frame * speeds[channel]) * np.cos(y / 7 + phases[channel])
    return np.rint(128 + 90 * wave).astype(np.uint8)


def yuv420(frames: np.ndarray) -> np.ndarray:
    """[F, 3 H / 2, W] uint8: these frames as a rank on a GPU hands them over."""
    planes = torch.from_numpy(frames).permute(3, 0, 1, 2).float().contiguous()
    count, height, width, _ = frames.shape
    out = torch.empty(count, height * 3 // 2, width, dtype=torch.uint8)
    return to_yuv420(planes, (1 / 255,) * 3, (0.0,) * 3, out).numpy()


def num_samples(num_frames: int) -> int:
    """Samples per channel that last as long as `num_frames`."""
    return round(num_frames * SAMPLE_RATE / FPS)


def tone(num_frames: int, amplitude: float = 0.3, hertz: float = 440.0) -> np.ndarray:
    """[2, N] float32 sine as long as `num_frames`."""
    time = np.arange(num_samples(num_frames)) / SAMPLE_RATE
    return np.tile(amplitude * np.sin(2 * np.pi * hertz * time), (2, 1)).astype(np.float32)


def clicks(frames: list[int], num_frames: int) -> np.ndarray:
    """[2, N] float32: silence with a click at the start of each of `frames`."""
    audio = np.zeros((2, num_samples(num_frames)), np.float32)
    for frame in frames:
        start = num_samples(frame)
        audio[:, start : start + 4] = 0.9
    return audio


def make_clip(
    path: Path,
    frames: np.ndarray | None = None,
    audio: np.ndarray | None = None,
    settings: EncoderSettings | None = None,
) -> Path:
    """A clip as Rushes encodes it, of RGB or of 4:2:0; by default one second of `moving_frames` and `tone` at 64x64."""
    frames = moving_frames(24) if frames is None else frames
    audio = tone(len(frames)) if audio is None else audio
    pixels = PixelFormat.RGB24 if frames.ndim == 4 else PixelFormat.YUV420P
    height, width = frames.shape[1:3] if frames.ndim == 4 else (frames.shape[1] * 2 // 3, frames.shape[2])
    with ClipEncoder(path, width=width, height=height, num_frames=len(frames), settings=settings) as encoder:
        encoder.add_frames(frames, pixels)
        return encoder.finish(audio)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How `mux` writes a file; the defaults are what a clip must be."""

    video_codec: str = "libx264"
    fps: Fraction = Fraction(FPS)
    late_frame: int | None = None
    """This frame is shown half a frame late."""
    pix_fmt: str = "yuv420p"
    color_tag: int | None = 1
    color_range: int = 1
    codec_tag: str = "avc1"
    faststart: bool = True
    audio_codec: str = "aac"
    sample_rate: int = SAMPLE_RATE
    layout: str = "stereo"
    audio_delay: int = 0
    audio_streams: int = 1
    video_options: tuple[tuple[str, str], ...] = (("preset", "veryfast"), ("bf", "0"))


def mux(path: Path, frames: np.ndarray, audio: np.ndarray, recipe: Recipe | None = None, **changes: object) -> Path:
    """An MP4 written without Rushes' encoder: right by default, wrong where `changes` to `Recipe` say so."""
    recipe = replace(recipe or Recipe(), **changes)  # pyright: ignore[reportArgumentType]
    with av.open(
        str(path), "w", format="mp4", options={"movflags": "+faststart" if recipe.faststart else "0"}
    ) as container:
        video = container.add_stream(recipe.video_codec, rate=recipe.fps)
        assert isinstance(video, av.VideoStream)
        context = video.codec_context
        context.time_base = 1 / (2 * recipe.fps)
        _, context.height, context.width, _ = frames.shape
        context.pix_fmt, context.codec_tag = recipe.pix_fmt, recipe.codec_tag
        context.color_range = recipe.color_range
        if recipe.color_tag is not None:
            context.colorspace = context.color_primaries = context.color_trc = recipe.color_tag
        context.options = dict(recipe.video_options)
        sounds = [_add_sound(container, recipe) for _ in range(recipe.audio_streams)]
        for index, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, "rgb24").reformat(
                format=recipe.pix_fmt, dst_colorspace=1, src_color_range=2, dst_color_range=recipe.color_range
            )
            picture.pts, picture.time_base = 2 * index + (index == recipe.late_frame), context.time_base
            container.mux(video.encode(picture))
        container.mux(video.encode(None))
        for sound in sounds:
            container.mux(sound.encode(_sound_frame(audio, recipe)))
            container.mux(sound.encode(None))
    return path


def _add_sound(container: OutputContainer, recipe: Recipe) -> av.AudioStream:
    stream = container.add_stream(recipe.audio_codec, rate=recipe.sample_rate)
    assert isinstance(stream, av.AudioStream)
    stream.codec_context.layout = recipe.layout
    return stream


def _sound_frame(audio: np.ndarray, recipe: Recipe) -> av.AudioFrame:
    channels = 1 if recipe.layout == "mono" else 2
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(audio[:channels]), format="fltp", layout=recipe.layout)
    frame.sample_rate = recipe.sample_rate
    frame.pts, frame.time_base = recipe.audio_delay, Fraction(1, recipe.sample_rate)
    return frame


def write_units(directory: Path, frames: np.ndarray, sizes: list[int]) -> list[Path]:
    """Raw unit files `frames_000.rgb`, ... of `sizes` frames each, as ranks leave them."""
    paths = []
    for index, unit in enumerate(np.split(frames, np.cumsum(sizes)[:-1])):
        paths.append(directory / f"frames_{index:03d}.rgb")
        unit.tofile(paths[-1])
    return paths


def decode_rgb(path: Path) -> np.ndarray:
    """[F, H, W, 3] float64 in 0..255, computed from Y, Cb and Cr by the BT.709 limited-range formula alone."""
    with av.open(str(path)) as container:
        return np.stack([_rgb(frame) for frame in container.decode(video=0)])


def _rgb(frame: av.VideoFrame) -> np.ndarray:
    planes = [
        np.frombuffer(memoryview(plane), np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
        for plane in frame.planes
    ]
    luma = (planes[0] - 16.0) / 219
    blue, red = ((plane.repeat(2, 0).repeat(2, 1) - 128.0) / 224 for plane in planes[1:])
    r, b = luma + 1.5748 * red, luma + 1.8556 * blue
    g = (luma - 0.2126 * r - 0.0722 * b) / 0.7152
    return np.stack([r, g, b], axis=-1) * 255


def decode_audio(path: Path) -> np.ndarray:
    """[2, N] float32 on the clip's own time line: sample n is heard at n / 32000 s."""
    with av.open(str(path)) as container:
        chunks = [(frame.pts, frame.to_ndarray()) for frame in container.decode(audio=0)]
    audio = np.zeros((2, chunks[-1][0] + chunks[-1][1].shape[1]), np.float32)
    for pts, samples in chunks:
        audio[:, pts : pts + samples.shape[1]] = samples
    return audio


def frame_times(path: Path) -> list[Fraction]:
    """When each frame is shown, in seconds."""
    with av.open(str(path)) as container:
        return [Fraction(frame.pts * frame.time_base) for frame in container.decode(video=0)]


def box_order(data: bytes) -> list[str]:
    """Kinds of the top-level boxes in file order."""
    kinds, offset = [], 0
    while offset < len(data):
        kinds.append(data[offset + 4 : offset + 8].decode())
        offset += int.from_bytes(data[offset : offset + 4], "big")
    return kinds


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
