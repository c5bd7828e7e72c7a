"""Uploads in tests: the bodies of their requests, and what is left in the store and in rows."""

import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
from rushes_core.database import create_sync_engine
from rushes_core.models import File
from rushes_core.object_keys import FILES
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from rushes_core.store_upload import PART_BYTES
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.api import AUTHORIZED, ApiProcess, ThreadedApi
from support.stack import s3_client

LINES = b'{"custom_id": "a", "body": {"prompt": "a dog"}}\n'
MAX_BYTES = 3 * PART_BYTES
BOUNDARY = "frontier"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


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


def heard(peer: socket.socket, until: bytes) -> bytes:
    """What comes until `until` has, which may be in several pieces, or until the other side leaves."""
    data = b""
    while until not in data and (piece := peer.recv(65_536)):
        data += piece
    return data
