"""Keys as every request meets them: requests per minute, and the look-up that goes on while servers are away."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rushes_api import auth, limits
from rushes_api.app import create_app
from rushes_api.auth import ApiKeys
from rushes_api.errors import Unauthorized, Unavailable
from rushes_core import keys
from rushes_core.settings import Settings
from sqlalchemy import make_url
from starlette.testclient import TestClient
from structlog.testing import capture_logs
from support.api import AUTHORIZED, offline_settings
from support.keys import RETRY_AFTER, bearer, code_of, create_key
from support.proxy import FreezableProxy

PATIENT_SECONDS = 60.0


@contextmanager
def frozen_redis(settings: Settings) -> Iterator[tuple[Settings, FreezableProxy]]:
    """Settings whose Redis lies behind a relay that can be frozen; it flows at first."""
    url = make_url(settings.redis_url)
    assert url.host is not None
    assert url.port is not None
    with FreezableProxy(url.host, url.port) as proxy:
        relayed = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        yield settings.model_copy(update={"redis_url": relayed}), proxy


def test_without_postgres_a_key_that_was_never_seen_is_not_called_wrong(api_settings: Settings) -> None:
    with TestClient(create_app(offline_settings(api_settings.checkpoint))) as offline:
        answer = offline.get("/v1/models", headers=bearer(keys.Secret.new().text))
        assert code_of(answer, 503) == "database_unavailable"
        assert RETRY_AFTER.fullmatch(answer.headers["retry-after"])
        assert answer.headers["x-should-retry"] == "true"
        assert code_of(offline.get("/v1/models", headers=bearer("nonsense")), 401) == "invalid_api_key"
        assert offline.get("/v1/models", headers=AUTHORIZED).status_code == 200


class TestRequestsPerMinute:
    def test_a_limited_key_is_told_where_it_stands(self, client: TestClient) -> None:
        header = bearer(create_key(client, requests_per_minute=4))
        answers = [
            client.get("/v1/videos", headers=header),
            client.get("/v1/videos/none", headers=header),
            client.get("/v1/videos?nothing=1", headers=header),
            client.get("/v1/api_keys", headers=header),
            client.get("/v1/videos", headers=header),
            client.get("/v1/videos", headers=header),
        ]
        assert [answer.status_code for answer in answers] == [200, 404, 400, 403, 429, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == [
            "3",
            "2",
            "1",
            "0",
            "0",
            "0",
        ]
        for answer in answers:
            assert answer.headers["x-ratelimit-limit-requests"] == "4"
            assert re.fullmatch(r"[1-9][0-9]?s", answer.headers["x-ratelimit-reset-requests"])
            assert answer.headers["x-request-id"]
        refused = answers[-1]
        assert code_of(refused, 429) == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert "4 requests per minute" in refused.json()["error"]["message"]
        assert RETRY_AFTER.fullmatch(refused.headers["retry-after"])
        assert int(refused.headers["retry-after"]) <= 60

    def test_other_keys_are_not_counted(self, client: TestClient) -> None:
        limited, other = (bearer(create_key(client, requests_per_minute=1)) for _ in range(2))
        unlimited = bearer(create_key(client))
        assert [client.get("/v1/models", headers=limited).status_code for _ in range(2)] == [200, 429]
        assert client.get("/v1/models", headers=other).status_code == 200
        answer = client.get("/v1/models", headers=unlimited)
        assert answer.status_code == 200
        assert not any(name.startswith("x-ratelimit") for name in answer.headers)

    def test_processes_count_together(self, client: TestClient, api_settings: Settings) -> None:
        header = bearer(create_key(client, requests_per_minute=3))
        with TestClient(create_app(api_settings)) as other:
            answers = [one.get("/v1/models", headers=header) for one in (client, other, client, other, client)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]

    def test_a_page_may_read_the_headers(self, api_settings: Settings, client: TestClient) -> None:
        header = bearer(create_key(client, requests_per_minute=1)) | {"Origin": "https://app.example"}
        with TestClient(create_app(api_settings.model_copy(update={"cors_origins": "*"}))) as other:
            for status in (200, 429):
                answer = other.get("/v1/models", headers=header)
                assert answer.status_code == status
                exposed = answer.headers["access-control-expose-headers"]
                assert {"x-ratelimit-remaining-requests", "Retry-After"} <= set(exposed.split(", "))

    def test_without_redis_the_process_counts_and_says_so_once(
        self, client: TestClient, api_settings: Settings
    ) -> None:
        header = bearer(create_key(client, requests_per_minute=3))
        away = api_settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0"})
        with TestClient(create_app(away)) as other, capture_logs() as logs:
            statuses = [other.get("/v1/models", headers=header).status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 429, 429]
        assert [line["event"] for line in logs].count("request_limits_in_process") == 1

    def test_a_key_that_is_over_its_limit_costs_redis_nothing(self, client: TestClient, api_settings: Settings) -> None:
        header = bearer(create_key(client, requests_per_minute=2))
        with (
            frozen_redis(api_settings) as (settings, proxy),
            capture_logs() as logs,
            TestClient(create_app(settings)) as other,
        ):
            assert [other.get("/v1/models", headers=header).status_code for _ in range(3)] == [200, 200, 429]
            proxy.freeze()
            assert {other.get("/v1/models", headers=header).status_code for _ in range(20)} == {429}
            proxy.thaw()
        assert "request_limits_in_process" not in [line["event"] for line in logs]

    def test_a_frozen_redis_is_left_alone_until_it_is_back(
        self, client: TestClient, api_settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        header = bearer(create_key(client, requests_per_minute=1_000))
        monkeypatch.setattr(limits, "AWAY_SECONDS", 600.0)
        with (
            frozen_redis(api_settings) as (settings, proxy),
            capture_logs() as logs,
            TestClient(create_app(settings)) as other,
        ):

            def remaining() -> int:
                answer = other.get("/v1/models", headers=header)
                assert answer.status_code == 200
                return int(answer.headers["x-ratelimit-remaining-requests"])

            def told() -> list[str]:
                return [line["event"] for line in logs if line["event"].startswith("request_limits_")]

            assert remaining() == 999
            proxy.freeze()
            monkeypatch.setattr(limits, "REDIS_SECONDS", 0.2)
            assert [remaining() for _ in range(3)] == [999, 998, 997]
            monkeypatch.setattr(limits, "REDIS_SECONDS", PATIENT_SECONDS)
            proxy.thaw()
            assert remaining() == 996
            assert told() == ["request_limits_in_process"]
            monkeypatch.setattr(limits, "AWAY_SECONDS", 0.0)
            # what lay frozen may be counted, or not: only that it is shared again is certain
            assert remaining() < 999
            assert told() == ["request_limits_in_process", "request_limits_shared_again"]


class TestCache:
    """`ApiKeys` of one process, without the rest of the API."""

    @pytest.fixture
    def queries(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many keys each query so far asked for."""
        asked: list[int] = []
        find = keys.find

        def counting(digests: Any) -> Any:
            asked.append(len(digests))
            return find(digests)

        monkeypatch.setattr(keys, "find", counting)
        return asked

    @staticmethod
    def run(settings: Settings, body: Any) -> None:
        async def whole() -> None:
            api_keys = ApiKeys(settings)
            try:
                await body(api_keys)
            finally:
                await api_keys.close()

        asyncio.run(whole())

    def test_a_key_is_looked_up_once_however_many_ask(
        self, client: TestClient, api_settings: Settings, queries: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(auth, "MAX_AGE_SECONDS", 600.0)
        monkeypatch.setattr(auth, "REFRESH_SECONDS", 600.0)
        header = [bearer(create_key(client))["Authorization"]]

        async def body(api_keys: ApiKeys) -> None:
            callers = await asyncio.gather(*(api_keys.caller(header) for _ in range(100)))
            assert len({id(caller) for caller in callers}) == 1
            # nothing to wait for: the coroutine ends at its first step
            with pytest.raises(StopIteration):
                api_keys.caller(header).send(None)

        self.run(api_settings, body)
        assert queries == [1]

    def test_an_answer_that_was_asked_for_before_a_change_is_asked_for_again(
        self, client: TestClient, api_settings: Settings, queries: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(auth, "MAX_AGE_SECONDS", 600.0)
        key = create_key(client)
        header = [bearer(key)["Authorization"]]
        query = auth._StoredKeys._query  # pyright: ignore[reportPrivateUsage]

        async def body(api_keys: ApiKeys) -> None:
            async def changed_meanwhile(held: Any, digests: list[bytes]) -> Any:
                found = await query(held, digests)
                if len(queries) == 1:
                    assert client.post(f"/v1/api_keys/{key['id']}/revoke").status_code == 200
                    api_keys.forget()
                return found

            monkeypatch.setattr(auth._StoredKeys, "_query", changed_meanwhile)  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(Unauthorized):
                await api_keys.caller(header)

        self.run(api_settings, body)

    def test_a_flood_of_wrong_keys_costs_few_queries_and_bounded_memory(
        self, client: TestClient, api_settings: Settings, queries: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(auth, "MAX_ENTRIES", 50)
        header = [bearer(create_key(client))["Authorization"]]
        wrong = [f"Bearer {keys.Secret.new().text}" for _ in range(1_000)]

        async def body(api_keys: ApiKeys) -> None:
            async def refused(one: str) -> None:
                with pytest.raises(Unauthorized):
                    await api_keys.caller([one])

            await api_keys.caller(header)
            for _ in range(3):
                await asyncio.gather(*(refused(one) for one in [*wrong, *wrong]))
            held = api_keys._stored  # pyright: ignore[reportPrivateUsage]
            assert len(held._misses) == 50
            assert len(held._hits) == 1
            await refused("Bearer nonsense")

        self.run(api_settings, body)
        assert sum(queries) <= 1 + 3 * 1_000 + 1
        assert len(queries) <= 12

    def test_a_key_that_was_seen_goes_on_while_postgres_is_away(
        self, client: TestClient, api_settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(auth, "LOOKUP_SECONDS", 0.2)
        monkeypatch.setattr(auth, "MAX_AGE_SECONDS", 0.0)
        url = make_url(api_settings.database_url)
        assert url.host is not None
        assert url.port is not None
        header = [bearer(create_key(client))["Authorization"]]
        with FreezableProxy(url.host, url.port) as proxy:
            relayed = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)

            async def body(api_keys: ApiKeys) -> None:
                monkeypatch.setattr(auth, "LOOKUP_SECONDS", PATIENT_SECONDS)
                caller = await api_keys.caller(header)
                monkeypatch.setattr(auth, "LOOKUP_SECONDS", 0.2)
                proxy.freeze()
                assert await api_keys.caller(header) == caller
                with pytest.raises(Unavailable):
                    await api_keys.caller([f"Bearer {keys.Secret.new().text}"])
                monkeypatch.setattr(auth, "STALE_SECONDS", 0.0)
                with pytest.raises(Unavailable):
                    await api_keys.caller(header)
                proxy.thaw()
                monkeypatch.setattr(auth, "LOOKUP_SECONDS", PATIENT_SECONDS)
                assert await api_keys.caller(header) == caller

            self.run(api_settings.model_copy(update={"database_url": relayed}), body)
