"""Files of campaigns that cannot be read, or not any more, or not in time."""

import gzip
from typing import Any

import pytest
from rushes_core.campaigns import loading
from rushes_core.campaigns.items import Item, Terms, resolve_line
from rushes_core.campaigns.lines import LineError
from rushes_worker.campaigns import chunks
from support.campaigns import Campaigns, jsonl, openai_line


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
        campaigns.load_chunk()
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
        away = {"s3_endpoint_url": "http://127.0.0.1:1"}
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
        away = {"s3_endpoint_url": "http://127.0.0.1:1"}
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
            campaigns.load_chunk()
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
