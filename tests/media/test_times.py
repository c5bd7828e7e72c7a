"""When what was at work on a clip."""

from pathlib import Path

import numpy as np
from rushes_worker.media.process import ClipSpec, MediaProcess
from rushes_worker.media.times import Span, timeline
from support.media import moving_frames, tone, write_units

SIZES = [17, 17, 22]


def test_a_clip_tells_of_each_unit_the_sound_and_the_file(tmp_path: Path) -> None:
    paths = write_units(tmp_path, moving_frames(56), SIZES)
    np.save(tmp_path / "sound.npy", tone(56))
    with MediaProcess() as media:
        media.start_clip(ClipSpec(tmp_path / "clip.mp4", 64, 64, 56))
        media.set_audio(tmp_path / "sound.npy")
        for index in (0, 2, 1):
            media.add_unit(index, paths[index], SIZES[index])
        spans = {span.what: span for span in media.finish(timeout=60).spans}
    assert set(spans) == {
        "unit 0 came",
        "unit 1 came",
        "unit 2 came",
        "frames 0-16",
        "frames 17-33",
        "frames 34-55",
        "sound",
        "file",
        "check",
        "by-products",
    }
    assert spans["unit 2 came"].began < spans["unit 1 came"].began <= spans["frames 17-33"].began
    assert all(span.ended <= spans["file"].began for what, span in spans.items() if what.startswith("frames"))
    assert spans["file"].ended <= spans["check"].began


def test_a_timeline_counts_from_the_last_unit() -> None:
    spans = [Span("check", 5.2, 5.25), Span("unit 0 came", 4.0, 4.0), Span("unit 1 came", 5.0, 5.0)]
    assert timeline(spans).splitlines()[2:] == [
        "| unit 0 came | -1000 | -1000 | 0 |",
        "| unit 1 came | 0 | 0 | 0 |",
        "| check | 200 | 250 | 50 |",
    ]
