"""A clip whose ranks convert their frames themselves, as those on GPUs do, and the one that swscale converts."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from rushes_core.variants import THUMBNAIL
from rushes_worker.parallel import SequenceParallel
from support.api import API_KEY
from support.keeping_pipeline import FOLDER, KEEPING, kept_clip
from support.media import decode_rgb, make_clip
from support.rendering import render_on_rank, request
from support.service import CALM, REQUEST, SMALL_CANVAS, Service
from support.stack import SharedStack


def test_ranks_that_hand_over_420_make_the_clip_that_rgb_makes(
    stack: SharedStack, checkpoint: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    settings = stack.settings(
        checkpoint=checkpoint,
        api_key=API_KEY,
        scratch=tmp_path / "scratch",
        pipeline=KEEPING,
        pipeline_options="pixels=yuv420p",
        provenance="off",
        **CALM,
    )
    with Service(settings, tmp_path, worker_env={FOLDER: str(kept)}, api_modules=[SMALL_CANVAS]) as service:
        rendered = service.render(size="64x64")
        url = f"/v1/videos/{rendered.id}/content?variant={THUMBNAIL.name}"
        poster = service.http.get(url).raise_for_status().content
    frames, samples = kept_clip(kept)

    # the media process encodes what the ranks handed over as it is
    assert frames.shape[1:] == (64 * 3 // 2, 64)
    assert rendered.data == make_clip(tmp_path / "made.mp4", frames, samples).read_bytes()
    with Image.open(io.BytesIO(poster)) as image:
        assert image.size == (64, 64)

    # swscale makes the same picture of what a rank hands over as RGB
    wanted = request(prompt=REQUEST["prompt"], seed=REQUEST["seed"], width=64, height=64)
    (rgb,) = render_on_rank(SequenceParallel.single(), checkpoint, [wanted])
    theirs_path, ours_path = make_clip(tmp_path / "rgb.mp4", rgb.clip, samples), tmp_path / "yuv.mp4"
    ours_path.write_bytes(rendered.data)
    ours, theirs = decode_rgb(ours_path), decode_rgb(theirs_path)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours.mean((0, 1, 2)), theirs.mean((0, 1, 2)), atol=0.5)
    assert 10 * np.log10(255**2 / np.square(ours - theirs).mean()) > 35
