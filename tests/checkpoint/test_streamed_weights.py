"""Weights that go through a few small buffers are what the files hold, wherever a buffer ends."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rushes_core.errors import CheckpointError, CheckpointUnreadable
from rushes_worker.checkpoint.directory import open_checkpoint
from rushes_worker.checkpoint.loader import Loader, Unwatched
from rushes_worker.checkpoint.shards import Stamp, StoredTensor, read_header, scan_shards
from rushes_worker.checkpoint.streaming import Staging, StreamedWeights
from rushes_worker.checkpoint.tiny import write_tiny_checkpoint
from rushes_worker.commands import Loading
from rushes_worker.loading import LoadWatcher
from safetensors.torch import save_file
from support.checkpoints import edit_tensors

BUFFER_BYTES = 100
"""Less than a row of the widest tensor, and no multiple of any row."""


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "matrix": (37, 11),
        "wide": (5, 130),
        "vector": (301,),
        "kernel": (3, 4, 5),
        "empty": (0, 4),
        "scalar": (),
    }
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return drawn | {"half": torch.randn(40, 6, generator=generator).to(torch.bfloat16)}


@pytest.fixture
def weights(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Iterator[StreamedWeights]:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    with Staging(torch.device("cpu"), buffer_bytes=BUFFER_BYTES) as staging:
        yield StreamedWeights(tmp_path, read_header(path), staging)


def age(path: Path) -> None:
    """Files that are written within a tick of the clock have one time."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


@pytest.mark.parametrize("name", ["matrix", "wide", "vector", "kernel", "empty", "scalar", "half"])
def test_whole_tensors_arrive_as_they_are_stored(
    weights: StreamedWeights, tensors: dict[str, torch.Tensor], name: str
) -> None:
    arrived = weights.get(name)
    assert arrived.dtype == tensors[name].dtype
    assert torch.equal(arrived, tensors[name])


@pytest.mark.parametrize("name", ["matrix", "wide", "kernel", "half"])
@pytest.mark.parametrize("rows", [None, slice(1, 3), slice(2, 2), slice(3, None)])
@pytest.mark.parametrize("columns", [None, slice(0, 2), slice(1, 4), slice(2, 2)])
def test_slices_arrive_contiguous(
    weights: StreamedWeights, tensors: dict[str, torch.Tensor], name: str, rows: slice | None, columns: slice | None
) -> None:
    expected = tensors[name][rows or slice(None), columns or slice(None)]
    arrived = weights.get(name, rows=rows, columns=columns)
    assert arrived.is_contiguous()
    assert torch.equal(arrived, expected)


def test_tensor_that_is_not_there_is_named(weights: StreamedWeights) -> None:
    with pytest.raises(KeyError, match="no tensor 'norm'"):
        weights.get("norm")


@pytest.mark.parametrize("columns", [None, slice(0, 2)])
def test_file_that_is_cut_short_while_it_is_read_is_named(
    weights: StreamedWeights, tmp_path: Path, columns: slice | None
) -> None:
    path = tmp_path / "model.safetensors"
    stored = read_header(path)["wide"]
    weights.get("scalar")
    with path.open("rb+") as file:
        file.truncate(stored.offset + stored.num_bytes // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cut short while it was read, at byte"):
        weights.get("wide", columns=columns)


def test_file_that_another_one_takes_the_place_of_after_its_header_was_read_is_named(
    weights: StreamedWeights, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(dict(reversed(tensors.items())), tmp_path / "other.safetensors")
    age(tmp_path / "other.safetensors")
    (tmp_path / "other.safetensors").replace(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed after its header was read"):
        weights.get("wide")


def test_file_that_another_one_takes_the_place_of_while_it_is_read_is_read_to_its_end(
    weights: StreamedWeights, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    weights.get("scalar")
    (tmp_path / "other.safetensors").touch()
    (tmp_path / "other.safetensors").replace(tmp_path / "model.safetensors")
    assert torch.equal(weights.get("wide"), tensors["wide"])
    weights.close()


def test_file_that_is_written_to_while_it_is_read_is_named(weights: StreamedWeights, tmp_path: Path) -> None:
    weights.get("scalar")
    path = tmp_path / "model.safetensors"
    with path.open("rb+") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    age(path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while it was read"):
        weights.close()


def test_file_that_went_away_is_named(weights: StreamedWeights, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: No such file"):
        weights.get("wide")


def test_file_system_that_fails_is_told_apart_from_a_file_that_is_wrong(tmp_path: Path) -> None:
    # its first page is nobody's: EIO
    path = Path("/proc/self/mem")
    with path.open("rb") as file:
        stamp = Stamp.of(file.fileno())
    stored = StoredTensor(path, stamp, "F32", (4, 4), 64, 0)
    with Staging(torch.device("cpu"), buffer_bytes=BUFFER_BYTES) as staging:
        weights = StreamedWeights(tmp_path, {"matrix": stored}, staging)
        with pytest.raises(CheckpointUnreadable, match=f"^{path}: Input/output error$"):
            weights.get("matrix")


def test_load_tells_its_stages_and_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rushes_worker.loading._TELL_SECONDS", 0.0)
    write_tiny_checkpoint(tmp_path / "tiny")
    checkpoint = open_checkpoint(tmp_path / "tiny")
    told: list[Loading] = []
    watcher = LoadWatcher(told.append)
    with Loader(checkpoint, torch.device("cpu"), watcher) as loader:
        for component in ("transformer", "vae"):
            with loader.component(component) as weights:
                used = [name for name, spec in checkpoint.manifest(component).items() if spec.used]
                for name in used:
                    weights.get(name, slice(0, 1))
                weights.get(used[0])
    assert [name for name, _ in watcher.seconds] == ["loading transformer", "loading vae"]
    done = [loading.done_bytes for loading in told]
    assert done == sorted(done)
    manifests = [checkpoint.manifest(component) for component in ("transformer", "vae")]
    assert done[-1] == sum(spec.num_bytes for manifest in manifests for spec in manifest.values() if spec.used)
    assert done[-1] < told[-1].total_bytes
    assert told[-1].bytes_per_second is not None
    assert told[-1].seconds_left is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("component", "name"), [("vae", "decoder.proj_in.bias"), ("transformer", "transformer_blocks.1.ff.net.2.weight")]
)
def test_weight_that_is_not_finite_is_named_when_its_component_was_read(
    damaged: Path, component: str, name: str, value: float
) -> None:
    file = scan_shards(damaged / component).tensors[name].path
    edit_tensors(file, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    with Loader(open_checkpoint(damaged), torch.device("cpu"), Unwatched()) as loader:

        def take(*parts: slice) -> None:
            with loader.component(component) as weights:
                for rows in parts:
                    weights.get(name, rows=rows)

        # the part of another rank does not count
        take(slice(0, 0), slice(0, 1))
        with pytest.raises(CheckpointError, match=f"/{component}: {name} has values that are not finite"):
            take(slice(0, 1), slice(1, None))
