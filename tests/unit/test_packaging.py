"""The folders at the root are containers, not packages.

transformers and diffusers probe for a top-level `kernels` package (Hugging Face's) with importlib, and uvicorn, Celery
and `python -m` put the working directory first on sys.path: an importable ./kernels would be executed in its place.
"""

import tomllib
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ["api", "cli", "core", "kernels", "worker"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_root_folder_is_not_a_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("folder", FOLDERS)
def test_root_folder_holds_one_typed_package_of_its_name(folder: str) -> None:
    package = ROOT / folder / f"rushes_{folder}"
    assert (package / "__init__.py").exists()
    assert (package / "py.typed").exists()


def test_kernels_never_resolves_to_this_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    spec = find_spec("kernels")
    assert spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(ROOT)


@pytest.mark.parametrize("lock", ["cpu.lock", "openai2.lock"])
def test_every_locked_package_has_a_hash(lock: str) -> None:
    blocks = (ROOT / "requirements" / lock).read_text().split("\n")
    names = [line for line in blocks if line and not line.startswith((" ", "#"))]
    hashed = [line for line, following in pairwise(blocks) if "--hash=sha256:" in following]
    assert names
    assert [name for name in names if name not in hashed] == []


def test_servers_are_pinned_to_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    servers = [line for line in project["optional-dependencies"]["local"] if not line.startswith("httpx")]
    assert len(servers) == 3
    assert all("==" in line for line in servers)
