"""The name of a replica: jobs remember by it, over restarts, which replicas they crashed. No two that are up share one.

A row says which process it is of, so that one that died is known by that where it can be looked for: in the same system
and the same namespace of processes. Elsewhere, as from another container, or where processes are hidden, a row counts
as long as it is refreshed.
"""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rushes_core import replicas
from rushes_core.database import create_sync_engine
from rushes_core.log import get_logger
from rushes_core.models import Replica
from rushes_core.setting_rules import variable
from rushes_core.settings import Settings
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

log = get_logger(__name__)

PROC = Path("/proc")
_LOOK_SECONDS = 0.5
_ENDED = (b"Z", b"X")


class NameTaken(ValueError):
    """Another replica that is up has the name."""


def process_detail() -> dict[str, Any]:
    """What a replica's row says of this process: `pid`, `host`, and what tells it from others of that number, None
    where that cannot be read."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "namespace": _namespace(), "ticks": _ticks(os.getpid())}


def claim_name(settings: Settings, replica_id: str, row: dict[str, Any], *, sleep: Callable[[float], bool]) -> None:
    """Write the first row of a replica, unless another one that is up has its name, in place of those that died.

    One of which it cannot be seen whether it died is waited for, until its row is refreshed or `lease_seconds` old.
    With the database away the name is not looked at.

    Args:
        sleep: waits so many seconds; False: the replica was asked to stop.

    Raises:
        NameTaken: names the other one, its host and process, and since when it is up.
    """
    engine = create_sync_engine(settings, pool_size=1)
    seen: dict[str, datetime] = {}
    told: list[str] = []
    try:
        while awaited := _claim(engine, replica_id, row, seen, lease_seconds=settings.lease_seconds):
            if awaited != told:
                told = awaited
                log.info("name_awaited", holders=awaited)
            if not sleep(_LOOK_SECONDS):
                return
    except SQLAlchemyError as error:
        log.warning("name_unchecked", error=str(error).splitlines()[0])
    finally:
        engine.dispose()


def _claim(
    engine: Engine, replica_id: str, row: dict[str, Any], seen: dict[str, datetime], *, lease_seconds: int
) -> list[str]:
    """The replicas that are to be waited for; none: the row is written.

    Args:
        seen: when each was heard of last, as it was read first.
    """
    replaced: Sequence[str] = ()
    with Session(engine) as session, session.begin():
        session.execute(replicas.lock_name(replica_id))
        namesakes = session.scalars(replicas.namesakes(replica_id, seen_within_seconds=lease_seconds))
        holders = [one for one in namesakes if _runs(one.detail) is not False]
        for holder in holders:
            if _runs(holder.detail) or seen.setdefault(holder.id, holder.last_seen) != holder.last_seen:
                raise NameTaken(_complaint(holder))
        if not holders:
            neighbours = session.scalars(replicas.of_namespace(_namespace()))
            ended = [one.id for one in neighbours if _runs(one.detail) is False]
            taken = replicas.take_places(replica_id, ended=ended, silent_for_seconds=lease_seconds)
            replaced = session.scalars(taken).all()
            session.execute(replicas.upsert_replica(replica_id, **row))
        awaited = [holder.id for holder in holders]
    for other_id in replaced:
        log.info("replica_replaced", replaced=other_id, by=replica_id)
    return awaited


def _runs(detail: dict[str, Any]) -> bool | None:
    """Whether the process that a row is of runs; None: it cannot be seen from here."""
    namespace, ticks = _namespace(), detail.get("ticks")
    if namespace is None or ticks is None or detail.get("namespace") != namespace:
        return None
    try:
        found = _ticks(detail["pid"])
    except ProcessLookupError:
        return False
    return None if found is None else found == ticks


def _complaint(holder: Replica) -> str:
    replica = replicas.name_of(holder.id)
    name = replica.rpartition("-r")[0]
    host, pid = holder.detail.get("host", "an unknown host"), holder.detail.get("pid", "unknown")
    return (
        f"{variable('worker_name')}: the name {name} is taken: replica {replica} is up on {host} as process {pid}, "
        f"since {holder.started_at:%Y-%m-%d %H:%M:%S} UTC. Stop that worker, or give this one another name; empty, it "
        "is the name of the host"
    )


def _namespace() -> str | None:
    """Of the numbers of processes: of this boot of this system, and of this container; None: it cannot be read."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return None


def _ticks(pid: int) -> int | None:
    """When process `pid` was started, in ticks of this boot; None: that cannot be seen.

    Raises:
        ProcessLookupError: it does not run.
    """
    try:
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except ProcessLookupError:
        raise
    except FileNotFoundError:
        # others' processes may be hidden (hidepid=2), and are there all the same
        with suppress(PermissionError):
            os.kill(pid, 0)
        return None
    except OSError:
        return None
    if fields[0] in _ENDED:
        raise ProcessLookupError(f"process {pid} has ended")
    return int(fields[19])
