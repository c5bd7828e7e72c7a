"""Requests that are sent again: with a key they take effect once, and a commit without a reply is looked into."""

import asyncio
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from pydantic import SecretStr
from rushes_api import once, view
from rushes_api.admission import admission
from rushes_api.app import create_app
from rushes_api.auth import Caller
from rushes_api.deps import State
from rushes_core import database
from rushes_core.errors import StorageError
from rushes_core.models import IdempotencyKey
from rushes_core.request import ResolvedRequest, resolve
from rushes_core.served_model import ServedModel
from rushes_core.settings import Settings
from sqlalchemy import func, insert, make_url, text, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.api import AUTHORIZED, ApiProcess, JobDriver, multipart
from support.faults.proxy import Mode, TcpProxy

OTHER_KEY = "another-key-0123456789"


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key that only this test uses."""
    name: str = request.node.name
    return f"key of {name}"


def post(client: TestClient | httpx.Client, key: str, path: str = "", **body: Any) -> Any:
    return client.post(f"/v1/videos{path}", json={"prompt": "a dog", **body}, headers={"Idempotency-Key": key})


def is_replayed(response: Any) -> bool:
    return response.headers.get("idempotent-replayed") == "true"


def code_of(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    code: str = response.json()["error"]["code"]
    return code


class TestKey:
    def test_the_same_request_gets_the_same_answer(self, client: TestClient, driver: JobDriver, key: str) -> None:
        before = driver.num_rows()
        first = post(client, key, metadata={"zz": "1", "a": "ü"}, seconds=5)
        driver.fail(first.json()["id"], code="generation_failed", message="no")
        again = post(client, key, metadata={"a": "ü", "zz": "1"}, seconds="5")
        assert (first.status_code, again.status_code) == (200, 200)
        assert first.content == again.content
        assert (is_replayed(first), is_replayed(again)) == (False, True)
        assert again.json()["status"] == "queued"
        assert driver.num_rows() == before + 1

    def test_every_kind_of_body_is_the_same_request(self, client: TestClient, driver: JobDriver, key: str) -> None:
        before = driver.num_rows()
        parts = [("prompt", "a dog"), ("seconds", "5"), ("seed", "12"), ("metadata[a]", "b"), ("fps", "24")]
        body, headers = multipart(*parts)
        header = {"Idempotency-Key": key}
        answers = [
            post(client, key, seconds=5, seed=12, metadata={"a": "b"}, fps=24, size=None),
            client.post("/v1/videos", content=body, headers=headers | header),
            client.post("/v1/videos", data=dict(parts), headers=header),
        ]
        assert len({answer.content for answer in answers}) == 1
        assert driver.num_rows() == before + 1

    @pytest.mark.parametrize("change", [{"prompt": "a cat"}, {"seed": 1}, {"n": 2}, {"priority": "bulk"}], ids=str)
    def test_another_request_is_refused(
        self, client: TestClient, driver: JobDriver, key: str, change: dict[str, Any]
    ) -> None:
        post(client, key)
        before = driver.num_rows()
        response = post(client, key, **change)
        assert code_of(response, 422) == "idempotency_key_reused"
        assert response.json()["error"]["param"] == "Idempotency-Key"
        assert driver.num_rows() == before
        assert is_replayed(post(client, key))

    def test_a_header_that_changes_the_job_is_part_of_the_request(self, client: TestClient, key: str) -> None:
        def send(cancel_after: str) -> Any:
            headers = {"Idempotency-Key": key, "Cancel-After": cancel_after}
            return client.post("/v1/videos", json={"prompt": "a dog"}, headers=headers)

        assert send("90m").content == send("90m").content
        assert code_of(send("91m"), 422) == "idempotency_key_reused"

    @pytest.mark.parametrize("wrong", ["", "x" * 256, "x" * 300, "é", "ключ", "a\tb", "a\x7f"], ids=ascii)
    def test_one_that_is_no_key_is_refused(self, client: TestClient, driver: JobDriver, wrong: str) -> None:
        before = driver.num_rows()
        headers = [(b"Idempotency-Key", wrong.encode())]
        response = client.post("/v1/videos", json={"prompt": "a dog"}, headers=headers)
        assert code_of(response, 400) == "invalid_value"
        assert response.json()["error"]["param"] == "Idempotency-Key"
        assert "1 to 255 printable ASCII characters" in response.json()["error"]["message"]
        assert driver.num_rows() == before

    def test_two_keys_are_refused(self, client: TestClient) -> None:
        headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
        response = client.post("/v1/videos", json={"prompt": "a dog"}, headers=headers)
        assert code_of(response, 400) == "duplicate_parameter"

    @pytest.mark.parametrize("longest", [" ~!", "k" * 255], ids=["printable", "longest"])
    def test_the_limits_are_keys(self, client: TestClient, longest: str) -> None:
        assert not is_replayed(post(client, longest))
        assert is_replayed(post(client, longest))

    def test_what_was_refused_is_not_remembered(self, client: TestClient, key: str) -> None:
        assert code_of(post(client, key, seconds=99), 400) == "invalid_value"
        assert code_of(post(client, key, n=2), 400) == "invalid_value"
        assert code_of(post(client, key, model="sora-2"), 404) == "model_not_found"
        response = post(client, key)
        assert response.status_code == 200
        assert not is_replayed(response)

    def test_a_fault_of_ours_is_not_remembered(
        self, client: TestClient, driver: JobDriver, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = driver.num_rows()

        def refuse(*arguments: object, **options: object) -> None:
            raise StorageError("no")

        with monkeypatch.context() as broken:
            broken.setattr(view, "video_of", refuse)
            assert code_of(post(client, key), 503) == "storage_unavailable"
        assert driver.num_rows() == before
        assert not is_replayed(post(client, key))
        assert driver.num_rows() == before + 1

    def test_an_answer_outlives_what_made_the_request_valid(
        self, client: TestClient, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        deadline = int(time.time()) + 3_600
        first = post(client, key, deadline=deadline)
        monkeypatch.setattr("rushes_core.request.MAX_BEHIND", timedelta(hours=-2))
        assert post(client, key, deadline=deadline).content == first.content
        assert code_of(post(client, f"new {key}", deadline=deadline), 400) == "invalid_value"

    def test_one_of_yesterday_is_forgotten(self, client: TestClient, driver: JobDriver, key: str) -> None:
        first = post(client, key)
        with Session(driver.engine) as session, session.begin():
            aged = update(IdempotencyKey).where(IdempotencyKey.key == key)
            session.execute(aged.values(created_at=func.now() - timedelta(hours=24, seconds=1)))
        second = post(client, key, prompt="a cat")
        assert second.status_code == 200
        assert second.json()["id"] != first.json()["id"]
        assert is_replayed(post(client, key, prompt="a cat"))

    def test_it_belongs_to_one_route(self, client: TestClient, driver: JobDriver, key: str) -> None:
        first, second = (post(client, f"{key} {i}").json()["id"] for i in range(2))
        answers = [act(client, f"/{video_id}/cancel", key) for video_id in (first, second)]
        assert [answer.json()["id"] for answer in answers] == [first, second]
        assert not any(is_replayed(answer) for answer in answers)

    def test_it_belongs_to_one_api_key(self, client: TestClient, api_settings: Settings, key: str) -> None:
        mine = post(client, key)
        other = api_settings.model_copy(update={"api_key": SecretStr(OTHER_KEY)})
        with TestClient(create_app(other), headers={"Authorization": f"Bearer {OTHER_KEY}"}) as theirs:
            response = post(theirs, key, prompt="a cat")
            assert response.status_code == 200
            assert response.json()["id"] != mine.json()["id"]
            assert is_replayed(post(theirs, key, prompt="a cat"))

    def test_a_retry_with_it_makes_one_generation(self, client: TestClient, driver: JobDriver, key: str) -> None:
        video_id = post(client, key).json()["id"]
        driver.fail(video_id, code="generation_failed", message="no")
        first = act(client, f"/{video_id}/retry", key)
        driver.fail(video_id, code="generation_failed", message="no")
        again = act(client, f"/{video_id}/retry", key)
        assert first.content == again.content
        assert is_replayed(again)
        row = driver.row(video_id)
        assert row is not None
        assert (row.generation, row.state) == (2, "failed")

    def test_one_that_is_being_answered_is_in_progress(
        self, api_settings: Settings, driver: JobDriver, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(database._CONNECT_ARGS, "options", "-c lock_timeout=100ms -c timezone=UTC")
        with TestClient(create_app(api_settings), headers=AUTHORIZED) as client:
            assert client.portal is not None
            caller = client.portal.call(client.app_state["keys"].caller, [AUTHORIZED["Authorization"]])
            taken = {"project": caller.project, "api_key": caller.api_key, "route": "POST /v1/videos", "key": key}
            with Session(driver.engine) as session:
                session.execute(insert(IdempotencyKey).values(**taken, fingerprint=""))
                response = post(client, key)
                assert code_of(response, 409) == "idempotency_in_progress"
                assert response.headers["retry-after"] == "1"
                assert response.headers.get("x-should-retry") != "false"
                session.rollback()
            assert not is_replayed(post(client, key))


def act(client: TestClient, path: str, key: str) -> Any:
    response = client.post(f"/v1/videos{path}", headers={"Idempotency-Key": key})
    assert response.status_code == 200, response.text
    return response


def test_one_key_makes_one_job_across_processes_and_restarts(
    api_settings: Settings, driver: JobDriver, tmp_path: Path
) -> None:
    before = driver.num_rows()
    with httpx.Client(headers=AUTHORIZED, timeout=60, trust_env=False, limits=httpx.Limits(max_connections=50)) as http:

        def send(url: str) -> httpx.Response:
            body = {"prompt": "a dog", "metadata": {"client": "acme"}}
            return http.post(f"{url}/v1/videos", json=body, headers={"Idempotency-Key": "one"})

        with (
            ApiProcess(api_settings, tmp_path / "a.log") as first,
            ApiProcess(api_settings, tmp_path / "b.log") as second,
            ThreadPoolExecutor(50) as pool,
        ):
            answers = list(pool.map(send, [first.url, second.url] * 25))
        assert {answer.status_code for answer in answers} == {200}, answers[0].text
        assert sum(not is_replayed(answer) for answer in answers) == 1
        with ApiProcess(api_settings, tmp_path / "c.log") as restarted:
            answers.append(send(restarted.url))
        assert is_replayed(answers[-1])
        assert len({answer.content for answer in answers}) == 1
    assert driver.num_rows() == before + 1


class TestLostCommit:
    """The server commits, and the connection is gone before it can say so."""

    @pytest.fixture
    def proxy(self, api_settings: Settings) -> Iterator[TcpProxy]:
        url = make_url(api_settings.database_url)
        assert url.host is not None
        assert url.port is not None
        with TcpProxy(url.host, url.port) as proxy:
            yield proxy

    @pytest.fixture
    def through(self, api_settings: Settings, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
        monkeypatch.setattr(once, "_PAUSES_SECONDS", (0.0, 0.01))
        url = make_url(api_settings.database_url).set(host="127.0.0.1", port=proxy.port)
        settings = api_settings.model_copy(update={"database_url": url.render_as_string(hide_password=False)})
        with TestClient(create_app(settings), headers=AUTHORIZED) as client:
            yield client

    def test_a_post_without_a_key_is_answered_with_its_one_job(
        self, through: TestClient, proxy: TcpProxy, driver: JobDriver
    ) -> None:
        before = driver.num_rows()
        proxy.set(Mode.LOSE_REPLY, budget=1)
        response = through.post("/v1/videos", json={"prompt": "a dog"})
        assert response.status_code == 200, response.text
        assert proxy.strikes == 1
        assert driver.num_rows() == before + 1
        assert driver.row(response.json()["id"]) is not None

    def test_a_commit_that_is_still_on_its_way_is_waited_for(self, api_settings: Settings) -> None:
        model = ServedModel.load(api_settings)
        state = cast("State", {"settings": api_settings, "model": model})

        async def order(session: AsyncSession) -> ResolvedRequest:
            return resolve({"prompt": "a dog"}, model)

        async def run() -> None:
            engine = database.create_api_engine(api_settings)
            sessions = async_sessionmaker(engine, expire_on_commit=False)
            admit = admission(order, caller=Caller("default", "key"), state=state)
            async with sessions() as first, sessions() as second, sessions() as observer:
                job = await admit(first)
                again = asyncio.ensure_future(admit(second))
                while not (await observer.execute(text("SELECT 1 FROM pg_locks WHERE NOT granted"))).first():
                    await asyncio.sleep(0.01)
                await first.commit()
                assert (await again).id == job.id
            await engine.dispose()

        asyncio.run(run())

    def test_a_post_with_a_key_is_answered_with_its_one_job(
        self, through: TestClient, proxy: TcpProxy, driver: JobDriver, key: str
    ) -> None:
        before = driver.num_rows()
        proxy.set(Mode.LOSE_REPLY, budget=1)
        first = post(through, key)
        assert first.status_code == 200, first.text
        assert not is_replayed(first)
        again = post(through, key)
        assert again.content == first.content
        assert driver.num_rows() == before + 1

    def test_a_database_that_stays_away_leaves_the_outcome_open(
        self, through: TestClient, proxy: TcpProxy, driver: JobDriver
    ) -> None:
        before = driver.num_rows()
        proxy.set(Mode.LOSE_REPLY)
        response = through.post("/v1/videos", json={"prompt": "a dog"})
        assert code_of(response, 503) == "outcome_unknown"
        # nothing may send it again by itself: there may be a job
        assert response.headers["x-should-retry"] == "false"
        assert driver.num_rows() == before + 1

    def test_with_a_key_it_may_be_sent_again(
        self, through: TestClient, proxy: TcpProxy, driver: JobDriver, key: str
    ) -> None:
        before = driver.num_rows()
        proxy.set(Mode.LOSE_REPLY)
        response = post(through, key)
        assert code_of(response, 503) == "database_unavailable"
        assert response.headers["x-should-retry"] == "true"
        proxy.set(Mode.PASS)
        assert is_replayed(post(through, key))
        assert driver.num_rows() == before + 1

    def test_a_database_that_goes_away_before_the_commit_has_done_nothing(
        self, through: TestClient, proxy: TcpProxy, driver: JobDriver
    ) -> None:
        before = driver.num_rows()
        proxy.set(Mode.LOSE_REPLY, triggers=(b"INSERT INTO jobs",))
        response = through.post("/v1/videos", json={"prompt": "a dog"})
        assert code_of(response, 503) == "database_unavailable"
        assert response.headers["x-should-retry"] == "true"
        assert re.fullmatch("[1-9][0-9]?", response.headers["retry-after"])
        assert driver.num_rows() == before

    def test_a_retry_makes_one_generation(self, through: TestClient, proxy: TcpProxy, driver: JobDriver) -> None:
        video_id = through.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
        driver.fail(video_id, code="generation_failed", message="no")
        proxy.set(Mode.LOSE_REPLY, budget=1)
        response = through.post(f"/v1/videos/{video_id}/retry")
        assert (response.status_code, response.json()["status"]) == (200, "queued")
        assert response.json()["generation"] == 2
        assert proxy.strikes == 1

    def test_a_cancel_is_answered_as_if_nothing_had_been(
        self, through: TestClient, proxy: TcpProxy, driver: JobDriver
    ) -> None:
        video_id = through.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
        proxy.set(Mode.LOSE_REPLY, budget=1)
        response = through.post(f"/v1/videos/{video_id}/cancel")
        assert (response.status_code, response.json()["status"]) == (200, "cancelled")
        assert proxy.strikes == 1

    def test_a_delete_is_answered_as_if_nothing_had_been(
        self, through: TestClient, proxy: TcpProxy, driver: JobDriver
    ) -> None:
        video_id = through.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
        proxy.set(Mode.LOSE_REPLY, budget=1)
        response = through.delete(f"/v1/videos/{video_id}")
        assert (response.status_code, response.json()["deleted"]) == (200, True)
        assert proxy.strikes == 1
        row = driver.row(video_id)
        assert row is not None
        assert row.deleted_at is not None

    def test_a_remix_makes_one_job(self, through: TestClient, proxy: TcpProxy, driver: JobDriver) -> None:
        source = through.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
        before = driver.num_rows()
        proxy.set(Mode.LOSE_REPLY, budget=1)
        response = through.post(f"/v1/videos/{source}/remix", json={"prompt": "a cat"})
        assert (response.status_code, response.json()["remixed_from_video_id"]) == (200, source)
        assert proxy.strikes == 1
        assert driver.num_rows() == before + 1
