"""Files that were uploaded: lists, contents, quotas, their end, and what outages leave of them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from rushes_api import upload as upload_module
from rushes_api.app import create_app
from rushes_core.campaigns.tables import Campaign
from rushes_core.errors import StorageError
from rushes_core.ids import new_file_id
from rushes_core.models import File
from rushes_core.object_keys import file_key
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from rushes_core.store_upload import PART_BYTES
from rushes_core.sweeper import Sweeper
from sqlalchemy import func, make_url, text, update
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED, ApiProcess, ThreadedApi
from support.checkpoints import tiny_checkpoint
from support.files import (
    FILE,
    FORM,
    LINES,
    MAX_BYTES,
    PURPOSE,
    Contents,
    connected,
    form,
    head,
    heard,
    part,
    refused,
    send,
    upload,
)
from support.forwarder import Forwarder
from support.keys import bearer, create_key, create_project
from support.later import TwoDaysAhead
from support.proxy import FreezableProxy
from support.stack import SharedStack
from support.waiting import wait_until


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, checkpoint: Path) -> Settings:
    return stack.settings(checkpoint=checkpoint, api_key=API_KEY, files_max_bytes=MAX_BYTES)


@pytest.fixture(scope="module")
def store(api_settings: Settings) -> ObjectStore:
    return ObjectStore(api_settings)


@pytest.fixture(scope="module")
def api(api_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with ApiProcess(api_settings, tmp_path_factory.mktemp("process") / "api.log") as api:
        yield api


class TestRepeated:
    def test_with_its_key_it_is_stored_once(self, client: TestClient, contents: Contents) -> None:
        headers = {"Idempotency-Key": "a file"}
        first = client.post("/v1/files", content=form(PURPOSE, FILE), headers={**FORM, **headers})
        before = contents.all()
        # another boundary and order say the same
        again = client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("jobs.jsonl", LINES)}, headers=headers
        )
        assert again.headers["idempotent-replayed"] == "true"
        assert again.content == first.content
        for parts in (
            [PURPOSE, part("file", LINES + b"\n", filename="jobs.jsonl")],
            [PURPOSE, part("file", LINES, filename="other.jsonl")],
            [PURPOSE, FILE, part("expires_after", '{"anchor": "created_at", "seconds": 3600}')],
        ):
            refused(send(client, *parts, **headers), 422, "idempotency_key_reused", "Idempotency-Key")
        assert contents.all() == before


def app_with(settings: Settings, **values: Any) -> Any:
    return create_app(settings.model_copy(update=values))


class TestQuota:
    def test_counts_files_and_bytes_of_the_project(self, api_settings: Settings, contents: Contents) -> None:
        app = app_with(api_settings, files_max_count=2, files_max_total_bytes=1_000)
        with TestClient(app, headers=AUTHORIZED) as client:
            key = bearer(create_key(client, project=create_project(client, "full"), scopes=["batches"]))
            first = upload(client, bytes(600), headers=key)
            before = contents.all()
            response = send(client, PURPOSE, part("file", bytes(500), filename="a"), **key)
            error = refused(response, 429, "quota_exceeded")
            assert "1000" in error["message"]
            assert (response.headers["x-should-retry"], contents.all()) == ("false", before)
            upload(client, bytes(400), headers={**key, "Idempotency-Key": "the last"})
            refused(send(client, PURPOSE, FILE, **key), 429, "quota_exceeded")
            # what is answered again takes no room
            upload(client, bytes(400), headers={**key, "Idempotency-Key": "the last"})
            client.delete(f"/v1/files/{first['id']}", headers=key)
            upload(client, bytes(600), headers=key)

    def test_is_not_passed_by_uploads_at_once(self, api_settings: Settings) -> None:
        settings = api_settings.model_copy(update={"files_max_count": 3})
        with ThreadedApi(settings) as api, httpx.Client(base_url=api.url, headers=AUTHORIZED, timeout=30) as http:
            key = bearer(create_key(http, project=create_project(http, "rivals"), scopes=["batches"]))
            statuses: list[int] = []
            rivals = [
                threading.Thread(target=lambda: statuses.append(send(http, PURPOSE, FILE, **key).status_code))
                for _ in range(8)
            ]
            for rival in rivals:
                rival.start()
            for rival in rivals:
                rival.join()
            assert sorted(statuses) == [200] * 3 + [429] * 5
            assert len(http.get("/v1/files", headers=key).json()["data"]) == 3


class TestLists:
    def test_page_by_page(self, client: TestClient) -> None:
        key = bearer(create_key(client, project=create_project(client, "listed"), scopes=["batches"]))
        made = [upload(client, headers=key)["id"] for _ in range(5)]

        def page(**query: Any) -> Any:
            return client.get("/v1/files", params=query, headers=key).json()

        first = page(limit=2)
        assert [one["id"] for one in first["data"]] == made[:2:-1]
        assert (first["first_id"], first["last_id"], first["has_more"]) == (made[4], made[3], True)
        assert [one["id"] for one in page(after=made[3])["data"]] == made[2::-1]
        assert [one["id"] for one in page(order="asc", after=made[2], purpose="batch")["data"]] == made[3:]
        # a position, not a row
        assert page(after=new_file_id(), limit=1)["data"] == first["data"][:1]

    @pytest.mark.parametrize(
        ("query", "param"),
        [
            ("after=video_01K0Z8W5T3N9F6Q2RJ4XCB7MEH", "after"),
            ("limit=101", "limit"),
            ("order=up", "order"),
            ("purpose=vision", "purpose"),
        ],
    )
    def test_refuse_what_is_malformed(self, client: TestClient, query: str, param: str) -> None:
        refused(client.get(f"/v1/files?{query}"), 400, "invalid_value", param)

    def test_refuse_other_parameters(self, client: TestClient) -> None:
        refused(client.get("/v1/files?status=processed"), 400, "unknown_parameter", "status")


class TestContent:
    def test_by_range_and_by_condition(self, client: TestClient) -> None:
        made = upload(client)
        url = f"/v1/files/{made['id']}/content"
        part_of = client.get(url, headers={"Range": "bytes=2-10"})
        assert (part_of.status_code, part_of.content) == (206, LINES[2:11])
        assert part_of.headers["content-range"] == f"bytes 2-10/{len(LINES)}"
        assert client.get(url, headers={"Range": f"bytes={len(LINES)}-"}).status_code == 416
        etag = f'"{made["sha256"]}"'
        assert client.get(url, headers={"If-None-Match": etag}).status_code == 304
        assert client.get(url, headers={"If-Match": '"other"'}).status_code == 412
        whole = client.head(url)
        assert (whole.status_code, whole.content) == (200, b"")
        assert int(whole.headers["content-length"]) == len(LINES)
        assert whole.headers["content-type"] == "application/octet-stream"
        assert whole.headers["x-content-type-options"] == "nosniff"

    def test_that_was_lost_is_not_found(self, client: TestClient, store: ObjectStore) -> None:
        made = upload(client)
        store.delete_keys([file_key("default", made["id"])])
        refused(client.get(f"/v1/files/{made['id']}/content"), 404, "file_content_missing")


class TestEnd:
    def test_a_deleted_file_is_a_tombstone_and_leaves_the_store(
        self, client: TestClient, store: ObjectStore, sweeper: Sweeper
    ) -> None:
        made = upload(client)
        url = f"/v1/files/{made['id']}"
        for _ in range(2):
            assert client.delete(url).json() == {"id": made["id"], "object": "file", "deleted": True}
        refused(client.get(url), 410, "file_deleted")
        refused(client.get(f"{url}/content"), 410, "file_deleted")
        assert made["id"] not in client.get("/v1/files?limit=100").text
        sweeper.purge()
        assert store.head(file_key("default", made["id"])) is None
        refused(client.get(url), 410, "file_deleted")

    def test_a_file_past_its_time_is_gone_before_it_is_swept(
        self, client: TestClient, contents: Contents, store: ObjectStore, sweeper: Sweeper
    ) -> None:
        expiry = part("expires_after", '{"anchor": "created_at", "seconds": 3600}')
        made = send(client, PURPOSE, expiry, FILE).json()
        url = f"/v1/files/{made['id']}"
        past = func.now() - text("interval '1 second'")
        contents.run(update(File).where(File.id == made["id"]).values(expires_at=past))
        for _ in range(2):
            refused(client.get(url), 410, "file_expired")
            assert made["id"] not in client.get("/v1/files?limit=100").text
            sweeper.purge()
        assert store.head(file_key("default", made["id"])) is None

    def test_a_campaign_reads_its_file_though_its_time_is_past(
        self, client: TestClient, contents: Contents, store: ObjectStore, sweeper: Sweeper
    ) -> None:
        expiry = part("expires_after", '{"anchor": "created_at", "seconds": 3600}')
        made = send(client, PURPOSE, expiry, FILE).json()
        campaign = client.post("/v1/campaigns", json={"input_file_id": made["id"]}).json()
        past = func.now() - text("interval '1 second'")
        contents.run(update(File).where(File.id == made["id"]).values(expires_at=past))
        sweeper.purge()
        assert store.head(file_key("default", made["id"])) is not None
        refused(client.get(f"/v1/files/{made['id']}"), 410, "file_expired")
        contents.run(update(Campaign).where(Campaign.id == campaign["id"]).values(loaded_at=func.now()))
        sweeper.purge()
        assert store.head(file_key("default", made["id"])) is None
        refused(client.get(f"/v1/files/{made['id']}"), 410, "file_expired")

    def test_an_object_that_cannot_be_removed_is_tried_again(
        self, client: TestClient, store: ObjectStore, sweeper: Sweeper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stuck, free = upload(client)["id"], upload(client)["id"]
        for file_id in (stuck, free):
            client.delete(f"/v1/files/{file_id}")
        remove = sweeper._store.delete_keys  # pyright: ignore[reportPrivateUsage]

        def refuse(keys: Any) -> None:
            if keys == [file_key("default", stuck)]:
                raise StorageError("locked")
            remove(keys)

        with monkeypatch.context() as patched:
            patched.setattr(sweeper._store, "delete_keys", refuse)  # pyright: ignore[reportPrivateUsage]
            sweeper.purge()
        assert store.head(file_key("default", free)) is None
        assert store.head(file_key("default", stuck)) is not None
        sweeper.purge()
        assert store.head(file_key("default", stuck)) is None

    def test_what_a_dead_process_left_is_swept(
        self,
        client: TestClient,
        store: ObjectStore,
        contents: Contents,
        sweeper: Sweeper,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        kept = upload(client)["id"]
        whole, unfinished = (store.begin(file_key("default", new_file_id()), max_bytes=MAX_BYTES) for _ in range(2))
        whole.write(LINES)
        whole.complete()
        unfinished.write(bytes(PART_BYTES))
        for one in (whole, unfinished):
            one.close()
        sweeper.tidy()
        assert list(sweeper.orphans(delete=True)) == []
        assert unfinished.key in contents.uploads()
        monkeypatch.setattr("rushes_core.sweeper.datetime", TwoDaysAhead)
        sweeper.tidy()
        assert contents.uploads() == []
        assert [orphan.key for orphan in sweeper.orphans(delete=True)] == [whole.key]
        assert whole.key not in contents.objects()
        assert file_key("default", kept) in contents.objects()


class TestIsolation:
    def test_foreign_files_are_answered_as_ids_that_never_existed(self, client: TestClient) -> None:
        theirs = upload(client)["id"]
        deleted = upload(client)["id"]
        client.delete(f"/v1/files/{deleted}")
        key = bearer(create_key(client, project=create_project(client, "apart"), scopes=["batches"]))
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content"), ("HEAD", "/content")):

            def answer(file_id: str, method: str = method, path: str = path) -> Any:
                response = client.request(method, f"/v1/files/{file_id}{path}", headers={**key, "x-request-id": "same"})
                assert response.status_code == 404
                return response.text.replace(file_id, "ID"), sorted(response.headers.items())

            assert answer(theirs) == answer(deleted) == answer(new_file_id())
        assert client.get("/v1/files", headers=key).json()["data"] == []
        assert client.get("/v1/files", params={"after": theirs}, headers=key).json()["data"] == []
        assert client.get(f"/v1/files/{theirs}").status_code == 200
        for malformed in ("file-abc", "video_01K0Z8W5T3N9F6Q2RJ4XCB7MEH", "file_x%00"):
            refused(client.get(f"/v1/files/{malformed}"), 404, "file_not_found")

    def test_the_scope_is_batches(self, client: TestClient) -> None:
        project = create_project(client, "scoped")
        for scopes, status in (
            (["videos:read", "videos:write", "webhooks"], 403),
            (["batches"], 200),
            (["admin"], 200),
        ):
            key = bearer(create_key(client, project=project, scopes=scopes))
            assert client.get("/v1/files", headers=key).status_code == status
            assert send(client, PURPOSE, FILE, **key).status_code == status


class TestOutage:
    def test_without_the_store_nothing_is_made(self, api_settings: Settings, contents: Contents) -> None:
        before = contents.all()
        with Forwarder(api_settings.s3_endpoint_url) as way:
            way.open()
            app = app_with(api_settings, s3_endpoint_url=way.url)
            with TestClient(app, headers=AUTHORIZED) as client:
                made = upload(client)
                way.shut()
                for size in (10, PART_BYTES + 10):
                    response = send(client, PURPOSE, part("file", bytes(size), filename="a"))
                    refused(response, 503, "storage_unavailable")
                    assert response.headers["x-should-retry"] == "true"
                assert client.get(f"/v1/files/{made['id']}").status_code == 200
                refused(client.get(f"/v1/files/{made['id']}/content"), 503, "storage_unavailable")
                assert client.delete(f"/v1/files/{made['id']}").status_code == 200
        assert contents.all() == (before[0] + 1, before[1] | {file_key("default", made["id"])}, before[2])

    def test_a_store_that_falls_silent_is_given_up(
        self, api_settings: Settings, contents: Contents, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = contents.all()
        parts = urlsplit(api_settings.s3_endpoint_url)
        with FreezableProxy(parts.hostname or "", parts.port or 0) as proxy:
            app = app_with(api_settings, s3_endpoint_url=f"http://127.0.0.1:{proxy.port}")
            with TestClient(app, headers=AUTHORIZED) as client:
                upload(client)
                monkeypatch.setattr(upload_module, "STORE_SECONDS", 1.0)
                proxy.freeze()
                refused(send(client, PURPOSE, FILE), 503, "storage_unavailable")
                proxy.thaw()
        assert contents.rows() == before[0] + 1

    def test_without_postgres_nothing_is_stored(self, api_settings: Settings, contents: Contents) -> None:
        url = make_url(api_settings.database_url)
        with Forwarder(f"http://{url.host}:{url.port}") as way:
            way.open()
            relayed = url.set(host="127.0.0.1", port=way.port).render_as_string(hide_password=False)
            with TestClient(app_with(api_settings, database_url=relayed), headers=AUTHORIZED) as client:
                made = upload(client)
                before = contents.all()
                way.shut()
                refused(send(client, PURPOSE, FILE), 503, "database_unavailable")
                # with a key the file is stored before the database is asked
                refused(send(client, PURPOSE, FILE, **{"Idempotency-Key": "away"}), 503, "database_unavailable")
                for method, path in (("GET", ""), ("GET", f"/{made['id']}"), ("DELETE", f"/{made['id']}")):
                    refused(client.request(method, f"/v1/files{path}"), 503, "database_unavailable")
        assert contents.all() == before

    def test_a_postgres_that_falls_silent_is_not_waited_for(self, api_settings: Settings, contents: Contents) -> None:
        """Neither before the body nor after it."""
        url = make_url(api_settings.database_url)
        with FreezableProxy(url.host or "", url.port or 0) as proxy:
            relayed = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
            settings = api_settings.model_copy(update={"database_url": relayed})
            with ThreadedApi(settings) as api, httpx.Client(base_url=api.url, headers=AUTHORIZED, timeout=30) as http:
                upload(http)
                before = contents.all()
                body = form(PURPOSE, FILE)
                with connected(api) as peer:
                    peer.sendall(head(len(body)))
                    peer.sendall(body[:100])
                    wait_until(lambda: api.state["uploads"].borrowed_tokens == 1)
                    proxy.freeze()
                    refused(send(http, PURPOSE, FILE), 503, "database_unavailable")
                    peer.sendall(body[100:])
                    assert b"database_unavailable" in heard(peer, b"}}")
                proxy.thaw()
        assert contents.rows() == before[0]
        wait_until(lambda: contents.all() == before)
