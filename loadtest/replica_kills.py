"""One rank of the first replica killed at a stage of its job, or of its start."""

import os
import signal
import time
from collections.abc import Callable, Collection
from typing import Any

from rushes_core.errors import RushesError
from rushes_core.models import Job, Replica
from rushes_core.states import JobState, Phase
from rushes_worker.layout import Layout
from worker_run import Record, Shape, WorkerRun, gpu_used_bytes, present, shared_segments

STAGES = ("load", "capture", "encode", "step-3", "decode", "mux")
_START_STAGES = {"load": "loading ", "capture": "capturing"}
_PHASES = list(Phase)
_MEMORY_SECONDS = 1.5
"""How long the devices' memory is looked at after the group is gone, while the next one starts."""


class Kills:
    """Kills rank after rank; every kill waits for whole and idle replicas before and after."""

    def __init__(self, run: WorkerRun, layout: Layout, shape: Shape, *, seconds: float) -> None:
        self._run = run
        self._layout = layout
        self._shape = shape
        self._seconds = seconds
        self._turn = 0

    def kill_at(self, stage: str) -> dict[str, Any]:
        """What became of it, in seconds since the kill."""
        self._settle()
        before = self._idle()
        segments, gpus = shared_segments(), gpu_used_bytes()
        kill = self._kill_start if stage in _START_STAGES else self._kill_job
        figures = kill(stage, before)
        after = self._idle()
        expected = {pid for one in after for pid in one.detail["ranks"]}
        ranks = {pid for pid, role in self._run.processes().items() if role == "rank"}
        figures |= {
            "others_undisturbed": figures.pop("others_done") and _same_ranks(before[1:], after[1:]),
            "ranks_left": len(ranks - expected),
            "segments_left": sorted(shared_segments() - segments),
        }
        if gpus:
            figures |= {"gpu_bytes_before": gpus, "gpu_bytes_after": gpu_used_bytes()}
        return {"stage": stage, "layout": str(self._layout), **figures}

    def _settle(self) -> None:
        """Clips of all replicas and of the first one at least, whose start is then put off for no failure before it."""
        ids, _, _ = self._give_work(self._idle()[0])
        self._finish(ids)

    def _give_work(self, victim: Replica) -> tuple[list[str], str, int]:
        """A job for each replica: all of them, the one that `victim` has started, and how many records were before."""
        while (given := self._offer_work(victim)) is None:
            pass
        return given

    def _offer_work(self, victim: Replica) -> tuple[list[str], str, int] | None:
        """None: others were quicker, and have done all of it."""
        since = len(self._run.records)
        ids = self._run.queue([self._shape] * self._layout.replicas, max_attempts=3)

        def started() -> Record | None:
            return self._run.find("job_started", since=since, replica=victim.id)

        self._run.until(
            lambda: started() is not None or not self._run.num_open(ids),
            "the first replica takes a job",
            seconds=self._seconds,
        )
        found = started()
        return None if found is None else (ids, found["job_id"], since)

    def _idle(self) -> list[Replica]:
        return self._run.until_idle(self._layout.replicas, seconds=self._seconds)

    def _finish(self, ids: Collection[str]) -> list[Job]:
        self._run.until(lambda: not self._run.num_open(ids), "jobs end", seconds=self._seconds, every=0.02)
        return self._run.jobs(ids)

    def _kill_job(self, stage: str, before: list[Replica]) -> dict[str, Any]:
        victim = before[0]
        ids, job_id, since = self._give_work(victim)
        self._reach(stage, job_id, since)
        figures, killed = self._kill(victim.detail["ranks"], victim, epoch=victim.epoch + 1, since=since)
        jobs = {job.id: job for job in self._finish(ids)}
        job = jobs.pop(job_id)
        done = self._run.until_found("job_completed", since=since, seconds=self._seconds, job_id=job_id)
        lost = self._run.find("job_requeued", since=since, job_id=job_id)
        beside = [one for one in jobs.values() if self._began_elsewhere(one, victim, since)]
        return figures | {
            "found_at": lost["stage"] if lost else None,
            "attempts": job.attempt,
            "job_seconds": done["at"] - killed,
            "job_done_by_victim": done["replica"] == victim.id,
            "jobs_beside": len(beside),
            "others_done": all((one.state, one.attempt) == (JobState.COMPLETED, 1) for one in beside),
        }

    def _began_elsewhere(self, job: Job, victim: Replica, since: int) -> bool:
        began = self._run.find("job_started", since=since, job_id=job.id)
        return began is not None and began["replica"] != victim.id

    def _reach(self, stage: str, job_id: str, since: int) -> None:
        if stage == "encode":
            # its ranks were told right before
            return
        if stage == "mux":
            self._run.until_found("job_rendered", since=since, seconds=self._seconds, job_id=job_id)
            return
        self._run.until(lambda: _has_reached(stage, self._run.jobs([job_id])[0]), stage, seconds=self._seconds, every=0)

    def _kill_start(self, stage: str, before: list[Replica]) -> dict[str, Any]:
        """In one group to have another start, and then in that one."""
        victim = before[0]
        since = len(self._run.records)
        self._strike(victim.detail["ranks"])
        own = {"since": since, "seconds": self._seconds, "replica": victim.id, "epoch": victim.epoch + 1}
        pids = self._run.until_found("group_starting", **own)["pids"]

        def is_there() -> bool:
            found = [one for one in self._run.records[since:] if _is_start_of(one, stage, victim)]
            return bool(found) or self._run.find("replica_ready", since=since, replica=victim.id) is not None

        self._run.until(is_there, f"the start is at {stage}", seconds=self._seconds)
        missed = self._run.find("replica_ready", since=since, replica=victim.id) is not None
        ids = self._run.queue([self._shape] * self._layout.replicas, max_attempts=3)
        figures, killed = self._kill(pids, victim, epoch=victim.epoch + 2, since=since)
        jobs = self._finish(ids)
        done = [self._run.until_found("job_completed", since=since, seconds=self._seconds, job_id=one) for one in ids]
        return figures | {
            "found_at": "ready" if missed else stage,
            "attempts": max(job.attempt for job in jobs),
            "job_seconds": max(record["at"] for record in done) - killed,
            "job_done_by_victim": done[0]["replica"] == victim.id,
            "others_done": all(job.state == JobState.COMPLETED for job in jobs),
        }

    def _kill(self, pids: list[int], victim: Replica, *, epoch: int, since: int) -> tuple[dict[str, Any], float]:
        """Figures of the group that ends and the one that follows, and when the kill was."""
        killed = self._strike(pids)
        self._run.until(lambda: not present(pids), f"ranks {pids} are gone", seconds=self._seconds, every=0.002)
        gone = time.time() - killed
        memory = _least_memory(gpu_used_bytes)
        ready = self._run.until_found(
            "replica_ready", since=since, seconds=self._seconds, replica=victim.id, epoch=epoch
        )
        figures: dict[str, Any] = {"gone_seconds": gone, "ready_seconds": ready["at"] - killed}
        if memory:
            figures["gpu_bytes_least"] = memory
        return figures, killed

    def _strike(self, pids: list[int]) -> float:
        """Kill one rank, another one each time; when that was.

        Raises:
            RushesError: none of them is a rank of this worker any more.
        """
        processes = self._run.processes()
        own = [pid for pid in pids if processes.get(pid) == "rank"]
        if not own:
            raise RushesError(f"processes {pids} are no ranks of this worker")
        self._turn += 1
        at = time.time()
        os.kill(own[self._turn % len(own)], signal.SIGKILL)
        return at


