"""Does the encoder that was asked for make a clip here? Tried before a worker claims anything."""

from dataclasses import replace
from pathlib import Path

import av
import numpy as np
from av.codec.codec import UnknownCodecError
from rushes_core.clip import AUDIO_SAMPLE_RATE, FPS, units_of

from rushes_worker.media.errors import MediaError
from rushes_worker.media.process import ClipSpec, MediaProcess
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.scratch import Scratch

_WIDTH, _HEIGHT, _NUM_FRAMES = 320, 192, 39
_SECONDS = 60.0


def try_encoder(settings: EncoderSettings, scratch: Path, *, device: str = "") -> None:
    """Make a short clip of two segments as jobs will have theirs made, in a process of its own. Main thread only.

    Args:
        scratch: where there is room for it.
        device: entry of `CUDA_VISIBLE_DEVICES` for a hardware encoder.

    Raises:
        ValueError: names the settings that made none, what came instead, and which encoders there are.
    """
    own = Scratch(scratch)
    try:
        _make_clip(replace(settings, refuse_flaws=False), own.path, device)
    except (MediaError, OSError) as error:
        raise ValueError(
            f"RUSHES_ENCODER={settings.encoder} with RUSHES_ENCODER_PRESET={settings.preset}, "
            f"RUSHES_ENCODER_CRF={settings.crf}, RUSHES_KEYFRAME_INTERVAL={settings.keyframe_interval}, "
            f"RUSHES_AUDIO_BITRATE={settings.audio_bitrate} makes no clip here: {error} "
            f"(H.264 encoders in this FFmpeg, {av.ffmpeg_version_info}: {', '.join(h264_encoders())}; "
            "a hardware encoder also needs its device and driver)"
        ) from error
    finally:
        own.remove()


def h264_encoders() -> list[str]:
    """Names of the H.264 encoders that this FFmpeg was built with."""
    found: list[str] = []
    for name in sorted(av.codecs_available):
        try:
            codec = av.Codec(name, "w")
        except UnknownCodecError:
            continue
        # `h264` itself finds the first of them
        if codec.canonical_name == "h264" and codec.name == name:
            found.append(name)
    return found


def _make_clip(settings: EncoderSettings, folder: Path, device: str) -> None:
    frame, y, x, channel = np.ogrid[:_NUM_FRAMES, :_HEIGHT, :_WIDTH, :3]
    frames = ((x + y * (channel + 1) + 5 * frame) % 256).astype(np.uint8)
    times = np.arange(_NUM_FRAMES * AUDIO_SAMPLE_RATE // FPS) / AUDIO_SAMPLE_RATE
    sound = folder / "sound.npy"
    np.save(sound, np.tile(0.2 * np.sin(2 * np.pi * 440 * times), (2, 1)).astype(np.float32))
    with MediaProcess(settings, device=device) as media:
        media.start_clip(ClipSpec(folder / "clip.mp4", _WIDTH, _HEIGHT, _NUM_FRAMES))
        media.set_audio(sound)
        for number, unit in enumerate(units_of(_NUM_FRAMES)):
            path = folder / f"unit-{number}.rgb"
            frames[unit.start : unit.stop].tofile(path)
            media.add_unit(number, path, len(unit))
        media.finish(_SECONDS)
