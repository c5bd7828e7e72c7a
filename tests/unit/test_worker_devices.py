from pathlib import Path

import pytest
from rushes_worker import devices
from rushes_worker.devices import VISIBLE, Devices, Driver, find_devices, runs_on, visible_devices
from rushes_worker.layout import Layout
from rushes_worker.pipeline.options import check_devices_serve, check_options
from support.api import offline_settings

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-377e0049-2e4b-4f6a-8a5c-0d5f3e1b2c3d"
OLD_MIG = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0"
HOPPERS = Driver(0, 13000, ("H200",) * 4, ((9, 0),) * 4)


class TestVisibleDevices:
    @pytest.mark.parametrize(
        ("value", "entries"),
        [
            (None, None),
            ("", ()),
            (" ", ()),
            ("-1", ()),
            ("NoDevFiles", ()),
            ("3,1", ("3", "1")),
            ("0, 1", ("0", "1")),
            (UUID, (UUID,)),
            (MIG, (MIG,)),
            (OLD_MIG, (OLD_MIG,)),
            ("GPU-8932f937,GPU-1", ("GPU-8932f937", "GPU-1")),
        ],
    )
    def test_entries_are_kept_as_they_were_written(self, value: str | None, entries: tuple[str, ...] | None) -> None:
        assert visible_devices(value) == entries

    @pytest.mark.parametrize("value", ["0,0", "0,1,00", f"{UUID},GPU-8932f937", f"{MIG},{MIG.upper()[:3]}{MIG[3:]}"])
    def test_same_device_twice_is_refused(self, value: str) -> None:
        with pytest.raises(ValueError, match="name the same device"):
            visible_devices(value)

    @pytest.mark.parametrize("value", ["0,-1,2", "0,-1"])
    def test_device_hidden_by_minus_one_is_refused(self, value: str) -> None:
        with pytest.raises(ValueError, match="-1 hides every device after it"):
            visible_devices(value)

    @pytest.mark.parametrize("value", ["gpu0", "0,,1", "0;1", "cuda:0", "all"])
    def test_odd_list_is_refused_by_value(self, value: str) -> None:
        with pytest.raises(ValueError, match="is no device number, GPU-UUID or MIG-UUID") as refusal:
            visible_devices(value)
        assert repr(value) in str(refusal.value)


