"""Segments: which frames they have, that they need no other, and that nobody sees how many were encoded at once."""

import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from rushes_core.clip import ADMISSIBLE_FRAMES, UNIT_FRAMES, units_of
from rushes_worker.media.encode import ClipEncoder
from rushes_worker.media.errors import InvalidClip, MediaError
from rushes_worker.media.picture import parameter_sets
from rushes_worker.media.segment import Segment, SegmentEncoder, plan_segments
from rushes_worker.media.segments import _Lane
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.media.times import Spans
from support.media import decode_rgb, grey_frames, make_clip, moving_frames, tone

NUM_FRAMES = 107


def settings_of(**changes: int) -> EncoderSettings:
    return EncoderSettings(**changes)  # pyright: ignore[reportArgumentType]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    # those of other tests may end meanwhile
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


class TestPlan:
    @pytest.mark.parametrize("interval", [1, 16, 17, 33, 34, 51, 240])
    @pytest.mark.parametrize("num_frames", [1, 21, 22, 24, 39, 56, *ADMISSIBLE_FRAMES])
    def test_it_covers_the_clip_in_whole_units(self, num_frames: int, interval: int) -> None:
        plan = plan_segments(num_frames, settings_of(keyframe_interval=interval))
        assert [frame for segment in plan for frame in segment] == list(range(num_frames))
        assert {segment.start for segment in plan} <= {unit.start for unit in units_of(num_frames)}
        assert plan[-1] == units_of(num_frames)[-1]
        assert all(len(segment) <= max(interval, UNIT_FRAMES) for segment in plan[:-1])

    def test_a_hardware_encoder_has_one_segment(self) -> None:
        assert plan_segments(124, EncoderSettings(encoder="h264_nvenc")) == [range(124)]


class TestFile:
    @pytest.mark.parametrize("interval", [17, 34, 51])
    def test_it_does_not_depend_on_how_many_are_encoded_at_once(self, tmp_path: Path, interval: int) -> None:
        frames = moving_frames(NUM_FRAMES) ^ np.random.default_rng(1).integers(0, 16, (NUM_FRAMES, 64, 64, 3), np.uint8)
        files = {
            make_clip(
                tmp_path / f"{encoders}.mp4",
                frames,
                settings=settings_of(keyframe_interval=interval, encoders=encoders),
            ).read_bytes()
            for encoders in (1, 2, 7)
        }
        assert len(files) == 1

    @pytest.mark.parametrize("sizes", [(1,) * NUM_FRAMES, (40, 0, 67), (17, 17, 17, 17, 17, 22)], ids=len)
    def test_it_does_not_depend_on_how_the_frames_come(self, tmp_path: Path, sizes: tuple[int, ...]) -> None:
        frames = moving_frames(NUM_FRAMES)
        whole = make_clip(tmp_path / "whole.mp4", frames)
        settings = settings_of(encoders=3)
        with ClipEncoder(
            tmp_path / "parts.mp4", width=64, height=64, num_frames=NUM_FRAMES, settings=settings
        ) as parts:
            for chunk in np.split(frames, np.cumsum(sizes)[:-1]):
                parts.add_frames(chunk)
            assert parts.finish(tone(NUM_FRAMES)).read_bytes() == whole.read_bytes()

    def test_packets_carry_their_place_and_there_is_one_set_of_parameters(self, tmp_path: Path) -> None:
        path = make_clip(tmp_path / "clip.mp4", moving_frames(NUM_FRAMES), settings=settings_of(keyframe_interval=34))
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            sets = parameter_sets(stream.codec_context.extradata or b"")
            packets = [packet for packet in container.demux(stream) if packet.size]
        assert [unit[0] & 31 for unit in sets] == [7, 8]
        assert all(packet.pts is not None and packet.pts == packet.dts for packet in packets)
        assert [packet.pts * packet.time_base for packet in packets] == [Fraction(i, 24) for i in range(NUM_FRAMES)]
        assert not {7, 8} & {kind for packet in packets for kind in unit_kinds(bytes(packet))}
        starts = {segment.start for segment in plan_segments(NUM_FRAMES, settings_of(keyframe_interval=34))}
        assert starts <= {number for number, packet in enumerate(packets) if packet.is_keyframe}

    def test_every_segment_decodes_without_the_others(self, tmp_path: Path) -> None:
        settings = settings_of(keyframe_interval=17)
        path = make_clip(tmp_path / "clip.mp4", moving_frames(NUM_FRAMES), settings=settings)
        whole = decode_rgb(path)
        for segment in plan_segments(NUM_FRAMES, settings):
            with av.open(str(path)) as container:
                stream = container.streams.video[0]
                assert stream.time_base is not None
                container.seek(round(Fraction(segment.start, 24) / stream.time_base), stream=stream)
                frame = next(container.decode(stream))
                assert frame.key_frame
                assert frame.time == pytest.approx(segment.start / 24)
                np.testing.assert_array_equal(frame.to_ndarray(format="gray"), to_gray(path, segment.start))
        assert len(whole) == NUM_FRAMES

    def test_a_picture_that_moves_from_one_segment_to_the_next_is_not_frozen(self, tmp_path: Path) -> None:
        frames = np.ascontiguousarray(np.broadcast_to(moving_frames(1), (56, 64, 64, 3)))
        frames[34:, 20:40, 20:40] = 255
        with ClipEncoder(tmp_path / "clip.mp4", width=64, height=64, num_frames=56) as clip:
            clip.add_frames(frames)
            clip.finish(tone(56))
            assert clip.facts is not None
            assert clip.facts.flaws == ()