def _has_reached(stage: str, job: Job) -> bool:
    if job.state != JobState.RUNNING or job.phase is None:
        return job.state.is_final
    phase = _PHASES.index(Phase(job.phase))
    if stage == "decode":
        return phase >= _PHASES.index(Phase.DECODING)
    step = int(stage.removeprefix("step-"))
    return phase > _PHASES.index(Phase.DENOISING) or job.completed_steps >= step


def _is_start_of(record: Record, stage: str, victim: Replica) -> bool:
    return (
        record["event"] == "replica_loading"
        and record["replica"] == victim.id
        and record["epoch"] == victim.epoch + 1
        and record["stage"].startswith(_START_STAGES[stage])
    )


def _same_ranks(before: list[Replica], after: list[Replica]) -> bool:
    """Whether these replicas have the ranks that they had."""

    def ranks(replicas: list[Replica]) -> list[tuple[str, int, list[int]]]:
        return [(one.id, one.epoch, one.detail["ranks"]) for one in replicas]

    return ranks(before) == ranks(after)


def _least_memory(used_bytes: Callable[[], list[int]]) -> list[int]:
    """The least that each GPU has in use for a moment from now on; empty without any."""
    least = used_bytes()
    deadline = time.monotonic() + _MEMORY_SECONDS
    while least and time.monotonic() < deadline:
        # a query may fail
        least = [min(pair) for pair in zip(least, used_bytes() or least, strict=True)]
    return least
