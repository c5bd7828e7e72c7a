"""Pipelines that end their rank: while they are made, and while they render."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rushes_core.contract import InferenceContract
from rushes_worker.pipeline.base import LoadWatch, Remainder, RenderRequest, Reporter


def _die() -> None:
    print("last words of a rank", file=sys.stderr, flush=True)
    os._exit(3)


class DyingPipeline:
    """Never comes to render."""

    precision = "none"

    def __init__(
        self,
        checkpoint: Path,
        *,
        contract: InferenceContract | None,
        rank: int,
        sp: int,
        device: str,
        options: Sequence[str],
        watch: LoadWatch,
    ) -> None:
        _die()

    def render(self, request: RenderRequest, reporter: Reporter) -> Remainder | None:
        raise AssertionError("it was never made")


class DyingAtWork(DyingPipeline):
    """Is ready, and dies of every job."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        contract: InferenceContract | None,
        rank: int,
        sp: int,
        device: str,
        options: Sequence[str],
        watch: LoadWatch,
    ) -> None:
        pass

    def render(self, request: RenderRequest, reporter: Reporter) -> Remainder | None:
        _die()
