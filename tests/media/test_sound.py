"""A soundtrack decoded as soon as it is encoded: the file must hold just that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from rushes_worker.media import encode
from rushes_worker.media.errors import InvalidClip
from rushes_worker.media.sound import Sound, decoded_sound
from rushes_worker.media.validate import ClipFacts, validate_clip
from support.media import decode_audio, make_clip, moving_frames, num_samples, tone

NUM_FRAMES = 24


def clip_and_sound(path: Path, monkeypatch: pytest.MonkeyPatch, audio: np.ndarray | None = None) -> Sound:
    """What was heard of a clip while it was made."""
    seen: list[Sound] = []

    def keep(file: Path, *, heard: Sound, **wanted: Any) -> ClipFacts:
        seen.append(heard)
        return validate_clip(file, heard=heard, **wanted)

    with monkeypatch.context() as patch:
        patch.setattr(encode, "validate_clip", keep)
        make_clip(path, moving_frames(NUM_FRAMES), tone(NUM_FRAMES) if audio is None else audio)
    return seen[0]


def validate(path: Path, heard: Sound | None) -> ClipFacts:
    return validate_clip(path, width=64, height=64, num_frames=NUM_FRAMES, heard=heard)


@pytest.mark.parametrize("amplitude", [0.0, 0.3])
def test_what_was_heard_is_what_the_file_sounds_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amplitude: float
) -> None:
    path = tmp_path / "clip.mp4"
    noise = np.random.default_rng(0).uniform(-amplitude, amplitude, (2, num_samples(NUM_FRAMES)))
    heard = clip_and_sound(path, monkeypatch, noise.astype(np.float32))
    # the last packet of AAC is filled up with silence, which the file's length leaves out
    assert heard.num_samples >= decode_audio(path).shape[1] >= num_samples(NUM_FRAMES)
    assert validate(path, heard) == validate(path, None)


def other_sound(sound: Sound) -> None:
    sound.packets[5] = (sound.packets[5][0], sound.packets[6][1])


def later(sound: Sound) -> None:
    time, data = sound.packets[5]
    assert time is not None
    sound.packets[5] = (time + 1, data)


def a_packet_more(sound: Sound) -> None:
    sound.packets.append(sound.packets[-1])


def a_packet_fewer(sound: Sound) -> None:
    sound.packets.pop()


def mono(sound: Sound) -> None:
    sound.extradata = bytes([sound.extradata[0], 0x88])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_sound, "packet 5 of the sound is not the one that was decoded"),
        (later, "packet 5 of the sound must be due at 4097 x 1/32000 s, got 4096"),
        (a_packet_more, "the number of packets of the sound must be 34, got 33"),
        (a_packet_fewer, "the sound must have 32 packets, the file has more"),
        (mono, "the configuration of the sound must be"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(
    change: Callable[[Sound], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "clip.mp4"
    heard = clip_and_sound(path, monkeypatch)
    change(heard)
    with pytest.raises(InvalidClip, match=message):
        validate(path, heard)


def test_sound_that_cannot_be_decoded_is_refused() -> None:
    packet = av.Packet(bytes(range(64)))
    packet.pts = packet.dts = 0
    with pytest.raises(InvalidClip, match="the sound cannot be decoded"):
        decoded_sound([packet], b"\x12\x90\x56\xe5\x00")
