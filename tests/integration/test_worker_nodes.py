"""One replica over two nodes: two loopback addresses of this machine, with a door on the way between them."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from rushes_core.contract import CONTRACT_FILE
from rushes_core.models import Replica
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from support.checkpoints import make_readable, make_unreadable
from support.forwarder import Forwarder
from support.nodes import HOST, settings_of_two_nodes
from support.processes import children, is_alive
from support.stack import SharedStack
from support.worker import Jobs, JoiningNode, Worker, eventually, write_contract

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""What a rank of several on one machine has, or sums would be made in another order."""
REAL = "rushes_worker.pipeline.fasth3:FastH3Pipeline"


@pytest.fixture
def settings(stack: SharedStack, tmp_path: Path) -> Iterator[Settings]:
    with settings_of_two_nodes(stack, tmp_path, drain_after_crashes=100) as settings:
        yield settings


class Pair:
    """Both nodes of one r1s2, and the way between them."""

    def __init__(self, settings: Settings, folder: Path, running: ExitStack) -> None:
        self._settings = settings
        self._folder = folder
        self._running = running
        self._numbers = count(2)
        self.door = running.enter_context(Forwarder(f"tcp://{HOST}:{settings.node_port}"))
        self.door.open()

    def start_first(self, **changes: Any) -> Worker:
        chosen = self._settings.model_copy(update=changes)
        return self._running.enter_context(
            Worker(chosen, self._folder / "first.log", layout="r1s2", nodes=2, env=ONE_THREAD)
        )

    def start_second(self, *, join: str = "", **changes: Any) -> JoiningNode:
        # it needs neither database nor Redis nor store
        elsewhere = {
            "database_url": "postgresql+psycopg://nobody:nothing@127.0.0.1:1/nowhere",
            "redis_url": "redis://127.0.0.1:1/0",
            "s3_endpoint_url": "http://127.0.0.1:1",
            "scratch": self._folder / "second",
            "node_host": "",
        }
        chosen = self._settings.model_copy(update=elsewhere | changes)
        log = self._folder / f"node-{next(self._numbers)}.log"
        return self._running.enter_context(
            JoiningNode(chosen, log, join or f"127.0.0.1:{self.door.port}", env=ONE_THREAD)
        )


