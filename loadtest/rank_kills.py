"""Kill one rank of a group at every stage, and time how long the next clip takes from there.

Ranks and their group are a worker's own; the clip ends where its last frame and its sound are handed over. One line of
JSON a stage: seconds until no process of the group is left, until the next group could render, and until its clip.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rushes_core.clip import Clip
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from rushes_worker.commands import Advanced, AudioReady, Done, Failed, Refused, Report, Stopped, UnitReady
from rushes_worker.devices import find_devices
from rushes_worker.group import GroupLost, GroupPlan, RankGroup
from rushes_worker.layout import Layout
from rushes_worker.pipeline.base import RenderRequest

PIPELINE = "rushes_worker.pipeline.fasth3:FastH3Pipeline"
STAGES: dict[str, Callable[[Report], bool]] = {
    "encode": lambda report: isinstance(report, Advanced) and report.phase == "encoding",
    "step 3": lambda report: isinstance(report, Advanced) and report.completed_steps == 3,
    "decode": lambda report: isinstance(report, UnitReady),
}
LOAD_SECONDS = 0.5
"""Into the load."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sp", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--synthetic", action="store_true", help="weights of the released sizes, drawn on the GPU")
    parser.add_argument("--size", default="64x64", metavar="WxH")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--stages", nargs="+", default=["load", *STAGES], choices=["load", *STAGES])
    arguments = parser.parse_args()
    width, height = map(int, arguments.size.split("x"))
    request = RenderRequest(
        "kill", 1, "a wave breaks on a pier", 7, width, height, Clip.for_seconds(arguments.seconds).num_frames
    )
    devices = find_devices(Layout(1, arguments.sp), arguments.device)
    with tempfile.TemporaryDirectory(prefix="rushes-kills-") as name:
        folder = Path(name)
        write_tiny_checkpoint(folder / "checkpoint", profile="wide")
        plan = GroupPlan(
            sp=arguments.sp,
            kind=devices.kind,
            visible=devices.visible,
            threads=1,
            pipeline=PIPELINE,
            checkpoint=folder / "checkpoint",
            start_timeout_seconds=300,
            stage_timeout_seconds=300,
            log_level="WARNING",
            log_json=True,
            options=("weights=synthetic:0",) if arguments.synthetic else (),
        )
        for epoch, stage in enumerate(arguments.stages):
            print(json.dumps(_kill(plan, 2 * epoch + 1, stage, request, folder)), flush=True)


def _kill(plan: GroupPlan, epoch: int, stage: str, request: RenderRequest, folder: Path) -> dict[str, object]:
    with _group(plan, epoch, folder) as group:
        victim = group.pids[-1]
        if stage == "load":
            time.sleep(LOAD_SECONDS)
        else:
            _until_ready(group)
            _render(group, request, folder, until=STAGES[stage])
        os.kill(victim, signal.SIGKILL)
        killed = time.perf_counter()
        try:
            while True:
                group.wait(5)
        except GroupLost:
            ended = time.perf_counter()
        left = [pid for pid in group.pids if Path(f"/proc/{pid}").exists()]
    with _group(plan, epoch + 1, folder) as group:
        _until_ready(group)
        ready = time.perf_counter()
        _render(group, request, folder)
        done = time.perf_counter()
    return {
        "killed_at": stage,
        "ended_seconds": round(ended - killed, 2),
        "processes_left": len(left),
        "ready_seconds": round(ready - killed, 2),
        "next_clip_seconds": round(done - killed, 2),
    }


@contextmanager
def _group(plan: GroupPlan, epoch: int, folder: Path) -> Iterator[RankGroup]:
    group = RankGroup(plan, epoch=epoch, directory=folder)
    try:
        yield group
    finally:
        group.end("measured")


def _until_ready(group: RankGroup) -> None:
    while not group.is_ready:
        group.wait(5)
    group.relax()


def _render(
    group: RankGroup, request: RenderRequest, folder: Path, *, until: Callable[[Report], bool] = lambda report: False
) -> None:
    """Until all ranks are done, or one says what is waited for.

    Raises:
        RuntimeError: a rank did not render it.
    """
    group.render(request, folder)
    done, units, sounds = 0, 0, 0
    while done < group.size:
        for rank, report in group.wait(5):
            if until(report):
                return
            units += isinstance(report, UnitReady)
            sounds += isinstance(report, AudioReady)
            if isinstance(report, Failed | Refused | Stopped):
                raise RuntimeError(f"rank {rank}: {report}")
            done += isinstance(report, Done)
    if (units, sounds) != (Clip(request.num_frames).num_units, 1):
        raise RuntimeError(f"{units} units and {sounds} soundtracks were handed over")
    group.relax()


if __name__ == "__main__":
    main()
