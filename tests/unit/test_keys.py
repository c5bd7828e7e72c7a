"""Secrets of API keys, what keys may be, and how a refusal says when to come again."""

from typing import Any

import pytest
from pydantic import BaseModel
from rushes_api.auth import Caller
from rushes_api.limits import Standing, too_many
from rushes_core import keys
from rushes_core.errors import InvalidRequest
from rushes_core.fields import PRIORITIES
from rushes_core.ids import is_key_id, new_key_id, new_video_id
from rushes_core.models import ApiKey


def refused(kind: type[BaseModel], body: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        keys.parse(kind, body)
    return raised.value


class TestSecrets:
    def test_they_are_random_and_recognised(self) -> None:
        made = {keys.Secret.new().text for _ in range(100)}
        assert len(made) == 100
        assert all(keys.is_secret(text) for text in made)

    @pytest.mark.parametrize(
        "text", ["", "rk_", "rk_" + "a" * 42, "rk_" + "a" * 44, "sk_" + "a" * 43, "rk_" + "é" * 43]
    )
    def test_what_was_never_made_is_not_recognised(self, text: str) -> None:
        assert not keys.is_secret(text)

    def test_what_is_kept_does_not_hold_them(self) -> None:
        secret = keys.Secret.new()
        assert secret.text not in repr(secret)
        assert secret.columns == {"digest": keys.digest_of(secret.text), "hint": secret.text[-4:]}
        assert len(secret.columns["digest"]) == 32

    def test_any_header_has_a_digest(self) -> None:
        assert keys.digest_of("\udcff") != keys.digest_of("?")


class TestValues:
    def test_words_come_in_their_order_and_once(self) -> None:
        wanted = keys.parse(keys.NewKey, {"name": "a", "scopes": ["admin", "videos:read", "admin"]})
        assert wanted.scopes == ["videos:read", "admin"]

    def test_defaults_are_not_shared(self) -> None:
        first, second = (keys.parse(keys.NewKey, {"name": "a"}) for _ in range(2))
        first.scopes.append("admin")
        assert second.scopes == ["videos:read", "videos:write"]

    def test_every_fault_is_told(self) -> None:
        error = refused(keys.NewKey, {"max_queued": -1, "color": "red"})
        assert [detail["loc"] for detail in getattr(error, "details", [])] == [["max_queued"], ["name"], ["color"]]

    @pytest.mark.parametrize("name", ["a", "0", "a-b", "a" * 63])
    def test_names_of_projects(self, name: str) -> None:
        assert keys.parse(keys.NewProject, {"name": name}).name == name

    def test_a_change_holds_what_was_sent(self) -> None:
        changes = keys.parse(keys.KeyChanges, {"max_running": None, "name": "b"})
        assert changes.model_dump(exclude_unset=True) == {"max_running": None, "name": "b"}

    def test_ids_are_of_one_kind(self) -> None:
        assert is_key_id(new_key_id())
        assert not is_key_id(new_video_id())


class TestCaller:
    def key(self, **values: Any) -> ApiKey:
        defaults: dict[str, Any] = {"id": "key_1", "project": "p", "scopes": ["videos:read"], "priorities": ["bulk"]}
        return ApiKey(**(defaults | values))

    def test_it_may_do_what_its_key_says(self) -> None:
        caller = Caller.of(self.key(max_running=2, compat="openai"))
        assert (caller.project, caller.api_key, caller.max_running, caller.compat) == ("p", "key_1", 2, "openai")
        assert (caller.scopes, caller.priorities) == ({"videos:read"}, {"bulk"})

    def test_admin_is_every_scope(self) -> None:
        assert Caller.of(self.key(scopes=["admin"])).scopes == set(keys.SCOPES)

    def test_the_operator_may_do_everything(self) -> None:
        caller = Caller("default", "0")
        assert (caller.scopes, caller.priorities) == (set(keys.SCOPES), set(PRIORITIES))
        assert caller.requests_per_minute is None


@pytest.mark.parametrize(
    ("seconds", "header"), [(-5.0, "1"), (0.0, "1"), (0.2, "1"), (1.5, "2"), (60.0, "60"), (9e9, "60")]
)
def test_retry_after_is_a_whole_number_of_seconds_up_to_a_minute(seconds: float, header: str) -> None:
    error = too_many("no", code="queue_full", retry_after=seconds)
    assert error.headers["Retry-After"] == header
    assert (error.status, error.code) == (429, "queue_full")


def test_a_standing_is_told_in_headers() -> None:
    standing = Standing(is_over=True, limit=5, remaining=0, reset_seconds=17)
    assert standing.headers == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "17s",
    }
    assert standing.error().headers["Retry-After"] == "17"
