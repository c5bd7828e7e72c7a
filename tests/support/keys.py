"""API keys in tests: made over HTTP by the operator's key."""

import re
from typing import Any

import httpx
from starlette.testclient import TestClient

RETRY_AFTER = re.compile(r"[1-9][0-9]?")


def create_project(client: TestClient | httpx.Client, name: str) -> str:
    response = client.post("/v1/projects", json={"name": name})
    assert response.status_code == 200, response.text
    return name


def create_key(client: TestClient | httpx.Client, **values: Any) -> dict[str, Any]:
    """A new key of the project `default`, with its `secret`."""
    response = client.post("/v1/api_keys", json={"name": "test", **values})
    assert response.status_code == 200, response.text
    key: dict[str, Any] = response.json()
    return key


def bearer(key: dict[str, Any] | str) -> dict[str, str]:
    """The header that a secret, or the key that holds one, is sent in."""
    return {"Authorization": f"Bearer {key if isinstance(key, str) else key['secret']}"}


def code_of(response: Any, status: int) -> str:
    """The code of an answer that is an error with this status."""
    assert response.status_code == status, response.text
    code: str = response.json()["error"]["code"]
    return code
