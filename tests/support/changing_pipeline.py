"""The real pipeline, whose checkpoint changes between what the rank reads of it and the load."""

from pathlib import Path
from typing import Any

from rushes_core.contract import CONTRACT_FILE
from rushes_worker.pipeline.fasth3 import FastH3Pipeline
from support.checkpoints import edit_json

CHANGING = "support.changing_pipeline:ChangingPipeline"
NUM_STEPS = 2
"""Of the contract that is there in the end."""


class ChangingPipeline(FastH3Pipeline):
    """Implements `pipeline.base.PipelineFactory` and `Pipeline`."""

    def __init__(self, checkpoint: Path, **given: Any) -> None:
        steps = {"transformer_forwards": NUM_STEPS, "num_inference_steps": NUM_STEPS + 1}
        edit_json(checkpoint / CONTRACT_FILE, dmd_denoising_steps=[1000, 500], **steps)
        super().__init__(checkpoint, **given)
