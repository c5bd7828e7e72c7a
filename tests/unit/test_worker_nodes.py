import socket
from importlib.metadata import version
from pathlib import Path

import pytest
from rushes_core.contract import load_contract
from rushes_worker import devices
from rushes_worker.devices import VISIBLE, Driver
from rushes_worker.layout import Layout
from rushes_worker.network import interface_of
from rushes_worker.node import match, parse_address
from rushes_worker.node_link import Welcome
from support.worker import write_contract


@pytest.mark.parametrize(
    ("text", "address"),
    [("node-0", ("node-0", 29400)), ("10.0.0.1:5", ("10.0.0.1", 5)), ("10.0.0.1", ("10.0.0.1", 29400))],
)
def test_address_to_join_has_a_port_or_the_usual_one(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text, 29_400) == address


@pytest.mark.parametrize("text", ["", ":1", "host:", "host:port", "host:0", "host:65536"])
def test_what_is_no_address_is_refused_by_value(text: str) -> None:
    with pytest.raises(ValueError, match="takes HOST or HOST:PORT") as refusal:
        parse_address(text, 29_400)
    assert repr(text) in str(refusal.value)


def test_interface_of_an_address() -> None:
    assert interface_of("127.0.0.2") == "lo"
    assert interface_of("192.0.2.1") is None
    with pytest.raises(ValueError, match="cannot be resolved"):
        interface_of("no-such-host.invalid")


def test_interface_of_the_address_that_leads_out() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("no network but loopback")
        address = probe.getsockname()[0]
    assert interface_of(address) in {name for _, name in socket.if_nameindex()} - {"lo"}


@pytest.mark.parametrize("layout", [None, Layout.parse("r1s4")])
def test_a_node_joins_a_first_one_of_the_layout_that_it_was_told_or_of_any(
    layout: Layout | None, tmp_path: Path
) -> None:
    contract = load_contract(write_contract(tmp_path / "checkpoint"))
    welcome = Welcome(version("rushes"), contract, "cpu", "r1s4", None)
    assert match(welcome, contract=contract, kind="cpu", layout=layout).kind == "cpu"


def test_a_node_that_was_told_another_layout_does_not_join(tmp_path: Path) -> None:
    contract = load_contract(write_contract(tmp_path / "checkpoint"))
    welcome = Welcome(version("rushes"), contract, "cpu", "r1s4", None)
    with pytest.raises(ValueError, match="this node's --layout is r1s8, the first node's is r1s4"):
        match(welcome, contract=contract, kind="cpu", layout=Layout.parse("r1s8"))


def test_a_node_whose_devices_cannot_do_what_the_first_one_is_asked_for_does_not_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(devices, "torch_cuda_build", lambda: "12.8")
    contract = load_contract(write_contract(tmp_path / "checkpoint"))
    welcome = Welcome(version("rushes"), contract, "cuda", "r1s4", ("attention=hopper",))
    hoppers = Driver(0, 13000, ("H200", "H200"), ((9, 0), (9, 0)))
    assert match(welcome, contract=contract, kind="auto", layout=None, driver=hoppers).visible == ("0", "1")
    mixed = Driver(0, 13000, ("H200", "A100"), ((9, 0), (8, 0)))
    refusal = "the first node's RUSHES_PIPELINE_OPTIONS=attention=hopper: .* device 1 has 8.0"
    with pytest.raises(ValueError, match=refusal):
        match(welcome, contract=contract, kind="auto", layout=None, driver=mixed)
