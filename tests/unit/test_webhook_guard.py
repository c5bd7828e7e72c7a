"""Where webhooks may go: URLs in every odd spelling, and addresses in every disguise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rushes_core.settings import Settings
from rushes_core.webhooks.guard import BlockedAddress, Guard, parse_address


def guard(**values: Any) -> Guard:
    defaults: dict[str, Any] = {
        "database_url": "postgresql+psycopg://u:p@127.0.0.1/d",
        "redis_url": "redis://127.0.0.1/0",
        "s3_bucket": "media",
        "s3_endpoint_url": "http://127.0.0.1:9000",
        "checkpoint": Path("checkpoint"),
    }
    return Guard(Settings(**(defaults | values)))


@pytest.mark.parametrize(
    ("url", "sent", "host", "port"),
    [
        ("https://hooks.example.com/a?b=c", "https://hooks.example.com/a?b=c", "hooks.example.com", 443),
        ("https://HOOKS.Example.com.:8443/", "https://hooks.example.com:8443/", "hooks.example.com", 8443),
        ("https://bücher.example/x", "https://xn--bcher-kva.example/x", "xn--bcher-kva.example", 443),
        ("https://8.8.8.8/", "https://8.8.8.8/", "8.8.8.8", 443),
        ("https://[2606:4700:4700::1111]/", "https://[2606:4700:4700::1111]/", "2606:4700:4700::1111", 443),
        ("https://[::ffff:8.8.8.8]/", "https://[::ffff:808:808]/", "::ffff:808:808", 443),
    ],
)
def test_a_public_url_is_taken_in_one_spelling(url: str, sent: str, host: str, port: int) -> None:
    target = guard().check_url(url)
    assert (target.url, target.host, target.port) == (sent, host, port)


REFUSED = [
    # cases.md B058
    "http://169.254.169.254/",
    "http://[::ffff:127.0.0.1]/",
    "http://2130706433/",
    "http://0x7f.1/",
    "http://127.1/",
    "http://localhost./",
    "http://0.0.0.0/",
    "http://[::]/",
    "http://user:pw@10.0.0.5/",
    "ftp://h/",
    "http://h:6379/",
    # the same over https
    "https://169.254.169.254/latest/meta-data/",
    "https://[::ffff:127.0.0.1]/",
    "https://[::ffff:7f00:1]/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0x7f.1/",
    "https://017700000001/",
    "https://127.1/",
    "https://127.0.0.01/",
    "https://１２７.０.０.１/",
    "https://127。0。0。1/",
    "https://localhost./",
    "https://LOCALHOST/",
    "https://a.localhost/",
    "https://intranet/",
    "https://printer.local/",
    "https://metadata.google.internal/",
    "https://0.0.0.0/",
    "https://0/",
    "https://[::]/",
    "https://[::1]/",
    "https://[::2]/",
    "https://[fe80::1%25eth0]/",
    "https://[fe80::1]/",
    "https://[fd00:ec2::254]/",
    "https://[64:ff9b::a9fe:a9fe]/",
    "https://[2002:7f00:1::]/",
    "https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/",
    "https://[2001:db8::1]/",
    "https://[ff02::1]/",
    "https://10.0.0.5/",
    "https://100.100.100.200/",
    "https://168.63.129.16/",
    "https://192.168.1.1/",
    "https://172.31.255.255/",
    "https://198.18.0.1/",
    "https://224.0.0.1/",
    "https://255.255.255.255/",
    "https://user@hooks.example.com/",
    "https://user:pw@hooks.example.com/",
    "https://@hooks.example.com/",
    "https://hooks.example.com:6379/",
    "https://hooks.example.com:0/",
    "https://hooks.example.com:99999/",
    "https://hooks.example.com:x/",
    "http://hooks.example.com/",
    "ftp://hooks.example.com/",
    "file:///etc/passwd",
    "javascript:alert(1)",
    "//hooks.example.com/",
    "hooks.example.com",
    "https://",
    "https:///x",
    "https://hooks.example.com/#fragment",
    "https://hooks.example.com\\@127.0.0.1/",
    "https://hooks.example.com/a b",
    "https://hooks.example.com/a\r\nX-Injected: 1",
    "https://hooks.example.com/\x00",
    "https://hooks%2eexample.com/",
    "https://hooks..example.com/",
    "https://-.example.com/",
    "https://exa mple.com/",
    "https://[1.2.3.4]/",
    "https://[not-an-address]/",
    "https://hooks.example.com/ünescaped",
    "https://hooks.example.com/" + "a" * 2_048,
    "",
    "\ud800",
]


@pytest.mark.parametrize("url", REFUSED)
def test_what_is_not_a_public_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(BlockedAddress, match=r"^webhook_url must ") as refusal:
        guard().check_url(url, param="webhook_url")
    assert refusal.value.param == "webhook_url"
    str(refusal.value).encode()


@pytest.mark.parametrize(
    "url",
    [
        "https://user:hush@hooks.example.com/",
        "ftp://user:hush@hooks.example.com/",
        "https://user:hu/sh@hooks.example.com/",
        "user:hush@hooks.example.com",
        "https://user:hush@hooks.example.com/a b",
        "https://user:hush@hooks.example.com:99999/",
    ],
)
def test_a_password_in_a_url_is_not_repeated_by_the_refusal(url: str) -> None:
    with pytest.raises(BlockedAddress, match=r"hooks\.example\.com") as refusal:
        guard().check_url(url)
    assert "sh" not in str(refusal.value).partition("got ")[2]
    assert "user" not in str(refusal.value).partition("got ")[2]


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["2606:4700::1111", "::1"], ["fe80::1%eth0"], ["169.254.169.254"], []],
)
def test_every_address_of_a_name_must_be_public(addresses: list[str]) -> None:
    with pytest.raises(BlockedAddress):
        guard().resolve("hooks.example.com", 443, lambda host, port: addresses)


def test_a_name_is_looked_up_once() -> None:
    asked: list[str] = []

    def lookup(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["8.8.8.8", "2606:4700::1111"]

    found = guard().resolve("hooks.example.com", 443, lookup)
    assert [str(address) for address in found] == ["8.8.8.8", "2606:4700::1111"]
    assert asked == ["hooks.example.com"]


def test_a_refusal_does_not_say_which_address_it_was() -> None:
    with pytest.raises(BlockedAddress) as refusal:
        guard().resolve("hooks.example.com", 443, lambda host, port: ["10.11.12.13"])
    assert "10.11.12.13" not in str(refusal.value)


def test_an_operator_may_allow_private_networks_and_only_those() -> None:
    rules = guard(webhook_networks="10.1.0.0/16, fd12::/16")
    for text in ("10.1.2.3", "::ffff:10.1.2.3", "fd12::1"):
        rules.check_addresses([parse_address(text)], shown_as="x")
        assert rules.is_private(parse_address(text))
    assert not rules.is_private(parse_address("8.8.8.8"))
    for text in ("10.2.0.1", "127.0.0.1", "169.254.169.254"):
        with pytest.raises(BlockedAddress):
            rules.check_addresses([parse_address(text)], shown_as="x")


def test_an_operator_may_name_the_only_hosts() -> None:
    rules = guard(webhook_hosts="hooks.example.com,*.partner.example")
    rules.check_url("https://hooks.example.com/")
    rules.check_url("https://a.b.partner.example/")
    for host in ("other.example.com", "partner.example", "evilpartner.example", "8.8.8.8"):
        with pytest.raises(BlockedAddress, match="a host that this deployment allows"):
            rules.check_url(f"https://{host}/")


def test_a_listed_host_may_have_one_label() -> None:
    assert guard(webhook_hosts="receiver").check_url("https://receiver/").host == "receiver"


def test_http_and_ports_are_the_operators_choice() -> None:
    rules = guard(webhook_http=True, webhook_ports="443,9000")
    assert rules.check_url("http://hooks.example.com/").port == 80
    assert rules.check_url("http://hooks.example.com:9000/").port == 9000
    with pytest.raises(BlockedAddress, match="port 80 or 443 or 9000"):
        rules.check_url("https://hooks.example.com:8443/")


def test_the_api_itself_is_no_receiver() -> None:
    with pytest.raises(BlockedAddress, match="this API itself"):
        guard(api_origin="https://rushes.example.com").check_url("https://rushes.example.com/v1/videos")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9000/", "http://localhost:1/", "http://[::1]:80/"])
def test_with_the_permission_for_tests_this_machine_is_a_receiver(url: str) -> None:
    guard(webhook_loopback=True).check_url(url)
    with pytest.raises(BlockedAddress):
        guard().check_url(url)


@pytest.mark.parametrize("url", ["http://10.0.0.1:9000/", "http://169.254.169.254/", "http://hooks.example.com/"])
def test_with_the_permission_for_tests_other_machines_are_as_ever(url: str) -> None:
    with pytest.raises(BlockedAddress):
        guard(webhook_loopback=True).check_url(url)


@pytest.mark.parametrize("make", [str, lambda text: f"::ffff:{text}", lambda text: f"64:ff9b::{text}"])
def test_an_address_is_judged_alike_in_every_form(make: Callable[[str], str]) -> None:
    guard().check_addresses([parse_address(make("8.8.8.8"))], shown_as="x")
    for text in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "0.0.0.0"):
        with pytest.raises(BlockedAddress):
            guard().check_addresses([parse_address(make(text))], shown_as="x")
