"""A rank is killed at every stage of a job in turn: its group ends and is replaced, and nothing else is disturbed."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from rushes_core.models import Job, Replica
from rushes_core.settings import Settings
from rushes_core.states import JobState
from support.checkpoints import tiny_checkpoint
from support.processes import children, is_alive
from support.stack import SharedStack
from support.worker import SCRIPTED, Jobs, Worker, eventually, write_contract

# what holds the first attempt at the stage, and whether a job is there
STAGES: dict[str, tuple[str, Callable[[Job], bool]]] = {
    "encoding": ("[sleep 600 on attempt 1]", lambda job: job.phase == "encoding"),
    "denoising": ("[hang at step 3 on attempt 1]", lambda job: job.phase == "denoising" and job.completed_steps == 2),
    "decoding": ("[unit 600 on attempt 1]", lambda job: job.phase == "decoding"),
}


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("kills")
    return stack.settings(
        checkpoint=write_contract(folder / "checkpoint"),
        pipeline=SCRIPTED,
        scratch=folder / "scratch",
        poll_seconds=0.1,
        lease_seconds=15,
        heartbeat_seconds=0.2,
        # the crashes here are made, and no reason to take a replica for sick
        drain_after_crashes=100,
    )


@pytest.fixture(scope="module")
def jobs(settings: Settings) -> Iterator[Jobs]:
    jobs = Jobs(settings)
    yield jobs
    jobs.close()


class Start:
    """What keeps groups of ranks from becoming ready."""

    def __init__(self, folder: Path) -> None:
        self._limit, self._hold = folder / "limit", folder / "hold"
        self.env = {"SCRIPTED_LOAD_LIMIT": str(self._limit), "SCRIPTED_CAPTURE_HOLD": str(self._hold)}
        self._let_load(100)

    @contextmanager
    def held_up(self, stage: str) -> Iterator[None]:
        if stage == "capturing":
            self._hold.touch()
        else:
            self._let_load(50)
        try:
            yield
        finally:
            self._hold.unlink(missing_ok=True)
            self._let_load(100)

    def _let_load(self, percent: int) -> None:
        new = self._limit.with_name("new")
        new.write_text(str(percent))
        new.rename(self._limit)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def worker(settings: Settings, jobs: Jobs, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Two replicas of two ranks each."""
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    with Worker(settings, log, layout="r2s2", env=start.env) as worker:
        yield worker


@pytest.fixture
def pair(worker: Worker, jobs: Jobs) -> list[Replica]:
    """Both replicas, idle."""
    return eventually(
        lambda: idle if len(idle := [one for one in jobs.replicas() if one.state == "ready"]) == 2 else []
    )


def ranks(replica: Replica) -> list[int]:
    pids: list[int] = replica.detail["ranks"]
    assert len(pids) == 2
    return pids


def owner(jobs: Jobs, job_id: str) -> str:
    held: str | None = jobs.get(job_id).lease_owner
    assert held is not None
    return held


def check_replaced(jobs: Jobs, worker: Worker, settings: Settings, before: list[Replica], victim: str) -> None:
    """The victim has a whole new group of the next epoch, the other replica what it had, and nothing else is left."""
    old = {replica.id: replica for replica in before}

    def both_ready() -> dict[str, Replica] | None:
        found = {one.id: one for one in jobs.replicas() if one.state == "ready"}
        return found if found.keys() == old.keys() and found[victim].epoch == old[victim].epoch + 1 else None

    new = eventually(both_ready)
    for replica_id, replica in new.items():
        if replica_id == victim:
            assert not set(ranks(replica)) & set(ranks(old[replica_id]))
        else:
            assert (replica.epoch, ranks(replica)) == (old[replica_id].epoch, ranks(old[replica_id]))
    expected = {pid for replica in new.values() for pid in ranks(replica)}
    for supervisor in worker.supervisors:
        # a media process each
        assert len(set(children(supervisor)) - expected) == 1
    assert len(worker.descendants) == len(worker.supervisors) + len(expected) + 2
    eventually(lambda: not list(settings.scratch.glob("*/attempt-*")))
    left = sorted(path.name for path in settings.scratch.glob("*/rendezvous-*"))
    assert left == sorted(f"rendezvous-{replica.epoch}" for replica in new.values())


