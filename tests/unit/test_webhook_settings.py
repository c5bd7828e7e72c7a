"""Settings of webhooks: what is unsafe or unusable is refused at start, by name."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rushes_core.setting_rules import problems
from rushes_core.settings import Settings

LOCAL: dict[str, Any] = {
    "database_url": "postgresql+psycopg://u:p@127.0.0.1:5432/d",
    "redis_url": "redis://localhost:6379/0",
    "s3_endpoint_url": "http://[::1]:9000",
    "s3_bucket": "media",
    "checkpoint": Path("checkpoint"),
}


def test_webhooks_may_go_to_this_machine_when_everything_is_on_it() -> None:
    assert Settings(**LOCAL, webhook_loopback=True).webhook_loopback
    assert Settings(**LOCAL, webhook_loopback=True, api_origin="http://127.0.0.1:8000").webhook_loopback


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("database_url", "postgresql+psycopg://u:hush@db.example.com/d"),
        ("redis_url", "rediss://:hush@10.0.0.3/0"),
        ("s3_endpoint_url", "https://store.example.com"),
        ("s3_endpoint_url", ""),
        ("api_origin", "https://rushes.example.com"),
    ],
)
def test_the_permission_for_tests_does_not_go_with_production_settings(name: str, url: str) -> None:
    with pytest.raises(
        ValidationError, match=f"RUSHES_WEBHOOK_LOOPBACK is for tests and trials: RUSHES_{name.upper()}"
    ) as refusal:
        Settings(**(LOCAL | {name: url}), webhook_loopback=True)
    assert "hush" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("webhook_key", "c2hvcnQ=", "32 bytes in base64"),
        ("webhook_key", "!", "32 bytes in base64"),
        ("webhook_ed25519_key", "c2hvcnQ=", "32 bytes in base64"),
        ("webhook_ports", "443,70000", "1..65535, got 70000"),
        ("webhook_networks", "10.0.0.1/8", "has host bits set"),
        ("webhook_networks", "127.0.0.0/8", "not of this machine"),
        ("webhook_networks", "169.254.169.0/24", "not of this machine or link"),
        ("webhook_networks", "8.8.8.0/24", "private networks"),
        ("webhook_networks", "0.0.0.0/0", "private networks"),
        ("webhook_networks", "::/0", "private networks"),
        ("webhook_timeout_seconds", 31, "30"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem) as refusal:
        Settings(**LOCAL, **{name: value})
    assert f"RUSHES_{name.upper()}" in problems(refusal.value, Settings)
    assert "c2hvcnQ" not in str(refusal.value)
