"""What the lines of a campaign ask for."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from rushes_core.campaigns.items import Item, Terms, merge, resolve_line
from rushes_core.campaigns.lines import (
    LineError,
)
from rushes_core.errors import InvalidRequest
from rushes_core.ids import video_ids
from rushes_core.request import ResolvedRequest, resolve
from rushes_core.served_model import ServedModel
from support.campaign_lines import offline_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return offline_model(tmp_path_factory.mktemp("lines"))


BODY = {"prompt": "A gull over the harbour", "seconds": 5}


def openai(**changes: Any) -> dict[str, Any]:
    members: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/videos", "body": BODY}
    return {name: value for name, value in (members | changes).items() if value is not ...}


class TestResolveLine:
    def test_both_forms_of_a_line_ask_for_the_same(self, model: ServedModel) -> None:
        plain = resolve_line({**BODY, "custom_id": "a", "seed": 1}, Terms(model))
        wrapped = resolve_line(openai(body={**BODY, "seed": 1}), Terms(model))
        assert isinstance(plain, Item)
        assert plain == wrapped
        assert (plain.custom_id, plain.seed, plain.num_frames, plain.priority) == ("a", 1, 124, None)

    def test_a_plain_line_may_do_without_an_id(self, model: ServedModel) -> None:
        found = resolve_line(BODY, Terms(model))
        assert isinstance(found, Item)
        assert found.custom_id is None

    @pytest.mark.parametrize(
        ("value", "code", "param"),
        [
            (openai(custom_id=...), "missing_required_parameter", "custom_id"),
            (openai(custom_id=None), "missing_required_parameter", "custom_id"),
            (openai(custom_id=""), "invalid_value", "custom_id"),
            (openai(custom_id="x" * 300), "invalid_value", "custom_id"),
            (openai(custom_id=1), "invalid_value", "custom_id"),
            (openai(custom_id="\x00"), "invalid_value", "custom_id"),
            (openai(custom_id="\ud800"), "invalid_value", "custom_id"),
            (openai(method=...), "missing_required_parameter", "method"),
            (openai(method="GET"), "invalid_value", "method"),
            (openai(url="/v1/images"), "invalid_value", "url"),
            (openai(body=...), "missing_required_parameter", "body"),
            (openai(body=[]), "invalid_value", "body"),
            (openai(prompt="p"), "unknown_parameter", "prompt"),
            (openai(body={**BODY, "custom_id": "a"}), "unknown_parameter", "custom_id"),
            ({}, "missing_required_parameter", "prompt"),
            ({"prompt": 5}, "invalid_value", "prompt"),
            ({"prompt": ""}, "invalid_value", "prompt"),
            ({"prompt": "p", "seconds": "long"}, "invalid_value", "seconds"),
            ({"prompt": "p", "webhook_url": "https://example.com"}, "unsupported_input", "webhook_url"),
            ({"prompt": "p", "not_before": 1}, "unsupported_input", "not_before"),
            ({"prompt": "p", "model": "other"}, "model_not_found", "model"),
            ({"prompt": "p", "output": {"bucket": "theirs"}}, "invalid_value", "output.bucket"),
        ],
    )
    def test_what_is_wrong_is_told_by_code_and_param(
        self, model: ServedModel, value: dict[str, Any], code: str, param: str
    ) -> None:
        found = resolve_line(value, Terms(model))
        assert isinstance(found, LineError)
        assert (found.code, found.param) == (code, param)

    def test_ids_are_compared_as_they_are_written(self, model: ServedModel) -> None:
        for custom_id in ("a ", "é", "e\u0301", "1", "007", "1E3", " "):
            found = resolve_line({**BODY, "custom_id": custom_id}, Terms(model))
            assert isinstance(found, Item)
            assert found.custom_id == custom_id

    def test_a_line_may_not_have_a_class_that_its_key_may_not(self, model: ServedModel) -> None:
        terms = Terms(model, priorities=["bulk"])
        found = resolve_line({**BODY, "priority": "interactive"}, terms)
        assert isinstance(found, LineError)
        assert (found.code, found.param) == ("priority_not_allowed", "priority")
        assert isinstance(resolve_line({**BODY, "priority": "bulk"}, terms), Item)
        assert isinstance(resolve_line(BODY, terms), Item)

    def test_defaults_lie_under_every_line(self, model: ServedModel) -> None:
        terms = Terms(model, defaults={"size": "832x480", "seed": 7, "metadata": {"client": "acme", "shot": "0"}})
        found = resolve_line({"prompt": "p", "seed": None, "metadata": {"shot": "1"}}, terms)
        assert isinstance(found, Item)
        assert (found.width, found.height, found.seed) == (832, 480, 7)
        assert json.loads(found.request)["metadata"] == {"client": "acme", "shot": "1"}
        assert terms.defaults["metadata"] == {"client": "acme", "shot": "0"}

    @pytest.mark.parametrize(
        ("defaults", "body", "merged"),
        [
            ({"seconds": 4}, {"num_frames": 124}, {"num_frames": 124}),
            ({"num_frames": 124}, {"seconds": 4}, {"seconds": 4}),
            (
                {"seconds": 4, "target": {"short_edge": 480}},
                {"target": {"duration_seconds": 5}},
                {"target": {"short_edge": 480, "duration_seconds": 5}},
            ),
            ({"size": "832x480"}, {"target": {"short_edge": 768}}, {"target": {"short_edge": 768}}),
            ({"target": {"short_edge": 768}}, {"size": "832x480"}, {"size": "832x480", "target": {}}),
            ({"seconds": 4}, {"seconds": None, "seed": 1}, {"seconds": 4, "seed": 1}),
        ],
    )
    def test_a_line_says_it_in_its_own_words(
        self, defaults: dict[str, Any], body: dict[str, Any], merged: dict[str, Any]
    ) -> None:
        assert merge(defaults, body) == merged


def _bodies(model: ServedModel) -> Iterator[dict[str, Any]]:
    """Requests of every kind, good and bad, mostly near a limit."""
    chance = random.Random(8)
    prompts: list[Any] = [
        "a ship",
        "é" * 50,
        "日本語の海",
        "\u212bngstr\u00f6m \ufb01",
        "x" * 9_000,
        "word " * 3_000,
        "\u0958" * 4_000,
        "🎬" * 3_000,
        "a\x00b",
        "\ud800",
        "\u3164",
        "",
        " ",
        "<|im_start|>",
        "<|im_start",
        "<d>hello</d>",
        7,
        None,
    ]
    fields: dict[str, list[Any]] = {
        "seconds": [4, "5", 15, 3.9, "long", True, "4.25"],
        "num_frames": [107, 124, 96, 95, 400, "124"],
        "size": ["832x480", "1280x720", "1x1", 5],
        "seed": [0, 2**63 - 1, 2**63, -1, "1", 1.0],
        "metadata": [{}, {"a": "b"}, {"a": 1}, {"k" * 65: "v"}, [], {"a": "\x00"}, {"é": "ü"}],
        "priority": ["bulk", "interactive", 50, 101, "urgent"],
        "target": [{"short_edge": 480}, {"duration_seconds": 5}, {"short_edge": 1}, {"odd": 1}],
        "retention": [{"seconds": 3_600}, {"seconds": 1}],
        "output": [{"thumbnail": True}, {"bucket": "other"}, {"key_prefix": "../x"}],
        "fps": [24, 25, "24"],
        "task": ["t2va", "fl2va"],
        "model": [model.name, "other"],
        "unknown": [1],
        "negative_prompt": ["", "no"],
    }
    for _ in range(2_000):
        body = {"prompt": chance.choice(prompts)}
        for name in chance.sample(list(fields), chance.choice([0, 0, 1, 1, 2, 3])):
            body[name] = chance.choice(fields[name])
        yield body


def _outcome(body: dict[str, Any], model: ServedModel) -> ResolvedRequest | LineError:
    try:
        return resolve(body, model)
    except InvalidRequest as error:
        return LineError.of(error)


def test_a_line_is_judged_as_the_same_request_would_be(model: ServedModel) -> None:
    verdicts = {"taken": 0, "refused": 0}
    for body in _bodies(model):
        found = resolve_line(body, Terms(model))
        expected = _outcome(body, model)
        if isinstance(expected, LineError):
            assert found == expected, body
            verdicts["refused"] += 1
            continue
        assert isinstance(found, Item), (body, found)
        columns = expected.job_values(model)
        if body.get("seed") is None:
            columns["seed"] = found.seed
        for name in ("prompt", "seed", "width", "height", "num_frames"):
            assert getattr(found, name) == columns[name]
        assert json.loads(found.request) == columns["request"]
        verdicts["taken"] += 1
    assert min(verdicts.values()) > 400


def test_ids_of_jobs_rise_with_every_line() -> None:
    ids = video_ids()
    drawn = [next(ids) for _ in range(5_000)]
    assert drawn == sorted(set(drawn))
    ahead = "video_7ZZZZZZZZZ0000000000000000"
    after = video_ids(ahead)
    drawn = [next(after) for _ in range(3)]
    assert [ahead, *drawn] == sorted({ahead, *drawn})


def test_the_tiny_tokenizer_is_one_that_needs_not_take_prompts_apart(model: ServedModel) -> None:
    for prompt in ("a ship", "\u212bngstr\u00f6m \ufb01", "\u0958" * 10, "🎬 日本語", "<d>hi</d>"):
        bound = model.tokenizer.bound(prompt)
        assert bound is not None
        assert len(model.tokenizer.encode(prompt, max_tokens=10_000)) <= bound
