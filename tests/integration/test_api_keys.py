"""Projects and API keys: how they are made, changed and ended, and what a key may do."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from rushes_api.routers import events
from rushes_core import keys
from rushes_core.models import ApiKey, IdempotencyKey
from rushes_core.settings import Settings
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from structlog.testing import capture_logs
from support.api import ApiProcess, JobDriver, ThreadedApi
from support.event_stream import events_of
from support.keys import bearer, code_of, create_key, create_project
from support.waiting import wait_until

SECRET = re.compile(r"rk_[A-Za-z0-9_-]{43}")


def row(driver: JobDriver, key: dict[str, Any]) -> ApiKey:
    with Session(driver.engine) as session:
        return session.get_one(ApiKey, key["id"])


class TestProjects:
    def test_a_project_is_made_once(self, client: TestClient) -> None:
        response = client.post("/v1/projects", json={"name": "acme"})
        assert response.status_code == 200
        project = response.json()
        assert (project["id"], project["object"], project["name"]) == ("acme", "project", "acme")
        assert client.get("/v1/projects/acme").json() == project
        again = client.post("/v1/projects", json={"name": "acme"})
        assert code_of(again, 409) == "project_exists"
        assert again.headers["x-should-retry"] == "false"

    def test_a_weight_is_one_unless_it_is_said_and_can_be_changed(self, client: TestClient) -> None:
        assert client.post("/v1/projects", json={"name": "plain"}).json()["weight"] == 1
        assert client.post("/v1/projects", json={"name": "heavy", "weight": 2.5}).json()["weight"] == 2.5
        changed = client.patch("/v1/projects/heavy", json={"weight": 4})
        assert changed.json() == client.get("/v1/projects/heavy").json()
        assert changed.json()["weight"] == 4
        assert client.patch("/v1/projects/heavy", json={}).json()["weight"] == 4
        assert code_of(client.patch("/v1/projects/none", json={"weight": 1}), 404) == "project_not_found"

    @pytest.mark.parametrize("weight", [0, -1, 0.001, 1_001, "2", True, []], ids=ascii)
    def test_a_weight_that_is_none_is_refused(self, client: TestClient, weight: object) -> None:
        client.post("/v1/projects", json={"name": "weighed"})
        for response in (
            client.post("/v1/projects", json={"name": "unweighed", "weight": weight}),
            client.patch("/v1/projects/weighed", json={"weight": weight}),
        ):
            assert code_of(response, 400) == "invalid_value"
            assert response.json()["error"]["param"] == "weight"

    def test_the_same_request_gets_the_same_answer(self, client: TestClient) -> None:
        header = {"Idempotency-Key": "make a project"}
        answers = [client.post("/v1/projects", json={"name": "again"}, headers=header) for _ in range(2)]
        assert answers[0].status_code == 200
        assert answers[0].content == answers[1].content
        assert answers[1].headers["idempotent-replayed"] == "true"

    @pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a" * 64, "ü", "a\n", 5, None, "*"], ids=ascii)
    def test_a_name_that_is_none_is_refused(self, client: TestClient, name: object) -> None:
        response = client.post("/v1/projects", json={"name": name})
        assert code_of(response, 400) == ("missing_required_parameter" if name is None else "invalid_value")
        assert response.json()["error"]["param"] == "name"

    def test_projects_are_listed_by_name_in_pages(self, client: TestClient) -> None:
        for name in ("page-b", "page-a", "page-c"):
            create_project(client, name)
        page = client.get("/v1/projects", params={"after": "page-", "limit": 2}).json()
        assert [one["name"] for one in page["data"]] == ["page-a", "page-b"]
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("page-a", "page-b", True)
        rest = client.get("/v1/projects", params={"after": page["last_id"], "limit": 100}).json()
        assert "page-c" in [one["name"] for one in rest["data"]]
        assert not rest["has_more"]
        assert code_of(client.get("/v1/projects", params={"after": "A"}), 400) == "invalid_value"

    @pytest.mark.parametrize("name", ["none", "NONE", "a b", "%00"])
    def test_one_that_does_not_exist_is_404(self, client: TestClient, name: str) -> None:
        assert code_of(client.get(f"/v1/projects/{name}"), 404) == "project_not_found"


class TestKeys:
    def test_a_secret_is_shown_once_and_not_kept(self, client: TestClient, driver: JobDriver) -> None:
        key = create_key(client, name="ci")
        assert SECRET.fullmatch(key["secret"])
        assert key["hint"] == key["secret"][-4:]
        stored = row(driver, key)
        assert stored.digest == keys.digest_of(key["secret"])
        assert client.get("/v1/models", headers=bearer(key)).status_code == 200
        for path in ("/v1/api_keys?limit=100", f"/v1/api_keys/{key['id']}"):
            assert key["secret"] not in client.get(path).text
        with Session(driver.engine) as session:
            dump = session.execute(select(func.string_agg(ApiKey.hint, ","))).scalar_one()
            bodies = session.execute(select(IdempotencyKey.body)).scalars().all()
        assert key["secret"] not in dump
        assert not any(key["secret"] in (body or "") for body in bodies)

    @pytest.mark.usefixtures("one_day")
    def test_a_key_has_what_it_was_made_with(self, client: TestClient) -> None:
        create_project(client, "whole")
        wanted: dict[str, Any] = {
            "name": "everything",
            "project": "whole",
            "scopes": ["videos:read", "batches"],
            "priorities": ["bulk"],
            "compat": "openai",
            "requests_per_minute": 100,
            "max_queued": 0,
            "max_running": 2,
            "daily_gpu_seconds": 3600,
            "expires_at": int(datetime.now(UTC).timestamp()) + 3600,
        }
        key = create_key(client, **wanted)
        assert {name: key[name] for name in wanted} == wanted
        secret = key.pop("secret")
        assert client.get(f"/v1/api_keys/{key['id']}").json() == key
        own = client.get("/v1/api_keys/me", headers=bearer(secret)).json()
        assert own | {"last_used_at": None} == key
        assert own["usage"] == {"day": datetime.now(UTC).date().isoformat(), "gpu_seconds": 0, "attempts": 0}

    def test_a_key_that_says_nothing_is_for_videos_without_limits(self, client: TestClient) -> None:
        key = create_key(client)
        assert key["project"] == "default"
        assert key["scopes"] == ["videos:read", "videos:write"]
        assert key["priorities"] == ["interactive", "normal", "bulk"]
        for name in ("compat", "requests_per_minute", "max_queued", "max_running", "daily_gpu_seconds", "expires_at"):
            assert key[name] is None

    @pytest.mark.parametrize(
        ("values", "param", "part"),
        [
            ({"name": " "}, "name", "1 to 100 printable characters"),
            ({"name": "x" * 101}, "name", "1 to 100 printable characters"),
            ({"name": "a\0"}, "name", "1 to 100 printable characters"),
            ({"name": "a\x1b[2J"}, "name", "1 to 100 printable characters"),
            ({"scopes": []}, "scopes", "one or more of videos:read, videos:write, batches, webhooks, admin, got []"),
            ({"scopes": ["videos"]}, "scopes", "got ['videos']"),
            ({"scopes": "admin"}, "scopes", "got 'admin'"),
            ({"scopes": [{}]}, "scopes", "got [{}]"),
            ({"priorities": ["urgent"]}, "priorities", "interactive, normal, bulk, got ['urgent']"),
            ({"compat": "azure"}, "compat", "openai or null, got 'azure'"),
            ({"requests_per_minute": 0}, "requests_per_minute", "greater than or equal to 1, got 0"),
            ({"requests_per_minute": 100_001}, "requests_per_minute", "less than or equal to 100000"),
            ({"max_queued": -1}, "max_queued", "greater than or equal to 0, got -1"),
            ({"max_queued": 2**70}, "max_queued", "less than or equal to 100000"),
            ({"max_running": 0}, "max_running", "greater than or equal to 1"),
            ({"max_running": True}, "max_running", "valid integer, got True"),
            ({"daily_gpu_seconds": 1.5}, "daily_gpu_seconds", "valid integer"),
            ({"daily_gpu_seconds": "5"}, "daily_gpu_seconds", "valid integer, got '5'"),
            ({"expires_at": 1}, "expires_at", "must lie ahead, got 1970-01-01T00:00:01+00:00"),
            ({"expires_at": "tomorrow"}, "expires_at", "ISO 8601"),
            ({"project": "No"}, "project", "lower-case"),
        ],
        ids=str,
    )
    def test_errors_name_field_value_and_limit(
        self, client: TestClient, values: dict[str, Any], param: str, part: str
    ) -> None:
        response = client.post("/v1/api_keys", json={"name": "test", **values})
        assert code_of(response, 400) == "invalid_value"
        assert response.json()["error"]["param"] == param
        assert part in response.json()["error"]["message"]

    def test_unknown_fields_projects_and_types_of_body_are_refused(self, client: TestClient) -> None:
        assert code_of(client.post("/v1/api_keys", json={"name": "a", "secret": "b"}), 400) == "unknown_parameter"
        assert code_of(client.post("/v1/api_keys", json={"name": "a", "project": "none"}), 404) == "project_not_found"
        assert code_of(client.post("/v1/api_keys"), 400) == "missing_required_parameter"
        assert code_of(client.post("/v1/api_keys", data={"name": "a"}), 415) == "unsupported_media_type"

    def test_an_answer_with_a_secret_is_not_kept_for_repetition(self, client: TestClient) -> None:
        key = create_key(client)
        header = {"Idempotency-Key": "one"}
        for path in ("", f"/{key['id']}/rotate"):
            response = client.post(f"/v1/api_keys{path}", json={"name": "a"} if not path else {}, headers=header)
            assert code_of(response, 400) == "invalid_value"
            assert response.json()["error"]["param"] == "Idempotency-Key"
            assert client.post(f"/v1/api_keys{path}", headers={**header, "Authorization": ""}).status_code == 401

    def test_keys_are_listed_newest_first_and_by_project(self, client: TestClient) -> None:
        create_project(client, "listed")
        made = [create_key(client, project="listed", name=str(number))["id"] for number in range(3)]
        create_key(client)
        page = client.get("/v1/api_keys", params={"project": "listed", "limit": 2}).json()
        assert [one["id"] for one in page["data"]] == [made[2], made[1]]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (made[2], made[1], True)
        rest = client.get("/v1/api_keys", params={"project": "listed", "after": made[1]}).json()
        assert [one["id"] for one in rest["data"]] == [made[0]]
        assert code_of(client.get("/v1/api_keys?project=A"), 400) == "invalid_value"
        assert code_of(client.get("/v1/api_keys?project=none"), 404) == "project_not_found"
        assert code_of(client.get("/v1/api_keys?after=video_1"), 400) == "invalid_value"

    def test_a_change_says_what_is_to_change(self, client: TestClient) -> None:
        key = create_key(client, max_queued=5, max_running=1, compat="openai")
        response = client.patch(f"/v1/api_keys/{key['id']}", json={"max_queued": None, "max_running": 2, "name": "b"})
        assert response.status_code == 200, response.text
        changed = response.json()
        assert (changed["max_queued"], changed["max_running"], changed["name"]) == (None, 2, "b")
        assert (changed["compat"], changed["scopes"]) == ("openai", key["scopes"])
        assert client.patch(f"/v1/api_keys/{key['id']}", json={}).json() == changed
        for wrong in ({"project": "default"}, {"name": None}, {"scopes": []}, {"max_running": 0}):
            refused = client.patch(f"/v1/api_keys/{key['id']}", json=wrong)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == next(iter(wrong))

    def test_a_changed_key_is_known_at_once_where_it_was_changed(self, client: TestClient) -> None:
        key = create_key(client, scopes=["videos:read"])
        assert code_of(client.post("/v1/videos", headers=bearer(key)), 403) == "insufficient_scope"
        client.patch(f"/v1/api_keys/{key['id']}", json={"scopes": ["videos:write"]})
        assert client.post("/v1/videos", json={"prompt": "a dog"}, headers=bearer(key)).status_code == 200
        assert code_of(client.get("/v1/videos", headers=bearer(key)), 403) == "insufficient_scope"

    @pytest.mark.parametrize(
        "key_id", ["key_01JD9ZZZZZZZZZZZZZZZZZZZZZ", "key_", "video_01JD9ZZZZZZZZZZZZZZZZZZZZZ", "%00"]
    )
    def test_one_that_does_not_exist_is_404(self, client: TestClient, key_id: str) -> None:
        path = f"/v1/api_keys/{key_id}"
        for response in (
            client.get(path),
            client.patch(path, json={"name": "a"}),
            client.post(f"{path}/rotate"),
            client.post(f"{path}/revoke"),
        ):
            assert code_of(response, 404) == "api_key_not_found"

    def test_use_is_noted(self, client: TestClient) -> None:
        key = create_key(client)
        client.get("/v1/models", headers=bearer(key))
        wait_until(lambda: client.get(f"/v1/api_keys/{key['id']}").json()["last_used_at"] is not None)

    def test_the_operators_own_key_has_everything_and_is_no_row(self, client: TestClient) -> None:
        own = client.get("/v1/api_keys/me").json()
        assert (own["project"], own["scopes"]) == ("default", list(keys.SCOPES))
        assert own["id"] not in client.get("/v1/api_keys?limit=100").text
        assert code_of(client.post(f"/v1/api_keys/{own['id']}/revoke"), 404) == "api_key_not_found"


class TestRotationAndRevocation:
    def test_both_secrets_work_while_they_overlap(self, client: TestClient, driver: JobDriver) -> None:
        key = create_key(client)
        rotated = client.post(f"/v1/api_keys/{key['id']}/rotate", json={"overlap_seconds": 3600}).json()
        assert rotated["id"] == key["id"]
        assert rotated["secret"] != key["secret"]
        assert rotated["previous_secret_until"] > rotated["created_at"] + 3500
        for secret in (key, rotated):
            assert client.get("/v1/api_keys/me", headers=bearer(secret)).json()["id"] == key["id"]
        with Session(driver.engine) as session, session.begin():
            session.execute(update(ApiKey).where(ApiKey.id == key["id"]).values(previous_until=func.now()))
        wait_until(lambda: client.get("/v1/models", headers=bearer(key)).status_code == 401)
        assert client.get("/v1/models", headers=bearer(rotated)).status_code == 200

    def test_without_overlap_the_old_secret_stops(self, client: TestClient) -> None:
        key = create_key(client)
        assert client.get("/v1/models", headers=bearer(key)).status_code == 200
        rotated = client.post(f"/v1/api_keys/{key['id']}/rotate", json={"overlap_seconds": 0}).json()
        assert code_of(client.get("/v1/models", headers=bearer(key)), 401) == "invalid_api_key"
        assert client.get("/v1/models", headers=bearer(rotated)).status_code == 200

    def test_a_second_rotation_ends_the_first_secret(self, client: TestClient) -> None:
        first = create_key(client)
        second, third = (client.post(f"/v1/api_keys/{first['id']}/rotate").json() for _ in range(2))
        assert client.get("/v1/models", headers=bearer(first)).status_code == 401
        assert client.get("/v1/models", headers=bearer(second)).status_code == 200
        assert client.get("/v1/models", headers=bearer(third)).status_code == 200

    @pytest.mark.parametrize("overlap", [-1, 2_592_001, "1d", 1.5], ids=str)
    def test_an_overlap_has_limits(self, client: TestClient, overlap: object) -> None:
        key = create_key(client)
        response = client.post(f"/v1/api_keys/{key['id']}/rotate", json={"overlap_seconds": overlap})
        assert code_of(response, 400) == "invalid_value"
        assert response.json()["error"]["param"] == "overlap_seconds"

    def test_a_revoked_key_is_ended_with_both_secrets_for_good(self, client: TestClient) -> None:
        key = create_key(client)
        rotated = client.post(f"/v1/api_keys/{key['id']}/rotate").json()
        revoked = client.post(f"/v1/api_keys/{key['id']}/revoke").json()
        assert revoked["revoked_at"] is not None
        assert client.post(f"/v1/api_keys/{key['id']}/revoke").json() == revoked
        for secret in (key, rotated):
            assert code_of(client.get("/v1/models", headers=bearer(secret)), 401) == "invalid_api_key"
        assert code_of(client.post(f"/v1/api_keys/{key['id']}/rotate"), 409) == "invalid_state"
        assert code_of(client.post(f"/v1/api_keys/{key['id']}/revoke", json={"a": 1}), 400) == "unknown_parameter"

    def test_a_process_learns_what_another_one_did(
        self, client: TestClient, api_settings: Settings, tmp_path: Path
    ) -> None:
        ended, changed, turned = create_key(client), create_key(client), create_key(client)
        with (
            ApiProcess(api_settings, tmp_path / "api.log") as other,
            httpx.Client(base_url=other.url, timeout=60, trust_env=False) as http,
        ):

            def status(secret: dict[str, Any], path: str = "/v1/models") -> int:
                return http.get(path, headers=bearer(secret)).status_code

            for key in (ended, changed, turned):
                assert status(key) == 200
            client.post(f"/v1/api_keys/{ended['id']}/revoke")
            client.patch(f"/v1/api_keys/{changed['id']}", json={"scopes": ["videos:write"]})
            after = client.post(f"/v1/api_keys/{turned['id']}/rotate", json={"overlap_seconds": 0}).json()
            assert status(after) == 200
            wait_until(lambda: status(ended) == 401)
            wait_until(lambda: status(changed) == 403)
            wait_until(lambda: status(turned) == 401)
        log = other.log.read_text()
        assert not any(key["secret"] in log for key in (ended, changed, turned, after))

    def test_what_operators_do_to_keys_is_logged_without_secrets(self, client: TestClient) -> None:
        with capture_logs() as logs:
            key = create_key(client)
            path = f"/v1/api_keys/{key['id']}"
            client.patch(path, json={"max_queued": 5})
            rotated = client.post(f"{path}/rotate").json()
            client.post(f"{path}/revoke")
        by = client.get("/v1/api_keys/me").json()["id"]
        told = [line for line in logs if line.get("api_key") == key["id"]]
        events_told = [line["event"] for line in told]
        assert events_told == ["api_key_created", "api_key_changed", "api_key_rotated", "api_key_revoked"]
        assert {line["by"] for line in told} == {by}
        assert not any(secret in str(logs) for secret in (key["secret"], rotated["secret"]))

    def test_unknown_revoked_and_expired_keys_get_the_same_answer(self, client: TestClient, driver: JobDriver) -> None:
        revoked, expired = create_key(client), create_key(client, expires_at=int(datetime.now(UTC).timestamp()) + 600)
        client.post(f"/v1/api_keys/{revoked['id']}/revoke")
        with Session(driver.engine) as session, session.begin():
            past = datetime.now(UTC) - timedelta(seconds=1)
            session.execute(update(ApiKey).where(ApiKey.id == expired["id"]).values(expires_at=past))
        answers = [
            client.get("/v1/videos", headers=bearer(secret) | {"x-request-id": "same"})
            for secret in (keys.Secret.new().text, "nonsense", revoked, expired)
        ]
        assert {code_of(answer, 401) for answer in answers} == {"invalid_api_key"}
        assert len({answer.content for answer in answers}) == 1
        assert len({str(sorted(answer.headers.items())) for answer in answers}) == 1


class TestScopes:
    def routes(self, client: TestClient) -> Iterator[tuple[str, str]]:
        for path, methods in client.get("/openapi.json").json()["paths"].items():
            for method in methods:
                if path.startswith("/v1/"):
                    yield method.upper(), path

    def needed(self, method: str, path: str) -> str | None:
        if path == "/v1/api_keys/me":
            return None
        if path.startswith(("/v1/projects", "/v1/api_keys", "/v1/workers")):
            return "admin"
        if path.startswith("/v1/webhook"):
            return "webhooks"
        if path.startswith(("/v1/files", "/v1/batches", "/v1/campaigns")):
            return "batches"
        return "videos:read" if method == "GET" else "videos:write"

    def test_every_route_needs_its_scope_and_says_which(self, client: TestClient) -> None:
        for missing in keys.SCOPES:
            others = [one for one in keys.SCOPES if one not in (missing, "admin")]
            header = bearer(create_key(client, scopes=others))
            for method, path in self.routes(client):
                if self.needed(method, path) == missing:
                    response = client.request(method, path.replace("{", "").replace("}", ""), headers=header)
                    assert code_of(response, 403) == "insufficient_scope", (method, path)
                    assert missing in response.json()["error"]["message"], (method, path)
                    assert response.headers["x-request-id"] == response.json()["error"]["request_id"]

    def test_admin_is_every_scope(self, client: TestClient) -> None:
        header = bearer(create_key(client, scopes=["admin"]))
        assert client.get("/v1/videos", headers=header).status_code == 200
        assert client.post("/v1/videos", json={"prompt": "a dog"}, headers=header).status_code == 200
        assert client.get("/v1/api_keys", headers=header).status_code == 200

    def test_any_key_may_look_at_itself(self, client: TestClient) -> None:
        key = create_key(client, scopes=["webhooks"])
        assert client.get("/v1/api_keys/me", headers=bearer(key)).json()["id"] == key["id"]

    def test_without_a_key_no_route_answers(self, client: TestClient) -> None:
        for method, path in self.routes(client):
            response = client.request(method, path.replace("{", "").replace("}", ""), headers={"Authorization": ""})
            assert code_of(response, 401) == "invalid_api_key", (method, path)
            assert response.headers["www-authenticate"].startswith("Bearer")
            assert response.headers["x-request-id"]


def test_a_stream_of_events_ends_with_its_key(
    client: TestClient, api_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "BEAT_SECONDS", 0.1)
    revoked, narrowed = create_key(client), create_key(client)
    with ThreadedApi(api_settings) as api:
        for key, end in (
            (revoked, lambda: client.post(f"/v1/api_keys/{revoked['id']}/revoke")),
            (narrowed, lambda: client.patch(f"/v1/api_keys/{narrowed['id']}", json={"scopes": ["videos:write"]})),
        ):
            with httpx.Client(base_url=api.url, headers=bearer(key), timeout=30, trust_env=False) as http:
                video_id = http.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
                with events_of(http, video_id) as stream:
                    stream.next("status")
                    stream.next_comment()
                    assert end().status_code == 200
                    assert list(stream) == []
