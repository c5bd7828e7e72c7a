"""A pipeline without a model that takes device memory: until there is none, or most of what there is.

[fill]          every rank takes all there is while denoising
[fill rank 1]   that rank alone, and the others wait for it in a collective
"""

from pathlib import Path

import torch
import torch.distributed as dist
from rushes_worker.pipeline.base import RenderRequest, Reporter

HUNGRY = "support.hungry_pipeline:HungryPipeline"
_BLOCK = 1 << 30
_SHARE = 0.8


class HungryPipeline:
    """Implements `pipeline.base.PipelineFactory` and `Pipeline`."""

    precision = "no model"

    def __init__(self, checkpoint: Path, *, rank: int, sp: int, device: str, **given: object) -> None:
        self._rank = rank
        self._sp = sp
        self._device = device

    def render(self, request: RenderRequest, reporter: Reporter) -> None:
        reporter.progress("denoising")
        if "[fill]" in request.prompt or f"[fill rank {self._rank}]" in request.prompt:
            blocks: list[torch.Tensor] = []
            while True:
                blocks.append(self._take(_BLOCK))
        if self._sp > 1:
            dist.all_reduce(torch.ones(1, device=self._device))
            torch.cuda.synchronize()
        total = torch.cuda.get_device_properties(self._device).total_memory
        self._take(int(_SHARE * total))
        reporter.checkpoint()

    def _take(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
