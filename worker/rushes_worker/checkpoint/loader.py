"""Loads the components of a checkpoint to one device and tells how far it is."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Self

import torch
from rushes_core.errors import CheckpointError
from torch import Tensor

from rushes_worker.checkpoint.directory import COMPONENTS, Checkpoint
from rushes_worker.checkpoint.manifest import Manifest
from rushes_worker.checkpoint.streaming import Staging, StreamedWeights
from rushes_worker.checkpoint.weights import WeightSource
from rushes_worker.pipeline.base import LoadWatch


class Unwatched:
    """A `pipeline.base.LoadWatch` for loads that nobody follows."""

    def expect(self, total_bytes: int) -> None:
        pass

    def stage(self, name: str) -> nullcontext[None]:
        return nullcontext()

    def add(self, done_bytes: int, read_bytes: int) -> None:
        pass


class Loader:
    """Hands out the components' weights, on `device`, within a `with` block.

    Args:
        watch: told of every component as a stage, and of every tensor.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, watch: LoadWatch) -> None:
        self._checkpoint = checkpoint
        self._watch = watch
        self._staging = Staging(device)
        watch.expect(
            sum(spec.num_bytes for name in COMPONENTS for spec in checkpoint.manifest(name).values() if spec.used)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._staging.close()

    @contextmanager
    def component(self, name: str) -> Iterator[WeightSource]:
        """The weights of component `name`, to be taken within the block.

        Raises:
            CheckpointError: behind the block: a file has changed, or something that was taken is not finite.
        """
        with self._watch.stage(f"loading {name}"):
            weights = self._checkpoint.weights(name, self._staging)
            watched = _Watched(weights, self._checkpoint.manifest(name), self._watch)
            yield watched
            if isinstance(weights, StreamedWeights):
                weights.close()
            if unusable := watched.not_finite():
                folder = self._checkpoint.path / name
                raise CheckpointError(f"{folder}: {unusable[0]} has values that are not finite: the file is damaged")


class _Watched:
    """A `WeightSource` that tells of what is taken from it: as dealt with the first time, as read every time."""

    def __init__(self, weights: WeightSource, manifest: Manifest, watch: LoadWatch) -> None:
        self._weights = weights
        self._left = {name: spec.num_bytes for name, spec in manifest.items() if spec.used}
        self._watch = watch
        self._extremes: list[tuple[str, Tensor]] = []

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        tensor = self._weights.get(name, rows=rows, columns=columns)
        self._watch.add(self._left.pop(name, 0), tensor.nbytes)
        if tensor.numel():
            # one pass over what has just arrived, while the next is read
            self._extremes.append((name, torch.stack(torch.aminmax(tensor)).float()))
        return tensor

    def not_finite(self) -> list[str]:
        """Names of the tensors, of those taken, that have infinities or no numbers in them. Waits for the device."""
        if not self._extremes:
            return []
        names, extremes = zip(*self._extremes, strict=True)
        are_finite = torch.stack(extremes).isfinite().all(dim=1).tolist()
        return [name for name, is_finite in zip(names, are_finite, strict=True) if not is_finite]
