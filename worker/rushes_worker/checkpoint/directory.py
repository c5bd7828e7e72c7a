"""A checkpoint directory: examined as a whole from its small files and headers, then opened for loading."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rushes_core.contract import INDEX_FILES, PIPELINE_CLASS, InferenceContract, read_contract, refuse_directory
from rushes_core.errors import CheckpointError, CheckpointUnreadable
from rushes_core.json_file import read_json_object
from rushes_core.read_fault import read_fault
from rushes_core.tokenizer import load_tokenizer

from rushes_worker.checkpoint.configs import (
    AudioVaeConfig,
    TextEncoderConfig,
    TransformerConfig,
    VideoVaeConfig,
    VisionConfig,
)
from rushes_worker.checkpoint.inventory import CONTENT_FILE
from rushes_worker.checkpoint.manifest import (
    Manifest,
    audio_vae_tensors,
    text_encoder_tensors,
    transformer_tensors,
    video_vae_tensors,
)
from rushes_worker.checkpoint.parsing import parse_audio_vae, parse_text_encoder, parse_transformer, parse_video_vae
from rushes_worker.checkpoint.shards import Shards, compare, scan_shards
from rushes_worker.checkpoint.streaming import Staging
from rushes_worker.checkpoint.weights import FileWeights, WeightSource

COMPONENTS = ("transformer", "text_encoder", "vae", "audio_vae")

MAX_LISTED = 40
"""Problems that one error message lists; the rest is counted."""


@dataclass(slots=True)
class Examination:
    """Everything known about a directory without reading a weight, and all reasons not to serve it."""

    path: Path
    problems: list[str] = field(default_factory=list)
    unreadable: CheckpointUnreadable | None = None
    """Why no more was looked at; among the problems, too."""
    contract: InferenceContract | None = None
    transformer_config: TransformerConfig | None = None
    text_encoder_config: TextEncoderConfig | None = None
    vision_config: VisionConfig | None = None
    video_vae_config: VideoVaeConfig | None = None
    audio_vae_config: AudioVaeConfig | None = None
    shards: dict[str, Shards] = field(default_factory=dict)
    manifests: dict[str, Manifest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory in which everything that a FastH3 student needs was found as expected."""

    path: Path
    contract: InferenceContract
    transformer_config: TransformerConfig
    text_encoder_config: TextEncoderConfig
    video_vae_config: VideoVaeConfig
    audio_vae_config: AudioVaeConfig
    _manifests: Mapping[str, Manifest]
    _weights: Mapping[str, WeightSource]

    @property
    def tokenizer_path(self) -> Path:
        """The folder that `rushes_core.tokenizer.load_tokenizer` reads."""
        return self.path / "tokenizer"

    def manifest(self, component: str) -> Manifest:
        """What `weights` has."""
        return self._manifests[component]

    def weights(self, component: str, staging: Staging | None = None) -> WeightSource:
        """The stored tensors of `transformer`, `text_encoder`, `vae` or `audio_vae`.

        Args:
            staging: takes what is read from files to its device; None leaves it on the host.
        """
        weights = self._weights[component]
        return weights.on(staging) if staging is not None and isinstance(weights, FileWeights) else weights


def open_checkpoint(path: Path, contract: InferenceContract | None = None) -> Checkpoint:
    """Check the whole directory and open it. Reads JSON files and safetensors headers, no weights.

    Args:
        contract: the directory's, which is read otherwise.

    Raises:
        CheckpointError: listing everything that is missing, surplus, damaged or not implemented.
        CheckpointUnreadable: its file system failed.
    """
    found = examine(path, contract)
    if found.unreadable is not None:
        raise found.unreadable
    if found.problems:
        raise CheckpointError(describe(path, found.problems))
    assert found.contract is not None
    assert found.transformer_config is not None
    assert found.text_encoder_config is not None
    assert found.video_vae_config is not None
    assert found.audio_vae_config is not None
    return Checkpoint(
        path=path,
        contract=found.contract,
        transformer_config=found.transformer_config,
        text_encoder_config=found.text_encoder_config,
        video_vae_config=found.video_vae_config,
        audio_vae_config=found.audio_vae_config,
        _manifests=found.manifests,
        _weights={name: FileWeights(path / name, found.shards[name].tensors) for name in COMPONENTS},
    )


