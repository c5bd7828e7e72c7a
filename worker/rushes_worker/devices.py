"""Which devices a worker may use, found without loading torch and without touching CUDA in this process.

`find_devices` asks the CUDA driver from a short-lived child, `python -m rushes_worker.devices`, which prints JSON.
"""

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rushes_worker.layout import Layout

VISIBLE = "CUDA_VISIBLE_DEVICES"
MIN_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16."""

_NO_DEVICE, _STUB_LIBRARY, _DRIVER_MISMATCH = 100, 34, 803
_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR = 75, 76
_PROBE_SECONDS = 120
_NUMBER_OR_NAME = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True, slots=True)
class Devices:
    """What a worker's ranks run on."""

    kind: str
    """`cpu` or `cuda`."""
    visible: tuple[str, ...]
    """One entry for `CUDA_VISIBLE_DEVICES` per rank of all replicas, as the operator wrote them; empty on the CPU."""
    capabilities: tuple[tuple[int, int], ...] = ()
    """Compute capability of each."""

    def of_replica(self, replica: int, layout: Layout) -> tuple[str, ...]:
        """The entries of replica `replica`, in the order of its ranks."""
        return self.visible[replica * layout.sp : (replica + 1) * layout.sp]


@dataclass(frozen=True, slots=True)
class Driver:
    """What the CUDA driver says."""

    status: int | None
    """Result of `cuInit`; None without a driver library."""
    version: int = 0
    """CUDA version that the driver supports: 13000 is 13.0."""
    names: tuple[str, ...] = ()
    capabilities: tuple[tuple[int, int], ...] = ()

    @property
    def has_nothing(self) -> bool:
        """No driver, or one that says that there is no device: an ordinary machine without GPUs."""
        return self.status in (None, _STUB_LIBRARY, _NO_DEVICE) or (self.status == 0 and not self.names)

    def __str__(self) -> str:
        if self.status is None:
            return "no CUDA driver library (libcuda.so.1)"
        version = (
            f"driver supports CUDA {self.version // 1000}.{self.version % 1000 // 10}" if self.version else "driver"
        )
        if self.status not in (0, _NO_DEVICE):
            return f"{version}, cuInit failed with error {self.status}"
        return f"{version}, {len(self.names)} usable devices"


def visible_devices(value: str | None) -> tuple[str, ...] | None:
    """The entries of a `CUDA_VISIBLE_DEVICES` value as they were written; None if it is unset: all devices.

    Raises:
        ValueError: an entry is no number, UUID or MIG name, or two name the same device.
    """
    if value is None:
        return None
    if value.strip() in ("", "-1", "NoDevFiles", "none", "void"):
        return ()
    entries = tuple(entry.strip() for entry in value.split(","))
    for index, entry in enumerate(entries):
        if entry == "-1":
            raise ValueError(f"{VISIBLE}={value!r}: -1 hides every device after it; leave it and them out")
        if not _NUMBER_OR_NAME.fullmatch(entry):
            raise ValueError(f"{VISIBLE}={value!r}: {entry!r} is no device number, GPU-UUID or MIG-UUID")
        for other in entries[:index]:
            if _same_device(entry, other):
                raise ValueError(f"{VISIBLE}={value!r}: {other!r} and {entry!r} name the same device")
    return entries


