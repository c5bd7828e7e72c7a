"""Strict reading of the components' config.json: every key known, of the right type, and within what is implemented.

Each `parse_*` returns the configuration, or None, and appends what is wrong to `problems`, naming file, field, value
and what was expected. A key that is not known may change what the model computes, so it is refused by name.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from rushes_core.clip import AUDIO_LATENTS_PER_SECOND, AUDIO_SAMPLE_RATE
from rushes_core.contract import is_integer, is_number
from rushes_core.errors import CheckpointError
from rushes_core.json_file import read_json_object

from rushes_worker.checkpoint.configs import (
    AudioVaeConfig,
    TextEncoderConfig,
    TransformerConfig,
    VideoVaeConfig,
    VisionConfig,
)
from rushes_worker.checkpoint.manifest import TEXT_LAYERS_USED

_METADATA = frozenset({"_class_name", "_diffusers_version", "_name_or_path"})
_TEXT_METADATA = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "image_token_id",
        "initializer_range",
        "model_type",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "video_token_id",
        "vision_end_token_id",
        "vision_start_token_id",
    }
)
"""Keys of a transformers config that do not change what the text encoder computes for a prompt."""

_NOT_IMPLEMENTED = {
    "quantization_config": "no such field: quantised weights are not implemented, use the BF16 export",
    "adaln_rank": "no such field: rank-reduced modulation is not implemented",
    "pdd_steps": "no such field: students of progressive distillation are not implemented",
}
_MAY_BE_ZERO = frozenset(
    {"token_drop", "decoder_num_register_tokens", "num_refiner_layers", "deepstack_visual_indexes"}
)
_ANY_SIGN = frozenset({"latents_mean"})
_MAX_INTEGER = 10_000_000
_MAX_LAYERS = 1000
_MAX_ENTRIES = 256

_Config = TypeVar("_Config", TransformerConfig, VideoVaeConfig, AudioVaeConfig, TextEncoderConfig, VisionConfig)


class _Section:
    """One object of a config file: `prefix` is its path inside the file."""

    def __init__(self, path: Path, values: Mapping[str, object], problems: list[str], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.problems = problems
        self.prefix = prefix

    def fault(self, name: str, expected: str) -> None:
        found = f"is {_short(self.values[name])}" if name in self.values else "is missing"
        self.problems.append(f"{self.path}: {self.prefix}{name} {found}, expected {expected}")

    def expect(self, name: str, *allowed: object) -> None:
        """`name` is one of `allowed`, or absent where None is allowed."""
        if self.values.get(name) not in allowed:
            self.fault(name, " or ".join(repr(value) for value in allowed if value is not None))

    def section(self, name: str) -> "_Section | None":
        value = self.values.get(name)
        if not isinstance(value, dict):
            self.fault(name, "an object")
            return None
        return _Section(self.path, value, self.problems, f"{self.prefix}{name}.")

    def refuse_unknown(self, known: Collection[str]) -> None:
        for name in sorted(set(self.values) - set(known)):
            self.fault(name, _NOT_IMPLEMENTED.get(name, "no such field: what it would change is not implemented"))

    def build(self, kind: type[_Config], values: Mapping[str, object] | None = None) -> _Config | None:
        """`kind` from its fields, or None if one is missing or of the wrong type."""
        before = len(self.problems)
        source = self.values if values is None else values
        arguments = {}
        for field in fields(kind):
            if field.name not in source:
                self.problems.append(f"{self.path}: {self.prefix}{field.name} is missing")
                continue
            value, expected = _convert(source[field.name], field.type, field.name)
            if expected is not None:
                self.fault(field.name, expected)
            arguments[field.name] = value
        return kind(**arguments) if len(self.problems) == before else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _convert(value: object, kind: Any, name: str) -> tuple[object, str | None]:
    """`value` as `kind` (int, float, str or tuples of them), or what was expected instead."""
    if get_origin(kind) is tuple:
        entries = get_args(kind)
        if not isinstance(value, list) or not 0 < len(value) <= _MAX_ENTRIES:
            return None, "a list"
        if entries[-1] is not Ellipsis and len(value) != len(entries):
            return None, f"a list of {len(entries)}"
        converted = [_convert(entry, entries[0], name) for entry in value]
        wrong = next((expected for _, expected in converted if expected is not None), None)
        return tuple(entry for entry, _ in converted), None if wrong is None else f"a list, each entry {wrong}"
    if kind is str:
        return value, None if isinstance(value, str) and value else "a string"
    if kind is int:
        least = 0 if name in _MAY_BE_ZERO else 1
        most = _MAX_LAYERS if "layers" in name or name == "depth" else _MAX_INTEGER
        within = is_integer(value) and least <= value <= most
        return value, None if within else f"an integer in {least}..{most}"
    assert kind is float, kind
    if not is_number(value):
        return None, "a number"
    number = float(value)
    return number, None if number > 0 or name in _ANY_SIGN else "a number above 0"


def _read(path: Path, problems: list[str]) -> _Section | None:
    try:
        return _Section(path, read_json_object(path), problems)
    except CheckpointError as error:
        problems.append(str(error))
        return None


def _parse_diffusers(folder: Path, kind: type[_Config], class_name: str, problems: list[str]) -> _Config | None:
    section = _read(folder / "config.json", problems)
    if section is None:
        return None
    section.expect("_class_name", class_name)
    section.refuse_unknown(_METADATA | {field.name for field in fields(kind)})
    return section.build(kind)


def _require(problems: list[str], path: Path, *rules: tuple[bool, str]) -> None:
    problems += [f"{path}: {message}" for holds, message in rules if not holds]


def parse_transformer(folder: Path, problems: list[str]) -> TransformerConfig | None:
    """`transformer/config.json`."""
    config = _parse_diffusers(folder, TransformerConfig, "MiniMaxH3Transformer3DModel", problems)
    if config is None:
        return None
    rotary = 6 * config.rope_freq_dim
    _require(
        problems,
        folder / "config.json",
        (config.patch_size == (1, 2, 2), f"patch_size is {list(config.patch_size)}, expected [1, 2, 2]"),
        (
            config.attention_head_dim >= rotary,
            f"attention_head_dim is {config.attention_head_dim}, expected at least 6 * rope_freq_dim = {rotary}",
        ),
        (config.freq_dim % 2 == 0, f"freq_dim is {config.freq_dim}, expected an even number"),
    )
    return config


def parse_video_vae(folder: Path, problems: list[str]) -> VideoVaeConfig | None:
    """`vae/config.json`. Compression, clip length and token drop must be those of the service's clip arithmetic."""
    config = _parse_diffusers(folder, VideoVaeConfig, "AutoencoderKLMiniMaxH3", problems)
    if config is None:
        return None
    levels = len(config.block_out_channels)
    rotary = int(config.decoder_attention_head_dim * config.decoder_rope_dim_ratio)
    lists = {
        "latents_mean": (len(config.latents_mean), config.latent_channels),
        "latents_std": (len(config.latents_std), config.latent_channels),
        "spatial_downsample_factors": (len(config.spatial_downsample_factors), levels),
        "temporal_downsample_factors": (len(config.temporal_downsample_factors), levels),
    }
    _require(
        problems,
        folder / "config.json",
        *((found == want, f"{name} has {found} entries, expected {want}") for name, (found, want) in lists.items()),
        (config.out_channels == 3, f"out_channels is {config.out_channels}, expected 3 (RGB)"),
        (config.spatial_compression == 16, f"spatial_downsample_factors compress by {config.spatial_compression}, "
         "expected 16"),
        (config.temporal_compression == 4, f"temporal_downsample_factors compress by {config.temporal_compression}, "
         "expected 4"),
        (config.clip_length == 17, f"clip_length is {config.clip_length}, expected 17"),
        (config.token_drop == 3, f"token_drop is {config.token_drop}, expected 3"),
        (config.decoder_rope_dim_ratio <= 1 and rotary > 0 and rotary % 6 == 0,
         f"decoder_rope_dim_ratio is {config.decoder_rope_dim_ratio}, expected a share of decoder_attention_head_dim "
         f"that is a multiple of 6, got {rotary} channels"),
        (config.spatial_padding_mode == "reflect",
         f"spatial_padding_mode is {config.spatial_padding_mode!r}, expected 'reflect'"),
    )  # fmt: skip
    mismatched = any(found != want for name, (found, want) in lists.items() if name.endswith("factors"))
    return None if mismatched else config


