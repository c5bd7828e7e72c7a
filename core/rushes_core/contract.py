"""What a FastH3 checkpoint says about how it must be run: its inference contract and its two scheduler configs.

Schedule, shifts, sparsity, tile size and the model's name come from these files and from nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard, cast

from rushes_core.errors import CheckpointError, CheckpointUnreadable
from rushes_core.json_file import read_json_object
from rushes_core.read_fault import read_fault

CONTRACT_FILE = "fastvideo_inference.json"
INDEX_FILES = ("modular_model_index.json", "model_index.json")
PIPELINE_CLASS = "MiniMaxH3ModularPipeline"
SCHEMA_VERSION = "fasth3-inference-contract-v1"
ATTENTION_BACKEND = "VIDEO_SPARSE_ATTN_H3"
TILE_SIZE = 64
"""Rows of one attention tile: 4 x 4 x 4 latents."""

# Fields by which other exports of the family change how they are sampled: ignoring one would run and be wrong.
_FOREIGN_FIELDS = (
    "adaln_rank",
    "conditioning",
    "grid_max_t",
    "pdd_step_indices",
    "pdd_steps",
    "quantization_config",
    "vsa_ref_keep_rate",
    "vsa_ref_policy",
)


@dataclass(frozen=True, slots=True)
class InferenceContract:
    """The fields of `fastvideo_inference.json` that decide how the model runs; shifts are those of the schedulers."""

    schema_version: str
    model_id: str
    task: str
    attention_backend: str
    vsa_sparsity: float
    """Share of video tiles that a query tile does not attend to, 0 <= sparsity < 1."""
    vsa_tile_size: int
    dmd_denoising_steps: tuple[int, ...]
    """Timesteps of the forwards on a scale of 1000, strictly decreasing."""
    guidance_scale: float
    video_scheduler_shift: float
    audio_scheduler_shift: float
    checkpoint_step: int | None = None
    checkpoint_content_sha256: str | None = None
    checkpoint_metadata_sha256: str | None = None
    base_model_revision: str | None = None
    """`hf://repository@revision` from which an export's absent component folders were meant to be taken."""

    @property
    def num_forwards(self) -> int:
        """Transformer forwards of one clip: the denoise steps that progress counts."""
        return len(self.dmd_denoising_steps)


def load_contract(checkpoint: Path) -> InferenceContract:
    """Read and check the contract of the checkpoint directory, with `scheduler/` and `audio_scheduler/`.

    Raises:
        CheckpointError: naming every file, field and value that is not as expected.
        CheckpointUnreadable: its file system failed.
    """
    contract, problems = read_contract(checkpoint)
    if contract is None or problems:
        raise CheckpointError("; ".join(problems))
    return contract


def read_contract(checkpoint: Path) -> tuple[InferenceContract | None, list[str]]:
    """The contract, or None and the reasons why it cannot be used.

    Raises:
        CheckpointUnreadable: its file system failed.
    """
    refusal = refuse_directory(checkpoint)
    if refusal is not None:
        return None, [refusal]
    path = checkpoint / CONTRACT_FILE
    if not (path.exists() or path.is_symlink()):
        return None, [_no_contract(checkpoint)]
    fields = _Fields(path)
    if fields.values is None:
        return None, fields.problems
    shifts = [_scheduler_shift(checkpoint / folder, fields.problems) for folder in ("scheduler", "audio_scheduler")]
    contract = _parse(fields, shifts)
    return (contract if not fields.problems else None), fields.problems


def refuse_directory(checkpoint: Path) -> str | None:
    """Why `checkpoint` is not a directory with something in it that can be reached, or None.

    Raises:
        CheckpointUnreadable: its file system failed.
    """
    try:
        if not checkpoint.exists():
            return f"{checkpoint}: {'a link that leads nowhere' if checkpoint.is_symlink() else 'no such directory'}"
        if not checkpoint.is_dir():
            return f"{checkpoint}: not a directory"
        if not any(checkpoint.iterdir()):
            return f"{checkpoint}: empty directory"
        # one that can be listed need not be one whose files can be reached
        (checkpoint / CONTRACT_FILE).exists()
    except OSError as error:
        fault = read_fault(error.filename or checkpoint, error)
        if isinstance(fault, CheckpointUnreadable):
            raise fault from error
        return str(fault)
    except RuntimeError as error:  # a loop of symbolic links, up to Python 3.12
        return f"{checkpoint}: {error}"
    return None


def _no_contract(checkpoint: Path) -> str:
    for name in INDEX_FILES:
        try:
            index = read_json_object(checkpoint / name)
        except CheckpointError:
            continue
        if index.get("_class_name") == PIPELINE_CLASS:
            return (
                f"{checkpoint / CONTRACT_FILE}: missing; {name} names {PIPELINE_CLASS}, so this is a base MiniMax-H3 "
                "checkpoint, which has no distilled schedule and no sparse-attention gates and cannot be served"
            )
        return f"{checkpoint / CONTRACT_FILE}: missing; {name} names {index.get('_class_name')!r}: another model"
    return f"{checkpoint / CONTRACT_FILE}: missing: not a FastH3 checkpoint"