class TestFindDevices:
    @pytest.fixture(autouse=True)
    def _cuda_build(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "torch_cuda_build", lambda: "13.0")
        monkeypatch.delenv(VISIBLE, raising=False)

    def test_each_replica_gets_its_own(self) -> None:
        layout = Layout.parse("r2s2")
        found = find_devices(layout, "cuda", driver=HOPPERS)
        assert [found.of_replica(replica, layout) for replica in (0, 1)] == [("0", "1"), ("2", "3")]

    def test_what_they_are_capable_of_is_told_of_those_that_are_used(self) -> None:
        mixed = Driver(0, 13000, ("H200", "A100"), ((9, 0), (8, 0)))
        assert find_devices(Layout.parse("r1s1"), "cuda", driver=mixed).capabilities == ((9, 0),)

    def test_names_of_the_operator_are_dealt_out_untouched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VISIBLE, f"{UUID}, 3")
        driver = Driver(0, 13000, ("H200",) * 2, ((9, 0),) * 2)
        assert find_devices(Layout.parse("r2s1"), "auto", driver=driver).visible == (UUID, "3")

    def test_too_few_devices_are_refused_with_both_numbers_and_versions(self) -> None:
        with pytest.raises(ValueError, match="layout r1s8 needs 8 CUDA devices, found 4") as refusal:
            find_devices(Layout.parse("r1s8"), "auto", driver=HOPPERS)
        assert "supports CUDA 13.0" in str(refusal.value)
        assert "torch is built for CUDA 13.0" in str(refusal.value)

    def test_driver_older_than_the_build_is_refused_with_both_versions(self) -> None:
        old = Driver(0, 12040, ("H200",), ((9, 0),))
        with pytest.raises(ValueError, match=r"too old: driver supports CUDA 12\.4, .*torch is built for CUDA 13\.0"):
            find_devices(Layout.parse("r1s1"), "auto", driver=old)

    def test_parts_of_gpus_are_asked_for_one_by_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other = MIG[:-1] + "e"
        monkeypatch.setenv(VISIBLE, f"{MIG},{other},{MIG[:-1]}f")
        seen: dict[str, tuple[str, ...]] = {MIG: ("MIG 1g",), other: ("MIG 2g",), MIG[:-1] + "f": ()}
        monkeypatch.setattr(devices, "_ask_driver", lambda one: Driver(0, 13000, seen[one], ((9, 0),) * len(seen[one])))
        layout = Layout.parse("r2s1")
        found = find_devices(layout, "auto")
        assert [found.of_replica(replica, layout) for replica in (0, 1)] == [(MIG,), (other,)]
        with pytest.raises(ValueError, match="layout r3s1 needs 3 CUDA devices, found 2"):
            find_devices(Layout.parse("r3s1"), "auto")

    def test_parts_of_gpus_cannot_be_joined(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VISIBLE, f"{MIG},{OLD_MIG}")
        with pytest.raises(ValueError, match=r"layout r1s2 joins 2 devices, .*s must be 1"):
            find_devices(Layout.parse("r1s2"), "cuda", driver=HOPPERS)

    def test_node_needs_the_devices_of_its_own_ranks(self) -> None:
        assert find_devices(Layout.parse("r1s8"), "cuda", nodes=2, driver=HOPPERS).visible == ("0", "1", "2", "3")
        two = Driver(0, 13000, ("H200",) * 2, ((9, 0),) * 2)
        with pytest.raises(ValueError, match="r1s8 needs 4 CUDA devices on each of 2 nodes, found 2"):
            find_devices(Layout.parse("r1s8"), "cuda", nodes=2, driver=two)

    def test_list_that_cuda_cuts_short_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VISIBLE, "0,99")
        driver = Driver(0, 13000, ("H200",), ((9, 0),))
        with pytest.raises(ValueError, match="needs 2 CUDA devices, found 1 with CUDA_VISIBLE_DEVICES=0,99"):
            find_devices(Layout.parse("r1s2"), "cuda", driver=driver)

    def test_device_without_bfloat16_is_refused(self) -> None:
        driver = Driver(0, 13000, ("Tesla T4",), ((7, 5),))
        with pytest.raises(ValueError, match=r"device 0 \(Tesla T4\) has compute capability 7.5, needed is 8.0"):
            find_devices(Layout.parse("r1s1"), "cuda", driver=driver)

    @pytest.mark.parametrize("kind", ["auto", "cuda"])
    def test_driver_that_does_not_work_is_no_reason_to_use_the_cpu(self, kind: str) -> None:
        with pytest.raises(ValueError, match=r"cuInit failed with error 803.*the driver and its library differ"):
            find_devices(Layout.parse("r1s1"), kind, driver=Driver(803, 11040))

    @pytest.mark.parametrize("driver", [Driver(None), Driver(100), Driver(0, 13000)])
    def test_machine_without_devices_runs_on_the_cpu_only_if_asked_for_what_there_is(self, driver: Driver) -> None:
        assert find_devices(Layout.parse("r1s1"), "auto", driver=driver) == Devices("cpu", ())
        with pytest.raises(ValueError, match=r"device cuda|needs 1 CUDA devices, found 0"):
            find_devices(Layout.parse("r1s1"), "cuda", driver=driver)

    def test_hidden_devices_are_as_good_as_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VISIBLE, "-1")
        assert find_devices(Layout.parse("r1s1"), "auto", driver=HOPPERS).kind == "cpu"

    def test_torch_for_the_cpu_cannot_be_asked_for_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(devices, "torch_cuda_build", lambda: None)
        assert find_devices(Layout.parse("r1s1"), "auto", driver=HOPPERS).kind == "cpu"
        with pytest.raises(ValueError, match="torch is built for the CPU only"):
            find_devices(Layout.parse("r1s1"), "cuda", driver=HOPPERS)

    def test_unknown_device_is_refused(self) -> None:
        with pytest.raises(ValueError, match="device must be cpu, cuda or auto, got 'gpu'"):
            find_devices(Layout.parse("r1s1"), "gpu")


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_80", "sm_90"], (8, 9), True),
        (["sm_80", "sm_90"], (10, 0), False),
        (["sm_80", "sm_90", "compute_90"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_120"], (9, 0), False),
        ([], (9, 0), False),
    ],
)
def test_code_that_does_not_run_on_a_device_is_known(
    architectures: list[str], capability: tuple[int, int], expected: bool
) -> None:
    assert runs_on(architectures, capability) is expected


def test_attention_for_hoppers_is_refused_on_others_by_their_capability() -> None:
    options = check_options(offline_settings(Path("nowhere"), pipeline_options="attention=hopper"))
    check_devices_serve(options, Devices("cuda", ("0", "1"), ((9, 0), (9, 0))))
    with pytest.raises(
        ValueError, match=r"RUSHES_PIPELINE_OPTIONS=attention=hopper: .* compute capability 9\.0, device 3 has 8\.0"
    ):
        check_devices_serve(options, Devices("cuda", ("0", "3"), ((9, 0), (8, 0))))


def test_fp8_is_refused_on_gpus_that_do_not_have_it() -> None:
    options = check_options(offline_settings(Path("nowhere"), pipeline_options="precision=fp8"))
    check_devices_serve(options, Devices("cuda", ("0", "1"), ((9, 0), (12, 0))))
    check_devices_serve(options, Devices("cpu", ("cpu",)))
    with pytest.raises(
        ValueError, match=r"RUSHES_PIPELINE_OPTIONS=precision=fp8: .* capability 9\.0 or more, device 3 has 8\.9"
    ):
        check_devices_serve(options, Devices("cuda", ("0", "3"), ((9, 0), (8, 9))))
