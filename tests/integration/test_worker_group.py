"""A rank group by itself: started, watched and ended as one, on the scripted pipeline."""

import multiprocessing.connection
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rushes_core.contract import InferenceContract, load_contract
from rushes_core.signals import ENDING
from rushes_worker.commands import (
    Advanced,
    Done,
    Failed,
    Idled,
    Loading,
    MemoryUsed,
    Outcome,
    Ready,
    Refused,
    Report,
    Stopped,
    UnitReady,
)
from rushes_worker.group import GroupLost, GroupNotLoaded, GroupPlan, GroupUnfit, RankGroup
from rushes_worker.local_ranks import LocalRanks, rank_environment
from rushes_worker.pipeline.base import RenderRequest
from support.changing_pipeline import CHANGING, NUM_STEPS
from support.checkpoints import edit_json, tiny_checkpoint
from support.processes import is_alive
from support.worker import NUM_FRAMES, SCRIPTED, SIZE, TESTS, eventually, first_boot, write_contract

StartGroup = Callable[..., RankGroup]


@pytest.fixture
def start_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartGroup]:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    groups: list[RankGroup] = []

    def start(
        sp: int = 1,
        *,
        start_seconds: float = 60,
        stage_seconds: float = 60,
        contract: InferenceContract | None = None,
        checkpoint: Path = tmp_path,
        pipeline: str = SCRIPTED,
    ) -> RankGroup:
        plan = GroupPlan(
            sp=sp,
            kind="cpu",
            visible=(),
            threads=1,
            pipeline=pipeline,
            checkpoint=checkpoint,
            contract=contract,
            start_timeout_seconds=start_seconds,
            stage_timeout_seconds=stage_seconds,
            log_level="INFO",
            log_json=True,
        )
        group = RankGroup(plan, epoch=len(groups) + 1, directory=tmp_path)
        groups.append(group)
        while not group.is_ready:
            group.wait(5)
        return group

    yield start
    for group in groups:
        group.end("the test is over")


def render(group: RankGroup, directory: Path, prompt: str) -> tuple[list[Report], dict[int, Outcome]]:
    """Everything that the ranks said of one render, and how it ended on each."""
    group.render(RenderRequest("video_1", 1, prompt, 7, SIZE, SIZE, NUM_FRAMES), directory)
    reports: list[Report] = []
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < group.size:
        for rank, report in group.wait(5):
            reports.append(report)
            if isinstance(report, Done | Stopped | Refused | Failed):
                outcomes[rank] = report
    group.relax()
    return reports, outcomes


def test_group_of_one_renders_one_request_after_another(start_group: StartGroup, tmp_path: Path) -> None:
    group = start_group()
    for serial in (1, 2):
        reports, outcomes = render(group, tmp_path, "a wave")
        units = [report for report in reports if isinstance(report, UnitReady)]
        assert [unit.unit for unit in units] == list(range(6))
        assert sum(unit.num_frames for unit in units) == NUM_FRAMES
        assert outcomes == {0: Done(serial)}


def test_errors_on_purpose_leave_the_ranks_as_they_are(start_group: StartGroup, tmp_path: Path) -> None:
    group = start_group()
    pids = group.pids
    _, outcomes = render(group, tmp_path, "[invalid]")
    assert outcomes == {0: Refused(1, "the prompt asks for a refusal")}
    _, outcomes = render(group, tmp_path, "[value error]")
    assert isinstance(outcomes[0], Failed)
    assert (outcomes[0].intact, outcomes[0].message) == (True, "The pipeline failed (ValueError).")
    assert "bad reference" in outcomes[0].traceback
    _, outcomes = render(group, tmp_path, "a wave")
    assert outcomes == {0: Done(3)}
    assert group.pids == pids


def test_bug_ends_its_rank_after_it_was_told(start_group: StartGroup, tmp_path: Path) -> None:
    group = start_group()
    _, outcomes = render(group, tmp_path, "[raise]")
    assert isinstance(outcomes[0], Failed)
    assert (outcomes[0].kind, outcomes[0].intact) == ("RuntimeError", False)