class TestLane:
    def test_segment_is_told_as_finished_by_the_one_who_finished_it(self) -> None:
        frames = moving_frames(2)

        def make(first: int) -> SegmentEncoder:
            return SegmentEncoder(first, EncoderSettings(), width=64, height=64)

        lane, given_up = _Lane(range(2), make, Spans()), threading.Event()
        assert lane.put(frames[:1])
        assert not lane.work(given_up)
        assert lane.put(frames[1:])
        assert lane.work(given_up)
        assert lane.segment is not None
        # a thread that ran out of frames before may come to see the segment only now
        assert not lane.work(given_up)
        lane.close()


class TestLast:
    def encoded(self, preset: str, *, is_last: bool) -> Segment:
        encoder = SegmentEncoder(0, EncoderSettings(preset=preset), width=192, height=128, is_last=is_last)
        try:
            for frame in moving_frames(22, 192, 128):
                encoder.add(frame)
            return encoder.finish()
        finally:
            encoder.close()

    def test_it_is_encoded_in_more_of_a_hurry_under_the_same_parameter_sets(self) -> None:
        last, other = (self.encoded("veryfast", is_last=is_last).picture for is_last in (True, False))
        assert last.packets != other.packets
        assert last.parameter_sets == other.parameter_sets

    @pytest.mark.parametrize("preset", ["superfast", "faster", "medium"])
    def test_a_preset_of_ones_own_is_kept_to(self, preset: str) -> None:
        last, other = (self.encoded(preset, is_last=is_last).picture for is_last in (True, False))
        assert last.packets == other.packets

    def test_it_is_the_last_unit_of_the_clip_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[tuple[int, bool]] = []

        class Noted(SegmentEncoder):
            def __init__(self, first: int, *args: Any, is_last: bool, **rest: Any) -> None:
                seen.append((first, is_last))
                super().__init__(first, *args, is_last=is_last, **rest)

        monkeypatch.setattr("rushes_worker.media.encode.SegmentEncoder", Noted)
        make_clip(tmp_path / "clip.mp4", moving_frames(NUM_FRAMES))
        assert sorted(seen) == [(0, False), (51, False), (85, True)]


class Broken(SegmentEncoder):
    """Fails at one frame."""

    at = 40

    def add(self, frame: np.ndarray) -> None:
        if self._next == self.at:
            raise MediaError("out of order")
        super().add(frame)


class Foreign(SegmentEncoder):
    """The second segment is made by an encoder that is set up otherwise."""

    def __init__(self, first: int, settings: EncoderSettings, **rest: Any) -> None:
        super().__init__(first, EncoderSettings(preset="slow") if first else settings, **rest)


class Misplaced(SegmentEncoder):
    """The second segment says that it is another one."""

    def finish(self) -> Segment:
        segment = super().finish()
        if self._first:
            segment.picture._first += 1
        return segment


class TestFailure:
    def test_one_that_fails_is_told_at_once_and_ends_the_clip(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rushes_worker.media.encode.SegmentEncoder", Broken)
        told = threading.Event()
        with ClipEncoder(
            tmp_path / "clip.mp4",
            width=64,
            height=64,
            num_frames=124,
            settings=settings_of(encoders=2),
            on_failure=told.set,
        ) as clip:
            clip.add_frames(grey_frames(85))
            assert told.wait(30)
            with pytest.raises(MediaError, match="out of order"):
                clip.check()
            with pytest.raises(MediaError, match="out of order"):
                clip.add_frames(grey_frames(39))
        assert list(tmp_path.iterdir()) == []

    def test_one_that_fails_after_everything_was_added_comes_out_of_finish(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Broken, "at", 123)
        monkeypatch.setattr("rushes_worker.media.encode.SegmentEncoder", Broken)
        with pytest.raises(MediaError, match="out of order"):
            make_clip(tmp_path / "clip.mp4", grey_frames(124))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("encoder", "message"),
        [
            (Foreign, "the parameter sets of a segment must be"),
            (Misplaced, "the first frame of a segment must be 51, got 52"),
        ],
    )
    def test_one_that_does_not_fit_the_others_is_never_joined(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: type[SegmentEncoder], message: str
    ) -> None:
        monkeypatch.setattr("rushes_worker.media.encode.SegmentEncoder", encoder)
        with pytest.raises(InvalidClip, match=message):
            make_clip(tmp_path / "clip.mp4", moving_frames(90))
        assert list(tmp_path.iterdir()) == []


def unit_kinds(data: bytes) -> list[int]:
    """Kinds of the NAL units of a packet as a file holds it."""
    kinds, offset = [], 0
    while offset < len(data):
        kinds.append(data[offset + 4] & 31)
        offset += 4 + int.from_bytes(data[offset : offset + 4], "big")
    return kinds


def to_gray(path: Path, number: int) -> np.ndarray:
    with av.open(str(path)) as container:
        for index, frame in enumerate(container.decode(video=0)):
            if index == number:
                return frame.to_ndarray(format="gray")
    raise AssertionError(f"no frame {number}")
