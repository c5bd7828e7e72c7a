"""Uploaded files: what is taken and what is refused, streamed into the store, with nothing left of what is not."""

import hashlib
import random
import socket
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from rushes_api import upload as upload_module
from rushes_api.app import create_app
from rushes_core.database import create_sync_engine
from rushes_core.errors import StorageError
from rushes_core.ids import new_file_id
from rushes_core.models import File
from rushes_core.settings import Settings
from rushes_core.storage import FILES, PART_BYTES, ObjectStore, file_key
from rushes_core.sweeper import Sweeper
from sqlalchemy import func, make_url, select, text, update
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED, ApiProcess, ThreadedApi
from support.checkpoints import tiny_checkpoint
from support.forwarder import Forwarder
from support.keys import bearer, create_key, create_project
from support.proxy import FreezableProxy
from support.stack import SharedStack, s3_client
from support.waiting import wait_until

LINES = b'{"custom_id": "a", "body": {"prompt": "a dog"}}\n'
MAX_BYTES = 3 * PART_BYTES
BOUNDARY = "frontier"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


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


@pytest.fixture
def sweeper(api_settings: Settings) -> Iterator[Sweeper]:
    sweeper = Sweeper(api_settings)
    yield sweeper
    sweeper.close()


def part(name: str, data: bytes | str, *, filename: str | None = None, headers: str = "") -> bytes:
    named = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n{headers}\r\n'
    return head.encode() + (data.encode() if isinstance(data, str) else data) + b"\r\n"


PURPOSE = part("purpose", "batch")
FILE = part("file", LINES, filename="jobs.jsonl")


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def send(client: TestClient | httpx.Client, *parts: bytes, **headers: str) -> Any:
    return client.post("/v1/files", content=form(*parts), headers={**FORM, **headers})


def upload(client: TestClient | httpx.Client, data: bytes = LINES, filename: str = "jobs.jsonl", **more: Any) -> Any:
    response = client.post("/v1/files", files={"file": (filename, data)}, data={"purpose": "batch"}, **more)
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: Any, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    return error


class Contents:
    """What there is, in the store and in rows."""

    def __init__(self, settings: Settings, env: dict[str, str]) -> None:
        self._engine = create_sync_engine(settings)
        self._store = ObjectStore(settings)
        self._s3 = s3_client(env)

    def rows(self) -> int:
        with Session(self._engine) as session:
            return session.execute(select(func.count()).select_from(File)).scalar_one()

    def objects(self) -> set[str]:
        return {item.key for page in self._store.list_pages(FILES) for item in page}

    def uploads(self) -> list[str]:
        found = self._s3.list_multipart_uploads(Bucket=self._store.bucket, Prefix=FILES)
        return [one["Key"] for one in found.get("Uploads", ())]

    def all(self) -> tuple[int, set[str], list[str]]:
        return self.rows(), self.objects(), self.uploads()

    def run(self, statement: Any) -> None:
        with self._engine.begin() as connection:
            connection.execute(statement)

    def close(self) -> None:
        self._engine.dispose()


@pytest.fixture(scope="module")
def contents(api_settings: Settings, stack_env: dict[str, str]) -> Iterator[Contents]:
    contents = Contents(api_settings, stack_env)
    yield contents
    contents.close()


