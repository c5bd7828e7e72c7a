"""Ranks that are processes of the other node: the same to a group as its own."""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rushes_worker.commands import AudioReady, Boot, Command, Render, Report, UnitReady
from rushes_worker.node_link import DumpStacks, EndRanks, FromRank, Leaving, NodeLink, RankExited, StartRanks, ToRank


class RemoteRanks:
    """The ranks of one epoch on the node at the other end of `link`.

    Frames and sound come over the link and are written to the directory of the render.
    """

    def __init__(self, boots: Sequence[Boot], *, epoch: int, link: NodeLink) -> None:
        self._epoch = epoch
        self._link = link
        self._exits: dict[int, str | None] = {}
        self._renders: deque[Render] = deque(maxlen=2)
        """The one that the ranks are at, and the one behind it."""
        self.is_leaving = False
        """The node was asked to stop and waits for the end of this epoch."""
        link.send(StartRanks(epoch, tuple(boots)))

    @property
    def pids(self) -> list[int]:
        """None are of this machine."""
        return []

    @property
    def waitables(self) -> Sequence[Any]:
        return [self._link]

    @property
    def is_lost(self) -> bool:
        """Whether the node is gone."""
        return self._link.is_lost

    def send(self, rank: int, command: Command) -> None:
        if isinstance(command, Render) and command not in self._renders:
            self._renders.append(command)
        self._link.send(ToRank(self._epoch, rank, command))

    def receive(self, readable: Collection[Any]) -> list[tuple[int, Report]]:
        """
        Raises:
            OSError: what a rank handed over cannot be written here.
        """
        if self._link not in readable:
            return []
        reports: list[tuple[int, Report]] = []
        for message in self._link.receive():
            # an epoch that was ended may still have said something
            if message.epoch != self._epoch:
                continue
            if isinstance(message, Leaving):
                self.is_leaving = True
            elif isinstance(message, RankExited):
                self._exits[message.rank] = message.how
            elif isinstance(message, FromRank):
                report = self._keep(message)
                if report is not None:
                    reports.append((message.rank, report))
        return reports

    def exits(self) -> dict[int, str | None]:
        return dict(self._exits)

    def dump_stacks(self) -> None:
        self._link.send(DumpStacks(self._epoch))

    def end(self) -> None:
        self._link.send(EndRanks(self._epoch))

    def _keep(self, message: FromRank) -> Report | None:
        """The report with its file on this machine; None if nobody waits for that any more."""
        report = message.report
        if not isinstance(report, UnitReady | AudioReady):
            return report
        render = next((one for one in self._renders if one.serial == report.serial), None)
        if render is None or message.data is None:
            return None
        path: Path = render.directory / report.path.name
        path.write_bytes(message.data)
        return replace(report, path=path)
