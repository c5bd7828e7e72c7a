"""From a file in the store to jobs that wait for their campaign: every line once, whatever dies."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rushes_cli.stack.ports import free_port
from rushes_core import replicas
from rushes_core.campaigns import loading, statements
from rushes_core.campaigns.items import Item, Terms, resolve_line
from rushes_core.campaigns.lines import LineError
from rushes_core.dispatcher import Dispatcher
from rushes_core.models import MeasuredTime
from rushes_core.queue import CAMPAIGN_QUEUE
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_core.sweeper import Sweeper
from rushes_worker.campaigns import chunks
from rushes_worker.campaigns.copying import copy_rows
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.campaigns import Campaigns, jsonl, openai_line
from support.checkpoints import tiny_checkpoint
from support.commands import RUSHES
from support.stack import SharedStack, settings_env
from support.waiting import wait_until

COST = 107 * 480 * 480 // 10_000
"""Of a line of `openai_line`."""

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


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return stack.settings(checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("loading")))


class TestLoading:
    def test_every_line_becomes_a_job_that_waits_for_its_campaign(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(
            jsonl(openai_line(1, seed=7, metadata={"shot": "1"}), openai_line(2, priority="normal")),
            project="night",
            max_attempts=5,
            defaults={"retention": {"seconds": 7_200}},
        )
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "in_progress"
        assert campaign.in_progress_at is not None
        assert campaign.loaded_at is not None
        assert (campaign.lease_owner, campaign.loaded_lines) == (None, 2)
        first, second = campaigns.items(campaign_id)
        assert (first.line, first.custom_id, first.project, first.model) == (1, "id-1", "night", campaigns.model.name)
        assert (first.state, first.hold, first.max_attempts) == (JobState.QUEUED, "campaign", 5)
        assert (first.prompt, first.seed, first.width, first.height, first.num_frames) == (
            "gull number 1",
            7,
            480,
            480,
            107,
        )
        assert first.request == {
            "seconds": "4",
            "size_requested": "480x480",
            "metadata": {"shot": "1"},
            "retention_seconds": 7_200,
        }
        assert first.retain_until is not None
        assert (first.priority, second.priority) == (2, 1)
        assert campaigns.counts(campaign_id) == {"queued": 2, "remaining_cost": 2 * COST}

    def test_bad_lines_are_items_that_have_failed(self, campaigns: Campaigns) -> None:
        rows = [
            {"prompt": "good"},
            b"{",
            b"",
            [],
            "x",
            None,
            {"prompt": 5},
            {"prompt": "p", "seconds": "long", "custom_id": "seven"},
            {"prompt": "good"},
        ]
        campaign_id = campaigns.loaded(jsonl(*rows))
        assert [job.line for job in campaigns.items(campaign_id)] == [1, 9]
        bad = campaigns.bad_lines(campaign_id)
        assert sorted(bad) == [2, 4, 5, 6, 7, 8]
        assert (bad[8].custom_id, bad[8].code, bad[8].param) == ("seven", "invalid_value", "seconds")
        assert "long" in bad[8].message
        assert campaigns.counts(campaign_id)["invalid"] == 6

    def test_what_cannot_be_stored_is_told_all_the_same(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(
            jsonl(
                {"prompt": "\ud800"},
                {"a\x00b": 1, "prompt": "p"},
                {"\ud800": 1, "prompt": "p"},
                {"prompt": "p", "size": "\x00\udfff"},
                {"prompt": "p", "custom_id": "\x00"},
                {"prompt": "p", "metadata": {"a": "\x00"}},
                b'{"prompt": "\x00"}',
                b'{"prompt": "p", "prompt\\u0000": 1}',
            )
        )
        assert sorted(campaigns.bad_lines(campaign_id)) == list(range(1, 9))

    def test_text_comes_through_as_it_is(self, campaigns: Campaigns) -> None:
        texts = [
            "\\N",
            "\\.",
            "a\tb\r\nc\\n",
            " '\"; DROP -- ",
            "\u212bngstr\u00f6m e\u0301",
            "\U0001f3ac",
            "\x1f.",
        ]
        rows = [{"prompt": one, "custom_id": one, "metadata": {one: one}} for one in texts]
        items = campaigns.items(campaigns.loaded(jsonl(*rows)))
        assert [(job.prompt, job.custom_id, job.request["metadata"]) for job in items] == [
            (one, one, {one: one}) for one in texts
        ]

    def test_an_id_is_taken_once_and_the_other_line_told(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 3)
        ids = ["a", "a", "a ", "\u00e9", "e\u0301", "1", "b", "c", "a", "b"]
        campaign_id = campaigns.loaded(jsonl(*({"prompt": "p", "custom_id": one} for one in ids), {"prompt": "p"}))
        bad = campaigns.bad_lines(campaign_id)
        assert {line: (row.custom_id, row.code) for line, row in bad.items()} == {
            2: ("a", "duplicate_custom_id"),
            9: ("a", "duplicate_custom_id"),
            10: ("b", "duplicate_custom_id"),
        }
        assert [re.findall(r"line (\d+)", bad[line].message) for line in (2, 9, 10)] == [
            ["2", "1"],
            ["9", "1"],
            ["10", "7"],
        ]
        assert [job.custom_id for job in campaigns.items(campaign_id)] == [*ids[:1], *ids[2:8], None]

    def test_jobs_are_in_the_order_of_lines(self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 100)
        campaign_id = campaigns.loaded(jsonl(*map(openai_line, range(950))))
        items = campaigns.items(campaign_id)
        assert [job.line for job in items] == list(range(1, 951))
        assert [job.id for job in items] == sorted(job.id for job in items)

    @pytest.mark.parametrize("pack", [bytes, gzip.compress])
    def test_a_table_is_loaded_alike(self, campaigns: Campaigns, pack: Any) -> None:
        data = "\ufeffcustom_id;prompt;seed;metadata.client\r\n007;NA;1;acme\r\n1E3;=1+1;;\r\n;;;\r\nx;;2;\r\n"
        campaign_id = campaigns.loaded(pack(data.encode()), filename="night.csv")
        items = campaigns.items(campaign_id)
        assert [(job.line, job.custom_id, job.prompt) for job in items] == [(2, "007", "NA"), (3, "1E3", "=1+1")]
        assert items[0].request["metadata"] == {"client": "acme"}
        bad = campaigns.bad_lines(campaign_id)
        assert {line: (row.code, row.param) for line, row in bad.items()} == {
            5: ("missing_required_parameter", "prompt")
        }

    def test_a_class_that_its_key_may_not_use_is_refused_line_by_line(self, campaigns: Campaigns) -> None:
        campaigns.execute("INSERT INTO projects (name) VALUES ('night') ON CONFLICT DO NOTHING")
        campaigns.execute(
            "INSERT INTO api_keys (id, project, name, hint, digest, scopes, priorities) "
            "VALUES ('key_bulk', 'night', 'k', 'hint', 'digest', '{}', '{bulk}') ON CONFLICT DO NOTHING"
        )
        campaign_id = campaigns.loaded(
            jsonl({"prompt": "p", "priority": "normal"}, {"prompt": "p"}), project="night", api_key="key_bulk"
        )
        assert [(job.line, job.api_key, job.priority) for job in campaigns.items(campaign_id)] == [(2, "key_bulk", 2)]
        assert campaigns.bad_lines(campaign_id)[1].code == "priority_not_allowed"

    def test_a_change_of_class_counts_for_the_lines_behind_it(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 2)
        campaign_id = campaigns.submit(jsonl(*map(openai_line, range(4))))
        loader = campaigns.loader()
        write = loader._write
        monkeypatch.setattr(
            loader,
            "_write",
            lambda *arguments: (
                write(*arguments),
                campaigns.execute("UPDATE campaigns SET priority = 1 WHERE id = :id", id=campaign_id),
            ),
        )
        assert loader.turn()
        assert [job.priority for job in campaigns.items(campaign_id)] == [2, 2, 1, 1]

    def test_others_have_their_turn_while_a_long_file_is_loaded(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 1)
        monkeypatch.setattr("rushes_worker.campaigns.loader.SLICE_SECONDS", 0.0)
        long = campaigns.submit(jsonl(*map(openai_line, range(4))))
        short = campaigns.submit(jsonl(openai_line(1)))
        loader = campaigns.loader()
        assert loader.turn()
        assert campaigns.read(long).loaded_at is None
        assert loader.turn()
        assert len(campaigns.items(short)) == 1
        campaigns.load()
        assert len(campaigns.items(long)) == 4


class TestUnreadable:
    @pytest.mark.parametrize(
        ("data", "code"),
        [
            (b"\n" * 100_000, "no_requests"),
            ("\ufeff{}".encode("utf-16-le"), "unsupported_encoding"),
            (gzip.compress(jsonl(*map(openai_line, range(100))))[:-20], "invalid_gzip"),
            (jsonl(*map(openai_line, range(101))), "too_many_lines"),
            (jsonl({"prompt": "x" * 200_000}), "file_too_large"),
            (b"prompt,promt\na,b\n", "unknown_parameter"),
        ],
    )
    def test_the_campaign_fails_as_a_whole(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch, data: bytes, code: str
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 10)
        campaign_id = campaigns.submit(data, filename="lines.csv")
        campaigns.load(campaign_max_lines=100 if code != "no_requests" else 100_000, campaign_max_bytes=100_000)
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "failed"
        assert campaign.failed_at is not None
        assert campaign.errors is not None
        assert [error["code"] for error in campaign.errors["data"]] == [code]
        assert campaigns.items(campaign_id) == []
        assert campaigns.counts(campaign_id) == {}
        assert campaigns.events(campaign_id) == ["batch.failed"]

    def test_a_file_that_is_gone_is_told(self, campaigns: Campaigns) -> None:
        deleted, lost = (campaigns.submit(jsonl(openai_line(1))) for _ in range(2))
        campaigns.execute(
            "UPDATE files SET deleted_at = now() WHERE id = (SELECT input_file_id FROM campaigns WHERE id = :id)",
            id=deleted,
        )
        campaigns.store.delete_keys([f"files/default/{campaigns.read(lost).input_file_id}"])
        campaigns.load()
        for campaign_id, code in ((deleted, "file_deleted"), (lost, "file_content_missing")):
            errors = campaigns.read(campaign_id).errors
            assert errors is not None
            assert errors["data"][0]["code"] == code

    def test_a_file_that_goes_while_it_is_loaded_ends_its_campaign(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 2)
        campaign_id = campaigns.submit(jsonl(*map(openai_line, range(6))))
        loader = campaigns.loader()
        loader.stop()
        assert loader.turn()
        campaigns.run(campaign_id, 1)
        campaigns.execute("UPDATE files SET deleted_at = now()")
        campaigns.load()
        campaigns.end()
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "cancelled"
        assert campaign.errors is not None
        assert campaign.errors["data"][0]["code"] == "file_deleted"
        assert campaigns.counts(campaign_id) == {"completed": 1, "cancelled": 1}

    def test_a_project_has_only_so_many_jobs_waiting(self, campaigns: Campaigns) -> None:
        first = campaigns.loaded(jsonl(*map(openai_line, range(6))))
        second = campaigns.submit(jsonl(*map(openai_line, range(5))))
        elsewhere = campaigns.submit(jsonl(*map(openai_line, range(5))), project="elsewhere")
        campaigns.load(campaign_max_queued=10)
        states = [campaigns.read(one).state for one in (first, second, elsewhere)]
        assert states == ["in_progress", "failed", "in_progress"]
        errors = campaigns.read(second).errors
        assert errors is not None
        assert errors["data"][0]["code"] == "queue_full"

    def test_lines_that_are_still_to_be_loaded_take_their_places(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 2)
        first = campaigns.submit(jsonl(*map(openai_line, range(6))))
        slow = campaigns.loader(campaign_max_queued=10)
        slow.stop()
        assert slow.turn()
        second = campaigns.submit(jsonl(*map(openai_line, range(5))))
        assert [row[0] for row in campaigns.execute(loading.num_queued("default"))] == [6]
        campaigns.load(campaign_max_queued=10)
        assert [campaigns.read(one).state for one in (first, second)] == ["in_progress", "failed"]
        assert campaigns.counts(first)["queued"] == 6
        assert [row[0] for row in campaigns.execute(loading.num_queued("default"))] == [6]

    def test_lines_that_are_all_bad_are_no_reason_to_fail(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(b"{\n[]\n")
        assert campaigns.read(campaign_id).state == "in_progress"
        assert campaigns.counts(campaign_id) == {"invalid": 2}

    def test_a_line_of_ten_megabytes_is_one_bad_line(self, campaigns: Campaigns) -> None:
        data = jsonl(openai_line(1)) + b'{"prompt":"' + b"x" * 10_000_000 + b'"}\n' + jsonl(openai_line(3))
        campaign_id = campaigns.loaded(data)
        assert [job.line for job in campaigns.items(campaign_id)] == [1, 3]
        assert campaigns.bad_lines(campaign_id)[2].code == "line_too_long"


class TestFaults:
    def break_at(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        """Have reading the line with this seed meet a bug."""
        resolve = resolve_line

        def meet(value: dict[str, Any], terms: Terms) -> Item | LineError:
            if value["body"]["seed"] == seed:
                raise KeyError(seed)
            return resolve(value, terms)

        monkeypatch.setattr(chunks, "resolve_line", meet)

    def test_a_file_that_the_store_does_not_give_is_waited_for_a_day(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.submit(jsonl(openai_line(1)))
        away = {"s3_endpoint_url": f"http://127.0.0.1:{free_port()}"}
        campaigns.load(**away)
        assert campaigns.read(campaign_id).state == "validating"
        campaigns.execute("UPDATE campaigns SET lease_until = now(), store_failed_at = now() - interval '25 hours'")
        campaigns.load(**away)
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "failed"
        assert campaign.errors is not None
        assert campaign.errors["data"][0]["code"] == "storage_error"
        assert campaigns.events(campaign_id) == ["batch.failed"]

    def test_an_old_campaign_is_waited_for_from_the_first_failure_of_the_store(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.submit(jsonl(openai_line(1)))
        campaigns.execute("UPDATE campaigns SET created_at = now() - interval '3 days'")
        away = {"s3_endpoint_url": f"http://127.0.0.1:{free_port()}"}
        campaigns.load(**away)
        first = campaigns.read(campaign_id)
        assert (first.state, first.store_failed_at is None) == ("validating", False)
        campaigns.execute("UPDATE campaigns SET lease_until = now()")
        campaigns.load(**away)
        assert campaigns.read(campaign_id).store_failed_at == first.store_failed_at
        campaigns.execute("UPDATE campaigns SET lease_until = now()")
        campaigns.load()
        # what it gives ends the patience that was begun
        loaded = campaigns.read(campaign_id)
        assert (loaded.state, loaded.store_failed_at) == ("in_progress", None)

    def test_a_line_that_cannot_be_loaded_ends_its_campaign_and_holds_up_no_other(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 2)
        self.break_at(monkeypatch, 5)
        broken = campaigns.submit(jsonl(*map(openai_line, range(8))))
        other = campaigns.submit(jsonl(*map(openai_line, range(4))))
        campaigns.load()
        assert campaigns.counts(other)["queued"] == 4
        for _ in range(loading.MAX_FAILURES - 1):
            assert campaigns.read(broken).state == "in_progress"
            # nobody touches it for a while
            assert not campaigns.loader().turn()
            campaigns.execute("UPDATE campaigns SET lease_until = now()")
            campaigns.load()
        campaigns.end()
        campaign = campaigns.read(broken)
        assert campaign.state == "cancelled"
        assert campaign.errors is not None
        assert [(error["code"], error["line"]) for error in campaign.errors["data"]] == [("internal_error", 5)]
        assert campaigns.counts(broken) == {"cancelled": 4}
        assert campaigns.events(broken) == ["batch.cancelled"]

    def test_a_file_whose_first_line_cannot_be_loaded_fails(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.break_at(monkeypatch, 0)
        campaign_id = campaigns.submit(jsonl(openai_line(0)))
        for _ in range(loading.MAX_FAILURES):
            campaigns.load()
            campaigns.execute("UPDATE campaigns SET lease_until = now()")
        assert campaigns.read(campaign_id).state == "failed"
        assert campaigns.events(campaign_id) == ["batch.failed"]

    def test_only_failures_in_a_row_are_counted(self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 2)
        campaign_id = campaigns.submit(jsonl(*map(openai_line, range(6))))
        self.break_at(monkeypatch, 3)
        campaigns.load()
        assert campaigns.read(campaign_id).load_failures == 1
        monkeypatch.undo()
        campaigns.execute("UPDATE campaigns SET lease_until = now()")
        campaigns.load()
        assert (campaigns.read(campaign_id).load_failures, campaigns.counts(campaign_id)["queued"]) == (0, 6)


class TestExpiring:
    @pytest.mark.parametrize("num_read", [0, 4])
    def test_nothing_more_is_loaded_once_the_completion_window_is_over(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch, num_read: int
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 4)
        campaign_id = campaigns.submit(jsonl(*map(openai_line, range(10))))
        if num_read:
            loader = campaigns.loader()
            loader.stop()
            assert loader.turn()
            campaigns.run(campaign_id, 1)
        campaigns.execute("UPDATE campaigns SET expires_at = now()")
        campaigns.load()
        campaigns.end()
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "expired"
        assert campaign.errors is not None
        (error,) = campaign.errors["data"]
        assert (error["code"], error["line"], error["param"]) == ("batch_expired", num_read + 1, None)
        assert f"when {num_read} lines were read" in error["message"]
        assert campaigns.counts(campaign_id) == ({"completed": 1, "expired": 3} if num_read else {})
        assert campaigns.events(campaign_id) == ["batch.expired"]

    def test_a_chunk_that_is_being_read_then_is_not_written(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 4)
        campaign_id = campaigns.submit(jsonl(*map(openai_line, range(10))))
        loader = campaigns.loader()
        write = loader._write

        def write_late(*arguments: Any) -> None:
            write(*arguments)
            campaigns.execute("UPDATE campaigns SET expires_at = now()")

        monkeypatch.setattr(loader, "_write", write_late)
        assert loader.turn()
        assert len(campaigns.items(campaign_id)) == 4


class TestOnlyReading:
    def test_a_dry_run_reports_and_makes_nothing(self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunks, "CHUNK_LINES", 2)
        replica = replicas.upsert_replica(
            "gpu#1",
            pool="default",
            layout="r1s4",
            model=campaigns.model.name,
            device="cuda",
            state="ready",
            epoch=1,
        )
        with Session(campaigns.engine) as session, session.begin():
            session.execute(replica)
            session.add(
                MeasuredTime(
                    model=campaigns.model.name,
                    width=480,
                    height=480,
                    num_frames=107,
                    num_jobs=50,
                    run_p50=10.0,
                    run_p80=12.0,
                    run_p90=13.0,
                    phases={},
                )
            )
        rows = [openai_line(1), openai_line(2), b"{", openai_line(1), openai_line(5, seconds="5")]
        days = ["mo", "tu", "we", "th", "fr", "sa", "su"]
        window = {"timezone": "UTC", "days": days, "start": "00:00", "end": "24:00", "on_close": "stop"}
        campaign_id = campaigns.loaded(jsonl(*rows), dry_run=True, window=window)
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "completed"
        assert campaign.report is not None
        report = dict(campaign.report)
        errors = report.pop("errors")
        assert report.pop("completes_at") < report.pop("completes_at_latest")
        # the shape that was not measured takes its part by frames, and each replica has four GPUs
        seconds = pytest.approx(4 * 10.0 * (2 + 124 / 107), abs=0.1)
        assert report == {
            "lines": 5,
            "valid": 3,
            "invalid": 2,
            "frames": 2 * 107 + 124,
            "gpu_seconds": seconds,
            "basis": "last 50 clips",
            "fits_window": True,
        }
        assert [(error["line"], error["code"]) for error in errors] == [
            (3, "invalid_line"),
            (4, "duplicate_custom_id"),
        ]
        assert campaigns.items(campaign_id) == []
        assert campaigns.counts(campaign_id) == {}
        assert campaigns.bad_lines(campaign_id) == {}

    def test_a_dry_run_is_forgotten_a_day_after_its_end(self, campaigns: Campaigns) -> None:
        data = jsonl(openai_line(1))
        old, unread, late, real = (
            campaigns.loaded(data, dry_run=True),
            campaigns.loaded(data, dry_run=True),
            campaigns.loaded(data, dry_run=True),
            campaigns.loaded(data),
        )
        for one, hours in ((old, 25), (unread, 25), (late, 23), (real, 25)):
            ended = "UPDATE campaigns SET completed_at = now() - make_interval(hours => :hours) WHERE id = :id"
            campaigns.execute(ended, id=one, hours=hours)
        campaigns.execute("UPDATE campaigns SET state = 'validating', loaded_at = NULL WHERE id = :id", id=unread)
        campaigns.execute("UPDATE campaigns SET state = 'completed' WHERE id = :id", id=real)
        sweeper = Sweeper(campaigns.settings)
        sweeper.tidy()
        sweeper.close()
        gone = {one for one in (old, unread, late, real) if campaigns.read(one).deleted_at is not None}
        assert gone == {old}
        assert campaigns.read(old).purged_at is not None

    def test_a_dry_run_tells_the_first_thousand_bad_lines(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(b"{\n" * 1_500, dry_run=True)
        report = campaigns.read(campaign_id).report
        assert report is not None
        assert (report["invalid"], len(report["errors"]), report["errors"][-1]["line"]) == (1_500, 1_000, 1_000)

    def test_one_bad_line_fails_a_strict_campaign_before_any_job_is_made(self, campaigns: Campaigns) -> None:
        bad = jsonl(openai_line(1), openai_line(2, seconds="long"), openai_line(3), openai_line(1))
        campaign_id = campaigns.loaded(bad, strict=True)
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "failed"
        assert campaign.errors is not None
        assert [(error["line"], error["code"], error["param"]) for error in campaign.errors["data"]] == [
            (2, "invalid_value", "seconds"),
            (4, "duplicate_custom_id", "custom_id"),
        ]
        assert campaigns.items(campaign_id) == []
        assert campaigns.execute("SELECT id FROM job_events") == []

    def test_a_strict_campaign_without_bad_lines_is_loaded(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(jsonl(*map(openai_line, range(3))), strict=True)
        assert campaigns.counts(campaign_id) == {"queued": 3, "remaining_cost": 3 * COST}


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

    @pytest.mark.parametrize("form", ["jsonl", "csv", "gzip"])
    def test_every_line_is_loaded_exactly_once(self, campaigns: Campaigns, settings: Settings, form: str) -> None:
        data, filename = self.lines(), "lines.jsonl"
        if form == "csv":
            rows = [json.loads(row) if row != b"{" else None for row in data.splitlines()]
            table = [f'{row["custom_id"]},"{row["body"]["prompt"]}\n"' if row else "bad" for row in rows]
            data, filename = "\r\n".join(["custom_id,prompt", *table]).encode(), "lines.csv"
        elif form == "gzip":
            data = gzip.compress(data)
        campaign_id = campaigns.submit(data, filename=filename)
        for chunk, where in ((1, "begin"), (1, "middle"), (1, "end"), (2, "middle"), (1, "end"), (3, "middle")):
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
            sent = [dispatcher.hint_campaigns() for _ in range(3)]
            assert sent in ([1, 0, 0], [0, 0, 0])
            return sent[0] == 1

        assert not is_hinted()
        campaign_id = campaigns.submit(jsonl(*map(openai_line, range(2))))
        assert is_hinted()
        campaigns.load()
        assert not is_hinted()
        campaigns.execute("UPDATE campaigns SET expires_at = now()")
        assert is_hinted()
        campaigns.end()
        assert campaigns.read(campaign_id).state == "expired"
        assert not is_hinted()
        campaigns.jobs.run(statements.delete(campaign_id))
        assert is_hinted()
        campaigns.end()
        assert not is_hinted()
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

    campaign_id = campaigns.submit(jsonl(*map(openai_line, range(20_000))))
    process = start()
    try:
        wait_until(lambda: campaigns.read(campaign_id).loaded_lines > 0)
        process.kill()
        process.wait()
        campaigns.execute("UPDATE campaigns SET lease_until = now()")
        process = start()
        wait_until(lambda: campaigns.read(campaign_id).loaded_at is not None)
        lines = [row.line for row in campaigns.execute("SELECT line FROM jobs ORDER BY line")]
        assert lines == list(range(1, 20_001))
        campaigns.stop(campaign_id)
        wait_until(lambda: campaigns.read(campaign_id).state == "cancelled")
        assert campaigns.counts(campaign_id) == {"cancelled": 20_000}
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    log = (tmp_path / "loader.log").read_text()
    assert "Traceback" not in log, log