def test_stop_is_seen_between_steps(start_group: StartGroup, tmp_path: Path) -> None:
    group = start_group()
    group.stop()  # there is nothing to stop yet
    group.render(RenderRequest("video_1", 1, "[step 0.1]", 7, SIZE, SIZE, NUM_FRAMES), tmp_path)
    group.stop()
    outcomes: list[Report] = []
    while not outcomes:
        outcomes = [report for _, report in group.wait(5) if isinstance(report, Done | Stopped)]
    assert outcomes == [Stopped(1)]


def test_two_ranks_share_the_units_and_stop_together(start_group: StartGroup, tmp_path: Path) -> None:
    group = start_group(2)
    reports, outcomes = render(group, tmp_path, "a wave")
    assert sorted(report.unit for report in reports if isinstance(report, UnitReady)) == list(range(6))
    assert outcomes == {0: Done(1), 1: Done(1)}
    group.render(RenderRequest("video_1", 1, "[step 0.1]", 7, SIZE, SIZE, NUM_FRAMES), tmp_path)
    group.stop()
    stopped: dict[int, Report] = {}
    while len(stopped) < 2:
        stopped |= {rank: report for rank, report in group.wait(5) if isinstance(report, Done | Stopped)}
    assert stopped == {0: Stopped(2), 1: Stopped(2)}
    group.relax()

    # one dies: the other one is not left alone
    with pytest.raises(GroupLost, match=r"Rank 1 of the worker was killed by SIGKILL\."):
        render(group, tmp_path, "[die rank 1 at step 3]")
    assert group.ended
    assert not any(is_alive(pid) for pid in group.pids)


def request(prompt: str) -> RenderRequest:
    return RenderRequest("video_1", 1, prompt, 7, SIZE, SIZE, NUM_FRAMES)


def hear_until(group: RankGroup, *serials: int) -> list[tuple[int, Report]]:
    """Everything that is said until every rank has told how these renders ended, but for memory."""
    said: list[tuple[int, Report]] = []
    left = {(rank, serial) for rank in range(group.size) for serial in serials}
    while left:
        for rank, report in group.wait(5):
            if not isinstance(report, MemoryUsed):
                said.append((rank, report))
            if isinstance(report, Done | Stopped | Refused | Failed):
                left.discard((rank, report.serial))
    group.relax()
    return said


@pytest.mark.parametrize("sp", [1, 2])
def test_next_render_begins_before_the_last_frames_of_one_are_handed_over(
    start_group: StartGroup, tmp_path: Path, sp: int
) -> None:
    group = start_group(sp)
    first = group.render(request("[tail 600]"), tmp_path)
    second = group.render(request("a wave"), tmp_path, behind=first)
    # a device that takes ten minutes for its last work is not waited for: the next step is queued first
    said: list[Report] = []
    while not any(isinstance(report, Advanced) and report.serial == second for report in said):
        said += [report for rank, report in group.wait(5) if rank == 0]
    assert [report for report in said if isinstance(report, Done)] == []
    group.end("the test is over")


@pytest.mark.parametrize("sp", [1, 2])
def test_last_frames_are_handed_over_when_the_first_step_of_the_next_render_is_queued(
    start_group: StartGroup, tmp_path: Path, sp: int
) -> None:
    group = start_group(sp)
    first = group.render(request("[tail 0.2]"), tmp_path / ".")
    second = group.render(request("[step 0.01]"), tmp_path, behind=first)
    said = hear_until(group, first, second)
    for rank in range(sp):
        mine = [report for speaker, report in said if speaker == rank]
        ended = mine.index(Done(first))
        units = [place for place, report in enumerate(mine) if isinstance(report, UnitReady) and report.serial == first]
        assert sorted(units)[-1] < ended < mine.index(Done(second))
        assert any(isinstance(report, Idled) and report.serial == second for report in mine)
        if rank == 0:
            assert mine.index(Advanced(second, "denoising", 1)) < units[-1]
            assert ended < mine.index(Advanced(second, "denoising", 2))
    units_of = {
        serial: [r.unit for _, r in said if isinstance(r, UnitReady) and r.serial == serial] for serial in (1, 2)
    }
    assert {serial: sorted(units) for serial, units in units_of.items()} == {1: list(range(6)), 2: list(range(6))}


