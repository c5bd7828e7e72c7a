"""From a file in the store to jobs that wait for their campaign."""

import gzip
import re
from typing import Any

import pytest
from rushes_core.states import JobState
from rushes_worker.campaigns import chunks
from support.campaigns import COST, Campaigns, jsonl, openai_line


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
