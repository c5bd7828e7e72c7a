"""The scripted pipeline that leaves a line in the history for every render, and can be sick.

`FAULT_RENDERS` names the file of lines. `FAULT_SICK` makes every render kill its rank, whatever the job. Beyond the
scripted directives, `[device memory]` in the prompt has every rank run out of it unless it was asked to spare memory,
and `[device memory always]` even then.
"""

import os
import signal
import time
from pathlib import Path

from rushes_worker.pipeline.base import Remainder, RenderRequest, Reporter
from support.faults.history import append_line
from support.scripted_pipeline import ScriptedPipeline


class FaultPipeline(ScriptedPipeline):
    """Implements `pipeline.base.PipelineFactory` and `Pipeline`."""

    def render(self, request: RenderRequest, reporter: Reporter) -> Remainder | None:
        self._note("invoke", request)
        if os.environ.get("FAULT_SICK"):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            _exhaust(request)
            remainder = super().render(request, reporter)
        except BaseException as error:
            self._note("fail", request, error=type(error).__name__)
            raise
        self._note("ok", request)
        return remainder

    def _note(self, phase: str, request: RenderRequest, **data: object) -> None:
        path = os.environ.get("FAULT_RENDERS")
        if path is None or self._rank != 0:
            return
        append_line(
            Path(path),
            {
                "t_mono": time.monotonic(),
                "t_wall": time.time(),
                "proc": f"rank-{os.getpid()}",
                "op": "render",
                "phase": phase,
                "job": request.job_id,
                "generation": None,
                "attempt": request.attempt,
                "fence": None,
                "data": data,
            },
        )


def _exhaust(request: RenderRequest) -> None:
    spared = getattr(request, "low_memory", False)
    if "[device memory always]" in request.prompt or ("[device memory]" in request.prompt and not spared):
        # seconds, on cores that do much else
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
