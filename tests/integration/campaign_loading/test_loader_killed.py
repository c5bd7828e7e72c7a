"""Every line of a file becomes a job once, whatever dies meanwhile."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rushes_core.campaigns import statements
from rushes_core.dispatcher import Dispatcher
from rushes_core.queue import CAMPAIGN_QUEUE
from rushes_core.settings import Settings
from rushes_worker.campaigns import chunks
from rushes_worker.campaigns.copying import copy_rows
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from support.campaigns import Campaigns, jsonl, openai_line
from support.commands import RUSHES
from support.stack import settings_env
from support.waiting import wait_until

# a loader that ends itself by SIGKILL where the arguments say: in which chunk, and before or after its commit
_KILLED_LOADER = """
import os, signal, sys
from rushes_core.campaigns import loading
from rushes_core.database import create_sync_engine
from rushes_core.served_model import ServedModel
from rushes_core.settings import get_settings
from rushes_worker.campaigns import chunks, loader

chunks.CHUNK_LINES = int(sys.argv[1])
left, where = int(sys.argv[2]), sys.argv[3]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Loader(loader.Loader):
    def _write(self, campaign, lease, chunk):
        global left
        left -= 1
        if not left and where == "begin":
            die()
        super()._write(campaign, lease, chunk)
        if not left and where == "end":
            die()

advance = loading.advance
def advance_or_die(*arguments, **values):
    if not left and where == "middle":
        die()
    return advance(*arguments, **values)
loading.advance = advance_or_die

settings = get_settings()
here = Loader(settings, ServedModel.load(settings), create_sync_engine(settings), owner="killed")
while here.turn():
    pass
