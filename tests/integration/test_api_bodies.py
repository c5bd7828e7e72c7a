"""Bodies as clients really write them, byte by byte: numbers, text, names, and every form of a whole request."""

import json
from datetime import timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.api import JobDriver, multipart

JSON = {"Content-Type": "application/json"}
URLENCODED = {"Content-Type": "application/x-www-form-urlencoded"}


def send(client: TestClient, body: bytes | str, headers: dict[str, str] = JSON) -> Any:
    return client.post("/v1/videos", content=body, headers=headers)


def accepted(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert len(error["message"]) < 400
    return error


@pytest.fixture
def unchanged(driver: JobDriver) -> Any:
    """Whatever the test does, it makes no job."""
    before = driver.num_rows()
    yield
    assert driver.num_rows() == before


class TestNumbers:
    @pytest.mark.parametrize(
        ("text", "seed"),
        [("-0", 0), ("12", 12), ("9007199254740993", 2**53 + 1), ("9223372036854775807", 2**63 - 1)],
    )
    def test_a_seed_comes_back_exactly(self, client: TestClient, text: str, seed: int) -> None:
        made = send(client, f'{{"prompt": "a dog", "seed": {text}}}')
        assert accepted(made)["seed"] == seed
        assert f'"seed":{seed},' in made.text

    @pytest.mark.usefixtures("unchanged")
    @pytest.mark.parametrize(
        "text",
        [
            "-1",
            "1.5",
            '"12"',
            '"\uff11\uff12"',
            "true",
            "1e3",
            "1.0",
            "9223372036854775808",
            "18446744073709551616",
            "[]",
        ],
    )
    def test_what_is_no_seed_is_refused(self, client: TestClient, text: str) -> None:
        assert error_of(send(client, f'{{"prompt": "a dog", "seed": {text}}}'))["param"] == "seed"

    @pytest.mark.usefixtures("unchanged")
    @pytest.mark.parametrize("text", ["9" * 5_000, "1e400", "NaN", "01", "+1", "0x1"])
    def test_what_is_no_number_that_is_read_is_refused(self, client: TestClient, text: str) -> None:
        assert error_of(send(client, f'{{"prompt": "a dog", "seed": {text}}}'))["code"] == "invalid_body"

    @pytest.mark.parametrize("text", ["null", "24", "24.0", '"24"', "2.4e1"])
    def test_what_the_model_fixes_may_be_restated_in_any_way(self, client: TestClient, text: str) -> None:
        assert accepted(send(client, f'{{"prompt": "a dog", "fps": {text}}}'))["output"]["fps"] == 24

    @pytest.mark.usefixtures("unchanged")
    @pytest.mark.parametrize("text", ["30", "23.976", "0", '"30"', "true", '"x"', "[24]"])
    def test_it_may_not_be_changed(self, client: TestClient, text: str) -> None:
        error = error_of(send(client, f'{{"prompt": "a dog", "fps": {text}}}'))
        assert (error["param"], "fixed at 24" in error["message"]) == ("fps", True)

    @pytest.mark.parametrize(
        ("text", "seconds", "frames"),
        [
            ('"5"', "5", 124),
            ("5.0", "5", 124),
            ('"5.5"', "5.5", 141),
            ("5.999999", "5.999999", 158),
            ("14.4", "14.4", 362),
            ("15", "15", 362),
        ],
    )
    def test_one_rule_makes_frames_of_seconds(self, client: TestClient, text: str, seconds: str, frames: int) -> None:
        video = accepted(send(client, f'{{"prompt": "a dog", "seconds": {text}}}'))
        assert (video["seconds"], video["output"]["num_frames"]) == (seconds, frames)
        assert video["output"]["duration_seconds"] >= float(seconds)

    @pytest.mark.usefixtures("unchanged")
    @pytest.mark.parametrize("text", ['"5,5"', '"PT5S"', "3.999", "15.0001", "16", '"5s"', "true", "{}"])
    def test_what_is_no_duration_is_refused(self, client: TestClient, text: str) -> None:
        assert error_of(send(client, f'{{"prompt": "a dog", "seconds": {text}}}'))["param"] == "seconds"

    @pytest.mark.usefixtures("unchanged")
    def test_frames_and_seconds_that_disagree_are_refused(self, client: TestClient) -> None:
        error = error_of(send(client, '{"prompt": "a dog", "seconds": 5, "num_frames": 243}'))
        assert ("243" in error["message"], "seconds 5" in error["message"]) == (True, True)


class TestText:
    @pytest.mark.usefixtures("unchanged")
    @pytest.mark.parametrize("text", [r"\ud83d", r"\ude00\ud83d", r"\ud83d" + "x" * 5_000, r"\u0000"])
    def test_what_cannot_be_stored_is_refused_by_name(self, client: TestClient, text: str) -> None:
        assert error_of(send(client, f'{{"prompt": "{text}"}}'))["param"] == "prompt"
        noted = f'{{"prompt": "a dog", "metadata": {{"note": "{text[:200]}"}}}}'
        assert error_of(send(client, noted))["param"] == "metadata"

    def test_a_proper_pair_is_one_character(self, client: TestClient) -> None:
        assert accepted(send(client, rb'{"prompt": "\ud83d\ude00"}'))["prompt"] == "😀"

    @pytest.mark.usefixtures("unchanged")
    @pytest.mark.parametrize(
        ("prompt", "reason"),
        [
            ("x" * 10_241, "at most 10240 tokens, got 10241"),
            ("犬" * 34_140, "at most 10240 tokens, got 102420"),
            ("😀" * 60_000, "at most 10240 tokens, got"),
            ("x" * 1_000_000, "at most 65536 characters, got 1000000"),
        ],
        ids=["one more", "ten times", "emoji", "a million"],
    )
    def test_a_prompt_is_not_cut(self, client: TestClient, prompt: str, reason: str) -> None:
        error = error_of(send(client, json.dumps({"prompt": prompt}, ensure_ascii=False).encode()))
        assert (error["param"], error["code"]) == ("prompt", "prompt_too_long")
        assert reason in error["message"]


class TestNames:
    @pytest.mark.usefixtures("unchanged")
    @pytest.mark.parametrize("name", ["secnds", "Prompt", "num_frame", "extra_body.foo", "target.short_edge", "width"])
    def test_one_that_does_not_exist_is_named(self, client: TestClient, name: str) -> None:
        parts, headers = multipart(("prompt", "a dog"), (name, "5"))
        for response in (send(client, json.dumps({"prompt": "a dog", name: 5})), send(client, parts, headers)):
            assert (error_of(response)["param"], error_of(response)["code"]) == (name, "unknown_parameter")

    @pytest.mark.usefixtures("unchanged")
    def test_one_that_comes_twice_is_named(self, client: TestClient) -> None:
        parts, headers = multipart(("prompt", "a dog"), ("seed", "1"), ("seed", "2"))
        for response in (
            send(client, '{"prompt": "a dog", "seed": 1, "seed": 2}'),
            send(client, parts, headers),
            send(client, "prompt=a+dog&seed=1&seed=2", URLENCODED),
        ):
            assert (error_of(response)["param"], error_of(response)["code"]) == ("seed", "duplicate_parameter")

    @pytest.mark.usefixtures("unchanged")
    @pytest.mark.parametrize(
        "headers", [{"Content-Type": "text/plain"}, URLENCODED, {"Content-Type": "multipart/form-data; boundary=b"}, {}]
    )
    def test_json_that_is_called_something_else_is_refused(self, client: TestClient, headers: dict[str, str]) -> None:
        error = error_of(send(client, '{"prompt": "a dog"}', headers), 415)
        assert "application/json" in error["message"]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("route", ["edits", "extensions", "characters"])
def test_openais_routes_that_start_from_a_video_say_why_not(client: TestClient, route: str) -> None:
    error = error_of(client.post(f"/v1/videos/{route}", json={"prompt": "a cat", "video": {"id": "video_1"}}))
    assert (error["param"], error["code"]) == ("video", "unsupported_input")
    assert "renders from text alone" in error["message"]


WHOLE: dict[str, Any] = {
    "prompt": "a dog\nand a “cat”",
    "num_frames": 124,
    "seed": 2**53 + 1,
    "task": "t2va",
    "target": {"short_edge": 480, "aspect_ratio": "1:1", "duration_seconds": "5"},
    "metadata": {"client": "acme", 'odd "key" [x]': ""},
    "priority": 20,
    "retention": {"anchor": "created_at", "seconds": 7_200},
    "output": {"thumbnail": False, "key_prefix": "acme/2026"},
    "fps": 24,
}


def flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Fields as the SDK writes them: maps in brackets, numbers as text."""
    if isinstance(value, dict):
        return [part for key, item in value.items() for part in flat(item, f"{name}[{key}]" if name else key)]
    return [(name, value if isinstance(value, str) else json.dumps(value))]


def test_every_form_of_a_body_makes_the_same_job(client: TestClient, driver: JobDriver) -> None:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in WHOLE.items()}
    bracketed, headers = multipart(*((name.replace('"', "%22"), value) for name, value in flat(WHOLE)))
    plain, _ = multipart(*texts.items())
    bodies: list[dict[str, Any]] = [
        {"content": json.dumps(WHOLE), "headers": JSON},
        {"content": bracketed, "headers": headers},
        {"content": plain, "headers": headers},
        {"data": dict(flat(WHOLE)), "headers": URLENCODED},
        {"data": texts, "headers": URLENCODED},
    ]
    rows = [driver.row(accepted(client.post("/v1/videos", **body))["id"]) for body in bodies]
    columns = ("prompt", "seed", "num_frames", "width", "height", "priority", "request")
    assert len({json.dumps([getattr(row, name) for name in columns]) for row in rows}) == 1
    kept = [row.retain_until - row.created_at for row in rows if row is not None and row.retain_until is not None]
    assert kept == [timedelta(seconds=7_200)] * len(bodies)
    # and so they are the same request
    for body in bodies:
        body["headers"] = body["headers"] | {"Idempotency-Key": "every form"}
    assert len({client.post("/v1/videos", **body).content for body in bodies}) == 1


def test_json_text_may_be_any_field_of_a_form(client: TestClient) -> None:
    prompt = "a dog\nand a “cat”"
    body, headers = multipart(("prompt", json.dumps(prompt)), headers={"Content-Type": "application/json"})
    assert accepted(send(client, body, headers))["prompt"] == prompt
