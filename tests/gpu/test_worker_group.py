"""Rank groups on CUDA: devices found and dealt out, NCCL between ranks, and an end that leaves the devices usable."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from rushes_worker.commands import Advanced, AudioReady, Done, Failed, Refused, Stopped, UnitReady
from rushes_worker.devices import VISIBLE, find_devices
from rushes_worker.group import GroupLost, GroupPlan, RankGroup
from rushes_worker.layout import Layout
from rushes_worker.pipeline.base import RenderRequest
from support.processes import is_alive

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
REQUEST = RenderRequest("video_1", 1, "a wave breaks on a pier", 7, 384, 320, 107)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "wide"
    write_tiny_checkpoint(path, profile="wide")
    return path


@pytest.fixture
def group(checkpoint: Path, tmp_path: Path) -> Iterator[RankGroup]:
    group = start(checkpoint, tmp_path)
    yield group
    group.end("the test is over")


def start(checkpoint: Path, directory: Path, *, epoch: int = 1) -> RankGroup:
    devices = find_devices(Layout.parse("r1s2"), "cuda")
    plan = GroupPlan(
        sp=2,
        kind=devices.kind,
        visible=devices.visible,
        threads=4,
        pipeline="rushes_worker.pipeline.fasth3:FastH3Pipeline",
        checkpoint=checkpoint,
        start_timeout_seconds=120,
        stage_timeout_seconds=60,
        log_level="INFO",
        log_json=True,
    )
    group = RankGroup(plan, epoch=epoch, directory=directory)
    while not group.is_ready:
        group.wait(5)
    return group


def wait_for_good(group: RankGroup) -> None:
    while True:
        group.wait(5)


def render(group: RankGroup, directory: Path) -> tuple[dict[int, int], list[object]]:
    """Frames by unit, and how each rank ended."""
    group.render(REQUEST, directory)
    units: dict[int, int] = {}
    outcomes: list[object] = []
    sounds = 0
    while len(outcomes) < 2:
        for _, report in group.wait(5):
            if isinstance(report, UnitReady):
                units[report.unit] = report.num_frames
            sounds += isinstance(report, AudioReady)
            if isinstance(report, Done | Stopped | Refused | Failed):
                outcomes.append(report)
    group.relax()
    assert sounds == 1
    return units, outcomes


def test_two_devices_render_one_request_after_another(group: RankGroup, tmp_path: Path) -> None:
    for serial in (1, 2):
        units, outcomes = render(group, tmp_path)
        assert sorted(units) == list(range(6))
        assert sum(units.values()) == 107
        assert outcomes == [Done(serial)] * 2


def test_both_ranks_stop_at_the_same_boundary(group: RankGroup, tmp_path: Path) -> None:
    group.render(REQUEST, tmp_path)
    outcomes: list[object] = []
    while len(outcomes) < 2:
        for _, report in group.wait(5):
            if isinstance(report, Advanced) and report.completed_steps == 2:
                group.stop()
            if isinstance(report, Done | Stopped | Refused | Failed):
                outcomes.append(report)
    group.relax()
    assert outcomes == [Stopped(1)] * 2
    _, outcomes = render(group, tmp_path)
    assert outcomes == [Done(2)] * 2


def test_devices_serve_the_next_group_after_a_rank_was_killed(
    group: RankGroup, checkpoint: Path, tmp_path: Path
) -> None:
    group.render(REQUEST, tmp_path)
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(GroupLost, match=r"Rank 1 of the worker was killed by SIGKILL\."):
        wait_for_good(group)
    assert not any(is_alive(pid) for pid in group.pids)
    following = start(checkpoint, tmp_path, epoch=2)
    try:
        _, outcomes = render(following, tmp_path)
        assert outcomes == [Done(1)] * 2
    finally:
        following.end("the test is over")


def test_more_ranks_than_devices_are_refused() -> None:
    found = torch.cuda.device_count()
    wanted = Layout(replicas=64, sp=8)
    with pytest.raises(ValueError, match=f"needs 512 CUDA devices, found {found}"):
        find_devices(wanted, "cuda")


def test_device_can_be_named_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(1).uuid}"
    monkeypatch.setenv(VISIBLE, uuid)
    assert find_devices(Layout.parse("r1s1"), "auto").visible == (uuid,)
    with pytest.raises(ValueError, match=f"needs 2 CUDA devices, found 1 with {VISIBLE}={uuid}"):
        find_devices(Layout.parse("r1s2"), "auto")
