"""The sound of a clip, decoded packet by packet: every sample is counted, and what was decoded is known again."""

from fractions import Fraction
from math import isfinite, sqrt

import av
import numpy as np
from av.error import FFmpegError
from rushes_core.clip import AUDIO_SAMPLE_RATE

from rushes_worker.media.errors import InvalidClip, require

SAMPLE = Fraction(1, AUDIO_SAMPLE_RATE)
"""Seconds of a tick of the sound."""


class Sound:
    """Checks decoded sound as it comes and adds up its power.

    Args:
        extradata: what an AAC encoder or a file says of the stream.
    """

    def __init__(self, extradata: bytes) -> None:
        self.extradata = extradata
        self.num_samples = 0
        self.packets: list[tuple[int | None, bytes]] = []
        """When each is to be heard, in ticks of `SAMPLE`, and what it holds."""
        self._power = 0.0

    def add(self, packet: av.Packet, frames: list[av.AudioFrame]) -> None:
        """Take the next packet and what it was decoded to."""
        if packet.size:
            self.packets.append((packet.pts, bytes(packet)))
        for frame in frames:
            if self.num_samples == 0:
                require(frame.pts == 0, f"the first sound must be heard at 0, got {frame.pts} x {frame.time_base} s")
            samples = frame.to_ndarray().astype(np.float64).ravel()
            self.num_samples += frame.samples
            self._power += float(np.einsum("i,i->", samples, samples))

    def rms(self) -> float:
        """Root mean square over both channels; 0 without any sound."""
        rms = sqrt(self._power / (2 * self.num_samples)) if self.num_samples else 0.0
        require(isfinite(rms), "the sound holds samples that are not finite")
        return rms


def decoded_sound(packets: list[av.Packet], extradata: bytes) -> Sound:
    """The sound of what an AAC encoder made, as it will be heard: without what comes before 0.

    Raises:
        InvalidClip: it cannot be decoded, or does not begin at 0.
    """
    decoder = av.CodecContext.create("aac", "r")
    assert isinstance(decoder, av.AudioCodecContext)
    decoder.extradata = extradata
    sound = Sound(extradata)
    try:
        for packet in packets:
            # a packet before 0 only prepares the decoder: the edit list of a file leaves it out
            frames = decoder.decode(packet)
            sound.add(packet, [frame for frame in frames if frame.pts is None or frame.pts >= 0])
    except FFmpegError as error:
        raise InvalidClip(f"the sound cannot be decoded: {error}") from error
    return sound
