"""What the served model and this deployment take, as `/v1/capabilities` tells it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from rushes_core.canvas import CANVASES, DEFAULT_CANVAS, SIZE_ALIASES, Canvas
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
)
from rushes_core.prompt import MAX_PROMPT_CHARACTERS
from rushes_core.request import DEFAULT_SECONDS, TASKS
from rushes_core.served_model import ServedModel
from rushes_core.settings import ContentDelivery
from rushes_core.variants import VARIANTS
from rushes_core.video import CONTENT_TYPE


class _Described(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class PromptLimits(_Described):
    max_tokens: int
    """Of the checkpoint's tokenizer."""
    max_characters: int


class CanvasSize(_Described):
    size: str
    width: int
    height: int
    aspect_ratio: str
    short_edge: int


class SecondsRange(_Described):
    min: int
    max: int
    default: str


class Range(_Described):
    min: int
    max: int


class Least(_Described):
    min: int


class MetadataLimits(_Described):
    max_pairs: int
    max_key_characters: int
    max_value_characters: int


class TargetValues(_Described):
    short_edge: list[int]
    aspect_ratio: list[str]


class FixedValues(_Described):
    """What the checkpoint decides: a request may restate it."""

    n: int
    fps: int
    guidance_scale: float
    num_inference_steps: int
    flow_shift: float
    audio_flow_shift: float
    quality: str


class ContentForms(_Described):
    type: str
    variants: list[str]
    delivery: ContentDelivery
    """Whether clips are streamed by the API or redirected to."""


class Capabilities(_Described):
    """The limits that requests are checked against."""

    object: Literal["capabilities"]
    model: str
    task: str
    inputs: list[str]
    outputs: list[str]
    prompt: PromptLimits
    sizes: list[CanvasSize]
    size_aliases: dict[str, str]
    """OpenAI's sizes and what is served for them."""
    default_size: str
    seconds: SecondsRange
    num_frames: list[int]
    """Every length that there is."""
    fps: int
    audio_sample_rate: int
    seed: Range
    metadata: MetadataLimits
    priorities: list[str]
    priority_numbers: dict[str, Least]
    """From which number on each word is meant."""
    tasks: list[str]
    target: TargetValues
    retention_seconds: Range
    response_formats: list[str]
    fixed: FixedValues
    content: ContentForms


def capabilities_of(model: ServedModel, *, delivery: ContentDelivery) -> Capabilities:
    contract = model.contract
    return Capabilities(
        object="capabilities",
        model=model.name,
        task=contract.task,
        inputs=["text"],
        outputs=["video", "audio"],
        prompt=PromptLimits(max_tokens=model.max_prompt_tokens, max_characters=MAX_PROMPT_CHARACTERS),
        sizes=[CanvasSize(**_canvas_members(canvas)) for canvas in CANVASES],
        size_aliases=SIZE_ALIASES,
        default_size=DEFAULT_CANVAS.size,
        seconds=SecondsRange(min=MIN_SECONDS, max=MAX_SECONDS, default=DEFAULT_SECONDS),
        num_frames=list(ADMISSIBLE_FRAMES),
        fps=FPS,
        audio_sample_rate=AUDIO_SAMPLE_RATE,
        seed=Range(min=0, max=MAX_SEED),
        metadata=MetadataLimits(
            max_pairs=MAX_METADATA_PAIRS,
            max_key_characters=MAX_METADATA_KEY,
            max_value_characters=MAX_METADATA_VALUE,
        ),
        priorities=list(PRIORITIES),
        priority_numbers={word: Least(min=least) for word, least in MIN_URGENCY.items()},
        tasks=list(TASKS),
        target=TargetValues(short_edge=SHORT_EDGES, aspect_ratio=[AUTO_ASPECT_RATIO, *ASPECT_RATIOS]),
        retention_seconds=Range(min=MIN_RETENTION_SECONDS, max=MAX_RETENTION_SECONDS),
        response_formats=["url"],
        fixed=FixedValues(
            n=1,
            fps=FPS,
            guidance_scale=contract.guidance_scale,
            num_inference_steps=contract.num_forwards + 1,
            flow_shift=contract.video_scheduler_shift,
            audio_flow_shift=contract.audio_scheduler_shift,
            quality="standard",
        ),
        content=ContentForms(type=CONTENT_TYPE, variants=list(VARIANTS), delivery=delivery),
    )


def _canvas_members(canvas: Canvas) -> dict[str, Any]:
    """A canvas as `/v1/capabilities` lists it."""
    return {
        "size": canvas.size,
        "width": canvas.width,
        "height": canvas.height,
        "aspect_ratio": canvas.aspect_ratio,
        "short_edge": canvas.short_edge,
    }