def describe(path: Path, problems: list[str]) -> str:
    """One message that lists the problems, bounded."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"  - {problem}" for problem in problems[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        lines.append(f"  and {len(problems) - MAX_LISTED} more")
    return "\n".join([f"{path} cannot be served, {len(problems)} problems:", *lines])


def examine(path: Path, contract: InferenceContract | None = None) -> Examination:
    """Look at everything in the directory; nothing is raised for what is wrong with it.

    Args:
        contract: the directory's, which is read otherwise.
    """
    found = Examination(path, contract=contract)
    try:
        _look_at_all(found)
    except CheckpointUnreadable as error:
        found.unreadable = error
        found.problems.append(str(error))
    return found


def _look_at_all(found: Examination) -> None:
    try:
        _look_at_parts(found)
    except OSError as error:
        # a link may lead to where nobody may look whether anything is there
        fault = read_fault(error.filename or found.path, error)
        if isinstance(fault, CheckpointUnreadable):
            raise fault from error
        found.problems.append(str(fault))


def _look_at_parts(found: Examination) -> None:
    path = found.path
    refusal = refuse_directory(path)
    if refusal is not None:
        found.problems.append(refusal)
        return
    if found.contract is None:
        found.contract, problems = read_contract(path)
        found.problems += problems
    if found.contract is None and not any((path / name).is_dir() for name in COMPONENTS):
        return
    _check_index(path, found.problems)
    _read_configs(found)
    for name in COMPONENTS:
        folder = path / name
        if folder.is_dir():
            shards = found.shards[name] = scan_shards(folder)
            found.problems += shards.problems
            if name in found.manifests:
                found.problems += compare(folder, shards, found.manifests[name])
    _check_agreement(found)
    _check_tokenizer(found)
    _check_content(found)


def _check_index(path: Path, problems: list[str]) -> None:
    for name in INDEX_FILES:
        if (path / name).exists():
            try:
                class_name = read_json_object(path / name).get("_class_name")
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if class_name != PIPELINE_CLASS:
                problems.append(f"{path / name}: _class_name is {class_name!r}, expected {PIPELINE_CLASS!r}")


def _read_configs(found: Examination) -> None:
    present = []
    for name in COMPONENTS:
        folder = found.path / name
        if folder.is_dir():
            present.append(name)
        else:
            found.problems.append(f"{folder}: missing component{_base_hint(found.contract)}")
    problems = found.problems
    if "transformer" in present:
        found.transformer_config = parse_transformer(found.path / "transformer", problems)
        if found.transformer_config is not None:
            found.manifests["transformer"] = transformer_tensors(found.transformer_config)
    if "text_encoder" in present:
        text = parse_text_encoder(found.path / "text_encoder", problems)
        if text is not None:
            found.text_encoder_config, found.vision_config = text
            found.manifests["text_encoder"] = text_encoder_tensors(*text)
    if "vae" in present:
        found.video_vae_config = parse_video_vae(found.path / "vae", problems)
        if found.video_vae_config is not None:
            found.manifests["vae"] = video_vae_tensors(found.video_vae_config)
    if "audio_vae" in present:
        found.audio_vae_config = parse_audio_vae(found.path / "audio_vae", problems)
        if found.audio_vae_config is not None:
            found.manifests["audio_vae"] = audio_vae_tensors(found.audio_vae_config)


def _base_hint(contract: InferenceContract | None) -> str:
    if contract is None or contract.base_model_revision is None:
        return ""
    return f"; the contract takes it from {contract.base_model_revision}: place that revision's folder here"


def _check_agreement(found: Examination) -> None:
    transformer, text = found.transformer_config, found.text_encoder_config
    video, audio = found.video_vae_config, found.audio_vae_config
    if transformer is None:
        return
    path = found.path / "transformer" / "config.json"
    pairs = [
        ("in_channels", transformer.in_channels, video and video.latent_channels, "latent_channels of vae"),
        ("audio_in_channels", transformer.audio_in_channels, audio and audio.latent_channels,
         "latent_channels of audio_vae"),
        ("text_dim", transformer.text_dim, text and text.hidden_size, "hidden_size of text_encoder"),
    ]  # fmt: skip
    found.problems += [
        f"{path}: {name} is {value}, expected {other}, the {owner}"
        for name, value, other, owner in pairs
        if other is not None and value != other
    ]


def _check_tokenizer(found: Examination) -> None:
    folder = found.path / "tokenizer"
    try:
        last = max(load_tokenizer(folder).get_vocab().values())
    except CheckpointError as error:
        found.problems.append(str(error))
        return
    text = found.text_encoder_config
    if text is not None and last >= text.vocab_size:
        found.problems.append(
            f"{folder}: the last token has id {last}, expected one below the {text.vocab_size} of "
            f"text_config.vocab_size in {found.path / 'text_encoder' / 'config.json'}"
        )


def _check_content(found: Examination) -> None:
    """The export's own inventory, where it is shipped, must be the one that the contract was written for."""
    path = found.path / CONTENT_FILE
    declared = found.contract.checkpoint_content_sha256 if found.contract else None
    if declared is None or not path.is_file():
        return
    try:
        aggregate = read_json_object(path).get("aggregate_sha256")
    except CheckpointError as error:
        found.problems.append(str(error))
        return
    if aggregate != declared:
        found.problems.append(
            f"{path}: aggregate_sha256 is {aggregate!r}, expected {declared}, the checkpoint_content_sha256 of the "
            "contract: contract and weights are of different exports"
        )
