"""Where a second node joins, as the first one's process sees it, on loopback."""

import os
import pickle
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from rushes_core.contract import load_contract
from rushes_worker.node_link import Joined, NodeLink, NotTrusted, Welcome, prove
from rushes_worker.node_port import NodePort
from structlog.testing import capture_logs
from support.ports import kept_port
from support.waiting import wait_until
from support.worker import write_contract

HOST = "127.0.0.2"
SECRET = b"what two nodes know"


class Port:
    def __init__(self, welcome: Welcome) -> None:
        with kept_port(HOST) as self.number:
            self.port = NodePort(HOST, self.number, secret=SECRET, welcome=welcome, on_change=lambda: None)
        self.port.start()

    def prove(self) -> tuple[socket.socket, Connection]:
        """A connection that is trusted."""
        connected = socket.create_connection((HOST, self.number))
        return connected, prove(connected, SECRET, first=False)

    def join(self) -> NodeLink:
        connected, connection = self.prove()
        with connection:
            assert isinstance(connection.recv(), Welcome)
            connection.send(Joined("second"))
        wait_until(lambda: self.port.link is not None)
        return NodeLink(connected)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    welcome = Welcome("1", load_contract(write_contract(tmp_path / "checkpoint")), "cpu", "r1s2", None)
    port = Port(welcome)
    yield port
    port.port.close()


def unknown_class() -> bytes:
    """A pickled value of a class that this release has not."""
    return pickle.dumps(Joined("x")).replace(b"rushes_worker.node_link", b"rushes_worker.node_gone")


@pytest.mark.parametrize("said", [unknown_class, lambda: b"no pickle", lambda: b""], ids=["class", "garbage", "empty"])
def test_a_node_that_says_what_this_one_cannot_read_is_turned_away_and_another_one_joins(
    port: Port, said: Callable[[], bytes]
) -> None:
    connected, connection = port.prove()
    with connected, connection:
        assert isinstance(connection.recv(), Welcome)
        connection.send_bytes(said())
        with suppress(EOFError, OSError):
            connection.recv()
    port.join().close()


def test_a_link_over_which_something_unreadable_comes_is_lost(port: Port) -> None:
    connected, connection = port.prove()
    with connected, connection:
        assert isinstance(connection.recv(), Welcome)
        connection.send(Joined("second"))
        wait_until(lambda: port.port.link is not None)
        connection.send_bytes(unknown_class())
        wait_until(lambda: port.port.link is None)


@pytest.mark.parametrize("is_taken", [False, True], ids=["unused", "used"])
def test_nodes_that_join_and_leave_leave_no_descriptor_behind(port: Port, is_taken: bool) -> None:
    def open_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def flap() -> None:
        joined = port.join()
        if is_taken:
            assert port.port.take() is port.port.link
        joined.close()
        wait_until(lambda: port.port.link is None)

    flap()
    before = open_descriptors()
    for _ in range(5):
        flap()
    wait_until(lambda: open_descriptors() <= before)


def test_a_link_that_is_used_stays_open_when_it_is_lost_and_another_node_has_joined(port: Port) -> None:
    first = port.join()
    used = port.port.take()
    assert used is not None
    first.close()
    wait_until(lambda: used.is_lost)
    second = port.join()
    # a group that was started over it still looks at it
    assert used.receive() == []
    assert port.port.take() is port.port.link is not used
    with pytest.raises(OSError, match="Bad file descriptor"):
        used.receive()
    second.close()


def test_a_stranger_that_comes_again_and_again_is_told_of_once_until_a_node_has_joined(port: Port) -> None:
    def come(secret: bytes) -> None:
        with socket.create_connection((HOST, port.number)) as connected, suppress(NotTrusted, OSError):
            prove(connected, secret, first=False).close()

    def told() -> int:
        return sum(one["event"] == "node_turned_away" for one in logs)

    with capture_logs() as logs:
        for _ in range(3):
            come(b"what one does not know")
        # the port takes one after the other
        port.join().close()
        assert told() == 1
        come(b"what one does not know")
        wait_until(lambda: told() == 2)
