"""When deliveries are tried again, and what is signed."""

import base64
import hashlib
import hmac
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from rushes_core.settings import Settings
from rushes_core.webhooks.schedule import DELAYS, MAX_RETRY_AFTER, delay_after, retry_after
from rushes_core.webhooks.signing import PublicKeys, SecretUnreadable, SigningSecret, Vault, sign

KEYS = [base64.urlsafe_b64encode(bytes([number]) * 32).decode() for number in (1, 2)]


def settings(**values: str) -> Settings:
    required = {"database_url": "postgresql+psycopg://u:p@h/d", "redis_url": "redis://h/0", "s3_bucket": "media"}
    return Settings(**required, checkpoint=Path("c"), **values)  # type: ignore[arg-type]


def test_ten_attempts_take_about_75_hours() -> None:
    assert len(DELAYS) == 9
    assert 74 * 3_600 < sum(DELAYS) < 77 * 3_600
    assert delay_after(9) is None


@pytest.mark.parametrize("step", range(9))
def test_delays_are_spread_by_a_fifth(step: int) -> None:
    drawn = [delay_after(step) for _ in range(200)]
    assert all(delay is not None and 0.8 <= delay / DELAYS[step] <= 1.2 for delay in drawn)
    assert len(set(drawn)) > 100


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2", 2),
        (" 120 ", 120),
        ("0", 1),
        ("999999999999999999", MAX_RETRY_AFTER),
        ("-5", None),
        ("soon", None),
        ("", None),
        ("1.5", None),
        ("²", None),
        (None, None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 1),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
        (f"Wed, 21 Oct {10**20} 07:28:00 GMT", None),
        (f"Wed, 21 Oct 2015 {10**20}:28:00 GMT", None),
        (f"Wed, 21 Oct 2015 07:28:00 +{10**20}", None),
    ],
)
def test_retry_after_is_bounded_and_nonsense_is_ignored(value: str | None, seconds: float | None) -> None:
    assert retry_after(value) == seconds


def test_retry_after_may_be_a_date() -> None:
    seconds = retry_after(format_datetime(datetime.now(UTC) + timedelta(minutes=5), usegmt=True))
    assert seconds is not None
    assert 290 < seconds <= 300


def test_the_bytes_of_the_secret_sign_and_not_its_text() -> None:
    secret = SigningSecret.new()
    key = base64.b64decode(secret.text.removeprefix("whsec_"))
    assert len(key) == 32
    headers = sign("evt_1", 1_700_000_000, b'{"a":1}', [secret], PublicKeys(settings()))
    digest = hmac.new(key, b'evt_1.1700000000.{"a":1}', hashlib.sha256).digest()
    assert headers == {
        "webhook-id": "evt_1",
        "webhook-timestamp": "1700000000",
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def test_a_secret_does_not_show_itself() -> None:
    secret = SigningSecret.new()
    assert secret.text not in repr(secret)
    assert secret.text.removeprefix("whsec_")[:8] not in secret.hint


def test_keys_for_secrets_can_be_replaced_one_after_the_other() -> None:
    secret = SigningSecret.new()
    locked = Vault(settings(webhook_key=KEYS[0])).lock(secret)
    assert Vault(settings(webhook_key=f"{KEYS[1]},{KEYS[0]}")).unlock(locked) == secret
    with pytest.raises(SecretUnreadable):
        Vault(settings(webhook_key=KEYS[1])).unlock(locked)


def test_of_several_public_keys_the_first_signs_and_all_are_published() -> None:
    two = ",".join(base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))
    keys = PublicKeys(settings(webhook_ed25519_key=two))
    assert len(keys.sign(b"x")) == 1
    assert len({key["kid"] for key in keys.jwks()["keys"]}) == 2