def test_render_that_was_said_behind_one_that_failed_is_void_until_it_is_said_again(
    start_group: StartGroup, tmp_path: Path
) -> None:
    group = start_group(2)
    for prompt in ("[value error]", "[invalid]"):
        first = group.render(request(prompt), tmp_path)
        void = group.render(request("a wave"), tmp_path, behind=first)
        hear_until(group, first)
        again = group.render(request("a wave"), tmp_path)
        said = hear_until(group, again)
        assert not [report for _, report in said if getattr(report, "serial", 0) == void]
        assert [report for _, report in said if isinstance(report, Done)] == [Done(again)] * 2


def test_render_that_was_said_behind_one_that_is_stopped_goes_on(start_group: StartGroup, tmp_path: Path) -> None:
    group = start_group(2)
    first = group.render(request("[step 0.2]"), tmp_path)
    second = group.render(request("a wave"), tmp_path, behind=first)
    group.stop(first)
    said = [report for _, report in hear_until(group, first, second)]
    assert said.count(Stopped(first)) == said.count(Done(second)) == 2


def test_render_goes_on_when_the_last_frames_of_the_one_before_were_bad(
    start_group: StartGroup, tmp_path: Path
) -> None:
    group = start_group(2)
    first = group.render(request("[tail 0.2] [late]"), tmp_path)
    second = group.render(request("a wave"), tmp_path, behind=first)
    said = [report for _, report in hear_until(group, first, second)]
    failed = [report for report in said if isinstance(report, Failed)]
    assert [(report.serial, report.intact, report.is_late) for report in failed] == [(first, True, True)] * 2
    assert said.count(Done(second)) == 2


def test_rank_of_another_epoch_does_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    env = rank_environment(kind="cpu", visible=(), threads=1, interface="lo")
    boot = replace(first_boot(tmp_path), sp=2, epoch=2, token="new")
    stale = LocalRanks([replace(boot, rank=1, epoch=1, token="old")], env=env)
    # it is where they meet before they are
    eventually(lambda: (tmp_path / "rendezvous").exists() and (tmp_path / "rendezvous").stat().st_size)
    new = LocalRanks([boot, replace(boot, rank=1)], env=env)
    try:
        ready: set[int] = set()
        while ready != {0, 1}:
            readable = multiprocessing.connection.wait(new.waitables, 5)
            ready |= {rank for rank, report in new.receive(readable) if isinstance(report, Ready)}
            assert not new.exits()
        said = [report for _, report in stale.receive(stale.waitables)]
        assert said
        assert all(isinstance(report, Loading) for report in said)
    finally:
        new.end()
        stale.end()


