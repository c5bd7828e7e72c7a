"""What ranks of the second node leave in files, while the way to the first node is held up."""

import io
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from rushes_core.settings import Settings
from rushes_worker.commands import AudioReady, Done, Render, UnitReady
from rushes_worker.node import _Epochs
from rushes_worker.node_link import FromRank, NodeLink, Pulse, RankExited, StartRanks, ToRank
from rushes_worker.pipeline.base import RenderRequest
from rushes_worker.scratch import Scratch
from rushes_worker.stopping import Stopping
from rushes_worker.wake import Wake
from support import scripted_pipeline
from support.processes import children
from support.worker import NUM_FRAMES, SIZE, TESTS, eventually, first_boot


def request(prompt: str, seed: int) -> RenderRequest:
    return RenderRequest("video_1", 1, prompt, seed, SIZE, SIZE, NUM_FRAMES)


FIRST, SECOND = request("a wave", 7), request("a wave", 9)


@dataclass(frozen=True, slots=True)
class Heard:
    """Frames by render and unit, sound by render, and which renders were done."""

    units: dict[tuple[int, int], np.ndarray]
    sounds: dict[int, np.ndarray]
    done: list[Done]


class HeldUp:
    """The first node's end of a link: it says that it lives, and reads only when it is asked to."""

    def __init__(self, connected: socket.socket) -> None:
        self._connection = Connection(connected.detach())
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._pulse)
        self._thread.start()

    def say(self, message: object) -> None:
        with self._lock:
            self._connection.send(message)

    def next(self) -> object:
        """What the node says next, but for its pulse."""
        while isinstance(message := self._connection.recv(), Pulse):
            pass
        return message

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._connection.close()

    def _pulse(self) -> None:
        while not self._over.wait(0.2):
            self.say(Pulse())


def narrow_way() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that takes far less than a unit of frames before somebody reads."""
    with socket.socket() as listener, ExitStack() as failing:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        one = failing.enter_context(socket.socket())
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        one.connect(listener.getsockname())
        other, _ = listener.accept()
        failing.pop_all()
        return one, other


def rank_runs() -> bool:
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children(os.getpid())]
    return any("rushes_worker.rank" in command for command in commands)


def order_and_read_late(first: HeldUp, folder: Path) -> Heard:
    """Have a rank make two clips and die, and read nothing before it is gone."""
    try:
        first.say(StartRanks(1, (first_boot(folder),)))
        for serial, one in enumerate((FIRST, SECOND, request("[die at step 1]", 1)), 1):
            first.say(ToRank(1, 0, Render(serial, one, folder, behind=serial - 1)))
        eventually(rank_runs)
        eventually(lambda: not rank_runs())
        return read_all(first)
    finally:
        first.close()


def read_all(first: HeldUp) -> Heard:
    """What comes until both clips are whole."""
    units: dict[tuple[int, int], np.ndarray] = {}
    sounds: dict[int, np.ndarray] = {}
    done: list[Done] = []
    while len(done) < 2:
        message = first.next()
        if isinstance(message, RankExited):
            continue
        assert isinstance(message, FromRank)
        report = message.report
        if isinstance(report, UnitReady):
            assert message.data is not None
            frames = np.frombuffer(message.data, np.uint8).reshape(report.num_frames, SIZE, SIZE, 3)
            units[report.serial, report.unit] = frames
        elif isinstance(report, AudioReady):
            assert message.data is not None
            sounds[report.serial] = np.load(io.BytesIO(message.data))
        elif isinstance(report, Done):
            done.append(report)
    return Heard(units, sounds, done)


def test_clip_that_is_read_late_has_its_own_frames_and_sound_and_not_those_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    settings = Settings(
        database_url="postgresql+psycopg://nobody:nothing@127.0.0.1:1/nowhere",
        redis_url="redis://127.0.0.1:1/0",
        s3_bucket="none",
        checkpoint=tmp_path,
    )
    scratch = Scratch(tmp_path / "scratch")
    ours, theirs = narrow_way()
    first, link, wake, stopping = HeldUp(ours), NodeLink(theirs), Wake(), Stopping(0)
    with ThreadPoolExecutor(1) as other_node:
        try:
            reading = other_node.submit(order_and_read_late, first, tmp_path)
            reading.add_done_callback(lambda _: stopping.request())
            _Epochs(settings, link, "cpu", (), scratch).serve(wake, stopping)
            heard = reading.result()
        finally:
            link.close()
            scratch.remove()

    assert heard.done == [Done(1), Done(2)]
    for serial, one in ((1, FIRST), (2, SECOND)):
        clip = np.concatenate([heard.units[serial, unit] for unit in range(6)])
        assert np.array_equal(clip, scripted_pipeline.frames(one, 0, NUM_FRAMES))
    assert not np.array_equal(heard.sounds[1], heard.sounds[2])
