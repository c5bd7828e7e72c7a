"""An MP4 whose index comes first, made of one whose index comes last, in memory.

FFmpeg's muxer can move the index itself, but reads and writes the whole file once more for that, and needs a file with
a name: PyAV leaves that open when its disk is full.
"""

from io import BytesIO

import numpy as np

from rushes_worker.media.errors import require
from rushes_worker.media.validate import top_level_boxes

_HOLDERS = frozenset({b"trak", b"mdia", b"minf", b"stbl"})
_OFFSETS = {b"stco": ">u4", b"co64": ">u8"}


def moov_first(data: memoryview) -> list[memoryview]:
    """The pieces of the same file with `moov` behind `ftyp`: everything else keeps its order.

    Raises:
        InvalidClip: `data` is no MP4, or too large for the width of its offsets.
    """
    boxes = list(top_level_boxes(BytesIO(data)))
    by_kind = {box.kind: data[box.offset : box.offset + box.size] for box in boxes}
    require(boxes[0].kind == "ftyp" and "moov" in by_kind, f"a muxer made {' '.join(box.kind for box in boxes)}")
    moov = bytearray(by_kind["moov"])
    _shift(moov, 8, len(moov), len(moov))
    others = [data[box.offset : box.offset + box.size] for box in boxes[1:] if box.kind != "moov"]
    return [by_kind["ftyp"], memoryview(moov), *others]


def _shift(moov: bytearray, start: int, end: int, by: int) -> None:
    """Add `by` to every offset of a chunk between `start` and `end`."""
    while start < end:
        size, kind = int.from_bytes(moov[start : start + 4], "big"), bytes(moov[start + 4 : start + 8])
        require(8 <= size <= end - start, f"the box {kind!r} in moov has the impossible size {size}")
        if kind in _HOLDERS:
            _shift(moov, start + 8, start + size, by)
        elif kind in _OFFSETS:
            count = int.from_bytes(moov[start + 12 : start + 16], "big")
            offsets = np.frombuffer(moov, _OFFSETS[kind], count, start + 16)
            most = int(offsets.max(initial=0)) + by
            require(most <= np.iinfo(offsets.dtype).max, f"an offset of {most} does not fit {kind!r}")
            offsets += by
        start += size