class TestUpload:
    def test_is_stored_with_its_size_and_digest(self, client: TestClient, store: ObjectStore) -> None:
        made = upload(client)
        assert made == {
            "id": made["id"],
            "object": "file",
            "bytes": len(LINES),
            "created_at": made["created_at"],
            "expires_at": None,
            "filename": "jobs.jsonl",
            "purpose": "batch",
            "status": "processed",
            "status_details": None,
            "sha256": hashlib.sha256(LINES).hexdigest(),
        }
        assert b"".join(store.read(file_key("default", made["id"]), 0, len(LINES) - 1)) == LINES
        assert client.get(f"/v1/files/{made['id']}").json() == made
        assert client.get(f"/v1/files/{made['id']}/content").content == LINES

    @pytest.mark.parametrize("num_bytes", [1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, MAX_BYTES])
    def test_is_the_same_bytes_however_many_parts_it_takes(self, client: TestClient, num_bytes: int) -> None:
        data = random.Random(num_bytes).randbytes(num_bytes)
        made = upload(client, data)
        assert (made["bytes"], made["sha256"]) == (num_bytes, hashlib.sha256(data).hexdigest())
        assert client.get(f"/v1/files/{made['id']}/content").content == data

    @pytest.mark.parametrize(
        "expiry",
        [
            [part("expires_after[anchor]", "created_at"), part("expires_after[seconds]", "3600")],
            [part("expires_after", '{"anchor": "created_at", "seconds": 3600}')],
        ],
    )
    def test_takes_its_parts_in_any_order(self, client: TestClient, expiry: list[bytes]) -> None:
        for parts in ([PURPOSE, *expiry, FILE], [*expiry, FILE, PURPOSE], [FILE, *expiry, PURPOSE]):
            made = send(client, *parts).json()
            assert (made["bytes"], made["purpose"]) == (len(LINES), "batch")
            assert made["expires_at"] - made["created_at"] == 3600

    @pytest.mark.parametrize(
        ("sent", "kept"),
        [
            ("jobs.jsonl", "jobs.jsonl"),
            ("夜の犬 🐕.jsonl", "夜の犬 🐕.jsonl"),
            ("../../etc/passwd", "passwd"),
            ("C:\\\\Users\\\\me\\\\a b.csv", "a b.csv"),
            ("a%22b%0D%0Ac", 'a"bc'),
            ("gpj\u202elnosj.txt", "gpjlnosj.txt"),
            ("x" * 255, "x" * 255),
        ],
    )
    def test_keeps_the_filename_without_what_is_unsafe(self, client: TestClient, sent: str, kept: str) -> None:
        made = send(client, PURPOSE, part("file", LINES, filename=sent)).json()
        assert made["filename"] == kept
        disposition = client.get(f"/v1/files/{made['id']}/content").headers["content-disposition"]
        assert disposition.startswith("attachment; filename=")
        assert disposition.isascii()
        assert disposition.isprintable()

    @pytest.mark.parametrize(
        ("parts", "code", "param"),
        [
            ([FILE], "missing_required_parameter", "purpose"),
            ([PURPOSE], "missing_required_parameter", "file"),
            ([], "missing_required_parameter", "file"),
            ([PURPOSE, FILE, PURPOSE], "duplicate_parameter", "purpose"),
            ([PURPOSE, FILE, FILE], "duplicate_parameter", "file"),
            ([PURPOSE, part("user", "me"), FILE], "unknown_parameter", "user"),
            ([FILE, PURPOSE, part("expires_after[days]", "1")], "unknown_parameter", "expires_after[days]"),
            ([part("purpose", "fine-tune"), FILE], "invalid_value", "purpose"),
            ([FILE, part("purpose", "vision")], "invalid_value", "purpose"),
            ([part("purpose", "batch", filename="a"), FILE], "invalid_value", "purpose"),
            ([part("purpose", "b" * 1_025), FILE], "invalid_value", "purpose"),
            ([PURPOSE, part("file", LINES)], "invalid_value", "file"),
            ([PURPOSE, part("file", b"", filename="empty")], "invalid_value", "file"),
            ([PURPOSE, part("file", LINES, filename="")], "invalid_value", "file"),
            ([PURPOSE, part("file", LINES, filename="..")], "invalid_value", "file"),
            ([PURPOSE, part("file", LINES, filename="é" * 128)], "invalid_value", "file"),
            (
                [PURPOSE, FILE, part("expires_after[seconds]", "3600")],
                "missing_required_parameter",
                "expires_after.anchor",
            ),
            (
                [PURPOSE, FILE, part("expires_after", '{"anchor": "created_at", "seconds": 3599}')],
                "invalid_value",
                "expires_after.seconds",
            ),
            (
                [PURPOSE, FILE, part("expires_after", '{"anchor": "created_at", "seconds": 2592001}')],
                "invalid_value",
                "expires_after.seconds",
            ),
            ([PURPOSE, FILE, part("expires_after", "soon")], "invalid_value", "expires_after"),
            ([PURPOSE, part("file", LINES, filename="a", headers="X: " + "y" * 5_000 + "\r\n")], "invalid_body", None),
            ([PURPOSE, part("file", LINES, filename="a", headers="X: y\r\n" * 20)], "invalid_body", None),
            ([PURPOSE, FILE.replace(b"form-data", b"inline")], "invalid_body", None),
        ],
    )
    def test_refuses_by_name_what_is_wrong_and_leaves_nothing(
        self, client: TestClient, contents: Contents, parts: list[bytes], code: str, param: str | None
    ) -> None:
        before = contents.all()
        refused(send(client, *parts), 400, code, param)
        assert contents.all() == before

    @pytest.mark.parametrize(
        ("body", "content_type", "status", "code"),
        [
            (form(PURPOSE, FILE)[:-20], FORM["Content-Type"], 400, "invalid_body"),
            (b"no form at all", FORM["Content-Type"], 400, "invalid_body"),
            (b"", FORM["Content-Type"], 400, "invalid_body"),
            (form(PURPOSE, FILE), "multipart/form-data", 400, "invalid_body"),
            (form(PURPOSE, FILE), "multipart/form-data; boundary=" + "x" * 300, 400, "invalid_body"),
            (b"{}", "application/json", 415, "unsupported_media_type"),
        ],
    )
    def test_refuses_a_body_that_is_no_whole_form(
        self, client: TestClient, body: bytes, content_type: str, status: int, code: str
    ) -> None:
        refused(client.post("/v1/files", content=body, headers={"Content-Type": content_type}), status, code)

    def test_names_the_purposes_that_there_are(self, client: TestClient) -> None:
        error = refused(send(client, part("purpose", "assistants"), FILE), 400, "invalid_value", "purpose")
        assert error["message"] == "purpose must be one of batch, got 'assistants'"

    def test_that_fails_in_the_middle_leaves_no_part(self, client: TestClient, contents: Contents) -> None:
        before = contents.all()
        large = part("file", bytes(2 * PART_BYTES + 1), filename="a")
        refused(send(client, large, part("purpose", "vision")), 400, "invalid_value", "purpose")
        assert contents.all() == before