def test_silence_ends_the_group_and_shows_where_it_hung(
    start_group: StartGroup, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    group = start_group(stage_seconds=3)
    with pytest.raises(GroupLost, match="silent for 3 s of rendering"):
        render(group, tmp_path, "[hang at step 3]")
    assert not any(is_alive(pid) for pid in group.pids)
    assert "scripted_pipeline.py" in capfd.readouterr().err


def test_loading_has_a_deadline(start_group: StartGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRIPTED_LOAD_SECONDS", "60")
    with pytest.raises(GroupLost, match=r"silent for 0\.5 s of loading"):
        start_group(start_seconds=0.5)


def test_checkpoint_that_no_rank_can_load_is_refused(
    start_group: StartGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SCRIPTED_LOAD_ERROR", "a tensor is missing")
    with pytest.raises(GroupUnfit, match=f"{tmp_path}: a tensor is missing"):
        start_group()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rushes_kernels.nvrtc:KernelError", "NVRTC cannot compile rows.cu"),
        ("triton.errors:TritonError", "ptxas knows no such architecture"),
        ("builtins:RuntimeError", "CUDA error: no kernel image is available for execution on the device"),
        ("rushes_kernels.nvrtc:DriverError", "cuLaunchKernel failed: no kernel image is available for execution"),
        ("builtins:ImportError", "libcudart.so.13: cannot open shared object file"),
    ],
    ids=["kernel", "triton", "architecture", "driver", "library"],
)
def test_what_another_rank_would_come_upon_too_is_refused(
    start_group: StartGroup, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    monkeypatch.setenv("SCRIPTED_LOAD_ERROR", message)
    monkeypatch.setenv("SCRIPTED_LOAD_ERROR_OF", kind)
    with pytest.raises(GroupUnfit, match=f"^{kind.partition(':')[2]}: {message}$"):
        start_group(2)


@pytest.mark.parametrize(
    ("kind", "is_unreadable"),
    [
        ("rushes_kernels.nvrtc:DriverError", False),
        ("builtins:RuntimeError", False),
        ("rushes_core.errors:CheckpointUnreadable", True),
    ],
)
def test_what_another_rank_may_not_come_upon_loses_the_group_and_is_told(
    start_group: StartGroup, monkeypatch: pytest.MonkeyPatch, kind: str, is_unreadable: bool
) -> None:
    monkeypatch.setenv("SCRIPTED_LOAD_ERROR", "a call failed")
    monkeypatch.setenv("SCRIPTED_LOAD_ERROR_OF", kind)
    with pytest.raises(GroupNotLoaded, match="a call failed") as lost:
        start_group()
    assert lost.value.is_unreadable is is_unreadable


def test_group_does_not_load_another_checkpoint_than_the_worker_started_with(
    start_group: StartGroup, tmp_path: Path
) -> None:
    checkpoint = write_contract(tmp_path / "served")
    contract = load_contract(checkpoint)
    start_group(checkpoint=checkpoint, contract=contract).end("its ranks are to load again")
    edit_json(checkpoint / "fastvideo_inference.json", vsa_sparsity=0.8)
    with pytest.raises(GroupUnfit, match=f"RUSHES_CHECKPOINT: {checkpoint}: the contract is another one"):
        start_group(checkpoint=checkpoint, contract=contract)


def test_the_contract_that_was_compared_is_the_one_that_is_served(start_group: StartGroup, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    contract = load_contract(checkpoint)
    group = start_group(checkpoint=checkpoint, contract=contract, pipeline=CHANGING)
    assert load_contract(checkpoint).num_forwards == NUM_STEPS != contract.num_forwards
    reports, _ = render(group, tmp_path, "a wave")
    assert max(one.completed_steps for one in reports if isinstance(one, Advanced)) == contract.num_forwards


def test_ranks_leave_signals_to_their_parent_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    ranks = LocalRanks([first_boot(tmp_path)], env=rank_environment(kind="cpu", visible=(), threads=1, interface=None))
    try:
        (pid,) = ranks.pids
        for number in ENDING:
            os.kill(pid, number)
        said: list[Report] = []
        while not any(isinstance(report, Ready) for report in said):
            readable = multiprocessing.connection.wait(ranks.waitables, 5)
            said += [report for _, report in ranks.receive(readable)]
            assert not ranks.exits()
        # what it starts is not to inherit that they wait
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert int(status["SigBlk"], 16) & sum(1 << number - 1 for number in ENDING) == 0
    finally:
        ranks.end()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(ENDING)


def test_idle_rank_that_dies_is_noticed(start_group: StartGroup) -> None:
    group = start_group()
    os.kill(group.pids[0], signal.SIGKILL)
    with pytest.raises(GroupLost, match="Rank 0 of the worker was killed by SIGKILL"):
        group.wait(5)
