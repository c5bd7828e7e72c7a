"""Settings: one place, documented, refused by name when wrong."""

import re
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from rushes_core.setting_rules import InvalidSettings, problems
from rushes_core.settings import Settings, get_settings, unknown_variables

ROOT = Path(__file__).parents[2]
REQUIRED: dict[str, Any] = {
    "database_url": "postgresql+psycopg://u:p@127.0.0.1/d",
    "redis_url": "redis://127.0.0.1/0",
    "s3_bucket": "media",
    "checkpoint": Path("checkpoint"),
}


def refusal(**changes: Any) -> str:
    """What the operator is told of settings that are none."""
    with pytest.raises(ValidationError) as refused:
        Settings(**REQUIRED | changes)
    return problems(refused.value, Settings)


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(**{name: value for name, value in REQUIRED.items() if name != "s3_bucket"})
    assert problems(refused.value, Settings) == "RUSHES_S3_BUCKET is missing"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"encoder_crf": "52"}, "RUSHES_ENCODER_CRF: Input should be less than or equal to 51, got '52'"),
        ({"node_port": "1e3"}, "RUSHES_NODE_PORT: Input should be a valid integer, .*, got '1e3'"),
        ({"metrics_open": "maybe"}, "RUSHES_METRICS_OPEN: Input should be a valid boolean, .*, got 'maybe'"),
        ({"content_delivery": "x"}, "RUSHES_CONTENT_DELIVERY: Input should be 'proxy' or 'redirect', got 'x'"),
        ({"encoder": "x265"}, "RUSHES_ENCODER: Input should be 'libx264' or 'h264_nvenc', got 'x265'"),
        ({"s3_region": " "}, "RUSHES_S3_REGION: String should have at least 1 character, got ' '"),
        ({"s3_region": "eu north"}, "RUSHES_S3_REGION: 'eu north' is no region"),
        ({"s3_region": "12"}, "RUSHES_S3_REGION: '12' is no region"),
        ({"s3_access_key_id": "a"}, "RUSHES_S3_SECRET_ACCESS_KEY is missing: "),
        ({"s3_secret_access_key": "hush"}, "RUSHES_S3_ACCESS_KEY_ID is missing: "),
        ({"pool": "A b"}, "RUSHES_POOL: String should match .*, got 'A b'"),
        ({"checkpoint": ""}, "RUSHES_CHECKPOINT: must be a path, got ''"),
        ({"scratch": ""}, "RUSHES_SCRATCH: must be a path, got ''"),
        ({"s3_endpoint_url": "foo bar"}, "RUSHES_S3_ENDPOINT_URL: 'foo bar' is no endpoint: https://host"),
        ({"s3_endpoint_url": "http://u:hush@h"}, r"RUSHES_S3_ENDPOINT_URL: 'http://\[...\]@h' is no endpoint"),
        (
            {"s3_endpoint_url": "http://minio_server:9000"},
            "RUSHES_S3_ENDPOINT_URL: 'http://minio_server:9000' is no end",
        ),
        ({"s3_endpoint_url": "http://a..b"}, "RUSHES_S3_ENDPOINT_URL: 'http://a..b' is no endpoint"),
        ({"s3_endpoint_url": "http://-a"}, "RUSHES_S3_ENDPOINT_URL: 'http://-a' is no endpoint"),
        ({"s3_public_endpoint_url": "s3://h"}, "RUSHES_S3_PUBLIC_ENDPOINT_URL: 's3://h' is no endpoint"),
        ({"api_origin": "nonsense"}, "RUSHES_API_ORIGIN: 'nonsense' is no origin: https://host"),
        ({"api_origin": "https://h/v1"}, "RUSHES_API_ORIGIN: 'https://h/v1' is no origin: https://host"),
        ({"webhook_hosts": "a.example,https://b"}, "RUSHES_WEBHOOK_HOSTS: 'https://b' is no host"),
        ({"database_url": "mysql://u:hush@h/d"}, r"RUSHES_DATABASE_URL: .*, got mysql://\[...\]@h/d"),
        ({"database_url": "hush"}, r"RUSHES_DATABASE_URL: must be .*://user:password@host:port/name, .* in 1..65535$"),
        (
            {"database_url": "postgresql+psycopg://u:hush@h:65536/d"},
            r"RUSHES_DATABASE_URL: .* in 1..65535, got .*@h:65536",
        ),
        ({"database_url": "postgresql+psycopg://u:hush@h:x/d"}, r"RUSHES_DATABASE_URL: .* in 1..65535, got .*@h:x/d"),
        ({"database_url": "postgresql+psycopg://u:hush@[::1/d"}, r"RUSHES_DATABASE_URL: .*, got .*@\[::1/d"),
        ({"redis_url": "redis://:hush@h:65536/0"}, r"RUSHES_REDIS_URL: .* in 1..65535, got redis://\[...\]@h:65536/0"),
        ({"redis_url": "redis://:hush@h:0/0"}, r"RUSHES_REDIS_URL: .* in 1..65535, got redis://\[...\]@h:0/0"),
        ({"redis_url": "redis://:hush@[::1/0"}, r"RUSHES_REDIS_URL: .*, got redis://\[...\]@\[::1/0"),
        (
            {"heartbeat_seconds": 20},
            "RUSHES_HEARTBEAT_SECONDS=20 must be at most half of RUSHES_LEASE_SECONDS=30",
        ),
        ({"capture": "1x1x1"}, "RUSHES_CAPTURE: canvas 1x1"),
        ({"text_capacities": "100"}, "RUSHES_TEXT_CAPACITIES: text capacities must be multiples of 64, got '100'"),
    ],
)
def test_a_wrong_setting_is_told_by_variable_value_and_limit(changes: dict[str, Any], said: str) -> None:
    told = refusal(**changes)
    assert re.search(said, told), told
    assert "hush" not in told


