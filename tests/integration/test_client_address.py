"""What commands make of an address of the API that is wrong, and of a right one where nobody answers."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest
from rushes_api.app import create_app
from rushes_api.server import Protocol
from rushes_cli.campaigns.address import fault_of
from rushes_cli.campaigns.client import Client, Unreachable, WrongAddress
from rushes_cli.main import main
from support.api import API_KEY, offline_settings, served
from support.checkpoints import tiny_checkpoint
from support.ports import kept_port
from support.receiver import make_certificate

HOST = "127.0.0.1"


@contextmanager
def serving(checkpoint: Path, certificate: Path | None = None, *, port: int = 0) -> Iterator[int]:
    """The port of the API in this process, which speaks TLS with a certificate."""
    with served(create_app(offline_settings(checkpoint)), Protocol, certificate=certificate, port=port) as port_served:
        yield port_served


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("address"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"), "localhost", address=HOST)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[int]:
    with serving(checkpoint) as port:
        yield port


@pytest.fixture(scope="module")
def secured(checkpoint: Path, certificate: Path) -> Iterator[int]:
    with serving(checkpoint, certificate) as port:
        yield port


@contextmanager
def asking(url: str, *, patience: float = 60.0) -> Iterator[tuple[Client, list[str]]]:
    """A client, and why it waited."""
    waits: list[str] = []
    with closing(Client(url, API_KEY, patience=patience, on_wait=waits.append)) as client:
        yield client, waits


def test_plain_http_that_is_spoken_to_by_tls_is_named_at_once(plain: int) -> None:
    with asking(f"https://{HOST}:{plain}") as (client, waits):
        with pytest.raises(WrongAddress, match=f"no TLS can be spoken there: .* is http://{HOST}:{plain}$"):
            client.get("/healthz")
        assert waits == []


def test_tls_that_is_spoken_to_by_plain_http_is_named_at_once(secured: int) -> None:
    with asking(f"http://{HOST}:{secured}") as (client, waits):
        with pytest.raises(WrongAddress, match=f"speaks TLS: it is https://{HOST}:{secured}$"):
            client.post("/v1/videos", {"prompt": "a wave"})
        assert waits == []


def test_a_path_that_the_api_is_not_at_is_named_at_once(plain: int) -> None:
    with asking(f"http://{HOST}:{plain}/elsewhere") as (client, waits):
        with pytest.raises(WrongAddress, match=f"^RUSHES_URL=http://{HOST}:{plain}/elsewhere: unknown route: GET"):
            client.get("/healthz")
        assert waits == []


def test_a_certificate_that_nobody_trusts_is_named_at_once(secured: int) -> None:
    with asking(f"https://{HOST}:{secured}") as (client, waits):
        with pytest.raises(WrongAddress, match=f"the certificate of {HOST} is not trusted: self-signed certificate"):
            client.get("/healthz")
        assert waits == []


def test_a_certificate_that_the_environment_trusts_is_good_on_this_machine_too(
    secured: int, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with asking(f"https://{HOST}:{secured}") as (client, _):
        assert client.get("/healthz")["status"] == "ok"


def test_trusted_certificates_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUSHES_KEY", API_KEY)
    monkeypatch.setenv("RUSHES_URL", f"https://{HOST}")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    assert main(["workers"]) == 2
    assert capsys.readouterr().err == f"rushes workers: SSL_CERT_FILE={tmp_path}/none.pem: No such file or directory\n"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "there is no host nowhere"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), None),
        (ConnectionRefusedError("refused"), None),
    ],
    ids=["unknown", "resolver-away", "refused"],
)
def test_a_name_that_nobody_has_is_a_fault_and_a_resolver_that_is_away_is_none(
    error: OSError, told: str | None
) -> None:
    failure = httpx.ConnectError(str(error))
    failure.__context__ = error
    found = fault_of("http://nowhere:8000", failure)
    assert found == (told and f"{told}: {error.strerror}")


def test_an_address_where_nobody_listens_is_asked_again() -> None:
    with asking(f"http://{HOST}:1", patience=2) as (client, waits):
        with pytest.raises(Unreachable, match="refused") as failure:
            client.get("/healthz")
        assert not isinstance(failure.value, WrongAddress)
        assert waits


def test_an_address_that_has_answered_is_asked_again_whatever_comes(checkpoint: Path, certificate: Path) -> None:
    with ExitStack() as running:
        port = running.enter_context(kept_port(HOST))
        with serving(checkpoint, port=port):
            client, waits = running.enter_context(asking(f"http://{HOST}:{port}", patience=5))
            client.get("/healthz")
        with (
            serving(checkpoint, certificate, port=port),
            pytest.raises(Unreachable) as failure,
        ):
            client.get("/healthz")
        assert not isinstance(failure.value, WrongAddress)
        assert waits


@pytest.mark.parametrize("words", ["campaign list", "workers", "bench service"])
def test_a_wrong_address_is_one_line_and_status_2(
    plain: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUSHES_KEY", API_KEY)
    monkeypatch.setenv("RUSHES_URL", f"https://{HOST}:{plain}")
    assert main(words.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"rushes {words.split()[0]}: RUSHES_URL=https://{HOST}:{plain}: no TLS can be spoken there")
    assert told.count("\n") == 1