def shared_memory(pid: int) -> list[str]:
    """Named segments that process `pid` maps: what would outlive it."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line]


@pytest.mark.parametrize(
    ("stage", "rank"),
    [
        ("encoding", 0),
        ("denoising", 1),
        ("decoding", 0),
        # what a rank is killed in and which rank it is have nothing to do with each other
        pytest.param("encoding", 1, marks=pytest.mark.long),
        pytest.param("denoising", 0, marks=pytest.mark.long),
        pytest.param("decoding", 1, marks=pytest.mark.long),
    ],
)
def test_rank_killed_while_its_job_renders(
    settings: Settings, jobs: Jobs, worker: Worker, pair: list[Replica], stage: str, rank: int
) -> None:
    directive, is_there = STAGES[stage]
    job_id = jobs.add(directive)
    eventually(lambda: is_there(jobs.get(job_id)))
    victim = owner(jobs, job_id)
    bystander = jobs.add("[step 0.3]")
    assert jobs.wait_for_step(bystander, 1).lease_owner != victim
    group = next(ranks(replica) for replica in pair if replica.id == victim)
    assert not any(shared_memory(pid) for pid in group)

    os.kill(group[rank], signal.SIGKILL)
    eventually(lambda: not any(is_alive(pid) for pid in group))
    job = jobs.wait_completed(job_id)
    assert (job.attempt, job.crash_count) == (2, 1)
    first, second = jobs.attempts(job_id)
    assert first.error is not None
    assert first.error["message"] == f"Rank {rank} of the worker was killed by SIGKILL."
    assert first.error["stage"] == stage
    assert second.outcome == "completed"
    undisturbed = jobs.wait_completed(bystander)
    assert (undisturbed.attempt, undisturbed.crash_count) == (1, 0)
    check_replaced(jobs, worker, settings, pair, victim)


def test_rank_killed_while_its_clip_is_finished_costs_no_attempt(
    settings: Settings, jobs: Jobs, worker: Worker, pair: list[Replica]
) -> None:
    with ExitStack() as frozen:
        # whichever takes the job, its clip is not finished before this test has looked
        for replica in pair:
            (media,) = set(children(replica.detail["pid"])) - set(ranks(replica))
            freeze(media, frozen)
        job_id = jobs.add()
        eventually(lambda: jobs.get(job_id).phase == "muxing")
        victim = next(replica for replica in pair if replica.id == owner(jobs, job_id))
        os.kill(ranks(victim)[1], signal.SIGKILL)
        eventually(lambda: not any(is_alive(pid) for pid in ranks(victim)))
        assert jobs.get(job_id).state == JobState.RUNNING
    job = jobs.wait_completed(job_id)
    assert (job.attempt, job.crash_count, job.error_count) == (1, 0, 0)
    eventually(lambda: len(children(victim.detail["pid"])) == 3)
    check_replaced(jobs, worker, settings, pair, victim.id)


@pytest.mark.parametrize("stage", ["loading weights", "capturing"])
def test_rank_killed_before_it_is_ready(
    settings: Settings, jobs: Jobs, worker: Worker, start: Start, pair: list[Replica], stage: str
) -> None:
    """Killed in one group to have another load, and then in that one: a job that waits loses nothing."""
    # not twice the same: a replica pauses for longer each time that its groups end without a job
    victim = pair[stage == "capturing"]
    starts = len(worker.events("group_starting"))

    def is_there() -> bool:
        now = next(one for one in jobs.replicas() if one.id == victim.id)
        return now.epoch == victim.epoch + 1 and now.detail.get("loading", {}).get("stage") == stage

    with start.held_up(stage):
        os.kill(ranks(victim)[0], signal.SIGKILL)
        loading = eventually(lambda: worker.events("group_starting")[starts:])[0]["pids"]
        eventually(is_there)
        os.kill(loading[1], signal.SIGKILL)
        eventually(lambda: not any(is_alive(pid) for pid in loading))
    job = jobs.wait_completed(jobs.add("a wave"))
    assert (job.attempt, job.crash_count) == (1, 0)

    def replaced() -> bool:
        return any(
            one.id == victim.id and (one.state, one.epoch) == ("ready", victim.epoch + 2) for one in jobs.replicas()
        )

    eventually(replaced)
    assert not any(is_alive(pid) for pid in loading)
    assert len(worker.descendants) == 8


def kill_at(stage: str, jobs: Jobs, replica: Replica, *, rank: int) -> str:
    """Have the only replica that takes jobs lose `rank` at `stage` of a job; returns the job's id."""
    directive, is_there = STAGES[stage]
    job_id = jobs.add(directive)
    eventually(lambda: is_there(jobs.get(job_id)))
    os.kill(ranks(replica)[rank], signal.SIGKILL)
    eventually(lambda: not any(is_alive(pid) for pid in ranks(replica)))
    return job_id