@pytest.fixture
def pair(settings: Settings, tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as running:
        yield Pair(settings, tmp_path, running)


class Running:
    """Both nodes of one r1s2 that runs, with its jobs. A test leaves it as it was, or as it comes back by itself."""

    def __init__(self, settings: Settings, folder: Path, running: ExitStack) -> None:
        self.settings = settings
        self.jobs = Jobs(settings)
        running.callback(self.jobs.close)
        self.pair = Pair(settings, folder, running)
        self.first = self.pair.start_first()
        self.start_second()

    def start_second(self) -> None:
        self.second = self.pair.start_second()

    def wait_ready(self, epoch: int = 0) -> Replica:
        """The replica once its group of this epoch, or any, is ready."""

        def ready() -> Replica | None:
            # a killed supervisor leaves its row as it was
            replica = next(iter(self.jobs.all_replicas()[::-1]), None)
            if replica is None or replica.state != "ready" or (epoch and replica.epoch != epoch):
                return None
            # nor does it say so at once when the second node is lost
            return replica if children(self.second.pid) == [rank_of(self.second)] else None

        return eventually(ready)


@pytest.fixture(scope="module")
def shared_nodes(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("nodes")
    with ExitStack() as running:
        settings = running.enter_context(settings_of_two_nodes(stack, folder, drain_after_crashes=100))
        yield Running(settings, folder, running)


@pytest.fixture
def nodes(shared_nodes: Running) -> Running:
    """Two nodes that have joined and are ready."""
    shared_nodes.wait_ready()
    return shared_nodes


def rank_of(worker: Worker) -> int:
    """The rank that the second node runs."""
    (pid,) = worker.events("ranks_starting")[-1]["pids"]
    return int(pid)


def test_two_nodes_make_the_clip_that_one_makes(settings: Settings, jobs: Jobs, pair: Pair, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tiny")
    real = {"checkpoint": tmp_path / "tiny", "pipeline": REAL}
    with Worker(settings.model_copy(update=real), tmp_path / "alone.log", layout="r1s2", env=ONE_THREAD) as alone:
        on_one = jobs.wait_completed(jobs.add(model="rushes/tiny-fasth3-8-step-demo"))
        alone.terminate()
        assert alone.wait() == 0
    first, second = pair.start_first(**real), pair.start_second(**real)
    on_two = jobs.wait_completed(jobs.add(model="rushes/tiny-fasth3-8-step-demo"))
    assert on_one.result is not None
    assert on_two.result is not None
    assert on_two.result["sha256"] == on_one.result["sha256"]
    assert not list((tmp_path / "second").glob("*/render/*"))

    # asked to stop, each leaves and leaves nothing
    processes = [*first.descendants, *second.descendants]
    first.terminate()
    assert first.wait() == 0
    eventually(lambda: not second.descendants)
    second.terminate()
    assert second.wait() == 0
    assert not any(is_alive(pid) for pid in processes)
    assert not [*settings.scratch.iterdir(), *(tmp_path / "second").iterdir()]


def test_first_node_waits_for_the_second_and_claims_nothing_meanwhile(jobs: Jobs, pair: Pair) -> None:
    first = pair.start_first()
    job_id = jobs.add()
    eventually(lambda: first.events("node_awaited"))
    assert [replica.state for replica in eventually(jobs.replicas)] == ["starting"]
    assert jobs.states(job_id) == ["queued"]
    pair.start_second()
    assert jobs.wait_completed(job_id).attempt == 1


def test_first_node_that_waits_can_be_stopped(jobs: Jobs, pair: Pair) -> None:
    first = pair.start_first()
    eventually(lambda: first.events("node_awaited"))
    first.terminate()
    assert first.wait() == 0


def kill_rank_of_the_second(nodes: Running) -> str:
    os.kill(rank_of(nodes.second), signal.SIGKILL)
    return "Rank 1 of the worker was killed by SIGKILL."


def kill_rank_of_the_first(nodes: Running) -> str:
    os.kill(nodes.first.events("group_starting")[-1]["pids"][0], signal.SIGKILL)
    return "Rank 0 of the worker was killed by SIGKILL."


def kill_the_second_node(nodes: Running) -> str:
    os.kill(nodes.second.pid, signal.SIGKILL)
    nodes.second.wait()
    return "The other node of the worker was lost."


def freeze_the_second_node(nodes: Running) -> str:
    # the connection stays open, and nothing comes any more: what a machine that lost its power leaves
    os.kill(nodes.second.pid, signal.SIGSTOP)
    return "The other node of the worker was lost."


def cut_the_link(nodes: Running) -> str:
    nodes.pair.door.shut()
    return "The other node of the worker was lost."


@pytest.mark.parametrize(
    ("lose", "restore"),
    [
        (kill_rank_of_the_second, None),
        (kill_rank_of_the_first, None),
        (kill_the_second_node, Running.start_second),
        (freeze_the_second_node, lambda nodes: os.kill(nodes.second.pid, signal.SIGCONT)),
        (cut_the_link, lambda nodes: nodes.pair.door.open()),
    ],
    ids=["rank-of-second", "rank-of-first", "second-node", "silent-node", "link"],
)
def test_loss_ends_the_group_on_both_nodes_and_the_job_runs_again(
    nodes: Running, lose: Callable[[Running], str], restore: Callable[[Running], object] | None
) -> None:
    jobs = nodes.jobs
    before = nodes.wait_ready()
    job_id = jobs.add("[hang at step 3 on attempt 1]")
    jobs.wait_for_step(job_id, 2)
    ranks = [*nodes.first.events("group_starting")[-1]["pids"], rank_of(nodes.second)]
    message = lose(nodes)
    frozen = lose is freeze_the_second_node
    # a frozen node ends its own when it wakes up
    eventually(lambda: not any(is_alive(pid) for pid in (ranks[:1] if frozen else ranks)), seconds=30)
    if restore is not None:
        eventually(lambda: jobs.get(job_id).state == JobState.QUEUED)
        restore(nodes)
    job = jobs.wait_completed(job_id)
    assert (job.attempt, job.crash_count) == (2, 1)
    error = jobs.attempts(job_id)[0].error
    assert error is not None
    assert (error["code"], error["message"]) == ("worker_lost", message)
    after = nodes.wait_ready(before.epoch + 1)
    assert (after.id, after.layout) == (before.id, "r1s2")
    assert not any(is_alive(pid) for pid in ranks)


def test_first_node_that_dies_ends_the_ranks_of_the_second(nodes: Running) -> None:
    before = rank_of(nodes.second)
    # its worker starts it again
    (supervisor,) = nodes.first.supervisors
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: not is_alive(before), seconds=30)
    job = nodes.jobs.wait_completed(nodes.jobs.add())
    assert job.attempt == 1
    assert rank_of(nodes.second) != before


def test_stranger_is_turned_away_and_disturbs_nobody(nodes: Running) -> None:
    jobs, first = nodes.jobs, nodes.first
    epoch, starts = nodes.wait_ready().epoch, len(nodes.second.events("ranks_starting"))
    strangers = len(first.events("node_turned_away"))
    with socket.create_connection((HOST, nodes.settings.node_port)) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        eventually(lambda: len(first.events("node_turned_away")) > strangers)
    late = nodes.pair.start_second(node_secret=SecretStr("what one does not know"))
    eventually(lambda: late.events("node_not_joined"))
    late.terminate()
    assert late.wait() == 0
    # nor does one that knows the secret take the place of a node that is alive
    spare = nodes.pair.start_second()
    eventually(lambda: "another node has joined" in spare.log.read_text())
    spare.terminate()
    assert spare.wait() == 0
    assert jobs.wait_completed(jobs.add()).attempt == 1
    assert nodes.wait_ready().epoch == epoch
    assert len(nodes.second.events("ranks_starting")) == starts


def test_second_node_waits_for_the_file_system_of_its_checkpoint(pair: Pair, tmp_path: Path, jobs: Jobs) -> None:
    own = write_contract(tmp_path / "own")
    second = pair.start_second(checkpoint=own)
    eventually(lambda: second.events("node_not_joined"))
    make_unreadable(own / CONTRACT_FILE)
    pair.start_first()
    eventually(lambda: "Input/output error" in second.events("node_not_joined")[-1]["reason"])
    make_readable(own / CONTRACT_FILE)
    jobs.wait_ready()


class TestRefusals:
    def test_node_with_another_checkpoint_does_not_join(self, pair: Pair, tmp_path: Path, jobs: Jobs) -> None:
        first = pair.start_first()
        write_tiny_checkpoint(tmp_path / "other")
        second = pair.start_second(checkpoint=tmp_path / "other")
        assert second.wait() == 1
        assert "this node's checkpoint is rushes/tiny-fasth3-8-step-demo, the first node's is fasth3-scripted" in (
            second.log.read_text()
        )
        eventually(lambda: first.events("node_declined"))

    @pytest.mark.parametrize(
        ("changes", "status", "message"),
        [
            ({"node_host": ""}, 2, "RUSHES_NODE_HOST is empty"),
            ({"node_secret": SecretStr("short")}, 2, "RUSHES_NODE_SECRET must have at least 16 characters, got 5"),
            (
                {"node_host": "192.0.2.1", "node_port": 29_400},
                1,
                "RUSHES_NODE_HOST=192.0.2.1 with RUSHES_NODE_PORT=29400 cannot be listened on for the other node: "
                "Cannot assign requested address\n",
            ),
        ],
        ids=["host", "secret", "address"],
    )
    def test_first_node_that_none_could_join(
        self, settings: Settings, pair: Pair, changes: dict[str, Any], status: int, message: str
    ) -> None:
        first = pair.start_first(**changes)
        assert first.wait() == status
        assert message in first.log.read_text()
        assert not list(settings.scratch.glob("*"))

    def test_second_node_that_is_to_join_a_machine_of_no_name(self, settings: Settings, tmp_path: Path) -> None:
        with JoiningNode(settings, tmp_path / "second.log", "no..name") as second:
            assert second.wait() == 2
        assert "rushes worker: --join no..name cannot be resolved: " in second.log.read_text()

    def test_second_node_that_is_to_join_what_says_nothing(self, pair: Pair) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            second = pair.start_second(join=f"127.0.0.1:{silent.getsockname()[1]}")
            told = eventually(lambda: second.events("node_not_joined"))
            assert told[0]["reason"] == "the other node said nothing for 3 s"
            second.terminate()
            assert second.wait() == 0

    def test_second_node_without_the_secret(self, pair: Pair) -> None:
        second = pair.start_second(node_secret=SecretStr(""))
        assert second.wait() == 2
        assert "RUSHES_NODE_SECRET must have at least 16 characters, got 0" in second.log.read_text()