def parse_audio_vae(folder: Path, problems: list[str]) -> AudioVaeConfig | None:
    """`audio_vae/config.json`. Rate and hop must be those of the service's clip arithmetic."""
    config = _parse_diffusers(folder, AudioVaeConfig, "AutoencoderKLMiniMaxH3Audio", problems)
    if config is None:
        return None
    hop = AUDIO_SAMPLE_RATE // AUDIO_LATENTS_PER_SECOND
    stages, kernels = len(config.decoder_rates), len(config.resblock_kernel_sizes)
    lists = {
        "latents_mean": (len(config.latents_mean), config.latent_channels),
        "latents_std": (len(config.latents_std), config.latent_channels),
        "decoder_kernel_sizes": (len(config.decoder_kernel_sizes), stages),
        "resblock_dilation_sizes": (len(config.resblock_dilation_sizes), kernels),
    }
    _require(
        problems,
        folder / "config.json",
        *((found == want, f"{name} has {found} entries, expected {want}") for name, (found, want) in lists.items()),
        (config.sampling_rate == AUDIO_SAMPLE_RATE,
         f"sampling_rate is {config.sampling_rate}, expected {AUDIO_SAMPLE_RATE}"),
        (config.hop == hop, f"decoder_rates multiply to {config.hop}, expected {hop}"),
        (prod(config.encoder_rates) == hop, f"encoder_rates multiply to {prod(config.encoder_rates)}, expected {hop}"),
        (config.latent_dim % config.latent_channels == 0,
         f"latent_dim is {config.latent_dim}, expected a multiple of latent_channels = {config.latent_channels}"),
        (config.decoder_dim % 2**stages == 0,
         f"decoder_dim is {config.decoder_dim}, expected a multiple of 2^{stages}: each stage halves it"),
        (all(kernel >= rate and (kernel - rate) % 2 == 0
             for kernel, rate in zip(config.decoder_kernel_sizes, config.decoder_rates, strict=False)),
         f"decoder_kernel_sizes is {list(config.decoder_kernel_sizes)}, expected each to exceed its rate evenly"),
        (all(kernel % 2 for kernel in config.resblock_kernel_sizes),
         f"resblock_kernel_sizes is {list(config.resblock_kernel_sizes)}, expected odd numbers"),
    )  # fmt: skip
    mismatched = any(found != want for name, (found, want) in lists.items() if not name.startswith("latents"))
    return None if mismatched else config


