"""Settings: one place, documented, refused by name when wrong."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rushes_core.settings import Settings, unknown_variables

ROOT = Path(__file__).parents[2]
REQUIRED: dict[str, Any] = {
    "database_url": "postgresql+psycopg://u:p@127.0.0.1/d",
    "redis_url": "redis://127.0.0.1/0",
    "s3_bucket": "media",
    "checkpoint": Path("checkpoint"),
}


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ValidationError, match="s3_bucket"):
        Settings(**{name: value for name, value in REQUIRED.items() if name != "s3_bucket"})


def test_a_lease_must_outlive_two_heartbeats() -> None:
    with pytest.raises(ValidationError, match=r"heartbeat_seconds=20 must be at most half of lease_seconds=30"):
        Settings(**REQUIRED, heartbeat_seconds=20)


@pytest.mark.parametrize("url", ["foo", "http://127.0.0.1/0", "redis://", "127.0.0.1:6379"])
def test_an_address_of_redis_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValidationError, match="redis_url"):
        Settings(**REQUIRED | {"redis_url": url})


@pytest.mark.parametrize("name", ["ab", "Clips", "my_clips", "clips-", ".clips", "a..b", "10.0.0.1", "c" * 64, "a/b"])
def test_a_bucket_that_no_store_can_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=r"s3_bucket: .* is no name of a bucket"):
        Settings(**REQUIRED | {"s3_bucket": name})
    with pytest.raises(ValidationError, match=r"s3_output_buckets: .* is no name of a bucket"):
        Settings(**REQUIRED, s3_output_buckets=f"fine, {name}")


@pytest.mark.parametrize("name", ["abc", "clips.example.com", "0-clips-9", "10.0.0.1a", "c" * 63])
def test_names_of_buckets_are_those_of_s3(name: str) -> None:
    settings = Settings(**REQUIRED | {"s3_bucket": name}, s3_output_buckets=f" other ,{name},")
    assert settings.output_buckets == (name, "other")


@pytest.mark.parametrize("pipeline", ["mine", "mine.module", ":Pipeline", "mine:", "a:b:c", "a-b:C"])
def test_a_pipeline_that_names_no_callable_is_refused(pipeline: str) -> None:
    with pytest.raises(ValidationError, match="pipeline"):
        Settings(**REQUIRED, pipeline=pipeline)


def test_variables_that_are_no_settings_are_found_with_the_nearest() -> None:
    names = ["RUSHES_LEASE_SECOND", "rushes_s3_bukcet", "RUSHES_ZZZZ", "RUSHES_API_KEY", "rushes_pool", "PATH"]
    assert unknown_variables([*names, "RUSHES_URL", "RUSHES_KEY"]) == {
        "RUSHES_LEASE_SECOND": "RUSHES_LEASE_SECONDS",
        "RUSHES_ZZZZ": None,
        "rushes_s3_bukcet": "RUSHES_S3_BUCKET",
    }


SECRETS: dict[str, Any] = REQUIRED | {
    "database_url": "postgresql+psycopg://u:hush@127.0.0.1/d",
    "redis_url": "redis://:hush@127.0.0.1/0",
    "api_key": "hush",
    "s3_secret_access_key": "hush",
}


def test_secrets_do_not_show_in_a_repr() -> None:
    assert "hush" not in repr(Settings(**SECRETS))


def test_secrets_do_not_show_in_an_error() -> None:
    with pytest.raises(ValidationError) as refusal:
        Settings(**SECRETS, heartbeat_seconds=20)
    assert "hush" not in str(refusal.value)


def test_every_setting_is_documented_with_its_default() -> None:
    table = (ROOT / "docs" / "configuration.md").read_text()
    documented = dict(re.findall(r"^\| `(RUSHES_\w+)` \| (.*?) \|", table, re.MULTILINE))
    assert documented.keys() == {f"RUSHES_{name.upper()}" for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        shown = documented[f"RUSHES_{name.upper()}"]
        if field.is_required():
            assert shown == "required"
        elif name != "scratch":
            value = getattr(field.default, "get_secret_value", lambda default=field.default: default)()
            assert shown == (f"`{value}`" if value != "" else "empty"), name
