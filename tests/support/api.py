"""The API in process: its settings, a client that sends the key, and bodies of every kind."""

from pathlib import Path
from typing import Any

from rushes_core.settings import Settings

API_KEY = "test-key-0123456789"
AUTHORIZED = {"Authorization": f"Bearer {API_KEY}"}


def offline_settings(checkpoint: Path, **values: Any) -> Settings:
    """Settings whose servers do not exist: nothing listens on port 1."""
    return Settings(
        **{
            "database_url": "postgresql+psycopg://nobody:nothing@127.0.0.1:1/none",
            "redis_url": "redis://127.0.0.1:1/0",
            "s3_bucket": "none",
            "s3_endpoint_url": "http://127.0.0.1:1",
            "s3_access_key_id": "nobody",
            "s3_secret_access_key": "nothing",
            "checkpoint": checkpoint,
            "api_key": API_KEY,
            **values,
        }
    )


def multipart(
    *parts: tuple[str, str | bytes], boundary: str = "frontier", headers: dict[str, str] | None = None
) -> tuple[bytes, dict[str, str]]:
    """A multipart body of text fields, and its header. `headers` are put on every part."""
    extra = "".join(f"\r\n{name}: {value}" for name, value in (headers or {}).items()).encode()
    body = b""
    for name, value in parts:
        data = value.encode() if isinstance(value, str) else value
        body += b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n' % (
            boundary.encode(),
            name.encode(),
            extra,
            data,
        )
    return body + f"--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}
