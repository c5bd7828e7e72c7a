"""Pipelines that end their rank: while they are made, and while they render."""

import os
import sys
from pathlib import Path

from rushes_worker.pipeline.base import Remainder, RenderRequest, Reporter


def _die() -> None:
    print("last words of a rank", file=sys.stderr, flush=True)
    os._exit(3)


class DyingPipeline:
    """Never comes to render."""

    precision = "none"

    def __init__(self, checkpoint: Path, **given: object) -> None:
        _die()

    def render(self, request: RenderRequest, reporter: Reporter) -> Remainder | None:
        raise AssertionError("it was never made")


class DyingAtWork(DyingPipeline):
    """Is ready, and dies of every job."""

    def __init__(self, checkpoint: Path, **given: object) -> None:
        pass

    def render(self, request: RenderRequest, reporter: Reporter) -> Remainder | None:
        _die()
