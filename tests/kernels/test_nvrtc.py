import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from rushes_kernels import nvrtc
from rushes_kernels.nvrtc import DriverError, KernelError, Module, cache_directory, cached


class Compiler:
    """Counts its calls."""

    def __init__(self, binary: bytes = b"machine code") -> None:
        self.binary = binary
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.binary


def load(directory: Path, compiler: Compiler, key: bytes = b"source", *, accepted: bytes = b"machine code") -> bytes:
    return cached("kernel", [key], compiler, directory=directory, accept=lambda binary: binary == accepted)


def test_second_use_compiles_nothing(tmp_path: Path) -> None:
    compiler = Compiler()
    assert load(tmp_path / "new" / "one", compiler) == load(tmp_path / "new" / "one", compiler) == b"machine code"
    assert compiler.calls == 1


def test_another_key_is_another_kernel(tmp_path: Path) -> None:
    compiler = Compiler()
    load(tmp_path, compiler, b"source")
    load(tmp_path, compiler, b"another source")
    assert compiler.calls == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_boundaries_between_parts_of_the_key_count(tmp_path: Path) -> None:
    compiler = Compiler()
    for key in ([b"ab", b"c"], [b"a", b"bc"]):
        cached("kernel", key, compiler, directory=tmp_path, accept=lambda binary: True)
    assert compiler.calls == 2


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: b"", lambda x: x[:-1] + b"?"], ids=["cut", "no", "bit"])
def test_damaged_file_is_replaced(damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Compiler()
    load(tmp_path, compiler)
    (path,) = tmp_path.iterdir()
    sound = path.read_bytes()
    path.write_bytes(damage(sound))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, compiler) == b"machine code"
    assert compiler.calls == 2
    assert path.read_bytes() == sound
    assert "damaged" in caplog.text


def test_kernel_that_the_driver_no_longer_takes_is_compiled_again(tmp_path: Path) -> None:
    load(tmp_path, Compiler(b"old"), accepted=b"old")
    compiler = Compiler(b"new")
    assert load(tmp_path, compiler, accepted=b"new") == b"new"
    assert load(tmp_path, compiler, accepted=b"new") == b"new"
    assert compiler.calls == 1


def test_fresh_kernel_that_the_driver_refuses_is_an_error_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="cannot load"):
        load(tmp_path, Compiler(b"wrong"))
    assert not list(tmp_path.iterdir())


def test_directory_that_cannot_be_written_is_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a directory")
    compiler = Compiler()
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path / "file", compiler) == b"machine code"
        assert load(tmp_path / "file", compiler) == b"machine code"
    assert compiler.calls == 2
    assert "cannot be kept" in caplog.text


def test_first_uses_at_the_same_time_leave_one_sound_file(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def make() -> bytes:
        together.wait()
        return b"machine code"

    def use() -> None:
        results.append(cached("kernel", [b"source"], make, directory=tmp_path, accept=lambda binary: True))

    results: list[bytes] = []
    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"machine code"] * 8
    assert len(os.listdir(tmp_path)) == 1
    compiler = Compiler()
    load(tmp_path, compiler)
    assert compiler.calls == 0


def test_cache_follows_the_users_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "rushes" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_directory() == Path("/home/somebody/.cache/rushes/kernels")


def test_driver_that_refuses_for_the_state_of_the_device_leaves_the_kept_code_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    statuses = [2, 209, 0]  # out of memory, no binary for the GPU, success
    driver = SimpleNamespace(
        cuModuleLoadData=lambda handle, binary: statuses.pop(0), cuGetErrorString=lambda status, said: 0
    )
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    module = Module.__new__(Module)
    module._handle = nvrtc.ctypes.c_void_p()
    load(tmp_path, Compiler())
    [kept] = tmp_path.iterdir()
    before, compiler = kept.stat().st_mtime_ns, Compiler(b"better")
    with pytest.raises(DriverError, match="cuModuleLoadData failed"):
        cached("kernel", [b"source"], compiler, directory=tmp_path, accept=module._load)
    assert compiler.calls == 0
    assert kept.stat().st_mtime_ns == before
    assert cached("kernel", [b"source"], compiler, directory=tmp_path, accept=module._load) == b"better"