def parse_text_encoder(folder: Path, problems: list[str]) -> tuple[TextEncoderConfig, VisionConfig] | None:
    """`text_encoder/config.json`: the language model, and the vision tower as far as its tensors are concerned."""
    section = _read(folder / "config.json", problems)
    if section is None:
        return None
    section.expect("model_type", "qwen3_vl")
    section.expect("architectures", ["Qwen3VLForConditionalGeneration"])
    section.expect("tie_word_embeddings", False, None)
    section.refuse_unknown(_TEXT_METADATA | {"text_config", "vision_config", "tie_word_embeddings"})
    text, vision = section.section("text_config"), section.section("vision_config")
    if text is None or vision is None:
        return None
    text_config, vision_config = _text_config(text), _vision_config(vision)
    if text_config is None or vision_config is None:
        return None
    if text_config.hidden_size != vision_config.out_hidden_size:
        vision.fault("out_hidden_size", f"{text_config.hidden_size}, the hidden_size of text_config")
    return text_config, vision_config


def _text_config(section: _Section) -> TextEncoderConfig | None:
    section.expect("model_type", "qwen3_vl_text", None)
    section.expect("hidden_act", "silu")
    section.expect("attention_bias", False, None)
    section.expect("tie_word_embeddings", False, None)
    known = {"attention_bias", "hidden_act", "rope_parameters", "rope_scaling", "tie_word_embeddings"}
    section.refuse_unknown(_TEXT_METADATA | known | {field.name for field in fields(TextEncoderConfig)})
    # transformers 4 calls the object rope_scaling and keeps the base beside it, transformers 5 puts both together
    name = "rope_parameters" if section.values.get("rope_parameters") is not None else "rope_scaling"
    rope = section.section(name)
    if rope is None:
        return None
    rope.refuse_unknown({"mrope_interleaved", "mrope_section", "rope_theta", "rope_type", "type"})
    rope.expect("rope_type", "default", None)
    rope.expect("type", "default", None)
    values = dict(section.values)
    if "rope_theta" in rope.values:
        values.setdefault("rope_theta", rope.values["rope_theta"])
        if values["rope_theta"] != rope.values["rope_theta"]:
            section.fault("rope_theta", f"{rope.values['rope_theta']!r}, as {name} says")
    config = section.build(TextEncoderConfig, values)
    if config is None:
        return None
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % key_heads:
        section.fault("num_attention_heads", f"a multiple of num_key_value_heads = {key_heads}")
    if config.head_dim % 2:
        section.fault("head_dim", "an even number")
    if config.num_hidden_layers < TEXT_LAYERS_USED:
        section.fault(
            "num_hidden_layers", f"at least {TEXT_LAYERS_USED}: the prompt is read after layer {TEXT_LAYERS_USED}"
        )
    return config


def _vision_config(section: _Section) -> VisionConfig | None:
    known = {"hidden_act", "rope_parameters"} | {field.name for field in fields(VisionConfig)}
    section.refuse_unknown(_TEXT_METADATA | known)
    return section.build(VisionConfig)