def test_every_wrong_variable_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (REQUIRED | {"log_level": "loud", "encoders": "65"}).items():
        monkeypatch.setenv(f"RUSHES_{name.upper()}", str(value))
    get_settings.cache_clear()
    with pytest.raises(InvalidSettings, match=r"RUSHES_ENCODERS: .* 64, got '65'; RUSHES_LOG_LEVEL: .*, got 'loud'"):
        get_settings()


@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example",
        "HTTP://localhost:3000",
        "http://127.0.0.1:8080",
        "http://[::1]:3000",
        "https://a-b.my_app.example:8443",
        "capacitor://localhost",
        "chrome-extension://abcdefghijklmnopabcdefghijklmnop",
        "*",
    ],
)
def test_origins_of_pages_are_those_that_browsers_send(origin: str) -> None:
    assert Settings(**REQUIRED, cors_origins=f"https://x.example, {origin}").cors_origins


@pytest.mark.parametrize(
    "origin",
    [
        "null",
        "ftp://app.example",
        "file://",
        "ws://app.example",
        "app.example",
        "https://",
        "https://*",
        "https://*.app.example",
        "https://app.example/",
        "https://app.example/app",
        "https://app.example?x",
        "https://app.example#x",
        "https://app.example;",
        "https://app.example https://b.example",
        "https://app.example:",
        "https://app.example:0",
        "https://app.example:70000",
        "https://app.example:3000x",
        "https://app.example:443",
        "http://app.example:80",
        "https://u:p@app.example",
        "https://app..example",
        "https://-app.example-",
        "https://[::1",
        "https://[1.2.3.4.5]",
        "https://bücher.example",
        "capacitor://localhost/",
    ],
)
def test_what_no_browser_sends_as_the_origin_of_a_page_is_refused(origin: str) -> None:
    told = refusal(cors_origins=f"https://x.example,{origin}")
    assert told.startswith(f"RUSHES_CORS_ORIGINS: {origin!r} is no origin of a web page, as https://app.example")


