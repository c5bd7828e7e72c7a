"""A picture decoded behind its encoder: the file must hold just that picture, and what is wrong with it comes out."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from rushes_worker.media import encode
from rushes_worker.media.errors import InvalidClip
from rushes_worker.media.picture import Picture, PictureBehind, parameter_sets
from rushes_worker.media.validate import ClipFacts, validate_clip
from support.media import flat_frames, make_clip, moving_frames, tone

NUM_FRAMES = 24


def encoded(frames: np.ndarray, **options: str) -> tuple[bytes, list[av.Packet]]:
    """Parameter sets and packets with start codes, as an encoder hands them over."""
    context = av.CodecContext.create("libx264", "w")
    assert isinstance(context, av.VideoCodecContext)
    context.width, context.height, context.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
    context.time_base = Fraction(1, 24)
    context.flags |= av.codec.context.Flags.global_header
    tags = "colorprim=bt709:transfer=bt709:colormatrix=bt709:range=tv"
    context.options = {"preset": "superfast", "bf": "0", "x264-params": tags} | options
    packets = []
    for index, frame in enumerate(frames):
        yuv = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="yuv420p")
        yuv.pts, yuv.time_base = index, Fraction(1, 24)
        packets += context.encode(yuv)
    packets += context.encode(None)
    assert context.extradata is not None
    return context.extradata, packets


def decoded_from_file(path: Path) -> Picture:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert stream.time_base is not None
        picture = Picture(stream.codec_context.extradata or b"", width=64, height=64, time_base=stream.time_base)
        for packet in container.demux(stream):
            if packet.size:
                picture.add(packet)
    picture.finish()
    return picture


def validate(path: Path, decoded: Picture | None) -> ClipFacts:
    return validate_clip(path, width=64, height=64, num_frames=NUM_FRAMES, decoded=decoded)


def test_facts_are_those_of_the_file_decoded_again(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4")
    assert validate(path, decoded_from_file(path)) == validate(path, None)


@pytest.mark.parametrize("kind", ["moving", "flat"])
def test_units_are_the_same_behind_start_codes_and_lengths(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flat pictures make packets of a few bytes; a length from 256 to 511 looks like a start code."""
    seen: list[Picture] = []

    def keep(path: Path, *, decoded: Picture, **wanted: Any) -> ClipFacts:
        seen.append(decoded)
        return validate_clip(path, decoded=decoded, **wanted)

    monkeypatch.setattr(encode, "validate_clip", keep)
    frames = moving_frames(NUM_FRAMES) if kind == "moving" else flat_frames(NUM_FRAMES, (9, 90, 200))
    again = decoded_from_file(make_clip(tmp_path / "clip.mp4", frames))
    assert again.packets == seen[0].packets
    assert again.parameter_sets == seen[0].parameter_sets
    assert (again.num_frames, again.variance(), again.moves) == (NUM_FRAMES, seen[0].variance(), seen[0].moves)


def another_picture(picture: Picture) -> None:
    picture.packets[5] = picture.packets[6]


def a_packet_more(picture: Picture) -> None:
    picture.packets.append(picture.packets[-1])


def a_packet_fewer(picture: Picture) -> None:
    picture.packets.pop()


def other_sets(picture: Picture) -> None:
    picture.parameter_sets = parameter_sets(encoded(moving_frames(2), preset="slow")[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_picture, "packet 5 of the picture is not the one that was decoded"),
        (a_packet_more, "the number of packets of the picture must be 25, got 24"),
        (a_packet_fewer, "the picture must have 23 packets, the file has more"),
        (other_sets, "the parameter sets of the picture must be"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(
    change: Callable[[Picture], None], message: str, tmp_path: Path
) -> None:
    path = make_clip(tmp_path / "clip.mp4")
    picture = decoded_from_file(path)
    change(picture)
    with pytest.raises(InvalidClip, match=message):
        validate(path, picture)


def test_a_clip_of_other_frames_is_not_the_one_decoded(tmp_path: Path) -> None:
    first = make_clip(tmp_path / "first.mp4")
    second = make_clip(tmp_path / "second.mp4", moving_frames(NUM_FRAMES, seed=1), tone(NUM_FRAMES))
    with pytest.raises(InvalidClip, match="packet 0 of the picture is not the one that was decoded"):
        validate(second, decoded_from_file(first))


class TestBehind:
    def run(self, extradata: bytes, packets: list[av.Packet]) -> Picture:
        behind = PictureBehind(Picture(extradata, width=64, height=64, time_base=Fraction(1, 24)))
        try:
            for packet in packets:
                behind.add(packet)
            return behind.finish()
        finally:
            behind.close()

    def test_every_frame_is_looked_at(self) -> None:
        picture = self.run(*encoded(moving_frames(NUM_FRAMES)))
        assert (picture.num_frames, picture.moves) == (NUM_FRAMES, True)
        assert picture.variance() > 100

    def test_a_wrong_tag_comes_out_at_the_end(self) -> None:
        wrong = encoded(moving_frames(3), **{"x264-params": "colorprim=bt709:transfer=bt709:range=tv"})
        with pytest.raises(InvalidClip, match="the colour matrix of frame 0 must be tagged 1"):
            self.run(*wrong)

    def test_a_damaged_packet_comes_out_at_the_end(self) -> None:
        extradata, packets = encoded(moving_frames(NUM_FRAMES))
        damaged = av.Packet(bytes(packets[3])[:20])
        damaged.pts, damaged.dts, damaged.time_base = packets[3].pts, packets[3].dts, packets[3].time_base
        with pytest.raises(InvalidClip):
            self.run(extradata, [*packets[:3], damaged, *packets[4:]])


class TestParameterSets:
    def test_records_cut_short_are_refused(self) -> None:
        with pytest.raises(InvalidClip, match="no avcC record"):
            parameter_sets(b"\1\x64\0\x28\xff")
        with pytest.raises(InvalidClip, match="cut short"):
            parameter_sets(b"\1\x64\0\x28\xff\xe1\0\x19")

    def test_lengths_of_other_sizes_are_refused(self) -> None:
        with pytest.raises(InvalidClip, match="must be 4, got 2"):
            parameter_sets(b"\1\x64\0\x28\xfd\xe1\0\1\x67\1\0\1\x68")