def find_devices(layout: Layout, kind: str, *, nodes: int = 1, driver: Driver | None = None) -> Devices:
    """The devices for this machine's part of `layout` on `kind`: `cpu`, `cuda`, or `auto`, which is CUDA where it
    works.

    Args:
        nodes: machines that share the layout's ranks.
        driver: what the driver says; asked if not given.

    Raises:
        ValueError: fewer usable devices than ranks, a device that is too old, or a driver that does not work.
    """
    if kind not in ("cpu", "cuda", "auto"):
        raise ValueError(f"device must be cpu, cuda or auto, got {kind!r}")
    num_ranks = layout.ranks_per_node(nodes)
    if kind == "cpu":
        return Devices("cpu", ())
    entries = visible_devices(os.environ.get(VISIBLE))
    build = torch_cuda_build()
    if kind == "auto" and (build is None or entries == ()):
        return Devices("cpu", ())
    is_mig = any(entry.upper().startswith("MIG") for entry in entries or ())
    if is_mig and layout.sp > 1:
        raise ValueError(
            f"layout {layout} joins {layout.sp} devices, but {VISIBLE}={os.environ[VISIBLE]} has parts of GPUs (MIG), "
            "which cannot be joined: s must be 1"
        )
    driver = driver or (_ask_driver_of_each(entries or ()) if is_mig else _ask_driver())
    if kind == "auto" and driver.has_nothing:
        return Devices("cpu", ())
    if build is None:
        raise ValueError(f"device cuda: the installed torch is built for the CPU only; {driver}")
    found = f"{driver}; torch is built for CUDA {build}"
    if driver.status not in (0, _NO_DEVICE):
        hint = ": the driver and its library differ" if driver.status == _DRIVER_MISMATCH else ""
        raise ValueError(f"device cuda does not work: {found}{hint}")
    if driver.version and driver.version // 1000 < int(build.partition(".")[0]):
        raise ValueError(f"device cuda does not work, the driver is too old: {found}")
    if len(driver.names) < num_ranks:
        where = "" if entries is None else f" with {VISIBLE}={os.environ[VISIBLE]}"
        here = "" if nodes == 1 else f" on each of {nodes} nodes"
        raise ValueError(
            f"layout {layout} needs {num_ranks} CUDA devices{here}, found {len(driver.names)}{where}: {found}"
        )
    if entries is None:
        entries = tuple(map(str, range(len(driver.names))))
    for entry, name, capability in zip(entries, driver.names, driver.capabilities, strict=False):
        if capability < MIN_CAPABILITY:
            raise ValueError(
                f"device {entry} ({name}) has compute capability {capability[0]}.{capability[1]}, "
                f"needed is {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or later"
            )
    return Devices("cuda", entries[:num_ranks], driver.capabilities[:num_ranks])


def torch_cuda_build() -> str | None:
    """The CUDA version that the installed torch was built for, or None; read from its files, torch is not loaded."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(next(iter(found.submodule_search_locations))) / "version.py"
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([0-9.]+)['\"]", path.read_text(), re.MULTILINE)
    return match[1] if match else None


def runs_on(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code for `architectures`, as torch lists them, runs on a device of `capability`.

    Machine code (`sm_90`) runs on later devices of the same major version, that for one device alone (`sm_90a`) on
    that; code to be translated (`compute_90`) on all later ones.
    """
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        made_for = (int(digits[:-1]), int(digits[-1]))
        is_portable = kind == "compute" or made_for[0] == capability[0]
        if made_for == capability or (made_for < capability and is_portable and not number.endswith("a")):
            return True
    return False


def _same_device(one: str, other: str) -> bool:
    if one.isdigit() or other.isdigit():
        return one.isdigit() and other.isdigit() and int(one) == int(other)
    # CUDA accepts any unambiguous beginning of a UUID
    return one.lower().startswith(other.lower()) or other.lower().startswith(one.lower())


def _ask_driver_of_each(entries: tuple[str, ...]) -> Driver:
    """What the driver says of every entry by itself: a process sees one part of a GPU, however many it names.

    As in a list that CUDA reads, what comes after an entry that it does not know does not count.
    """
    answers: list[Driver] = []
    for entry in entries:
        answer = _ask_driver(entry)
        if answer.status not in (0, _NO_DEVICE):
            return answer
        if not answer.names:
            break
        answers.append(answer)
    return Driver(
        0,
        answers[0].version if answers else 0,
        tuple(one.names[0] for one in answers),
        tuple(one.capabilities[0] for one in answers),
    )


def _ask_driver(visible: str | None = None) -> Driver:
    """What the driver says of the devices that this process would see, or one with `CUDA_VISIBLE_DEVICES=visible`."""
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", "rushes_worker.devices"],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=True,
            env=None if visible is None else os.environ | {VISIBLE: visible},
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"the CUDA driver could not be asked for its devices: {error}") from error
    fields: dict[str, Any] = json.loads(answer.stdout)
    return Driver(
        status=fields["status"],
        version=fields["version"],
        names=tuple(fields["names"]),
        capabilities=tuple((major, minor) for major, minor in fields["capabilities"]),
    )


def _probe() -> Driver:
    """Ask the driver in this process."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(None)
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    status = int(cuda.cuInit(0))
    if status != 0:
        return Driver(status, version.value)
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    names, capabilities = [], []
    for ordinal in range(count.value):
        device, name, major, minor = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _ATTRIBUTE_MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _ATTRIBUTE_MINOR, device)
        names.append(name.value.decode(errors="replace"))
        capabilities.append((major.value, minor.value))
    return Driver(0, version.value, tuple(names), tuple(capabilities))


if __name__ == "__main__":
    asked = _probe()
    print(
        json.dumps(
            {
                "status": asked.status,
                "version": asked.version,
                "names": asked.names,
                "capabilities": asked.capabilities,
            }
        )
    )