@pytest.mark.parametrize("url", ["foo", "http://127.0.0.1/0", "redis://", "127.0.0.1:6379"])
def test_an_address_of_redis_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValidationError, match="redis_url"):
        Settings(**REQUIRED | {"redis_url": url})


@pytest.mark.parametrize("name", ["ab", "Clips", "my_clips", "clips-", ".clips", "a..b", "10.0.0.1", "c" * 64, "a/b"])
def test_a_bucket_that_no_store_can_have_is_refused_by_name(name: str) -> None:
    assert refusal(s3_bucket=name).startswith(f"RUSHES_S3_BUCKET: {name!r} is no name of a bucket")
    told = refusal(s3_output_buckets=f"fine, {name}")
    assert told.startswith(f"RUSHES_S3_OUTPUT_BUCKETS: {name!r} is no name of a bucket")


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
    "s3_access_key_id": "a",
    "s3_secret_access_key": "hush",
}


def test_credentials_of_the_store_may_end_with_a_line() -> None:
    settings = Settings(**SECRETS | {"s3_access_key_id": " a\n", "s3_secret_access_key": "hush\n"})
    assert (settings.s3_access_key_id, settings.s3_secret_access_key.get_secret_value()) == ("a", "hush")


def test_secrets_do_not_show_in_a_repr() -> None:
    assert "hush" not in repr(Settings(**SECRETS))


def test_secrets_do_not_show_in_an_error() -> None:
    with pytest.raises(ValidationError) as refusal:
        Settings(**SECRETS, heartbeat_seconds=20)
    assert "hush" not in str(refusal.value)


DOCUMENTED = re.compile(r"^\| `(RUSHES_\w+)` \| (.*?) \| (.*?) \| .+ \|$", re.MULTILINE)


def documented() -> dict[str, tuple[str, str]]:
    """Default and limits of every variable, as the documentation has them."""
    table = (ROOT / "docs" / "configuration.md").read_text()
    return {name: (default, limits) for name, default, limits in DOCUMENTED.findall(table)}


def limits_of(field: FieldInfo) -> str:
    """What the documentation has to say of a setting's values; nothing where they are text of some form."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(field.annotation))
    if field.annotation is bool:
        return "`True`, `False`"
    if isinstance(field.annotation, type) and issubclass(field.annotation, StrEnum):
        return ", ".join(f"`{value}`" for value in field.annotation)
    if field.annotation not in (int, float):
        return ""
    bounds = {
        name: getattr(one, name)
        for one in field.metadata
        for name in ("gt", "ge", "le")
        if getattr(one, name, None) is not None
    }
    most = f"{bounds['le']:.0f}"
    return f"more than {bounds['gt']}, up to {most}" if "gt" in bounds else f"{bounds['ge']}..{most}"


def test_every_setting_is_documented_with_its_default() -> None:
    found = documented()
    assert found.keys() == {f"RUSHES_{name.upper()}" for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        shown = found[f"RUSHES_{name.upper()}"][0]
        if field.is_required():
            assert shown == "required"
        elif name != "scratch":
            value = getattr(field.default, "get_secret_value", lambda default=field.default: default)()
            assert shown == (f"`{value}`" if value != "" else "empty"), name


def test_the_limits_of_every_setting_are_documented_as_they_are() -> None:
    expected = {f"RUSHES_{name.upper()}": limits_of(field) for name, field in Settings.model_fields.items()}
    assert {name: limits for name, (_, limits) in documented().items()} == expected


def test_no_number_is_without_limits() -> None:
    for name, field in Settings.model_fields.items():
        if field.annotation in (int, float):
            for huge in ("9" * 30, "1e30", "inf", "nan"):
                assert f"got '{huge}'" in refusal(**{name: huge})


def test_the_documentation_names_other_settings_by_their_variables() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert not [name for name in Settings.model_fields if f"`{name}`" in text and name not in ("pipeline",)]