class TestSize:
    def test_is_limited_by_the_file_and_by_the_byte(self, client: TestClient, contents: Contents) -> None:
        before = contents.all()
        response = send(client, PURPOSE, part("file", bytes(MAX_BYTES + 1), filename="a"))
        error = refused(response, 413, "file_too_large", "file")
        assert str(MAX_BYTES) in error["message"]
        assert contents.all() == before

    def test_is_refused_by_its_header_before_the_body(self, api: ApiProcess) -> None:
        with connected(api) as peer:
            peer.sendall(head(MAX_BYTES * 2))
            assert b"413 " in peer.recv(65_536)

    def test_is_refused_while_it_streams_without_a_length(self, api: ApiProcess, contents: Contents) -> None:
        before = contents.all()

        def endless() -> Iterator[bytes]:
            yield PURPOSE + part("file", b"", filename="a")[:-2]
            for _ in range(10 * MAX_BYTES // 65_536):
                yield bytes(65_536)

        with httpx.Client(base_url=api.url, headers=AUTHORIZED, timeout=30) as http:
            refused(http.post("/v1/files", content=endless(), headers=FORM), 413, "file_too_large", "file")
        wait_until(lambda: contents.all() == before)


def head(num_bytes: int) -> bytes:
    lines = (
        "POST /v1/files HTTP/1.1",
        "Host: a",
        f"Authorization: {AUTHORIZED['Authorization']}",
        f"Content-Type: {FORM['Content-Type']}",
        f"Content-Length: {num_bytes}",
    )
    return "\r\n".join([*lines, "", ""]).encode()


def connected(api: ApiProcess | ThreadedApi) -> socket.socket:
    parts = urlsplit(api.url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30)


def test_a_client_that_vanishes_leaves_nothing(api: ApiProcess, contents: Contents) -> None:
    before = contents.all()
    body = form(PURPOSE, part("file", bytes(MAX_BYTES - 1), filename="a"))
    with connected(api) as peer:
        peer.sendall(head(len(body)))
        peer.sendall(body[: 2 * PART_BYTES + 100_000])
        wait_until(lambda: len(contents.uploads()) == len(before[2]) + 1)
    wait_until(lambda: contents.all() == before)


def test_a_body_that_comes_too_slowly_is_given_up(
    api_settings: Settings, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "GRACE_SECONDS", 0.5)
    before = contents.all()
    with ThreadedApi(api_settings) as api, connected(api) as peer:
        body = form(PURPOSE, FILE)
        peer.sendall(head(len(body)))
        peer.sendall(body[:-10])
        answer = peer.recv(65_536)
        assert b"408 " in answer
        assert b"request_timeout" in answer
    assert contents.all() == before


def test_uploads_at_once_are_bounded(api_settings: Settings) -> None:
    with ThreadedApi(api_settings) as api, httpx.Client(base_url=api.url, headers=AUTHORIZED, timeout=30) as http:
        seats = api.state["uploads"]
        seats.total_tokens = 1
        body = form(PURPOSE, FILE)
        with connected(api) as peer:
            peer.sendall(head(len(body)))
            peer.sendall(body[:100])
            wait_until(lambda: seats.borrowed_tokens == 1)
            refused(send(http, PURPOSE, FILE), 503, "overloaded")
            peer.sendall(body[100:])
            assert b"200 OK" in peer.recv(65_536)
        assert send(http, PURPOSE, FILE).status_code == 200


def test_200_megabytes_pass_through_in_bounded_memory(api_settings: Settings, tmp_path: Path) -> None:
    """Case B080."""
    settings = api_settings.model_copy(update={"files_max_bytes": 200 * 1024 * 1024})
    piece = random.Random(1).randbytes(1024 * 1024)
    digest = hashlib.sha256()

    def body() -> Iterator[bytes]:
        yield PURPOSE + part("file", b"", filename="large.jsonl")[:-2]
        for _ in range(200):
            digest.update(piece)
            yield piece
        yield b"\r\n" + form()

    with (
        ApiProcess(settings, tmp_path / "api.log") as api,
        httpx.Client(base_url=api.url, headers=AUTHORIZED, timeout=120) as http,
    ):
        wait_until(lambda: http.get("/healthz").status_code == 200)
        process = psutil.Process(api._process.pid)  # pyright: ignore[reportPrivateUsage]
        peak = 0
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.02):
                peak = max(peak, process.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        response = http.post("/v1/files", content=body(), headers=FORM)
        done.set()
        watcher.join()
        assert response.status_code == 200, response.text
        assert response.json()["sha256"] == digest.hexdigest()
        assert peak < 200_000_000
        assert http.delete(f"/v1/files/{response.json()['id']}").json()["deleted"] is True


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
            sweeper.sweep()
            sweeper.purge()
        assert store.head(file_key("default", made["id"])) is None

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

        class Ahead(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
                return datetime.now(tz) + timedelta(days=2)

        monkeypatch.setattr("rushes_core.sweeper.datetime", Ahead)
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
        monkeypatch.setattr(upload_module, "STORE_SECONDS", 1.0)
        before = contents.all()
        parts = urlsplit(api_settings.s3_endpoint_url)
        with FreezableProxy(parts.hostname or "", parts.port or 0) as proxy:
            app = app_with(api_settings, s3_endpoint_url=f"http://127.0.0.1:{proxy.port}")
            with TestClient(app, headers=AUTHORIZED) as client:
                upload(client)
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
                    assert b"database_unavailable" in peer.recv(65_536)
                proxy.thaw()
        assert contents.rows() == before[0]
        wait_until(lambda: contents.all() == before)
