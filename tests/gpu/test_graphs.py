"""Work that is replayed from CUDA graphs, and the memory that it passes through, on tiny checkpoints."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from rushes_worker.pipeline.base import Cancelled, RenderRequest
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from rushes_worker.pipeline.graphs import Graphs, MemoryUse
from support.faulty_capture import add
from support.rendering import RecordingReporter, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CAPACITIES = "text-capacities=64,128"
LONG = "a robot dancing in the rain " * 4
DEVICE = torch.device("cuda:0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "wide"
    write_tiny_checkpoint(path, profile="wide")
    return path


def build(checkpoint: Path, *options: str) -> FastH3Pipeline:
    return FastH3Pipeline(checkpoint, device="cuda:0", options=[CAPACITIES, *options])


def render(pipeline: FastH3Pipeline, one: RenderRequest, *, cancel_at: int | None = None) -> RecordingReporter:
    reporter = RecordingReporter(cancel_at=cancel_at)
    rest = pipeline.render(one, reporter)
    assert rest is not None
    rest.hand_over()
    return reporter


def same(a: RecordingReporter, b: RecordingReporter) -> bool:
    return np.array_equal(a.clip, b.clip) and np.array_equal(a.samples, b.samples)


class TestReplay:
    def test_equals_eager_work_bit_for_bit(self, checkpoint: Path) -> None:
        pipeline = build(checkpoint)
        one = request(width=384, height=320)
        pipeline._graphs._max_bytes = 0
        eager = render(pipeline, one)
        assert pipeline._graphs.num_graphs == 0
        pipeline._graphs._max_bytes = 1 << 30
        first, replayed = render(pipeline, one), render(pipeline, one)
        assert pipeline._graphs.num_graphs == 7
        assert same(first, eager)
        assert same(replayed, eager)
        assert eager.clip.std() > 10

    def test_serves_every_prompt_that_the_capacity_holds(self, checkpoint: Path) -> None:
        pipeline, eager = build(checkpoint), build(checkpoint)
        eager._graphs._max_bytes = 0
        for prompt in ("x", "a robot", "x"):
            render(pipeline, request(prompt=prompt, width=64, height=96))
        graphs = pipeline._graphs.num_graphs
        for prompt in ("a boat at dusk", "y", "x" * 64):
            one = request(prompt=prompt, width=64, height=96)
            assert same(render(pipeline, one), render(eager, one))
        assert pipeline._graphs.num_graphs == graphs

    def test_is_there_before_the_first_job(self, checkpoint: Path) -> None:
        pipeline = build(checkpoint, "capture=480x480x107x64")
        graphs = pipeline._graphs.num_graphs
        assert graphs == 7
        before = MemoryUse.now(DEVICE)
        first = render(pipeline, request(width=480, height=480))
        used = MemoryUse.now(DEVICE)
        assert (used.allocations, used.segments) == (before.allocations, before.segments)
        assert pipeline._graphs.num_graphs == graphs
        assert same(first, render(build(checkpoint), request(width=480, height=480)))

    def test_goes_on_after_a_job_was_cancelled(self, checkpoint: Path) -> None:
        pipeline = build(checkpoint)
        one = request(width=64, height=96)
        expected = render(pipeline, one)
        for boundary in (0, 2, 5, 10):
            with pytest.raises(Cancelled):
                render(pipeline, one, cancel_at=boundary)
            assert same(render(pipeline, one), expected)


class TestMemory:
    def test_fifty_jobs_of_mixed_shapes_allocate_nothing(self, checkpoint: Path) -> None:
        pipeline = build(checkpoint)
        sizes = [(64, 96), (96, 64), (128, 128), (384, 320)]
        shapes = [
            request(prompt=prompt, width=width, height=height, num_frames=num_frames, seed=seed)
            for seed, ((width, height), prompt, num_frames) in enumerate(
                itertools.product(sizes, ("x", LONG), (107, 124))
            )
        ]
        expected = [render(pipeline, one) for one in shapes]
        for one in shapes:
            render(pipeline, one)
        before = MemoryUse.now(DEVICE)
        order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).tolist()
        for index in order:
            shape = index % len(shapes)
            assert same(render(pipeline, shapes[shape]), expected[shape])
        assert MemoryUse.now(DEVICE) == before

    def test_is_bounded_for_graphs(self, checkpoint: Path) -> None:
        pipeline = build(checkpoint)
        for size in (64, 96):
            for _ in range(2):
                expected = render(pipeline, request(width=size, height=64))
        num_bytes = pipeline._graphs.num_bytes
        assert num_bytes > 0
        pipeline._graphs._max_bytes = num_bytes // 2
        for size in (128, 64, 96):
            for _ in range(2):
                last = render(pipeline, request(width=size, height=64))
            assert pipeline._graphs.num_bytes <= num_bytes // 2
        assert same(last, expected)

    def test_is_all_there_again_after_the_low_memory_plan(self, checkpoint: Path) -> None:
        pipeline = build(checkpoint)
        one = request(width=64, height=96)
        render(pipeline, one)
        # of what a clip does several times
        captured_at_first = pipeline._graphs.num_graphs
        expected = render(pipeline, one)
        assert 0 < captured_at_first < pipeline._graphs.num_graphs == 7
        reserved = MemoryUse.now(DEVICE).reserved_bytes
        low = render(pipeline, request(width=64, height=96, low_memory=True))
        assert pipeline._graphs.num_graphs == 0
        assert low.clip.shape == expected.clip.shape
        assert MemoryUse.now(DEVICE).reserved_bytes < reserved
        assert same(render(pipeline, one), expected)
        # what ran by that plan has not run as it is captured
        assert pipeline._graphs.num_graphs == captured_at_first
        assert MemoryUse.now(DEVICE).reserved_bytes >= pipeline._graphs._reserved_bytes > 0
        assert same(render(pipeline, one), expected)
        assert pipeline._graphs.num_graphs == 7


class TestFailure:
    @pytest.mark.parametrize("fault", ["wait", "memory", "error"])
    def test_of_a_capture_leaves_the_work_as_it_is(self, fault: str) -> None:
        # what torch holds of a capture that broke off stays with its process
        code = f"from support.faulty_capture import run_after; run_after({fault!r})"
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})

    def test_of_the_keeper_of_the_pool_is_told_as_such(self) -> None:
        code = "from support.faulty_capture import run_without_keeper; run_without_keeper()"
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})

    def test_to_leave_nothing_behind_costs_the_graphs(self) -> None:
        torch.cuda.set_stream(torch.cuda.Stream(DEVICE))
        graphs = Graphs(DEVICE, max_bytes=1 << 30)
        x = torch.zeros(1 << 20, device=DEVICE)
        kept: list[torch.Tensor] = []
        for _ in range(2):
            graphs.run("one", lambda: add(x, 1.0))
        assert graphs.num_graphs == 1
        graphs.run("keeps", lambda: kept.append(torch.full((1 << 20,), 7.0, device=DEVICE)))
        assert graphs.num_graphs == 0
        for _ in range(2):
            graphs.run("one", lambda: add(x, 1.0))
        assert graphs.num_graphs == 1
        assert kept[0].unique().tolist() == [7.0]
        assert x.unique().tolist() == [4.0]

    def test_to_keep_memory_is_not_seen_in_what_work_frees_of_others(self) -> None:
        torch.cuda.set_stream(torch.cuda.Stream(DEVICE))
        graphs = Graphs(DEVICE, max_bytes=1 << 30)
        x = torch.zeros(1 << 20, device=DEVICE)
        for _ in range(2):
            graphs.run("one", lambda: add(x, 1.0))
        others = [torch.zeros(1 << 20, device=DEVICE)]
        graphs.run("frees", others.clear)
        assert graphs.num_graphs == 1
