"""What a request for a clip may say, and what it resolves to."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rushes_core.errors import InvalidRequest
from rushes_core.models import Job
from rushes_core.parsing import InvalidFields
from rushes_core.request import ModelNotFound, VideoRequest, remix, resolve
from rushes_core.served_model import ServedModel
from support.api import offline_settings
from support.checkpoints import tiny_checkpoint
from support.request_bodies import refused, resolved


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("request"))
    return ServedModel.load(offline_settings(checkpoint, max_prompt_tokens=200))


class TestPrompt:
    def test_it_is_required(self, model: ServedModel) -> None:
        with pytest.raises(InvalidRequest, match="prompt is required") as caught:
            resolve({}, model)
        assert (caught.value.param, caught.value.code) == ("prompt", "missing_required_parameter")

    @pytest.mark.parametrize("value", [1, True, ["a"], {"a": "b"}, 1.5])
    def test_it_is_a_string(self, model: ServedModel, value: object) -> None:
        assert "prompt must be a string" in str(refused(model, prompt=value))

    def test_null_is_the_same_as_absent(self, model: ServedModel) -> None:
        assert refused(model, prompt=None).code == "missing_required_parameter"

    def test_a_proper_pair_of_surrogates_is_one_character(self, model: ServedModel) -> None:
        assert resolved(model, prompt="\U0001f600").prompt == "😀"

    def test_it_is_kept_as_it_was_sent(self, model: ServedModel) -> None:
        text = "  e\u0301 \n\t<d>Hi</d>  "
        assert resolved(model, prompt=text).prompt == text

    def test_its_tokens_are_counted(self, model: ServedModel) -> None:
        assert resolved(model, prompt="x" * 200).num_tokens == 200
        assert refused(model, prompt="x" * 201).code == "prompt_too_long"


class TestSeconds:
    @pytest.mark.parametrize(
        ("value", "shown", "frames"),
        [
            (None, "4", 107),
            ("5", "5", 124),
            (5, "5", 124),
            (5.0, "5", 124),
            ("5.5", "5.5", 141),
            (5.999999, "5.999999", 158),
            ("14.4", "14.4", 362),
            (15, "15", 362),
            ("4.0", "4", 107),
        ],
    )
    def test_one_rule_for_numbers_and_text(self, model: ServedModel, value: object, shown: str, frames: int) -> None:
        found = resolved(model, seconds=value)
        assert (found.seconds, found.clip.num_frames) == (shown, frames)

    @pytest.mark.parametrize(
        "value",
        [
            *(3.9, "3.999", 15.1, "15.0001", 16, 0, -5, "-5", "5" * 5_000, 10**400, 1e300, float("nan"), float("inf")),
            *("5,5", "PT5S", "5s", "", " 5", "５", "1e1", "0x5", "+5", "NaN", "inf", "\ud83d", True, [5], {"a": 5}),
        ],
        ids=lambda value: ascii(value)[:20],
    )
    def test_anything_else_is_refused_with_the_range_or_the_type(self, model: ServedModel, value: object) -> None:
        error = refused(model, seconds=value)
        assert error.param == "seconds"
        assert ("4 and 15" in str(error)) or "number of seconds" in str(error)
        assert len(str(error)) < 300

    def test_frames_may_be_given_instead(self, model: ServedModel) -> None:
        found = resolved(model, num_frames=124)
        assert (found.clip.num_frames, found.seconds) == (124, "5.1667")

    def test_frames_that_agree_with_seconds_are_accepted(self, model: ServedModel) -> None:
        assert resolved(model, num_frames=124, seconds="5").seconds == "5"
        assert resolved(model, num_frames=120, seconds="5").clip.num_frames == 124

    def test_frames_that_disagree_with_seconds_are_refused(self, model: ServedModel) -> None:
        error = refused(model, num_frames=243, seconds="5")
        assert error.param == "num_frames"
        assert "different clips" in str(error)

    @pytest.mark.parametrize("value", [363, 95, 0, -1, "124", 124.0, True, 2**70])
    def test_frames_are_a_whole_number_in_range(self, model: ServedModel, value: object) -> None:
        assert refused(model, num_frames=value).param == "num_frames"

    def test_too_many_frames_are_refused_with_the_range(self, model: ServedModel) -> None:
        assert "between 96 and 362, got 363" in str(refused(model, num_frames=363))


class TestSize:
    def test_an_alias_keeps_what_was_asked_for(self, model: ServedModel) -> None:
        found = resolved(model, size="1280x720")
        assert (found.canvas.size, found.size_requested) == ("1344x768", "1280x720")

    def test_the_default_is_not_recorded_as_asked_for(self, model: ServedModel) -> None:
        found = resolved(model)
        assert (found.canvas.size, found.size_requested) == ("1344x768", None)

    @pytest.mark.parametrize("value", ["769x1345", "129x97", "", "1344X768", 1344, [1344, 768], True, "\udfff"])
    def test_others_are_refused_with_the_list(self, model: ServedModel, value: object) -> None:
        error = refused(model, size=value)
        assert (error.param, error.code) == ("size", "unsupported_size")
        assert "1344x768" in str(error)
        assert "1024x1792" in str(error)


class TestSeed:
    @pytest.mark.parametrize("value", [0, -0, 1, 2**53 + 1, 2**63 - 1])
    def test_it_comes_back_exactly(self, model: ServedModel, value: int) -> None:
        assert resolved(model, seed=value).seed == value

    @pytest.mark.parametrize(
        "value", [-1, 1.5, 1.0, "12", "１２", True, 1e3, 2**63, 2**64, -(2**70), [1], 9007199254740992.0, 10**4_000]
    )
    def test_anything_else_is_refused(self, model: ServedModel, value: object) -> None:
        error = refused(model, seed=value)
        assert (error.param, error.code) == ("seed", "invalid_value")
        assert len(str(error)) < 300

    def test_an_absent_one_is_drawn(self, model: ServedModel) -> None:
        drawn = {resolved(model, seed=None).seed for _ in range(20)}
        assert len(drawn) == 20
        assert all(0 <= seed < 2**53 for seed in drawn)


class TestMetadata:
    def test_it_is_kept(self, model: ServedModel) -> None:
        metadata = {"client": "acme", "a" * 64: "b" * 512, "": ""}
        assert resolved(model, metadata=metadata).metadata == metadata

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ({str(i): "x" for i in range(17)}, "at most 16 pairs, got 17"),
            ({"a" * 65: "b"}, "must have keys of at most 64 characters of text, got 'aaaa"),
            ({"a": "b" * 513}, "must have values of at most 512 characters of text, got 'bbbb"),
            ({"x": "y", "a": 1}, "metadata must have values of at most 512 characters of text, got 1 for 'a'"),
            ({"a": None}, "got null for 'a'"),
            ({"a": {"b": "c"}}, "got {'b': 'c'} for 'a'"),
            ({"a": "\x00"}, "NUL"),
            ({"\ud800": "b"}, "valid Unicode"),
            ({"a": "\udc00"}, "valid Unicode"),
            ([], "must be a map of strings to strings, got []"),
            ("x", "must be a map of strings to strings, got 'x'"),
            (1, "must be a map of strings to strings, got 1"),
        ],
        ids=lambda value: ascii(value)[:24],
    )
    def test_openais_limits_hold(self, model: ServedModel, value: object, reason: str) -> None:
        error = refused(model, metadata=value)
        assert error.param == "metadata"
        assert reason in str(error)


class TestModel:
    def test_the_served_one_may_be_named(self, model: ServedModel) -> None:
        resolved(model, model=model.name)

    @pytest.mark.parametrize("name", ["sora-2", "", "\ud800", "x" * 150])
    def test_another_one_is_not_found(self, model: ServedModel, name: str) -> None:
        error = refused(model, model=name)
        assert error.param == "model"
        assert isinstance(error, ModelNotFound) or name == "\ud800"

    def test_something_else_is_no_name(self, model: ServedModel) -> None:
        assert refused(model, model=1).code == "invalid_value"


class TestFixedByTheModel:
    @pytest.mark.parametrize(
        "body",
        [
            {"fps": "24"},
            {"fps": 24.0},
            {"fps": 24},
            {"fps": None},
            {"n": 1},
            {"guidance_scale": 1.0},
            {"guidance_scale": "1.0"},
            {"num_inference_steps": 9},
            {"flow_shift": 10},
            {"audio_flow_shift": 3.0},
            {"quality": "standard"},
        ],
        ids=str,
    )
    def test_it_may_be_restated(self, model: ServedModel, body: dict[str, Any]) -> None:
        resolved(model, **body)

    @pytest.mark.parametrize(
        "body",
        [
            {"fps": 30},
            {"fps": 23.976},
            {"fps": 0},
            {"fps": True},
            {"fps": "２４"},
            {"fps": [24]},
            {"n": 2},
            {"n": True},
            {"guidance_scale": 7.5},
            {"num_inference_steps": 50},
            {"flow_shift": "x" * 10_000},
            {"audio_flow_shift": {"\ud800": 1}},
            {"quality": "hd"},
        ],
        ids=lambda body: ascii(body)[:30],
    )
    def test_it_may_not_be_changed(self, model: ServedModel, body: dict[str, Any]) -> None:
        error = refused(model, **body)
        assert error.param == next(iter(body))
        assert "fixed at" in str(error)


class TestFieldsThatDoNotExist:
    @pytest.mark.parametrize("name", ["secnds", "Prompt", "num_frame", "extra_body.foo", "width", "", "seed "])
    def test_they_are_refused_by_name(self, model: ServedModel, name: str) -> None:
        error = refused(model, **{name: "x"})
        assert error.code == "unknown_parameter"
        assert error.param == name

    def test_a_name_that_cannot_be_encoded_is_escaped(self, model: ServedModel) -> None:
        assert refused(model, **{"\ud800\x00": 1}).param == r"\ud800\x00"

    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("input_reference", "x", "renders from text alone"),
            ("negative_prompt", "x", "renders from text alone"),
            ("conditions", [{"type": "image", "uri": "https://a.example/b.png"}], "renders from text alone"),
            ("image", "x", "renders from text alone"),
            ("keyframes", ["x"], "renders from text alone"),
            ("user", "u-1", "metadata"),
            ("safety_identifier", "u-1", "metadata"),
            ("extra_body", {"seed": 1}, "beside prompt"),
            ("response_format", "b64_json", "content_url"),
            ("response_format", 1, "content_url"),
            ("task", "fl2va", "keyframes"),
            ("task", "ref2va", "references"),
        ],
    )
    def test_what_exists_elsewhere_is_refused_with_the_reason(
        self, model: ServedModel, name: str, value: object, reason: str
    ) -> None:
        error = refused(model, **{name: value})
        assert (error.param, error.code) == (name, "unsupported_input")
        assert reason in str(error)

    @pytest.mark.parametrize("value", [None, "", [], {}])
    def test_such_an_input_may_be_empty(self, model: ServedModel, value: object) -> None:
        resolved(model, negative_prompt=value, conditions=value, keyframes=value)

    def test_the_only_format_of_a_response_may_be_restated(self, model: ServedModel) -> None:
        resolved(model, response_format="url")


class TestRemix:
    @staticmethod
    def source(**request: Any) -> Job:
        return Job(id="video_1", seed=7, width=768, height=1344, num_frames=124, priority=2, request=request)

    def test_what_the_source_asked_for_is_asked_for_again(self) -> None:
        asked = {
            "seconds": "5",
            "size_requested": "720x1280",
            "metadata": {"a": "b"},
            "retention_seconds": 3_600,
            "output": {"bucket": "masters", "thumbnail": False},
        }
        made = remix(self.source(**asked, not_before=1.0), "a cat", num_tokens=5, buckets=["masters"])
        assert (made.prompt, made.seed, made.canvas.size, made.clip.num_frames) == ("a cat", 7, "768x1344", 124)
        assert (made.priority, made.not_before, made.deadline) == (2, None, None)
        assert made.output == asked["output"]

    def test_a_bucket_that_may_not_be_named_any_more_is_refused(self) -> None:
        with pytest.raises(InvalidRequest) as caught:
            remix(self.source(output={"bucket": "gone"}), "a cat", num_tokens=5, buckets=["clips"])
        assert caught.value.param == "output.bucket"

    @pytest.mark.parametrize("request_", [{}, {"metadata": "x", "output": None}, {"metadata": [1], "seconds": None}])
    def test_a_row_that_lacks_what_rows_have_will_do(self, request_: dict[str, Any]) -> None:
        made = remix(self.source(**request_), "a cat", num_tokens=5)
        assert (made.metadata, made.seconds, made.output) == ({}, "4", {})

    def test_what_is_not_served_any_more_is_refused(self) -> None:
        source = self.source()
        source.width = 100
        with pytest.raises(InvalidRequest, match="100x1344"):
            remix(source, "a cat", num_tokens=5)


def test_several_faults_are_reported_together(model: ServedModel) -> None:
    error = refused(model, seed=-1, size="1x1", secnds=4)
    assert isinstance(error, InvalidFields)
    assert {entry["loc"][0] for entry in error.details} == {"seed", "size", "secnds"}


class TestPriority:
    def test_it_is_one_of_three_words(self, model: ServedModel) -> None:
        assert [resolved(model, priority=word).priority for word in ("interactive", None, "bulk")] == [0, 1, 2]

    @pytest.mark.parametrize(("number", "priority"), [(0, 2), (32, 2), (33, 1), (66, 1), (67, 0), (100, 0)])
    def test_or_a_number_that_stands_for_one(self, model: ServedModel, number: int, priority: int) -> None:
        assert resolved(model, priority=number).priority == priority

    @pytest.mark.parametrize("value", ["urgent", "", "50", -1, 101, 50.0, True, [50], 10**400])
    def test_anything_else_is_refused_with_both(self, model: ServedModel, value: object) -> None:
        error = refused(model, priority=value)
        assert (error.param, error.code) == ("priority", "invalid_value")
        assert "one of interactive, normal, bulk or a whole number from 0 to 100" in str(error)


def test_the_row_holds_what_was_asked_and_what_is_served(model: ServedModel) -> None:
    found = resolved(model, size="720x1280", seconds=5, seed=7, metadata={"a": "b"})
    values = found.job_values(model)
    assert values["request"] == {"seconds": "5", "size_requested": "720x1280", "metadata": {"a": "b"}}
    assert (values["width"], values["height"], values["num_frames"], values["seed"]) == (768, 1344, 124, 7)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=40),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
names = st.sampled_from([*VideoRequest.model_fields, "image", "conditions", "extra_body"]) | st.text(
    st.characters(codec=None), max_size=8
)


@given(body=st.dictionaries(names, json_values, max_size=5))
def test_no_body_does_anything_but_resolve_or_be_refused(model: ServedModel, body: dict[str, Any]) -> None:
    try:
        outcome = str(resolve(body, model).clip.num_frames)
    except InvalidRequest as error:
        outcome = str(error)
    assert len(outcome.encode()) < 1_000
