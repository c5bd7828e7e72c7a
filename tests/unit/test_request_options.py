"""What a request may say besides its clip: where results go, how long they stay, when it runs."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from rushes_core.errors import InvalidRequest
from rushes_core.ids import new_video_id
from rushes_core.request import resolve
from rushes_core.served_model import ServedModel
from support.api import offline_settings
from support.checkpoints import tiny_checkpoint
from support.request_bodies import refused, resolved


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("request"))
    return ServedModel.load(offline_settings(checkpoint, max_prompt_tokens=200))


class TestTarget:
    """UniServe's MiniMax-H3 body says the same in other words."""

    def test_it_says_size_and_duration(self, model: ServedModel) -> None:
        target = {"short_edge": 480, "aspect_ratio": "9:16", "duration_seconds": 5}
        found = resolved(model, task="t2va", target=target, conditions=[], seed=1000)
        assert (found.canvas.size, found.seconds, found.clip.num_frames, found.seed) == ("480x832", "5", 124, 1000)
        assert found.size_requested is None

    @pytest.mark.parametrize(
        ("target", "size", "seconds"),
        [
            ({}, "1344x768", "4"),
            ({"short_edge": 480}, "832x480", "4"),
            ({"aspect_ratio": "21:9"}, "1536x672", "4"),
            ({"aspect_ratio": "auto", "duration_seconds": "5.5"}, "1344x768", "5.5"),
            ({"short_edge": None, "aspect_ratio": None, "duration_seconds": None}, "1344x768", "4"),
        ],
    )
    def test_what_it_leaves_out_is_as_without_it(
        self, model: ServedModel, target: dict[str, object], size: str, seconds: str
    ) -> None:
        found = resolved(model, target=target)
        assert (found.canvas.size, found.seconds) == (size, seconds)

    @pytest.mark.parametrize(
        "body",
        [
            {"size": "1280x720", "target": {"short_edge": 768, "aspect_ratio": "16:9"}},
            {"size": "832x480", "target": {"short_edge": 480}},
            {"size": "1344x768", "target": {"aspect_ratio": "auto"}},
            {"seconds": "5", "target": {"duration_seconds": 5.0}},
            {"num_frames": 124, "target": {"duration_seconds": 5}},
            {"size": "480x480", "target": {"duration_seconds": 5}},
        ],
        ids=str,
    )
    def test_both_may_be_given_if_they_agree(self, model: ServedModel, body: dict[str, Any]) -> None:
        resolved(model, **body)

    @pytest.mark.parametrize(
        ("body", "named"),
        [
            ({"size": "1280x720", "target": {"short_edge": 480}}, ("size 1280x720", "target.short_edge 480")),
            ({"size": "480x480", "target": {"aspect_ratio": "16:9"}}, ("size 480x480", "target.aspect_ratio 16:9")),
            ({"size": "480x480", "target": {"aspect_ratio": "auto"}}, ("size 480x480", "target.aspect_ratio 16:9")),
            ({"seconds": "5", "target": {"duration_seconds": 6}}, ("seconds 5", "target.duration_seconds 6")),
            ({"num_frames": 124, "target": {"duration_seconds": 6}}, ("num_frames 124", "target.duration_seconds 6")),
        ],
        ids=str,
    )
    def test_both_are_named_if_they_do_not(
        self, model: ServedModel, body: dict[str, Any], named: tuple[str, str]
    ) -> None:
        error = refused(model, **body)
        assert error.code == "invalid_value"
        assert all(name in str(error) for name in (*named, "different clips"))

    @pytest.mark.parametrize(
        ("target", "param", "reason"),
        [
            ({"short_edge": 720}, "target.short_edge", "must be one of 768, 480, got 720"),
            ({"short_edge": "768"}, "target.short_edge", "must be one of 768, 480"),
            ({"short_edge": True}, "target.short_edge", "must be one of"),
            ({"aspect_ratio": "2:1"}, "target.aspect_ratio", "auto, 21:9, 16:9, 4:3, 1:1, 3:4, 9:16"),
            ({"aspect_ratio": ["16:9"]}, "target.aspect_ratio", "must be one of"),
            ({"duration_seconds": 16}, "target.duration_seconds", "between 4 and 15, got 16"),
            ({"fps": 24}, "target.fps", "unknown parameter"),
            ("16:9", "target", "must be an object"),
            ([], "target", "must be an object"),
        ],
        ids=str,
    )
    def test_what_is_wrong_with_it_is_named(self, model: ServedModel, target: object, param: str, reason: str) -> None:
        error = refused(model, target=target)
        assert error.param == param
        assert reason in str(error)

    @pytest.mark.parametrize("task", ["t2va", "t2av"])
    def test_the_task_may_be_restated(self, model: ServedModel, task: str) -> None:
        resolved(model, task=task)

    @pytest.mark.parametrize("task", ["", "t2v", 1, ["t2va"], {"t2va": 1}])
    def test_another_task_is_refused(self, model: ServedModel, task: object) -> None:
        error = refused(model, task=task)
        assert (error.param, "must be t2va or t2av" in str(error)) == ("task", True)


