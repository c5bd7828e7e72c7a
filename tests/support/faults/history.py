"""What happened in one fault run, as JSON lines: clients, ranks, worker logs, and what the servers hold at the end.

Every line is one object: `t_mono`, `t_wall`, `proc`, `op`, `phase` (`invoke`, `ok`, `fail`, or `info` for an outcome
that nobody knows), `job`, `generation`, `attempt`, `fence`, `data`. The last dump comes as one line a row: `dump.jobs`,
`dump.job_attempts`, `dump.job_events`, `dump.outbox`, `dump.object`, those of campaigns and files; the database's
times are seconds since the epoch.
"""

import json
import os
import threading
import time
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class History:
    """Appends records to a file; any thread may."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file = path.open("a", encoding="utf-8")

    def add(
        self,
        op: str,
        phase: str = "ok",
        *,
        proc: str = "harness",
        job: str | None = None,
        generation: int | None = None,
        attempt: int | None = None,
        fence: int | None = None,
        t_wall: float | None = None,
        row: Record | None = None,
        **data: Any,
    ) -> None:
        """Append one record; `row` is data whose names may be those of the record's own members."""
        line = json.dumps(
            {
                "t_mono": time.monotonic(),
                "t_wall": time.time() if t_wall is None else t_wall,
                "proc": proc,
                "op": op,
                "phase": phase,
                "job": job,
                "generation": generation,
                "attempt": attempt,
                "fence": fence,
                "data": {**(row or {}), **data},
            },
            default=plain,
        )
        with self._lock:
            # a thread that outlives its scenario has nothing to add
            if not self._file.closed:
                self._file.write(line + "\n")
                self._file.flush()

    def close(self) -> None:
        self._file.close()


def append_line(path: str | Path, record: Record) -> None:
    """Append one record in one write, so that processes may share the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(record) + "\n").encode())
    finally:
        os.close(descriptor)


def load(path: Path) -> list[Record]:
    """The records of a file; a line that its writer was killed in the middle of is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def plain(value: object) -> object:
    """`value` as JSON has it: times as seconds since the epoch."""
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, Decimal):
        return float(value)
    return str(value)
