"""What campaigns are called and asked for outside: names in archives, cells of tables, durations, columns."""

import csv
import io
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rushes_api.campaign_options import options_of
from rushes_core.campaigns.names import clip_name
from rushes_core.campaigns.options import CampaignChanges, CampaignRequest, duration_text
from rushes_core.campaigns.output import guarded
from rushes_core.campaigns.view import line_of_id
from rushes_core.errors import InvalidRequest
from rushes_core.moment import parse_duration
from rushes_core.served_model import ServedModel
from support.api import offline_settings
from support.checkpoints import tiny_checkpoint

IDS = st.one_of(
    st.none(),
    st.text(min_size=1, max_size=256),
    st.sampled_from(
        ["a", "A", "a~2", "A~1", "a_2", "con", "CON", "manifest", "missing", ".", "..", "a.", "line", "a/b"]
    ),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.load(offline_settings(tiny_checkpoint(tmp_path_factory.mktemp("options"))))


@given(st.lists(IDS, max_size=30, unique_by=lambda one: one if one is not None else object()))
def test_names_of_clips_are_safe_and_one_of_a_kind(ids: list[str | None]) -> None:
    names = [clip_name(one, line) for line, one in enumerate(ids, 1)]
    assert len({name.lower() for name in names}) == len(names)
    for name in names:
        assert Path(name).name == name
        assert name.endswith(".mp4")
        assert name.isascii()
        assert name.isprintable()
        assert not set(name) & set('<>:"/\\|?*')
        assert len(name) <= 150
        assert name[0] not in ".-"
        assert name.partition(".")[0].lower() not in ("con", "prn", "aux", "nul", "com1", "lpt9")


@given(st.text())
def test_a_cell_is_its_text_or_its_text_behind_an_apostrophe(text: str) -> None:
    cell = guarded(text)
    assert cell in (text, f"'{text}")
    assert not str(cell).startswith(("=", "+", "-", "@", "\t", "\r", "\n"))


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_a_cell_comes_back_from_the_table(text: str) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerow([guarded(text), "end"])
    ((cell, end),) = csv.reader(io.StringIO(out.getvalue(), newline=""))
    assert (cell, end) == (guarded(text), "end")


@given(st.integers(min_value=1, max_value=30 * 86_400))
def test_a_duration_that_is_shown_is_read_as_the_same(seconds: int) -> None:
    assert parse_duration(duration_text(seconds)) == timedelta(seconds=seconds)


@pytest.mark.parametrize(("seconds", "text"), [(86_400, "24h"), (172_800, "2d"), (5_400, "90m"), (61, "61s")])
def test_a_duration_is_shown_in_the_unit_that_fits(seconds: int, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize("wrong", ["", "item_", "7", "item_-1", "item_1x", "item_" + "1" * 13, "item_１"])
def test_what_is_no_id_of_an_item(wrong: str) -> None:
    assert line_of_id(wrong) is None
    assert line_of_id("item_12") == 12


class TestOptions:
    def test_text_of_a_query_means_what_json_says(self, model: ServedModel) -> None:
        pairs = {
            "max_parallel": "3",
            "proof[count]": "4",
            "proof[auto_continue_after]": "30m",
            "budget[gpu_seconds]": "9.5",
            "budget[on_limit]": "cancel",
            "window": '{"timezone": "UTC", "start": "22:00", "end": "06:00"}',
            "defaults[target][short_edge]": "480",
            "defaults[output][thumbnail]": "false",
            "webhook_events": "batch.completed, batch.failed",
            "webhook_url": "https://example.com/hook",
            "metadata[client]": "7",
            "dry_run": "1",
            "start_paused": "0",
        }
        as_json: dict[str, Any] = {
            "max_parallel": 3,
            "proof": {"count": 4, "auto_continue_after": "30m"},
            "budget": {"gpu_seconds": 9.5, "on_limit": "cancel"},
            "window": {"timezone": "UTC", "start": "22:00", "end": "06:00"},
            "defaults": {"target": {"short_edge": 480}, "output": {"thumbnail": False}},
            "webhook_events": ["batch.completed", "batch.failed"],
            "webhook_url": "https://example.com/hook",
            "metadata": {"client": "7"},
            "dry_run": True,
            "start_paused": False,
        }
        assert options_of(pairs.items()) == as_json
        assert CampaignRequest.parse(options_of(pairs.items())) == CampaignRequest.parse(as_json)

    def test_what_is_not_said_is_no_column(self, model: ServedModel) -> None:
        columns = CampaignRequest.parse({}).columns(model)
        assert columns == {
            "model": model.name,
            "priority": 2,
            "strict": False,
            "dry_run": False,
            "tell_items": False,
        }

    def test_a_window_is_kept_whole(self, model: ServedModel) -> None:
        window = {"timezone": "UTC", "start": "22:00", "end": "06:00"}
        kept = CampaignRequest.parse({"window": window}).columns(model)["window"]
        assert (kept["days"], kept["on_close"]) == (["mo", "tu", "we", "th", "fr", "sa", "su"], "finish_current")

    def test_null_takes_away_and_absent_stays(self) -> None:
        _, changed = CampaignChanges.parse({"window": None, "budget": None, "max_parallel": None, "metadata": None})
        assert changed == {"window": None, "budget_gpu_seconds": None, "max_parallel": None, "metadata_": {}}
        assert CampaignChanges.parse({})[1] == {}

    def test_every_fault_of_defaults_is_named(self) -> None:
        with pytest.raises(InvalidRequest, match=r"defaults\.seconds must be between") as caught:
            CampaignRequest.parse({"defaults": {"seconds": 99}})
        assert caught.value.param == "defaults.seconds"