"""


class TestKilled:
    NUM_LINES = 60

    def lines(self) -> bytes:
        """Sixty lines in chunks of ten; every seventh is bad, every eleventh has the id of the first."""
        rows: list[Any] = []
        for number in range(1, self.NUM_LINES + 1):
            row: Any = openai_line(number)
            if number % 7 == 0:
                row = b"{"
            elif number % 11 == 0:
                row = {**row, "custom_id": "id-1"}
            rows.append(row)
        return jsonl(*rows)

    # what differs between forms is where the next chunk begins
    @pytest.mark.parametrize(
        ("form", "kills"),
        [
            ("jsonl", ((1, "begin"), (1, "middle"), (1, "end"), (2, "middle"), (1, "end"), (3, "middle"))),
            ("csv", ((2, "middle"), (2, "end"))),
            ("gzip", ((2, "middle"), (2, "end"))),
        ],
        ids=["jsonl", "csv", "gzip"],
    )
    def test_every_line_is_loaded_exactly_once(
        self, campaigns: Campaigns, settings: Settings, form: str, kills: tuple[tuple[int, str], ...]
    ) -> None:
        data, filename = self.lines(), "lines.jsonl"
        if form == "csv":
            rows = [json.loads(row) if row != b"{" else None for row in data.splitlines()]
            table = [f'{row["custom_id"]},"{row["body"]["prompt"]}\n"' if row else "bad" for row in rows]
            data, filename = "\r\n".join(["custom_id,prompt", *table]).encode(), "lines.csv"
        elif form == "gzip":
            data = gzip.compress(data)
        campaign_id = campaigns.submit(data, filename=filename)
        for chunk, where in kills:
            arguments = [sys.executable, "-P", "-c", _KILLED_LOADER, "10", str(chunk), where]
            killed = subprocess.run(arguments, env=os.environ | settings_env(settings), capture_output=True)
            assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
            # nobody else may have it before its lease has run out
            assert not campaigns.loader().turn()
            campaigns.execute("UPDATE campaigns SET lease_until = now()")
        campaigns.load()
        bad = campaigns.bad_lines(campaign_id)
        assert len(bad) == 8 + 5
        assert sum(row.code == "duplicate_custom_id" for row in bad.values()) == 5
        jobs = campaigns.items(campaign_id)
        assert len(jobs) == self.NUM_LINES - len(bad)
        assert {job.line for job in jobs}.isdisjoint(bad)
        assert [job.id for job in jobs] == sorted(job.id for job in jobs)
        assert [job.prompt.strip() for job in jobs] == [
            f"gull number {job.custom_id.removeprefix('id-')}" for job in jobs if job.custom_id
        ]
        counts = campaigns.counts(campaign_id)
        assert (counts["queued"], counts["invalid"]) == (len(jobs), len(bad))

    def test_a_connection_that_is_lost_within_a_chunk_costs_no_line(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 10)
        campaign_id = campaigns.submit(self.lines())
        left = 3

        def copy_and_lose(connection: Connection, statement: str, rows: Any) -> None:
            nonlocal left
            left -= 1
            copy_rows(connection, statement, rows)
            if not left:
                pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
                campaigns.execute("SELECT pg_terminate_backend(:pid)", pid=pid)

        monkeypatch.setattr("rushes_worker.campaigns.loader.copy_rows", copy_and_lose)
        with pytest.raises(DBAPIError):
            campaigns.load()
        assert campaigns.read(campaign_id).loaded_lines == 20
        campaigns.execute("UPDATE campaigns SET lease_until = now()")
        campaigns.load()
        counts = campaigns.counts(campaign_id)
        assert counts["queued"] + counts["invalid"] == self.NUM_LINES

    def test_a_loader_that_lost_its_lease_writes_nothing(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.submit(self.lines())
        slow = campaigns.loader()
        campaigns_write = slow._write

        def write(*arguments: Any) -> None:
            # another one takes over, and is done, before this one's first chunk is written
            campaigns.execute("UPDATE campaigns SET lease_until = now()")
            campaigns.load()
            campaigns_write(*arguments)

        slow._write = write  # pyright: ignore[reportAttributeAccessIssue]
        assert slow.turn()
        counts = campaigns.counts(campaign_id)
        assert counts["queued"] + counts["invalid"] == self.NUM_LINES
        assert campaigns.read(campaign_id).loaded_at is not None

    def test_a_campaign_that_is_cancelled_is_loaded_no_further(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 10)
        campaign_id = campaigns.submit(self.lines())
        loader = campaigns.loader()
        write = loader._write

        def write_and_cancel(*arguments: Any) -> None:
            write(*arguments)
            campaigns.stop(campaign_id)

        monkeypatch.setattr(loader, "_write", write_and_cancel)
        assert loader.turn()
        assert campaigns.counts(campaign_id)["queued"] <= 10
        campaigns.end()
        campaigns.load()
        assert campaigns.read(campaign_id).state == "cancelled"
        assert "queued" not in campaigns.counts(campaign_id)


def test_a_hint_waits_while_there_is_something_to_do(campaigns: Campaigns, settings: Settings) -> None:
    dispatcher = Dispatcher(settings)
    redis: Any = Redis.from_url(settings.redis_url)
    try:

        def is_hinted() -> bool:
            redis.delete(CAMPAIGN_QUEUE)
            is_called = "campaign_hint" in dispatcher.glance()
            sent = [dispatcher.hint_campaigns() for _ in range(3)]
            assert sent == [int(is_called), 0, 0]
            return is_called

        assert not is_hinted()
        campaign_id = campaigns.submit(jsonl(*map(openai_line, range(2))))
        assert is_hinted()
        campaigns.load()
        assert not is_hinted()
        assert dispatcher.glance() == {"feed"}
        campaigns.execute("UPDATE campaigns SET expires_at = now()")
        assert is_hinted()
        campaigns.end()
        assert campaigns.read(campaign_id).state == "expired"
        assert not is_hinted()
        campaigns.jobs.run(statements.delete(campaign_id))
        assert is_hinted()
        campaigns.end()
        assert not is_hinted()
        assert dispatcher.glance() == frozenset()
    finally:
        redis.close()
        dispatcher.close()


def test_the_process_loads_and_ends_what_it_is_woken_for(
    campaigns: Campaigns, settings: Settings, tmp_path: Path
) -> None:
    def start() -> "subprocess.Popen[bytes]":
        with (tmp_path / "loader.log").open("ab") as log:
            return subprocess.Popen(
                [*RUSHES, "loader"], env=os.environ | settings_env(settings), stdout=log, stderr=log
            )

    campaign_id = campaigns.submit(jsonl(*map(openai_line, range(6_000))))
    process = start()
    try:
        wait_until(lambda: campaigns.read(campaign_id).loaded_lines > 0)
        process.kill()
        process.wait()
        campaigns.execute("UPDATE campaigns SET lease_until = now()")
        process = start()
        wait_until(lambda: campaigns.read(campaign_id).loaded_at is not None)
        lines = [row.line for row in campaigns.execute("SELECT line FROM jobs ORDER BY line")]
        assert lines == list(range(1, 6_001))
        campaigns.stop(campaign_id)
        wait_until(lambda: campaigns.read(campaign_id).state == "cancelled")
        assert campaigns.counts(campaign_id) == {"cancelled": 6_000}
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    log = (tmp_path / "loader.log").read_text()
    assert "Traceback" not in log, log
