"""Other layouts than one replica of one rank, on the CPU: the ranks talk through gloo."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from rushes_worker.parallel import SequenceParallel
from support.api import API_KEY
from support.commands import RUSHES, clean_environment
from support.keeping_pipeline import FOLDER, KEEPING, kept_clip
from support.media import make_clip
from support.rendering import render_on_rank, request
from support.service import CALM, REQUEST, SMALL_CANVAS, Rendered, Service
from support.stack import SharedStack
from support.worker import eventually


def shown_workers(service: Service) -> list[str]:
    """The words of the one line that `rushes workers` shows."""
    command = [*RUSHES, "workers"]
    env = clean_environment() | {"RUSHES_URL": service.api.url, "RUSHES_KEY": API_KEY}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    titles, line = done.stdout.splitlines()
    assert titles.split()[:2] == ["NAME", "STATUS"]
    return line.split()


def test_two_ranks_render_the_clip_that_one_renders(stack: SharedStack, checkpoint: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    settings = stack.settings(
        checkpoint=checkpoint, api_key=API_KEY, scratch=tmp_path / "scratch", pipeline=KEEPING, provenance="off", **CALM
    )
    with Service(
        settings, tmp_path, layout="r1s2", worker_env={FOLDER: str(kept)}, api_modules=[SMALL_CANVAS]
    ) as service:
        (replica,) = service.jobs.replicas()
        assert (replica.layout, len(replica.detail["ranks"])) == ("r1s2", 2)
        name, status, layout, model, precision, *_ = shown_workers(service)
        assert (name, status, layout) == (replica.id.partition("#")[0], "ready", "r1s2")
        assert model.startswith("rushes/tiny-fasth3-8-step-demo@")
        assert precision == "float32"
        rendered = service.render(size="64x64")
    frames, samples = kept_clip(kept)

    # codecs blow the least difference up, so the clips are compared before they are encoded ...
    wanted = request(prompt=REQUEST["prompt"], seed=REQUEST["seed"], width=64, height=64)
    (single,) = render_on_rank(SequenceParallel.single(), checkpoint, [wanted])
    assert single.samples is not None
    assert np.abs(frames.astype(int) - single.clip).max() <= 1
    assert (frames != single.clip).mean() < 1e-2
    np.testing.assert_allclose(samples, single.samples, atol=1e-4)
    # ... and the file is what the encoder makes of exactly these frames in this order
    assert rendered.data == make_clip(tmp_path / "clip.mp4", frames, samples).read_bytes()


# the scripted pipeline shows two replicas at work in the usual run
@pytest.mark.long
def test_two_replicas_render_two_jobs_at_the_same_time(
    stack: SharedStack, checkpoint: Path, tmp_path: Path, reference: Rendered
) -> None:
    settings = stack.settings(checkpoint=checkpoint, api_key=API_KEY, scratch=tmp_path / "scratch")
    with Service(settings, tmp_path, layout="r2s1") as service:
        ids = [service.post(seed=seed)["id"] for seed in (1, 2)]
        busy = eventually(lambda: [one for one in service.jobs.replicas() if one.state == "busy"] or None)
        assert {replica.layout for replica in busy} == {"r2s1"}
        for video_id in ids:
            service.wait_completed(video_id)
        (first,), (second,) = (service.jobs.attempts(video_id) for video_id in ids)
        assert first.lease_owner != second.lease_owner
        assert max(first.started_at, second.started_at) < min(first.finished_at, second.finished_at)
        assert service.content(ids[0]) != service.content(ids[1])
