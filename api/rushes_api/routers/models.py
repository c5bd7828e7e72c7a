"""The served model and what may be asked of it."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel
from rushes_core.canvas import CANVASES, DEFAULT_CANVAS, SIZE_ALIASES
from rushes_core.clip import ADMISSIBLE_FRAMES, AUDIO_SAMPLE_RATE, FPS, MAX_SECONDS, MIN_SECONDS
from rushes_core.fields import (
    ASPECT_RATIOS,
    AUTO_ASPECT_RATIO,
    MAX_METADATA_KEY,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE,
    MAX_RETENTION_SECONDS,
    MAX_SEED,
    MIN_RETENTION_SECONDS,
    MIN_URGENCY,
    PRIORITIES,
    SHORT_EDGES,
    shown,
)
from rushes_core.prompt import MAX_PROMPT_CHARACTERS
from rushes_core.request import DEFAULT_SECONDS, TASKS, ModelNotFound
from rushes_core.variants import VARIANTS

from rushes_api.deps import AppState, CurrentProject, NoQuery, State
from rushes_api.video import CONTENT_TYPE, canvas_members

router = APIRouter(prefix="/v1", tags=["models"])


class Model(BaseModel):
    """OpenAI's Model object."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


def _served(state: State) -> Model:
    return Model(id=state["model"].name, object="model", created=state["model_created"], owned_by="rushes")


@router.get("/models")
async def list_models(project: CurrentProject, state: AppState, parameters: NoQuery) -> ModelList:
    return ModelList(object="list", data=[_served(state)])


@router.get("/models/{model_id:path}")
async def get_model(model_id: str, project: CurrentProject, state: AppState, parameters: NoQuery) -> Model:
    served = _served(state)
    if model_id != served.id:
        raise ModelNotFound(f"model {shown(model_id)} is not served here; served: {served.id}", param="model")
    return served


@router.get("/capabilities")
async def get_capabilities(project: CurrentProject, state: AppState, parameters: NoQuery) -> dict[str, Any]:
    """The limits that requests are checked against."""
    model = state["model"]
    contract = model.contract
    return {
        "object": "capabilities",
        "model": model.name,
        "task": contract.task,
        "inputs": ["text"],
        "outputs": ["video", "audio"],
        "prompt": {"max_tokens": model.max_prompt_tokens, "max_characters": MAX_PROMPT_CHARACTERS},
        "sizes": [canvas_members(canvas) for canvas in CANVASES],
        "size_aliases": SIZE_ALIASES,
        "default_size": DEFAULT_CANVAS.size,
        "seconds": {"min": MIN_SECONDS, "max": MAX_SECONDS, "default": DEFAULT_SECONDS},
        "num_frames": list(ADMISSIBLE_FRAMES),
        "fps": FPS,
        "audio_sample_rate": AUDIO_SAMPLE_RATE,
        "seed": {"min": 0, "max": MAX_SEED},
        "metadata": {
            "max_pairs": MAX_METADATA_PAIRS,
            "max_key_characters": MAX_METADATA_KEY,
            "max_value_characters": MAX_METADATA_VALUE,
        },
        "priorities": list(PRIORITIES),
        "priority_numbers": {word: {"min": least} for word, least in MIN_URGENCY.items()},
        "tasks": list(TASKS),
        "target": {"short_edge": SHORT_EDGES, "aspect_ratio": [AUTO_ASPECT_RATIO, *ASPECT_RATIOS]},
        "retention_seconds": {"min": MIN_RETENTION_SECONDS, "max": MAX_RETENTION_SECONDS},
        "response_formats": ["url"],
        "fixed": {
            "n": 1,
            "fps": FPS,
            "guidance_scale": contract.guidance_scale,
            "num_inference_steps": contract.num_forwards + 1,
            "flow_shift": contract.video_scheduler_shift,
            "audio_flow_shift": contract.audio_scheduler_shift,
            "quality": "standard",
        },
        "content": {
            "type": CONTENT_TYPE,
            "variants": list(VARIANTS),
            "delivery": state["settings"].content_delivery.value,
        },
    }
