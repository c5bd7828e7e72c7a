"""What the API answers while a server behind it is missing, frozen or not set up; it never hangs and never breaks."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from rushes_api import app as app_module
from rushes_api import auth, eta, lookup, pauses, pulse, readiness, watch
from rushes_api.app import create_app
from rushes_api.errors import Unavailable
from rushes_core import keys, store_clients, time_limit
from rushes_core.database import create_api_engine
from rushes_core.events import Glimpse
from rushes_core.ids import new_video_id
from rushes_core.settings import Settings
from rushes_core.states import JobState
from rushes_core.storage import ObjectStore
from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from starlette.testclient import TestClient
from structlog.testing import capture_logs
from support.api import API_KEY, AUTHORIZED, JobDriver, ThreadedApi, offline_settings
from support.checkpoints import tiny_checkpoint
from support.event_stream import events_of
from support.proxy import FreezableProxy, behind, relayed
from support.stack import SharedStack, libpq_url, settings_env
from support.waiting import wait_until

Sessions = async_sessionmaker[AsyncSession]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("outage"))


@pytest.fixture
def api_settings(stack: SharedStack, checkpoint: Path) -> Settings:
    return stack.settings(checkpoint=checkpoint, api_key=API_KEY)


def started(settings: Settings) -> TestClient:
    return TestClient(create_app(settings), headers=AUTHORIZED)


def warm_up(client: TestClient) -> None:
    """Return when what is slow for the first time has been done: the times that these tests set are short."""
    wait_until(lambda: client.get("/v1/videos").status_code == 200)
    wait_until(lambda: client.get("/readyz").json().get("checks", {}).get("storage") == "ok")


def checks(client: TestClient, status: int) -> dict[str, str]:
    response = client.get("/readyz")
    assert response.status_code == status, response.text
    if status == 503:
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert response.json()["error"]["code"] == "not_ready"
    found: dict[str, str] = response.json()["checks"]
    return found


def every_video_route(client: TestClient) -> Iterator[Any]:
    video_id = new_video_id()
    yield client.post("/v1/videos", json={"prompt": "a dog"})
    yield client.get("/v1/videos")
    yield client.get(f"/v1/videos/{video_id}")
    yield client.get(f"/v1/videos/{video_id}/content")
    yield client.delete(f"/v1/videos/{video_id}")


class TestReadiness:
    def test_a_replica_of_the_served_model_makes_it_ready(self, api_settings: Settings) -> None:
        driver = JobDriver(api_settings)
        with started(api_settings) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            assert checks(client, 503)["workers"] == f"no replica is ready for model {model}"
            driver.report_replica(model="another", state="ready")
            assert checks(client, 503)["workers"] != "ok"
            driver.report_replica(model=model, state="starting")
            assert checks(client, 503)["workers"] == f"no replica is ready for model {model}"
            driver.report_replica(model=model, state="full")
            full = f"no replica is ready for model {model}: there is no room in RUSHES_SCRATCH"
            assert checks(client, 503)["workers"] == full
            driver.report_replica(model=model, state="busy")
            assert set(checks(client, 200).values()) == {"ok"}
        driver.close()

    def test_a_missing_bucket_is_named(self, api_settings: Settings) -> None:
        with started(api_settings.model_copy(update={"s3_bucket": "no-such-bucket"})) as client:
            assert "no-such-bucket" in checks(client, 503)["storage"]
        with started(api_settings.model_copy(update={"s3_output_buckets": "nor-this-one"})) as client:
            assert checks(client, 503)["storage"] == "bucket nor-this-one cannot be reached"

    def test_liveness_depends_on_nothing(self, checkpoint: Path) -> None:
        with started(offline_settings(checkpoint)) as client:
            found = checks(client, 503)
            assert found["database"] == "cannot be reached"
            assert found["storage"].endswith("cannot be reached")
            assert client.get("/healthz").status_code == 200
            assert client.get("/v1/models").status_code == 200


def test_without_postgres_every_route_says_so(checkpoint: Path) -> None:
    with started(offline_settings(checkpoint)) as client:
        for response in every_video_route(client):
            assert response.status_code == 503
            error = response.json()["error"]
            assert error["code"] == "database_unavailable"
            assert "127.0.0.1" not in response.text
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert response.headers["x-should-retry"] == "true"


def test_without_migrations_every_route_says_so(
    stack: SharedStack, stack_env: dict[str, str], checkpoint: Path
) -> None:
    with psycopg.connect(libpq_url(stack_env, database="postgres"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE blank")
    url = make_url(stack_env["RUSHES_DATABASE_URL"]).set(database="blank").render_as_string(hide_password=False)
    with started(stack.settings(checkpoint=checkpoint, api_key=API_KEY, database_url=url)) as client:
        assert "run `rushes migrate`" in checks(client, 503)["migrations"]
        for response in every_video_route(client):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "maintenance"


def test_a_frozen_postgres_does_not_hold_clients(api_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "CHECK_SECONDS", 0.2)
    with relayed(api_settings) as (settings, proxy), started(settings) as client:
        warm_up(client)
        video_id = client.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
        path = f"/v1/videos/{video_id}"
        requests: list[tuple[str, str]] = [
            ("POST", "/v1/videos"),
            ("GET", "/v1/videos"),
            ("GET", path),
            ("GET", f"{path}/attempts"),
            ("GET", f"{path}/content"),
            ("POST", f"{path}/cancel"),
            ("DELETE", path),
        ]
        proxy.freeze()
        with ThreadPoolExecutor(len(requests)) as clients:
            bodies = [{"prompt": "a dog"} if one == ("POST", "/v1/videos") else None for one in requests]
            responses = list(clients.map(lambda r, body: client.request(*r, json=body), requests, bodies))
        for response in responses:
            # `timeout` would be the ten seconds that a slow answer gets
            assert (response.status_code, response.json()["error"]["code"]) == (503, "database_unavailable")
            assert 1 <= int(response.headers["retry-after"]) <= 60
        assert "did not answer" in checks(client, 503)["database"]
        assert client.get("/healthz").status_code == 200
        proxy.thaw()
        assert client.get(path).status_code == 200
        assert client.get("/v1/videos").status_code == 200


def test_a_connection_that_never_answers_again_is_given_up(
    api_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "LINE_SECONDS", 2.0)
    with relayed(api_settings) as (settings, proxy), started(settings) as client:
        warm_up(client)
        path = f"/v1/videos/{client.post('/v1/videos', json={'prompt': 'a dog'}).json()['id']}"

        def is_shown() -> bool:
            answer = client.get(path)
            return answer.status_code == 200 and answer.json()["queue"]["position"] is not None

        wait_until(is_shown)
        # as often as there are connections to be lost for one kind of question
        for _ in range(2):
            proxy.strand()
            assert client.get(path).status_code == 503
            wait_until(is_shown)


def test_streams_and_the_pulse_outlive_connections_that_never_answer_again(
    api_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    # much longer than until the database counts as silent
    monkeypatch.setattr(time_limit, "WAIT_SECONDS", 5.0)
    driver = JobDriver(api_settings)
    with (
        relayed(api_settings) as (settings, proxy),
        ThreadedApi(settings) as api,
        httpx.Client(base_url=api.url, headers=AUTHORIZED, timeout=60, trust_env=False) as http,
    ):
        video_id = http.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
        with events_of(http, video_id) as stream:
            assert stream.next().data["status"] == "queued"
            proxy.strand()
            wait_until(lambda: api.state["pulse"].is_silent)
            driver.start(video_id)
            assert stream.next("status").data["status"] == "in_progress"
            wait_until(lambda: not api.state["pulse"].is_silent)
    driver.close()


class TestStranded:
    """What a process asks of its own accord, when the connection that it has for that never answers again."""

    @pytest.fixture(autouse=True)
    def _patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # nothing is given up before it is stranded, however busy the machine is
        monkeypatch.setattr(time_limit, "WAIT_SECONDS", 60.0)
        monkeypatch.setattr(eta, "STALE_SECONDS", 60.0)
        monkeypatch.setattr(readiness, "CHECK_SECONDS", 60.0)
        monkeypatch.setattr(pauses, "WAIT_SECONDS", 60.0)
        monkeypatch.setattr(auth, "LOOKUP_SECONDS", 60.0)
        monkeypatch.setattr(eta, "REFRESH_SECONDS", 0.05)
        monkeypatch.setattr(pauses, "MAX_AGE_SECONDS", 0.0)

    @contextmanager
    def stranded(self, proxy: FreezableProxy) -> Iterator[None]:
        """Strand what is connected, and have what is asked on it given up soon; what is asked afterwards is not."""
        proxy.strand()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time_limit, "WAIT_SECONDS", 0.3)
            patch.setattr(eta, "STALE_SECONDS", 0.3)
            yield
        assert proxy.num_held, "the fault was not met"

    def run(self, settings: Settings, story: Callable[[Sessions, FreezableProxy], Coroutine[Any, Any, None]]) -> None:
        async def tell() -> None:
            with relayed(settings) as (through, proxy):
                engine = create_api_engine(through, pool_size=1)
                async with asyncio.timeout(90):
                    await story(async_sessionmaker(engine, expire_on_commit=False), proxy)
                await engine.dispose()

        asyncio.run(tell())

    def test_pauses_are_heard_again(self, api_settings: Settings) -> None:
        async def story(sessions: Sessions, proxy: FreezableProxy) -> None:
            known = pauses.Pauses(sessions)
            await known.refresh()
            with psycopg.connect(libpq_url(settings_env(api_settings)), autocommit=True) as other:
                other.execute("INSERT INTO queue_pauses (project) VALUES ('stranded')")
                try:
                    with self.stranded(proxy):
                        await known.refresh()
                    assert not known.has("stranded")
                    while not known.has("stranded"):
                        await known.refresh()
                finally:
                    other.execute("DELETE FROM queue_pauses")

        self.run(api_settings, story)

    def test_forecasts_are_made_again(self, api_settings: Settings) -> None:
        async def story(sessions: Sessions, proxy: FreezableProxy) -> None:
            async with eta.forecasting(api_settings, sessions, model="tiny") as forecast:
                while forecast.outlook is None:
                    await asyncio.sleep(0.01)
                with capture_logs() as logs, self.stranded(proxy):
                    while not (proxy.num_held and "forecast_failed" in [line["event"] for line in logs]):
                        await asyncio.sleep(0.01)
                before = forecast.outlook
                while forecast.outlook in (None, before):
                    await asyncio.sleep(0.01)

        self.run(api_settings, story)

    def test_uses_of_keys_are_given_up(self, api_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        secret = keys.Secret.new()
        url = libpq_url(settings_env(api_settings))

        async def story(sessions: Sessions, proxy: FreezableProxy) -> None:
            async with sessions() as session, session.begin():
                await session.execute(keys.create(**keys.key_values(keys.NewKey(name="stranded"), secret)))
            known = auth.ApiKeys(behind(proxy, api_settings))
            with psycopg.connect(url) as other, capture_logs() as logs:
                # so that the use is not noted before nothing comes back any more
                other.execute("SELECT FROM api_keys FOR UPDATE")
                # it is given up so long after it was begun, and stranded before
                monkeypatch.setattr(time_limit, "WAIT_SECONDS", 3.0)
                assert (await known.caller([f"Bearer {secret.text}"])).is_stored
                with self.stranded(proxy):
                    other.rollback()
                    while "use_of_keys_not_noted" not in [line["event"] for line in logs]:
                        await asyncio.sleep(0.01)
            await known.close()

        self.run(api_settings, story)

    def test_who_waits_for_a_job_is_told_that_the_database_did_not_answer(self, api_settings: Settings) -> None:
        async def story(sessions: Sessions, proxy: FreezableProxy) -> None:
            watcher = watch.Watcher(sessions, max_waiting=1, max_waiting_per_key=1, on_change=lambda _: None)
            assert await watcher.story(new_video_id(), project="default") is None
            with self.stranded(proxy), pytest.raises(Unavailable, match="did not answer"):
                await watcher.story(new_video_id(), project="default")
            assert await watcher.story(new_video_id(), project="default") is None

        self.run(api_settings, story)

    @pytest.mark.parametrize("kind", ["forecast", "pulse", "watcher"])
    def test_nothing_is_left_of_what_was_told_to_end(
        self, kind: str, api_settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pulse, "BEAT_SECONDS", 0.05)
        monkeypatch.setattr(watch, "LOOK_SECONDS", 0.05)

        async def story(sessions: Sessions, proxy: FreezableProxy) -> None:
            through = behind(proxy, api_settings)
            async with AsyncExitStack() as stack:
                if kind == "forecast":
                    forecast = await stack.enter_async_context(eta.forecasting(through, sessions, model="tiny"))
                    while forecast.outlook is None:
                        await asyncio.sleep(0.01)
                elif kind == "pulse":
                    beats = await stack.enter_async_context(pulse.beating(through))
                    while not beats.is_silent:
                        if not proxy.num_held:
                            proxy.strand()
                        await asyncio.sleep(0.1)
                else:
                    watching = watch.watching(through, sessions, on_change=lambda _: None)
                    watcher = await stack.enter_async_context(watching)
                    seat = stack.enter_context(watcher.seat("key"))
                    seat.follow(Glimpse(new_video_id(), JobState.QUEUED, 0, 0, None, None, None, 0, 0, None))
                    while seat.seen is not None:
                        await asyncio.sleep(0.01)
                proxy.strand()
                # until something was asked that is never answered
                while not proxy.num_held:
                    await asyncio.sleep(0.01)
            assert asyncio.all_tasks() == {asyncio.current_task()}

        self.run(api_settings, story)

    def test_readiness_is_seen_again(self, api_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        async def story(sessions: Sessions, proxy: FreezableProxy) -> None:
            store = ObjectStore(api_settings)
            checked = readiness.Readiness(api_settings, model="tiny", sessions=sessions, store=store)
            while (await checked.check())["database"] != "ok":
                pass
            monkeypatch.setattr(readiness, "CHECK_SECONDS", 0.2)
            proxy.strand()
            # that is when the check is given up: much later than it is answered
            monkeypatch.setattr(time_limit, "WAIT_SECONDS", 5.0)
            assert (await checked.check())["database"] == "did not answer within 0.2 seconds"
            assert proxy.num_held
            monkeypatch.setattr(readiness, "CHECK_SECONDS", 60.0)
            monkeypatch.setattr(time_limit, "WAIT_SECONDS", 60.0)
            while (await checked.check())["database"] != "ok":
                pass

        self.run(api_settings, story)


def test_a_connection_that_was_cut_is_replaced_unseen(api_settings: Settings) -> None:
    url = libpq_url(settings_env(api_settings))
    with started(api_settings) as client, psycopg.connect(url, autocommit=True) as other:
        path = f"/v1/videos/{client.post('/v1/videos', json={'prompt': 'a dog'}).json()['id']}"
        assert client.get(path).status_code == 200
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert client.get(path).status_code == 200
        assert client.get("/v1/videos").status_code == 200


def test_a_frozen_store_does_not_hold_clients(
    api_settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(app_module, "ANSWER_WITHIN_SECONDS", 2.0)
    monkeypatch.setattr(readiness, "CHECK_SECONDS", 0.2)
    store = make_url(api_settings.s3_endpoint_url)
    assert store.host is not None
    assert store.port is not None
    driver = JobDriver(api_settings)
    with FreezableProxy(store.host, store.port) as proxy:
        relayed = api_settings.model_copy(update={"s3_endpoint_url": f"http://127.0.0.1:{proxy.port}"})
        with started(relayed) as client:
            warm_up(client)
            video_id = client.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
            driver.complete(video_id, b"clip", tmp_path)
            content = f"/v1/videos/{video_id}/content"
            assert client.get(content).content == b"clip"
            proxy.freeze()
            assert client.get(content).status_code == 503
            assert "did not answer" in checks(client, 503)["storage"]
            assert client.get(f"/v1/videos/{video_id}").json()["status"] == "completed"
            proxy.thaw()
            assert client.get(content).content == b"clip"
    driver.close()


def test_a_store_that_falls_silent_in_the_middle_of_a_clip_ends_the_stream(
    api_settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(store_clients, "_READ_TIMEOUT_SECONDS", 1)
    store = make_url(api_settings.s3_endpoint_url)
    assert store.host is not None
    assert store.port is not None
    # more than the sockets on the way hold
    clip = bytes(32_000_000)
    driver = JobDriver(api_settings)
    with FreezableProxy(store.host, store.port) as proxy:
        relayed = api_settings.model_copy(update={"s3_endpoint_url": f"http://127.0.0.1:{proxy.port}"})
        with ThreadedApi(relayed) as api, httpx.Client(base_url=api.url, headers=AUTHORIZED, timeout=60) as http:
            video_id = http.post("/v1/videos", json={"prompt": "a dog"}).json()["id"]
            driver.complete(video_id, clip, tmp_path)
            content = f"/v1/videos/{video_id}/content"
            with http.stream("GET", content) as response:
                pieces = response.iter_raw()
                received = len(next(pieces))
                proxy.freeze()
                # the length was announced, so the client knows that this is not the whole
                with pytest.raises(httpx.TransportError):
                    received += sum(len(piece) for piece in pieces)
            assert received < len(clip)
            assert http.get("/v1/videos").status_code == 200
            proxy.thaw()
            assert http.get(content, headers={"Range": "bytes=-10"}).content == bytes(10)
    driver.close()
