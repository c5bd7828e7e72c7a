"""`rushes projects` and `rushes keys`, straight on a database; the API takes what they make."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from rushes_cli.main import main
from rushes_core.ids import new_key_id
from rushes_core.settings import Settings
from starlette.testclient import TestClient
from support.keys import bearer
from support.stack import SharedStack

Command = Callable[..., str]


@pytest.fixture
def rushes(api_settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command that succeeds; what it printed. The database is all that it knows of."""
    monkeypatch.setenv("RUSHES_DATABASE_URL", api_settings.database_url)
    for name in ("REDIS_URL", "S3_BUCKET", "CHECKPOINT"):
        monkeypatch.delenv(f"RUSHES_{name}", raising=False)

    def run(*words: str) -> str:
        capsys.readouterr()
        assert main(words) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def fails(rushes: Command, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command that fails; the one line that it printed."""

    def run(*words: str, status: int = 1) -> str:
        capsys.readouterr()
        assert main(words) == status
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err

    return run


def create(rushes: Command, *words: str) -> dict[str, Any]:
    key: dict[str, Any] = json.loads(rushes("keys", "create", "test", "--json", *words))
    return key


class TestKeys:
    def test_a_key_that_was_made_works(self, rushes: Command, client: TestClient) -> None:
        rushes("projects", "create", "film")
        key = create(rushes, "--project", "film", "--scope", "videos:read", "--max-queued", "3", "--priority", "bulk")
        own = client.get("/v1/api_keys/me", headers=bearer(key)).json()
        assert (own["id"], own["project"], own["max_queued"]) == (key["id"], "film", 3)
        assert (own["scopes"], own["priorities"]) == (["videos:read"], ["bulk"])

    def test_the_secret_is_printed_with_what_the_key_may_do(self, rushes: Command, client: TestClient) -> None:
        printed = rushes("keys", "create", "for the shop", "--requests-per-minute", "60", "--expires", "90d")
        secret = next(line.split()[-1] for line in printed.splitlines() if line.startswith("secret"))
        assert client.get("/v1/models", headers=bearer(secret)).status_code == 200
        for part in (
            "for the shop",
            "default",
            "requests per minute    60",
            "max running            no limit",
            "keep it",
        ):
            assert part in printed
        assert secret not in rushes("keys", "list") + rushes("keys", "list", "--json")

    def test_an_end_may_be_a_duration_or_a_time(self, rushes: Command) -> None:
        now = datetime.now(UTC).timestamp()
        assert 86_000 < create(rushes, "--expires", "1d")["expires_at"] - now < 87_000
        assert create(rushes, "--expires", "2099-01-01T00:00:00Z")["expires_at"] == 4_070_908_800

    def test_rotate_and_revoke(self, rushes: Command, client: TestClient) -> None:
        key = create(rushes)
        rotated = json.loads(rushes("keys", "rotate", key["id"], "--overlap", "1h", "--json"))
        assert [client.get("/v1/models", headers=bearer(one)).status_code for one in (key, rotated)] == [200, 200]
        again = json.loads(rushes("keys", "rotate", key["id"], "--overlap", "0s", "--json"))
        assert again["previous_secret_until"] is None
        assert client.get("/v1/models", headers=bearer(again)).status_code == 200
        other = create(rushes)
        assert "is revoked" in rushes("keys", "revoke", other["id"])
        assert client.get("/v1/models", headers=bearer(other)).status_code == 401
        assert "revoked" in rushes("keys", "show", other["id"])

    def test_a_change_says_what_is_to_change(self, rushes: Command, client: TestClient) -> None:
        key = create(rushes, "--max-queued", "3", "--compat", "openai", "--requests-per-minute", "9")
        words = [
            "--max-queued",
            "none",
            "--max-running",
            "2",
            "--scope",
            "admin",
            "--name",
            "other",
            "--compat",
            "none",
        ]
        changed = json.loads(rushes("keys", "change", key["id"], *words, "--json"))
        assert (changed["max_queued"], changed["max_running"], changed["requests_per_minute"]) == (None, 2, 9)
        assert (changed["name"], changed["scopes"], changed["compat"]) == ("other", ["admin"], None)
        assert client.get("/v1/api_keys", headers=bearer(key)).status_code == 200

    def test_lists_are_by_project(self, rushes: Command) -> None:
        rushes("projects", "create", "one")
        mine, other = create(rushes, "--project", "one"), create(rushes)
        listed = rushes("keys", "list", "--project", "one")
        assert mine["id"] in listed
        assert other["id"] not in listed
        every = [json.loads(line)["id"] for line in rushes("keys", "list", "--json").splitlines()]
        assert {mine["id"], other["id"]} <= set(every)
        projects = [json.loads(line)["name"] for line in rushes("projects", "list", "--json").splitlines()]
        assert {"default", "one"} <= set(projects)
        assert "one" in rushes("projects", "list")

    def test_a_project_is_weighed(self, rushes: Command) -> None:
        rushes("projects", "create", "weighed", "--weight", "2")
        assert "weighed has weight 0.5" in rushes("projects", "change", "weighed", "--weight", "0.5")
        listed = [json.loads(line) for line in rushes("projects", "list", "--json").splitlines()]
        assert [one["weight"] for one in listed if one["name"] == "weighed"] == [0.5]


class TestErrors:
    def test_what_the_database_refuses_is_one_line_and_status_1(self, fails: Command, rushes: Command) -> None:
        assert "no project none: make it with `rushes projects create none`" in fails(
            "keys", "create", "a", "--project", "none"
        )
        assert "no project none" in fails("keys", "list", "--project", "none")
        nobody = new_key_id()
        for words in (("show",), ("revoke",), ("rotate",), ("change", "--max-running", "1")):
            assert f"no API key with id {nobody}: `rushes keys list` lists" in fails("keys", *words, nobody)
        rushes("projects", "create", "twice")
        assert "there is a project twice already" in fails("projects", "create", "twice")
        assert "no project none" in fails("projects", "change", "none", "--weight", "2")
        revoked = create(rushes)["id"]
        rushes("keys", "revoke", revoked)
        assert "was revoked or has expired" in fails("keys", "rotate", revoked)

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ("keys create a --max-queued -1", "max_queued"),
            ("keys create a --expires 2001-01-01T00:00:00Z", "expires_at must lie ahead"),
            ("keys create a --project No", "project"),
            ("keys rotate {key} --overlap 31d", "overlap_seconds"),
            ("keys change {key}", "nothing to change"),
            ("keys change {key} --max-running 0", "max_running"),
            ("keys change {key} --compat azure", "compat must be openai or null, got 'azure'"),
            ("projects create Film", "lower-case"),
            ("projects create film --weight 0", "weight"),
            ("projects change default --weight 0", "weight"),
        ],
    )
    def test_a_value_that_cannot_be_is_one_line_and_status_2(self, fails: Command, words: str, told: str) -> None:
        assert told in fails(*words.format(key=new_key_id()).split(), status=2)

    @pytest.mark.parametrize(
        "words",
        [
            "keys",
            "keys create",
            "keys create a --scope videos",
            "keys create a --expires soon",
            "keys rotate",
            "keys revoke key_1",
            "keys change key_1 --max-running 1",
            "projects",
        ],
    )
    def test_wrong_usage_ends_with_status_2(self, words: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        assert ended.value.code == 2

    def test_a_database_that_is_wrong_is_named_without_its_password(
        self, fails: Command, monkeypatch: pytest.MonkeyPatch, stack: SharedStack
    ) -> None:
        monkeypatch.delenv("RUSHES_DATABASE_URL")
        assert "RUSHES_DATABASE_URL is missing" in fails("keys", "list", status=2)
        for url in ("nonsense:secret", "nothing://user:secret@host/none"):
            monkeypatch.setenv("RUSHES_DATABASE_URL", url)
            message = fails("keys", "list", status=2)
            assert "must be postgresql+psycopg://" in message
            assert "secret" not in message
        monkeypatch.setenv("RUSHES_DATABASE_URL", "postgresql+psycopg://user:secret@127.0.0.1:1/none")
        message = fails("projects", "list")
        assert "database: connection failed" in message
        assert "secret" not in message
        blank = stack.settings().database_url.rpartition("/")[0] + "/template1"
        monkeypatch.setenv("RUSHES_DATABASE_URL", blank)
        assert "run `rushes migrate`" in fails("keys", "list")
