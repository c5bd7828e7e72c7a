"""What the outermost layer does to every answer, the unforeseen ones included."""

from collections.abc import Iterator

import pytest
from fastapi import APIRouter
from rushes_api.app import create_app
from starlette.testclient import TestClient
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs
from support.api import AUTHORIZED, offline_settings
from support.checkpoints import tiny_checkpoint

PAGE = "https://app.example"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"

broken = APIRouter()


@broken.get("/v1/broken")
async def raise_unforeseen() -> None:
    raise LookupError("secret-of-the-server")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("boundary"))
    app = create_app(offline_settings(checkpoint, api_max_body_bytes=50_000, cors_origins=PAGE))
    app.include_router(broken)
    with TestClient(app, headers=AUTHORIZED) as client:
        yield client


class TestUnforeseenError:
    def test_is_answered_like_any_other(self, client: TestClient) -> None:
        response = client.get("/v1/broken", headers={"X-Request-Id": "mine"})
        assert response.status_code == 500
        error = response.json()["error"]
        assert (error["code"], error["type"], error["request_id"]) == ("internal_error", "server_error", "mine")
        assert response.headers["x-request-id"] == "mine"
        assert "secret-of-the-server" not in response.text

    def test_is_a_problem_for_those_who_ask_for_one(self, client: TestClient) -> None:
        response = client.get("/v1/broken", headers={"Accept": "application/problem+json"})
        assert response.headers["content-type"] == "application/problem+json"
        assert (response.json()["status"], response.json()["title"]) == (500, "Internal Server Error")
        assert response.json()["error"]["code"] == "internal_error"


class TestCors:
    """A browser shows the real error, whichever it is."""

    @pytest.mark.parametrize(
        ("method", "path", "status", "headers"),
        [
            ("GET", "/v1/models", 401, {"Authorization": "Bearer wrong"}),
            ("GET", "/v1/nothing", 404, {}),
            ("PUT", "/v1/models", 405, {}),
            ("POST", "/v1/videos", 413, {"Content-Length": "50001"}),
            ("POST", "/v1/videos", 415, {"Content-Type": "text/plain"}),
            ("POST", "/v1/videos", 400, {"Content-Type": "application/json"}),
            ("GET", "/v1/broken", 500, {}),
            ("GET", "/v1/videos", 503, {}),
            ("GET", "/v1/models", 431, {f"X-{number}": "1" for number in range(100)}),
        ],
    )
    def test_every_error_may_be_read(
        self, client: TestClient, method: str, path: str, status: int, headers: dict[str, str]
    ) -> None:
        body = b"x" * 50_001 if status == 413 else b"{" if method == "POST" else None
        response = client.request(method, path, headers={"Origin": PAGE, **headers}, content=body)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["vary"] == "Origin"
        assert "Retry-After" in response.headers["access-control-expose-headers"]


class TestLog:
    def test_every_request_is_a_line_with_its_duration(self, client: TestClient) -> None:
        with capture_logs() as lines:
            client.get("/v1/nothing", headers={"X-Request-Id": "mine"})
        (line,) = [line for line in lines if line["event"] == "request_answered"]
        assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/nothing", 404)
        assert line["ms"] > 0

    def test_no_line_tells_a_key_or_a_query(self, client: TestClient) -> None:
        with capture_logs() as lines:
            client.get("/v1/nothing?token=secret")
        assert "secret" not in str(lines)
        assert AUTHORIZED["Authorization"].split()[1] not in str(lines)

    @pytest.mark.parametrize(
        ("sent", "trace"),
        [
            (f"00-{TRACE}-00f067aa0ba902b7-01", TRACE),
            (f"00-{TRACE}-00f067aa0ba902b7", None),
            ("no trace\x1b[2J", None),
        ],
    )
    def test_the_trace_of_a_request_is_in_the_log_alone(self, client: TestClient, sent: str, trace: str | None) -> None:
        with capture_logs(processors=[merge_contextvars]) as lines:
            response = client.get("/healthz", headers={"traceparent": sent})
        (line,) = [line for line in lines if line["event"] == "request_answered"]
        assert line.get("trace_id") == trace
        assert not any("trace" in name for name in response.headers)
