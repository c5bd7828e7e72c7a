"""A replica without ranks: it claims ahead, keeps its leases and settles as a real one does, and renders nothing."""

import multiprocessing.connection

import bench
from rushes_core.settings import Settings
from rushes_worker.claimer import Claimer
from rushes_worker.heartbeat import Heartbeat
from rushes_worker.ledger import Claim, Ledger
from rushes_worker.stopping import Stopping
from rushes_worker.wake import Wake


class RanklessReplica:
    """Its threads run from the beginning until `close`."""

    def __init__(self, settings: Settings, owner: str) -> None:
        self._wake = Wake()
        self.ledger = Ledger(settings, replica_id=owner, model=bench.MODEL)
        row = {"pool": settings.pool, "layout": "r1s1", "model": bench.MODEL, "device": "cpu", "state": "busy"}
        self.heartbeat = Heartbeat(
            settings,
            replica_id=owner,
            replica=row | {"epoch": 1, "job_id": None, "detail": {}},
            on_change=self._wake.poke,
            is_stopping=lambda: False,
        )
        self._claimer = Claimer(
            settings,
            ledger=self.ledger,
            heartbeat=self.heartbeat,
            stopping=Stopping(60),
            has_room=lambda rendering: True,
            on_claim=self._wake.poke,
            wake=Wake(),
            replica_id=owner,
        )
        self.heartbeat.start()
        self._claimer.start()
        self._claimer.open()

    def take(self, *, wait_seconds: float) -> Claim | None:
        """What was claimed; None after `wait_seconds` at most."""
        self._wake.clear()
        claim = self._claimer.take()
        if claim is None:
            multiprocessing.connection.wait([self._wake.fileno()], wait_seconds)
        return claim

    def close(self) -> None:
        self._claimer.close()
        self.heartbeat.close()
        self.ledger.close()