class TestRetention:
    @pytest.mark.parametrize("retention", [{"anchor": "created_at", "seconds": 3_600}, {"seconds": 2_592_000}])
    def test_it_is_counted_from_acceptance(self, model: ServedModel, retention: dict[str, Any]) -> None:
        values = resolved(model, retention=retention).job_values(model)
        assert values["request"]["retention_seconds"] == retention["seconds"]
        assert values["retention_seconds"] == retention["seconds"]

    def test_without_it_the_deployment_decides(self, model: ServedModel) -> None:
        assert resolved(model).job_values(model)["retention_seconds"] is None

    @pytest.mark.parametrize(
        ("retention", "param", "reason"),
        [
            ({"seconds": 3_599}, "retention.seconds", "greater than or equal to 3600, got 3599"),
            ({"seconds": 2_592_001}, "retention.seconds", "less than or equal to 2592000"),
            ({"seconds": "3600"}, "retention.seconds", "integer"),
            ({"seconds": 3_600.0}, "retention.seconds", "integer"),
            ({"seconds": True}, "retention.seconds", "integer"),
            ({"anchor": "created_at"}, "retention.seconds", "required"),
            ({"anchor": "completed_at", "seconds": 3_600}, "retention.anchor", "'created_at'"),
            ({"days": 1, "seconds": 3_600}, "retention.days", "unknown parameter"),
            (3_600, "retention", "must be an object"),
        ],
        ids=str,
    )
    def test_what_is_wrong_with_it_is_named(
        self, model: ServedModel, retention: object, param: str, reason: str
    ) -> None:
        error = refused(model, retention=retention)
        assert error.param == param
        assert reason in str(error)


class TestOutput:
    def test_what_is_given_goes_to_the_worker(self, model: ServedModel) -> None:
        output = {"thumbnail": False, "key_prefix": "acme/spots-2026/a.b", "bucket": "masters"}
        found = resolve({"prompt": "a dog", "output": output}, model, buckets=["clips", "masters"])
        assert found.job_values(model)["request"]["output"] == output

    @pytest.mark.parametrize("output", [None, {}, {"thumbnail": None}])
    def test_without_it_nothing_is_said(self, model: ServedModel, output: object) -> None:
        assert "output" not in resolved(model, output=output).job_values(model)["request"]

    @pytest.mark.parametrize(
        "prefix",
        [
            "",
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "../a",
            "a/../b",
            "a/.b",
            "a b",
            "a\\b",
            "a%2Fb",
            "é",
            "a\n",
            "\x00",
            "a" * 201,
            1,
        ],
    )
    def test_a_prefix_is_a_plain_relative_path(self, model: ServedModel, prefix: object) -> None:
        error = refused(model, output={"key_prefix": prefix})
        assert error.param == "output.key_prefix"
        assert "relative path of at most 200 characters" in str(error)

    @pytest.mark.parametrize("prefix", ["{}", "a/{}", "{}/b"])
    def test_no_prefix_leads_below_another_video_which_would_take_the_clip_with_it(
        self, model: ServedModel, prefix: str
    ) -> None:
        error = refused(model, output={"key_prefix": prefix.format(new_video_id())})
        assert error.param == "output.key_prefix"
        assert "must not have the id of a video among its names" in str(error)

    def test_a_bucket_is_one_that_the_operator_named(self, model: ServedModel) -> None:
        error = refused(model, output={"bucket": "somebody-elses"})
        assert (error.param, error.code) == ("output.bucket", "invalid_value")

    @pytest.mark.parametrize(
        ("output", "param"),
        [({"thumbnail": "true"}, "output.thumbnail"), ({"format": "webm"}, "output.format"), ([], "output")],
    )
    def test_what_is_wrong_with_it_is_named(self, model: ServedModel, output: object, param: str) -> None:
        assert refused(model, output=output).param == param


