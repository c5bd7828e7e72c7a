"""Ranks whose device has no memory left: what they report, and that those that go on have all of it again."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from rushes_worker.commands import Done, Failed
from rushes_worker.devices import find_devices
from rushes_worker.group import GroupLost, GroupPlan, RankGroup
from rushes_worker.layout import Layout
from rushes_worker.pipeline.base import RenderRequest
from support.hungry_pipeline import HUNGRY

TESTS = Path(__file__).parents[1]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_two = [pytest.mark.multigpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(params=[1, pytest.param(2, marks=needs_two)])
def group(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    monkeypatch.syspath_prepend(TESTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, map(os.path.abspath, sys.path))))
    with ExitStack() as running:
        group = start(request.param, tmp_path)
        running.callback(group.end, "the test is over")
        yield group


def start(sp: int, directory: Path) -> RankGroup:
    layout = Layout.parse(f"r1s{sp}")
    devices = find_devices(layout, "cuda")
    plan = GroupPlan(
        sp=sp,
        kind=devices.kind,
        visible=devices.of_replica(0, layout),
        threads=4,
        pipeline=HUNGRY,
        checkpoint=directory,
        start_timeout_seconds=120,
        stage_timeout_seconds=60,
        log_level="INFO",
        log_json=True,
    )
    group = RankGroup(plan, epoch=1, directory=directory)
    while not group.is_ready:
        group.wait(5)
    return group


def render(group: RankGroup, directory: Path, prompt: str) -> list[Done | Failed]:
    """How each rank ended."""
    group.render(RenderRequest("video_1", 1, prompt, 7, 64, 64, 107), directory)
    outcomes: list[Done | Failed] = []
    while len(outcomes) < group.size:
        for _, report in group.wait(5):
            if isinstance(report, Done | Failed):
                outcomes.append(report)
                group.expect(10, "waiting for the other ranks")
    group.relax()
    return outcomes


def test_group_whose_ranks_all_ran_out_of_memory_goes_on_with_all_of_it(group: RankGroup, tmp_path: Path) -> None:
    pids = group.pids
    for _ in range(2):
        for outcome in render(group, tmp_path, "[fill]"):
            assert isinstance(outcome, Failed)
            assert (outcome.code, outcome.stage, outcome.intact) == ("out_of_memory", "denoising", True)
            assert outcome.kind == "OutOfMemoryError"
        assert all(isinstance(outcome, Done) for outcome in render(group, tmp_path, "a wave"))
    assert group.pids == pids


@pytest.mark.parametrize("group", [pytest.param(2, marks=needs_two)], indirect=True)
def test_rank_that_ran_out_of_memory_alone_leaves_the_others_hanging(group: RankGroup, tmp_path: Path) -> None:
    with pytest.raises(GroupLost, match="waiting for the other ranks"):
        render(group, tmp_path, "[fill rank 1]")
    assert group.ended
