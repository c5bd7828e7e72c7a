"""The index comes first, and nothing else of the file changes."""

import struct
from pathlib import Path

import av
import numpy as np
import pytest
from rushes_worker.media.errors import InvalidClip
from rushes_worker.media.fast_start import moov_first
from support.media import box_order, decode_rgb, moving_frames, mux, tone


def packets(path: Path) -> list[tuple[int, int | None, bytes]]:
    with av.open(str(path)) as container:
        return [(packet.stream.index, packet.pts, bytes(packet)) for packet in container.demux() if packet.size]


def test_it_holds_the_same_packets_at_their_new_places(tmp_path: Path) -> None:
    slow = mux(tmp_path / "slow.mp4", moving_frames(60), tone(60), faststart=False)
    fast = tmp_path / "fast.mp4"
    fast.write_bytes(b"".join(moov_first(memoryview(slow.read_bytes()))))
    assert box_order(slow.read_bytes()) == ["ftyp", "free", "mdat", "moov"]
    assert box_order(fast.read_bytes()) == ["ftyp", "moov", "free", "mdat"]
    assert fast.stat().st_size == slow.stat().st_size
    assert packets(fast) == packets(slow)
    np.testing.assert_array_equal(decode_rgb(fast), decode_rgb(slow))


def test_it_is_what_the_muxer_itself_would_write(tmp_path: Path) -> None:
    slow = mux(tmp_path / "slow.mp4", moving_frames(60), tone(60), faststart=False)
    fast = mux(tmp_path / "fast.mp4", moving_frames(60), tone(60), faststart=True)
    assert b"".join(moov_first(memoryview(slow.read_bytes()))) == fast.read_bytes()


@pytest.mark.parametrize(("kind", "form"), [(b"stco", ">I"), (b"co64", ">Q")])
def test_offsets_of_either_width_are_moved(kind: bytes, form: str) -> None:
    table = struct.pack(f">I4sII{2 * form[1]}", 16 + 2 * struct.calcsize(form), kind, 0, 2, 40, 50)
    for holder in (b"stbl", b"minf", b"mdia", b"trak", b"moov"):
        table = struct.pack(">I4s", 8 + len(table), holder) + table
    data = struct.pack(">I4s", 8, b"ftyp") + struct.pack(">I4s", 8, b"mdat") + table
    _, moov, _ = moov_first(memoryview(data))
    assert struct.unpack(f">{2 * form[1]}", moov[-2 * struct.calcsize(form) :]) == (40 + len(table), 50 + len(table))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([(b"mdat", b""), (b"moov", b"")], "a muxer made mdat moov"),
        ([(b"ftyp", b""), (b"mdat", b"")], "a muxer made ftyp mdat"),
        ([(b"ftyp", b""), (b"moov", struct.pack(">I4s", 99, b"trak"))], "impossible size 99"),
        ([(b"ftyp", b""), (b"moov", struct.pack(">I4sIII", 20, b"stco", 0, 1, 2**32 - 9))], "does not fit b'stco'"),
    ],
)
def test_what_cannot_be_moved_is_refused(boxes: list[tuple[bytes, bytes]], message: str) -> None:
    data = b"".join(struct.pack(">I4s", 8 + len(body), kind) + body for kind, body in boxes)
    with pytest.raises(InvalidClip, match=message):
        moov_first(memoryview(data))
