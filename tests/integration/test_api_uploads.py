"""Uploads: what is taken and what is refused, streamed into the store, with nothing left of what is not."""

import hashlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from rushes_api import upload as upload_module
from rushes_core.object_keys import file_key
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from rushes_core.store_upload import PART_BYTES
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
            assert b"413 " in heard(peer, b"413 ")

    def test_is_refused_while_it_streams_without_a_length(self, api: ApiProcess, contents: Contents) -> None:
        before = contents.all()

        def endless() -> Iterator[bytes]:
            yield PURPOSE + part("file", b"", filename="a")[:-2]
            for _ in range(10 * MAX_BYTES // 65_536):
                yield bytes(65_536)

        with httpx.Client(base_url=api.url, headers=AUTHORIZED, timeout=30) as http:
            refused(http.post("/v1/files", content=endless(), headers=FORM), 413, "file_too_large", "file")
        wait_until(lambda: contents.all() == before)


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
        answer = heard(peer, b"}}")
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
            assert b"200 OK" in heard(peer, b"200 OK")
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
        before = peak = process.memory_info().rss
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
        assert peak - before < 80_000_000
        assert http.delete(f"/v1/files/{response.json()['id']}").json()["deleted"] is True
