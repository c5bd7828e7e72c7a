import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from rushes_worker.scratch import Scratch, check_directory


def test_directory_of_a_dead_replica_is_swept_and_one_in_use_is_not(tmp_path: Path) -> None:
    (tmp_path / "somebody else's").mkdir()
    dead = tmp_path / "rushes-replica-dead"
    dead.mkdir()
    (dead / "unit-000.rgb").write_bytes(b"x")
    first = Scratch(tmp_path)
    second = Scratch(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"somebody else's", first.path.name, second.path.name}
    first.remove()
    second.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["somebody else's"]


def test_link_with_a_replicas_name_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (tmp_path / "rushes-replica-x").symlink_to(target)
    Scratch(tmp_path).remove()
    assert target.is_dir()


def test_scratch_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"RUSHES_SCRATCH=.*/file cannot be written"):
        check_directory(tmp_path / "file")


def test_scratch_that_is_full_is_refused_with_what_it_has_and_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=4096))
    with pytest.raises(ValueError, match=r"RUSHES_SCRATCH=.* has 4096 bytes free, needed are at least 33554432"):
        check_directory(tmp_path)


def test_file_system_without_locks_is_refused_and_not_filled_with_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=f"RUSHES_SCRATCH={tmp_path} is on a file system without locks: Function not"):
        check_directory(tmp_path)
    with pytest.raises(OSError, match="Function not implemented"):
        Scratch(tmp_path)


def test_directory_that_was_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    make = tempfile.mkdtemp

    def make_and_lose(**options: Any) -> str:
        path = make(**options)
        made.append(Path(path))
        if len(made) == 1:
            Path(path).rmdir()
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    scratch = Scratch(tmp_path)
    assert scratch.path == made[1]
    scratch.remove()