class _Fields:
    """Typed access to one JSON object that collects what is wrong instead of stopping at the first fault."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.values: dict[str, object] | None = None
        try:
            self.values = read_json_object(path)
        except CheckpointError as error:
            self.problems.append(str(error))

    def fault(self, name: str, expected: str) -> None:
        assert self.values is not None
        found = f"is {self.values[name]!r}" if name in self.values else "is missing"
        self.problems.append(f"{self.path}: {name} {found}, expected {expected}")

    def get(self, name: str) -> object:
        assert self.values is not None
        return self.values.get(name)

    def text(self, name: str, expected: str | None = None) -> str:
        value = self.get(name)
        if not isinstance(value, str) or not value or (expected is not None and value != expected):
            self.fault(name, repr(expected) if expected else "a non-empty string")
            return ""
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self.get(name) is not None else None

    def integer(self, name: str) -> int | None:
        value = self.get(name)
        if not is_integer(value):
            self.fault(name, "an integer")
            return None
        return value

    def number(self, name: str) -> float | None:
        value = self.get(name)
        if not is_number(value):
            self.fault(name, "a number")
            return None
        return float(value)


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _parse(fields: _Fields, shifts: Sequence[float | None]) -> InferenceContract:
    for name in _FOREIGN_FIELDS:
        if fields.get(name) is not None:
            fields.fault(name, "no such field: this member of the family is not implemented")
    fields.text("schema_version", SCHEMA_VERSION)
    model_id = fields.text("model_id")
    _check_task(fields)
    fields.text("attention_backend", ATTENTION_BACKEND)
    sparsity = fields.number("vsa_sparsity")
    if sparsity is not None and not 0 <= sparsity < 1:
        fields.fault("vsa_sparsity", "0 <= vsa_sparsity < 1")
    tile_size = fields.integer("vsa_tile_size")
    if tile_size is not None and tile_size != TILE_SIZE:
        fields.fault("vsa_tile_size", f"{TILE_SIZE}: no other tile is implemented")
    guidance_scale = fields.number("guidance_scale")
    if guidance_scale is not None and guidance_scale != 1:
        fields.fault("guidance_scale", "1.0: the student is run without guidance")
    steps = _steps(fields)
    names = ("video_scheduler_shift", "audio_scheduler_shift")
    for name, folder, shift in zip(names, ("scheduler", "audio_scheduler"), shifts, strict=True):
        if fields.get(name) is not None and shift is not None and fields.number(name) not in (None, shift):
            fields.fault(name, f"{shift}, the shift of {folder}/scheduler_config.json")
    checkpoint_step = fields.integer("checkpoint_step") if fields.get("checkpoint_step") is not None else None
    return InferenceContract(
        schema_version=SCHEMA_VERSION,
        model_id=model_id,
        task="t2va",
        attention_backend=ATTENTION_BACKEND,
        vsa_sparsity=sparsity or 0.0,
        vsa_tile_size=TILE_SIZE,
        dmd_denoising_steps=steps,
        guidance_scale=1.0,
        video_scheduler_shift=shifts[0] or 0.0,
        audio_scheduler_shift=shifts[1] or 0.0,
        checkpoint_step=checkpoint_step,
        checkpoint_content_sha256=fields.optional_text("checkpoint_content_sha256"),
        checkpoint_metadata_sha256=fields.optional_text("checkpoint_metadata_sha256"),
        base_model_revision=fields.optional_text("base_model_revision"),
    )


def _check_task(fields: _Fields) -> None:
    name = "task" if fields.get("task") is not None else "model_type"
    task = fields.get(name)
    if task == "ref2va":
        fields.fault(name, "'t2av': a student that renders from references is not implemented")
    elif task != "t2av":
        fields.fault(name, "'t2av'")
    component = fields.get("transformer_component")
    if component not in (None, "transformer"):
        fields.fault("transformer_component", "'transformer'")


def _steps(fields: _Fields) -> tuple[int, ...]:
    value = fields.get("dmd_denoising_steps")
    expected = "a list of integers, strictly decreasing, each in 1..1000"
    if not isinstance(value, list) or not value or not all(map(is_integer, cast("list[object]", value))):
        fields.fault("dmd_denoising_steps", expected)
        return ()
    steps = tuple(cast("list[int]", value))
    if any(not 0 < step <= 1000 for step in steps) or any(b >= a for a, b in pairwise(steps)):
        fields.fault("dmd_denoising_steps", expected)
    for name, count, why in (
        ("transformer_forwards", len(steps), "the number of dmd_denoising_steps"),
        ("num_inference_steps", len(steps) + 1, "the number of dmd_denoising_steps and the end point"),
    ):
        if fields.integer(name) not in (None, count):
            fields.fault(name, f"{count}, {why}")
    return steps


def _scheduler_shift(folder: Path, problems: list[str]) -> float | None:
    fields = _Fields(folder / "scheduler_config.json")
    shift = None
    if fields.values is not None:
        fields.text("_class_name", "MiniMaxH3Scheduler")
        shift = fields.number("shift")
        if shift is not None and shift <= 0:
            fields.fault("shift", "a number above 0")
        unknown = sorted(set(fields.values) - {"_class_name", "_diffusers_version", "shift"})
        for name in unknown:
            fields.fault(name, "no such field: what it would change is not implemented")
    problems += fields.problems
    return shift