def iso(**ahead: float) -> str:
    return (datetime.now(UTC) + timedelta(**ahead)).isoformat()


class TestTimes:
    def test_they_become_columns_of_the_job(self, model: ServedModel) -> None:
        request = resolved(model, not_before=iso(hours=1), deadline=iso(hours=2))
        values = request.job_values(model)
        assert (values["run_at"], values["deadline_at"]) == (request.not_before, request.deadline)

    def test_without_them_the_database_decides(self, model: ServedModel) -> None:
        values = resolved(model).job_values(model)
        assert (values["run_at"], values["deadline_at"]) == (None, None)

    def test_a_start_that_is_past_is_now(self, model: ServedModel) -> None:
        assert resolved(model, not_before=iso(seconds=-30)).not_before is None

    @pytest.mark.parametrize("form", [int, float, str, lambda unix: f"{unix:.3f}"])
    def test_unix_seconds_are_a_time(self, model: ServedModel, form: Callable[[int], object]) -> None:
        unix = int(time.time()) + 3_600
        assert resolved(model, deadline=form(unix)).deadline == datetime.fromtimestamp(unix, UTC)

    def test_a_zone_is_respected(self, model: ServedModel) -> None:
        ahead = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
        local = ahead.astimezone(timezone(timedelta(hours=5, minutes=30)))
        assert resolved(model, deadline=local.isoformat()).deadline == ahead
        assert resolved(model, deadline=ahead.isoformat().replace("+00:00", "Z")).deadline == ahead

    @pytest.mark.parametrize(
        "value",
        [
            "2026-12-01T22:00:00",
            "2026-12-01",
            "tomorrow",
            "2026-13-01T22:00:00Z",
            "2026-12-01 22:00:00Z",
            "20261201T220000Z",
            "9999-12-31T23:59:59-23:59",
            "٢٠٢٦-12-01T22:00:00Z",
            True,
            -1,
            1e300,
            float("inf"),
            10**400,
            [],
            "",
        ],
    )
    @pytest.mark.parametrize("field", ["not_before", "deadline"])
    def test_anything_else_is_refused_by_name(self, model: ServedModel, field: str, value: object) -> None:
        error = refused(model, **{field: value})
        assert (error.param, error.code) == (field, "invalid_value")

    @pytest.mark.parametrize("field", ["not_before", "deadline"])
    def test_they_lie_within_thirty_days_and_not_in_the_past(self, model: ServedModel, field: str) -> None:
        assert "60 seconds in the past" in str(refused(model, **{field: iso(seconds=-65)}))
        assert "30 days ahead" in str(refused(model, **{field: iso(days=30, seconds=5)}))

    def test_the_deadline_lies_after_the_start(self, model: ServedModel) -> None:
        error = refused(model, not_before=iso(hours=2), deadline=iso(hours=1))
        assert (error.param, "must lie after not_before" in str(error)) == ("deadline", True)


class TestCancelAfter:
    @pytest.mark.parametrize(
        ("text", "seconds"), [("90m", 5_400), ("1h30m", 5_400), ("2d", 172_800), ("45s", 45), ("30d", 2_592_000)]
    )
    def test_it_is_a_deadline_from_now(self, model: ServedModel, text: str, seconds: int) -> None:
        before = datetime.now(UTC)
        deadline = resolve({"prompt": "a dog"}, model, cancel_after=text).deadline
        assert deadline is not None
        assert before <= deadline - timedelta(seconds=seconds) <= datetime.now(UTC)

    @pytest.mark.parametrize("text", ["", "90", "m", "30m1h", "1.5h", "-5m", "4s", "31d", "9999999d", "5 m", "٥m"])
    def test_anything_else_is_refused_by_name(self, model: ServedModel, text: str) -> None:
        with pytest.raises(InvalidRequest, match="Cancel-After") as caught:
            resolve({"prompt": "a dog"}, model, cancel_after=text)
        assert caught.value.param == "Cancel-After"

    def test_it_excludes_the_field(self, model: ServedModel) -> None:
        with pytest.raises(InvalidRequest, match="exclude each other"):
            resolve({"prompt": "a dog", "deadline": iso(hours=1)}, model, cancel_after="5m")