def left_segments() -> set[Path]:
    """Segments of this machine, but for those of database servers that other tests start."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("PostgreSQL.")}


@pytest.mark.long
def test_five_kills_in_a_row_leave_nothing_behind(
    settings: Settings, jobs: Jobs, worker: Worker, pair: list[Replica]
) -> None:
    """One replica loses a rank at another stage of a job each time; nothing is in the way of its next group."""
    victim, other = pair
    segments = left_segments()
    for turn, stage in enumerate([*STAGES, *STAGES][:5]):
        before = {one.id: one for one in jobs.wait_ready(2)}[victim.id]
        jobs.drain(other.id)
        eventually(lambda: {one.id: one.state for one in jobs.replicas()}[other.id] == "drained")
        job_id = kill_at(stage, jobs, before, rank=turn % 2)
        jobs.resume(other.id)
        job = jobs.wait_completed(job_id)
        assert (job.attempt, job.crash_count) == (2, 1)
    epochs = {one.id: one.epoch for one in jobs.wait_ready(2)}
    assert epochs == {victim.id: victim.epoch + 5, other.id: other.epoch}
    assert left_segments() <= segments
    log = worker.log.read_text()
    assert "EADDRINUSE" not in log
    assert "FileExistsError" not in log
    assert len(worker.descendants) == 8
    eventually(lambda: not list(settings.scratch.glob("*/attempt-*")))


def freeze(pid: int, until: ExitStack) -> None:
    os.kill(pid, signal.SIGSTOP)
    until.callback(lambda: is_alive(pid) and os.kill(pid, signal.SIGCONT))


def reach(stage: str, jobs: Jobs, replica: Replica, frozen: ExitStack) -> str:
    """Have a job of a tiny checkpoint, or the group that is to render it, be at `stage`; returns the job's id."""

    def add() -> str:
        return jobs.add(model="rushes/tiny-fasth3-8-step-demo", width=480, height=480)

    if stage == "load":
        os.kill(ranks(replica)[0], signal.SIGKILL)
        eventually(lambda: any(one.id == replica.id and one.detail.get("loading") for one in jobs.replicas()))
        return add()
    if stage == "encode":
        for pid in ranks(replica):
            freeze(pid, frozen)
        job_id = add()
        eventually(lambda: jobs.get(job_id).phase == "encoding")
        return job_id
    job_id = add()
    if stage == "step 3":
        jobs.wait_for_step(job_id, 3)
        return job_id
    eventually(lambda: jobs.get(job_id).phase == "decoding")
    if stage == "mux":
        (media,) = set(children(replica.detail["pid"])) - set(ranks(replica))
        freeze(media, frozen)
        eventually(lambda: jobs.get(job_id).phase == "muxing")
    return job_id


@pytest.mark.long
def test_rank_of_a_checkpoint_that_is_killed_at_every_stage_in_turn_leaves_nothing_behind(
    stack: SharedStack, tmp_path: Path
) -> None:
    settings = stack.settings(
        checkpoint=tiny_checkpoint(tmp_path),
        scratch=tmp_path / "scratch",
        poll_seconds=0.1,
        heartbeat_seconds=0.2,
        drain_after_crashes=100,
    )
    jobs = Jobs(settings)
    segments = left_segments()
    with Worker(settings, tmp_path / "worker.log", layout="r2s2", env={"OMP_NUM_THREADS": "1"}) as worker:
        for turn, stage in enumerate(("load", "encode", "step 3", "decode", "mux")):
            victim, other = jobs.wait_ready(2)
            jobs.drain(other.id)
            eventually(lambda: {one.id: one.state for one in jobs.replicas()}[other.id] == "drained")  # noqa: B023
            with ExitStack() as frozen:
                job_id = reach(stage, jobs, victim, frozen)
                before = jobs.replicas()
                group = ranks(before[0])
                os.kill(group[turn % 2], signal.SIGKILL)
                eventually(lambda: not any(is_alive(pid) for pid in group))  # noqa: B023
            jobs.resume(other.id)
            job = jobs.wait_completed(job_id)
            lost = stage not in ("load", "mux")
            assert (job.attempt, job.crash_count) == ((2, 1) if lost else (1, 0)), stage
            check_replaced(jobs, worker, settings, before, victim.id)
        worker.terminate()
        assert worker.wait() == 0
    jobs.close()
    assert left_segments() <= segments
    assert not list(settings.scratch.iterdir())
