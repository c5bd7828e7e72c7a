"""What every answer has in common: the envelope, the id, the key, CORS, and the limits before parsing."""

import asyncio
import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from rushes_api import admission
from rushes_api.app import create_app
from rushes_api.boundary import Boundary
from rushes_api.errors import ApiError, install
from rushes_api.once import OUTCOME_UNKNOWN
from rushes_core.errors import InvalidRequest
from rushes_core.served_model import ServedModel
from starlette.testclient import TestClient
from starlette.types import Message
from structlog.testing import capture_logs
from support.api import API_KEY, AUTHORIZED, multipart, offline_settings
from support.checkpoints import tiny_checkpoint

PAGE = "https://app.example"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("app"))


@pytest.fixture(scope="module")
def client(checkpoint: Path) -> Iterator[TestClient]:
    settings = offline_settings(checkpoint, api_max_body_bytes=50_000, cors_origins=f"{PAGE}, https://b.example")
    with TestClient(create_app(settings), headers=AUTHORIZED) as client:
        yield client


@pytest.fixture(scope="module")
def anonymous(client: TestClient) -> Iterator[TestClient]:
    with TestClient(client.app) as anonymous:
        yield anonymous


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code", "details", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    assert error["message"]
    return error


class TestEnvelope:
    def test_an_unknown_route(self, client: TestClient) -> None:
        error = error_of(client.get("/v1/nothing%ED%A0%BD"), 404)
        assert (error["code"], error["type"]) == ("unknown_url", "invalid_request_error")

    def test_one_that_begins_with_a_host_is_shown_as_it_was_sent(self, client: TestClient) -> None:
        problem = client.get(
            "http://testserver//host/v1/nothing", headers={"Accept": "application/problem+json"}
        ).json()
        assert problem["detail"] == "unknown route: GET //host/v1/nothing"
        assert problem["instance"] == "//host/v1/nothing"

    def test_a_trailing_slash_is_another_route(self, client: TestClient) -> None:
        error_of(client.get("/v1/videos/"), 404)

    def test_a_method_that_a_route_lacks(self, client: TestClient) -> None:
        response = client.put("/v1/videos")
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "GET, HEAD, POST"
        assert client.post("/v1/videos/x/content").headers["allow"] == "GET, HEAD"

    def test_an_invalid_field_is_named(self, client: TestClient) -> None:
        error = error_of(client.post("/v1/videos", json={"prompt": "x", "secnds": 4}), 400)
        assert (error["param"], error["code"]) == ("secnds", "unknown_parameter")

    def test_several_invalid_fields_are_listed(self, client: TestClient) -> None:
        error = error_of(client.post("/v1/videos", json={"prompt": "x", "secnds": 4, "seed": "12"}), 400)
        assert {detail["loc"][0] for detail in error["details"]} == {"secnds", "seed"}

    def test_the_list_of_invalid_fields_is_bounded(self, client: TestClient) -> None:
        body = {"prompt": "x", **{f"field{i}": 1 for i in range(200)}}
        assert len(error_of(client.post("/v1/videos", json=body), 400)["details"]) == 20

    def test_another_model_is_not_found(self, client: TestClient) -> None:
        error = error_of(client.post("/v1/videos", json={"prompt": "x", "model": "sora-2"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")

    @pytest.mark.parametrize("prompt", [r"\ud83d", r"\ude00\ud83d", r"\ud83d" + "x" * 5_000])
    def test_text_that_cannot_be_encoded_is_refused_with_a_body_that_can(self, client: TestClient, prompt: str) -> None:
        response = client.post(
            "/v1/videos", content=f'{{"prompt":"{prompt}"}}', headers={"Content-Type": "application/json"}
        )
        assert error_of(response, 400)["param"] == "prompt"
        assert response.content.isascii()

    def test_problem_details_keep_the_error(self, client: TestClient) -> None:
        accept = {"Accept": "text/html, Application/Problem+JSON;q=0.5"}
        response = client.post("/v1/videos", json={"prompt": "x", "seed": -1}, headers=accept)
        assert response.headers["content-type"] == "application/problem+json"
        problem = response.json()
        assert error_of(response, 400)["param"] == "seed"
        assert problem["status"] == 400
        assert problem["title"] == "Bad Request"
        assert problem["detail"] == problem["error"]["message"]
        assert problem["instance"] == "/v1/videos"
        assert (problem["code"], problem["param"]) == ("invalid_value", "seed")
        assert problem["request_id"] == response.headers["x-request-id"]

    @pytest.mark.parametrize("accept", ["application/json", "*/*", "application/problem+json;q=0"])
    def test_problem_details_are_for_those_who_ask(self, client: TestClient, accept: str) -> None:
        assert "problem" not in client.get("/nothing", headers={"Accept": accept}).headers["content-type"]

    def test_an_unexpected_fault_is_an_error_without_its_story(self) -> None:
        app = FastAPI()
        app.add_middleware(Boundary, cors_origins=[PAGE], answer_within_seconds=5)
        install(app)

        @app.get("/broken")
        async def broken() -> None:
            raise ZeroDivisionError("secret")

        response = TestClient(app).get("/broken", headers={"Origin": PAGE})
        assert error_of(response, 500)["code"] == "internal_error"
        assert "secret" not in response.text
        assert response.headers["access-control-allow-origin"] == PAGE


class TestRequestId:
    def test_it_is_echoed(self, client: TestClient) -> None:
        response = client.get("/healthz", headers={"X-Request-Id": "abc-1.2:3"})
        assert response.headers["x-request-id"] == "abc-1.2:3"

    @pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é".encode("latin-1"), "<script>"], ids=ascii)
    def test_one_that_is_no_token_is_replaced(self, client: TestClient, given: str | bytes) -> None:
        response = client.get("/healthz", headers={"X-Request-Id": given})
        assert re.fullmatch(r"req_[0-9A-Z]{26}", response.headers["x-request-id"])


class TestKey:
    @pytest.mark.parametrize(
        "header",
        [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer wrong", API_KEY, f"Bearer {API_KEY}x", "Bearer é"],
    )
    def test_without_it_nothing_is_told(self, anonymous: TestClient, header: str | None) -> None:
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        for method, path in (("GET", "/v1/videos"), ("POST", "/v1/videos"), ("GET", "/v1/videos/x/content")):
            response = anonymous.request(method, path, headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"].startswith("Bearer")
            assert API_KEY not in response.text

    def test_the_scheme_is_written_in_any_case(self, client: TestClient) -> None:
        response = client.get("/v1/models", headers={"Authorization": f"bearer  {API_KEY}"})
        assert response.status_code == 200

    @pytest.mark.parametrize("key", ["", " ", "a b", "ключ", "x" * 513])
    def test_the_app_does_not_start_without_a_usable_one(self, checkpoint: Path, key: str) -> None:
        with pytest.raises(ValueError, match="RUSHES_API_KEY"):
            create_app(offline_settings(checkpoint, api_key=key))

    def test_health_needs_none(self, anonymous: TestClient) -> None:
        assert anonymous.get("/healthz").json() == {"status": "ok"}


class TestBody:
    def test_one_that_declares_too_much_is_refused_unread(self, client: TestClient) -> None:
        response = client.post("/v1/videos", content=b"x" * 50_001)
        error = error_of(response, 413)
        assert error["code"] == "file_too_large"
        assert "at most 50000 bytes, got 50001" in error["message"]

    def test_one_that_turns_out_too_large_is_refused(self, client: TestClient) -> None:
        chunks = (b"x" * 10_000 for _ in range(10))
        response = client.post("/v1/videos", content=chunks)
        assert "content-length" not in response.request.headers
        error_of(response, 413)

    def test_the_key_comes_first(self, anonymous: TestClient) -> None:
        error_of(anonymous.post("/v1/videos", content=b"x" * 50_001), 401)

    def test_text_is_unsupported(self, client: TestClient) -> None:
        response = client.post("/v1/videos", content='{"prompt": "x"}', headers={"Content-Type": "text/plain"})
        assert error_of(response, 415)["code"] == "unsupported_media_type"

    def test_a_seed_is_a_number_in_json_and_digits_in_a_form(self, client: TestClient) -> None:
        assert error_of(client.post("/v1/videos", json={"prompt": "", "seed": "12"}), 400)["param"] == "seed"
        body, headers = multipart(("prompt", ""), ("seed", "12"))
        assert error_of(client.post("/v1/videos", content=body, headers=headers), 400)["param"] == "prompt"

    def test_an_uploaded_reference_is_unsupported(self, client: TestClient) -> None:
        response = client.post("/v1/videos", data={"prompt": "x"}, files={"input_reference": ("a.png", b"\x89PNG")})
        error = error_of(response, 400)
        assert (error["param"], error["code"]) == ("input_reference", "unsupported_input")

    def test_a_file_is_no_prompt(self, client: TestClient) -> None:
        response = client.post("/v1/videos", files={"prompt": ("a.txt", b"a dog")})
        assert "must be a string, got the file 'a.txt'" in error_of(response, 400)["message"]

    def test_an_unknown_query_parameter_is_named(self, client: TestClient) -> None:
        response = client.post("/v1/videos?seed=1", json={"prompt": "x"})
        assert (error_of(response, 400)["param"], response.json()["error"]["code"]) == ("seed", "unknown_parameter")


class TestLoop:
    """The event loop goes on while a large body is checked."""

    @pytest.mark.parametrize(("size", "is_inline"), [(100, True), (40_000, False)])
    def test_only_small_bodies_are_checked_in_it(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch, size: int, is_inline: bool
    ) -> None:
        inline: list[bool] = []

        def resolve(body: dict[str, Any], model: ServedModel, **options: object) -> None:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                inline.append(False)
            else:
                inline.append(True)
            raise InvalidRequest("enough")

        monkeypatch.setattr(admission, "resolve", resolve)
        assert client.post("/v1/videos", json={"prompt": "x" * size}).status_code == 400
        assert inline == [is_inline]


class TestCors:
    @pytest.mark.parametrize(("method", "path", "status"), [("GET", "/healthz", 200), ("GET", "/x", 404)])
    def test_a_page_may_read_every_answer(self, client: TestClient, method: str, path: str, status: int) -> None:
        response = client.request(method, path, headers={"Origin": PAGE})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["vary"] == "Origin"
        exposed = response.headers["access-control-expose-headers"]
        for name in ("Retry-After", "Content-Range", "ETag", "Content-Disposition", "Accept-Ranges", "x-request-id"):
            assert name in exposed
        assert "Idempotent-Replayed" in exposed

    def test_another_page_may_not(self, client: TestClient) -> None:
        response = client.get("/healthz", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in response.headers
        assert response.headers["vary"] == "Origin"

    def test_a_preflight_needs_no_key(self, anonymous: TestClient) -> None:
        headers = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, idempotency-key, range, x-stainless-os",
        }
        response = anonymous.options("/v1/videos", headers=headers)
        assert response.status_code == 204
        assert response.headers["access-control-allow-headers"] == headers["Access-Control-Request-Headers"]
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-origin"] == PAGE

    def test_a_preflight_of_another_page_gets_no_leave(self, client: TestClient) -> None:
        headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        response = client.options("/v1/videos", headers=headers)
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers

    def test_it_is_off_by_default(self, checkpoint: Path) -> None:
        with TestClient(create_app(offline_settings(checkpoint))) as client:
            response = client.get("/healthz", headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in response.headers
        assert "vary" not in response.headers

    def test_every_page_may_be_let_in(self, checkpoint: Path) -> None:
        with TestClient(create_app(offline_settings(checkpoint, cors_origins="*"))) as client:
            assert client.get("/healthz", headers={"Origin": PAGE}).headers["access-control-allow-origin"] == "*"

    def test_an_origin_may_be_written_in_capitals(self, checkpoint: Path) -> None:
        with TestClient(
            create_app(offline_settings(checkpoint, cors_origins=f"capacitor://x,{PAGE.upper()}"))
        ) as client:
            assert client.get("/healthz", headers={"Origin": PAGE}).headers["access-control-allow-origin"] == PAGE


class TestModels:
    def test_the_served_model_is_listed(self, client: TestClient) -> None:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        (model,) = listed["data"]
        assert model["object"] == "model"
        assert isinstance(model["created"], int)
        # the name holds a slash: the SDK quotes it, curl does not
        assert client.get(f"/v1/models/{model['id']}").json() == model
        assert client.get(f"/v1/models/{model['id'].replace('/', '%2F')}").json() == model

    def test_another_is_not_found(self, client: TestClient) -> None:
        assert error_of(client.get("/v1/models/sora-2"), 404)["code"] == "model_not_found"

    def test_capabilities_name_the_limits(self, client: TestClient) -> None:
        found = client.get("/v1/capabilities").json()
        assert found["prompt"]["max_tokens"] == 10_240
        assert len(found["sizes"]) == 12
        assert found["seconds"] == {"min": 4, "max": 15, "default": "4"}
        assert found["num_frames"][0] == 107
        assert found["num_frames"][-1] == 362
        assert found["fixed"]["num_inference_steps"] == 9
        assert found["tasks"] == ["t2va", "t2av"]
        assert found["target"]["short_edge"] == [768, 480]
        assert found["target"]["aspect_ratio"] == ["auto", "21:9", "16:9", "4:3", "1:1", "3:4", "9:16"]
        assert found["retention_seconds"] == {"min": 3_600, "max": 2_592_000}
        assert found["priority_numbers"] == {"interactive": {"min": 67}, "normal": {"min": 33}, "bulk": {"min": 0}}

    def test_what_capabilities_say_of_uniserves_body_is_accepted(self, client: TestClient) -> None:
        found = client.get("/v1/capabilities").json()
        for short_edge in found["target"]["short_edge"]:
            for aspect_ratio in found["target"]["aspect_ratio"]:
                target = {"short_edge": short_edge, "aspect_ratio": aspect_ratio}
                body = {"prompt": "x", "task": found["tasks"][0], "target": target}
                resolved = client.post("/v1/videos/validate", json=body).json()
                ratio = "16:9" if aspect_ratio == "auto" else aspect_ratio
                (size,) = (
                    one["size"]
                    for one in found["sizes"]
                    if (one["short_edge"], one["aspect_ratio"]) == (short_edge, ratio)
                )
                assert resolved["size"] == size

    def test_what_capabilities_call_fixed_is_accepted(self, client: TestClient) -> None:
        fixed = client.get("/v1/capabilities").json()["fixed"]
        error = error_of(client.post("/v1/videos", json={**fixed, "prompt": ""}), 400)
        assert error["param"] == "prompt"

    def test_an_unknown_query_parameter_is_named(self, client: TestClient) -> None:
        assert error_of(client.get("/v1/models?limit=1"), 400)["param"] == "limit"


class TestRedirects:
    @pytest.mark.parametrize("store", ["https://media.example", "https://media.example:443/x", "HTTPS://Media.example"])
    def test_a_store_at_the_apis_own_origin_is_refused(self, checkpoint: Path, store: str) -> None:
        with pytest.raises(ValueError, match="another origin"):
            create_app(
                offline_settings(
                    checkpoint,
                    content_delivery="redirect",
                    api_origin="https://media.example",
                    s3_public_endpoint_url=store,
                )
            )

    @pytest.mark.parametrize("origin", ["", "https://api.example", "http://media.example", "https://media.example:444"])
    def test_a_store_at_another_origin_is_not(self, checkpoint: Path, origin: str) -> None:
        create_app(
            offline_settings(
                checkpoint,
                content_delivery="redirect",
                api_origin=origin,
                s3_public_endpoint_url="https://media.example",
            )
        )


class TestBoundary:
    """The outermost layer alone, around applications that misbehave."""

    @staticmethod
    def run(app: Any, *, answer_within_seconds: float = 5, body_ends: bool = True) -> list[Message]:
        sent: list[Message] = []
        received: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            if received:
                await asyncio.Event().wait()
            received.append({"type": "http.request", "body": b"", "more_body": not body_ends})
            return received[0]

        scope = {"type": "http", "method": "GET", "path": "/x", "headers": []}
        asyncio.run(Boundary(app, cors_origins=[], answer_within_seconds=answer_within_seconds)(scope, receive, send))
        return sent

    def test_a_request_that_hangs_is_answered(self) -> None:
        late: list[str] = []

        async def hangs(scope: Any, receive: Any, send: Any) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                # what a driver does that has its own idea of cancellation
                await send({"type": "http.response.start", "status": 200, "headers": []})
                late.append("sent")

        start, body = self.run(hangs, answer_within_seconds=0.01)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        assert start["status"] == 503
        assert 1 <= int(headers["retry-after"]) <= 60
        assert headers["x-should-retry"] == "true"
        assert json.loads(body["body"])["error"]["code"] == "timeout"
        assert late == ["sent"]

    def test_a_commit_that_hangs_is_not_to_be_repeated(self) -> None:
        async def commits(scope: Any, receive: Any, send: Any) -> None:
            scope[OUTCOME_UNKNOWN] = True
            await asyncio.Event().wait()

        start, body = self.run(commits, answer_within_seconds=0.01)
        assert start["status"] == 503
        assert (b"x-should-retry", b"false") in start["headers"]
        assert json.loads(body["body"])["error"]["code"] == "outcome_unknown"

    def test_a_body_that_does_not_come_is_the_clients_fault(self) -> None:
        async def reads(scope: Any, receive: Any, send: Any) -> None:
            while (await receive())["more_body"]:
                pass

        start, body = self.run(reads, answer_within_seconds=0.01, body_ends=False)
        assert start["status"] == 408
        assert (b"connection", b"close") in start["headers"]
        assert json.loads(body["body"])["error"]["code"] == "request_timeout"

    def test_the_log_has_the_number_of_the_status(self) -> None:
        async def answers(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        with capture_logs() as logs:
            self.run(answers)
        assert [repr(entry["status"]) for entry in logs] == ["200"]

    def test_a_long_answer_is_not_cut(self) -> None:
        async def streams(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(0.05)
            await send({"type": "http.response.body", "body": b"whole"})

        assert self.run(streams, answer_within_seconds=0.01)[-1]["body"] == b"whole"

    def test_an_answer_that_breaks_off_is_not_patched(self) -> None:
        async def breaks(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise ApiError("too late")

        with pytest.raises(ApiError):
            self.run(breaks)
