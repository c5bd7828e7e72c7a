"""How long writers wait while the schema is migrated under many jobs.

    python loadtest/migration.py --jobs 200000 --rate 20

The database is brought to the previous release's revision and filled. Then it is upgraded while one connection accepts
jobs at a steady rate and another cancels jobs, as that release does. One line of JSON: the longest wait of each, and
the seconds of the upgrade. A database of `RUSHES_*` is emptied first.
"""

import argparse
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import bench
from alembic import command
from command_line import amount, at_least, run
from rushes_core.database import alembic_config
from rushes_core.settings import Settings
from sqlalchemy import Connection, text

PREVIOUS_RELEASE = "b60f3d9a2e78"

_ACCEPT = text("""
INSERT INTO jobs (id, project, model, prompt, seed, width, height, num_frames, request, max_attempts)
VALUES ('video_late_' || :number, 'project-0001', :model, 'waves', 1, 832, 480, 107, '{"metadata": {}}', 3)
""")
_CANCEL = text("""
UPDATE jobs SET state = 'cancelled', cancel_requested_at = now(), finished_at = now()
WHERE id = 'video_' || lpad(:number, 26, '0')
""")
# the history that so many jobs would have left behind
_HISTORY = """
INSERT INTO outbox (event_id, job_id, project, generation, type)
SELECT 'evt_old_' || i, 'video_old_' || i, 'project-0001', 1, 'video.completed' FROM generate_series(1, :jobs) AS i
"""


class Writer(threading.Thread):
    """Writes at a steady rate on one connection until it is told to stop; a write that is late is not made up for."""

    def __init__(self, settings: Settings, rate: float, write: Callable[[Connection, int], object]) -> None:
        super().__init__(daemon=True)
        self._engine = bench.patient_engine(settings, pool_size=1)
        self._interval = 1 / rate
        self._write = write
        self.stop = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for number in itertools.count(1):
                began = time.perf_counter()
                self._write(connection, number)
                taken = time.perf_counter() - began
                self.seconds.append(taken)
                if self.stop.wait(max(0.0, self._interval - taken)):
                    break
        self._engine.dispose()


def accept(connection: Connection, number: int) -> None:
    connection.execute(_ACCEPT, {"number": str(number), "model": bench.MODEL})


def cancel(connection: Connection, number: int) -> None:
    connection.execute(_CANCEL, {"number": str(number)})


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--jobs", type=at_least(1), default=200_000)
    parser.add_argument("--projects", type=at_least(1), default=200)
    parser.add_argument("--rate", type=amount, default=20.0, help="writes a second of each writer")
    arguments = parser.parse_args()
    with bench.servers() as settings:
        config = alembic_config(settings.database_url)
        engine = bench.patient_engine(settings)
        bench.clear(engine)
        command.downgrade(config, PREVIOUS_RELEASE)
        bench.fill(engine, jobs=arguments.jobs, projects=arguments.projects)
        with engine.begin() as connection:
            connection.execute(text(_HISTORY), {"jobs": arguments.jobs})
        engine.dispose()
        writers = {
            name: Writer(settings, arguments.rate, write) for name, write in (("insert", accept), ("end", cancel))
        }
        for writer in writers.values():
            writer.start()
        time.sleep(2)
        usual = {name: max(writer.seconds) for name, writer in writers.items()}
        began = time.monotonic()
        command.upgrade(config, "head")
        taken = time.monotonic() - began
        for writer in writers.values():
            writer.stop.set()
            writer.join()
        bench.report(
            "migration",
            jobs=arguments.jobs,
            seconds=taken,
            writes=sum(len(writer.seconds) for writer in writers.values()),
            **{f"longest_{name}_ms": 1_000 * max(writer.seconds) for name, writer in writers.items()},
            **{f"longest_{name}_before_ms": 1_000 * seconds for name, seconds in usual.items()},
            load_average=Path("/proc/loadavg").read_text().split()[0],
        )
        engine.dispose()


if __name__ == "__main__":
    run(main)
