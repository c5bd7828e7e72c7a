"""A tiny random checkpoint in the published layout: complete, servable in seconds on a CPU, the same for one seed.

Geometry that the service's arithmetic depends on (latent channels, compression, rates, patch size) is the released
one; only widths and depths shrink. `random_weights.py` says how the weights are drawn.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rushes_core.contract import CONTRACT_FILE, PIPELINE_CLASS, SCHEMA_VERSION, TILE_SIZE
from rushes_core.errors import CheckpointError
from rushes_core.json_file import read_json_object
from rushes_core.tokenizer import H3_TOKENS, QWEN_TOKENS, QWEN_WORD_TOKENS
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor

from rushes_worker.checkpoint.configs import (
    AudioVaeConfig,
    TextEncoderConfig,
    TransformerConfig,
    VideoVaeConfig,
    VisionConfig,
)
from rushes_worker.checkpoint.inventory import CONTENT_FILE, aggregate
from rushes_worker.checkpoint.random_weights import RandomWeights, Sizes, Source
from rushes_worker.checkpoint.student import AUDIO_SHIFT, DENOISING_STEPS, VIDEO_SHIFT

DIFFUSERS_VERSION = "0.36.0.dev0"
_MODEL_PREFIX = "rushes/tiny-fasth3-8-step-"

_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Profile:
    """The sizes of one tiny checkpoint."""

    transformer: TransformerConfig
    text_encoder: TextEncoderConfig
    mrope_section: tuple[int, int, int]
    sparsity: float = 0.9
    gates: bool = True
    """False stores all sparse-attention gates as zero, which makes the coarse branch vanish."""


_DEMO = Profile(
    transformer=TransformerConfig(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=48,
        num_layers=2,
        num_refiner_layers=2,
        ffn_dim=96,
        in_channels=24,
        audio_in_channels=32,
        patch_size=(1, 2, 2),
        text_dim=32,
        freq_dim=16,
        time_embed_hidden_dim=64,
        time_embed_dim=32,
        rope_freq_dim=2,
        rope_theta=10000.0,
        norm_eps=1e-5,
        qk_norm_eps=1e-5,
        final_norm_eps=1e-5,
    ),
    text_encoder=TextEncoderConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=52,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rope_theta=5_000_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
    ),
    mrope_section=(4, 2, 2),
)

PROFILES: Mapping[str, Profile] = {
    "demo": _DEMO,
    "dense": replace(_DEMO, sparsity=0.0, gates=False),
    "wide": replace(
        _DEMO,
        transformer=replace(
            _DEMO.transformer,
            num_attention_heads=4,
            attention_head_dim=128,
            hidden_size=256,
            ffn_dim=512,
            freq_dim=256,
            time_embed_hidden_dim=256,
            time_embed_dim=128,
            rope_freq_dim=16,
        ),
    ),
    "split": replace(
        _DEMO,
        transformer=replace(_DEMO.transformer, num_attention_heads=56),
        text_encoder=replace(_DEMO.text_encoder, num_attention_heads=16, num_key_value_heads=8),
    ),
}
"""demo: what the demo and most tests serve. dense: no sparsity, no gates, for comparison with dense implementations.
wide: heads of 128 and the released rotary width, as fast kernels want them. split: the released numbers of heads and
groups, for every number of ranks that is served."""

VISION = VisionConfig(
    depth=2,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    in_channels=3,
    patch_size=16,
    temporal_patch_size=2,
    spatial_merge_size=2,
    out_hidden_size=32,
    num_position_embeddings=64,
    deepstack_visual_indexes=(0, 1),
)


def _statistics(name: str, count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means around 0 and deviations around 1, rounded as a config file shows them."""
    generator = Source(0).generator(name)
    means = torch.randn(count, generator=generator) * 0.3
    deviations = 0.7 + 0.6 * torch.rand(count, generator=generator)
    return tuple(round(x, 4) for x in means.tolist()), tuple(round(x, 4) for x in deviations.tolist())


def _video_vae_config() -> VideoVaeConfig:
    means, deviations = _statistics("vae", 24)
    return VideoVaeConfig(
        in_channels=3,
        out_channels=3,
        latent_channels=24,
        block_out_channels=(8, 8, 16, 16, 16, 16),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 2, 2, 1, 1),
        temporal_downsample_factors=(1, 2, 2, 1, 1, 1),
        norm_num_groups=4,
        norm_eps=1e-6,
        spatial_padding_mode="reflect",
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        decoder_num_register_tokens=2,
        decoder_ffn_mult=2,
        decoder_rope_theta=100.0,
        decoder_rope_dim_ratio=0.75,
        decoder_norm_eps=1e-5,
        clip_length=17,
        token_drop=3,
        latents_mean=means,
        latents_std=deviations,
    )


def _audio_vae_config() -> AudioVaeConfig:
    means, deviations = _statistics("audio_vae", 32)
    return AudioVaeConfig(
        encoder_dim=4,
        encoder_rates=(2, 4, 4, 5, 5),
        latent_dim=128,
        latent_channels=32,
        num_attention_heads=2,
        decoder_dim=128,
        decoder_rates=(5, 5, 2, 2, 2, 2, 2),
        decoder_kernel_sizes=(9, 9, 4, 4, 4, 4, 4),
        # sound is most of what a clip of this model costs: two short blocks a stage, where the released model has three
        resblock_kernel_sizes=(3, 7),
        resblock_dilation_sizes=((1,), (3,)),
        sampling_rate=32000,
        latents_mean=means,
        latents_std=deviations,
    )


def write_tiny_checkpoint(path: Path, *, seed: int = 0, profile: str = "demo", force: bool = False) -> None:
    """Write a complete checkpoint to the directory `path`; its contract appears last, when the rest is there.

    Args:
        path: a directory that does not exist or is empty; with `force` also one that holds a tiny checkpoint.
        seed: seeds all weights; the same seed gives the same bytes on one torch release.
        profile: a key of `PROFILES`.

    Raises:
        ValueError: `path` is a file or has other content, or there is no such profile.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile {profile!r} is not one of {', '.join(PROFILES)}")
    if not path.is_dir() and (path.exists() or path.is_symlink()):
        raise ValueError(f"{path}: not a directory")
    if path.is_dir() and any(path.iterdir()):
        if not force:
            raise ValueError(f"{path}: not empty")
        _clear(path)
    path.mkdir(parents=True, exist_ok=True)
    # inside `path`, which may be a mount of its own, so that moving up is a rename
    partial = path / f".partial-{os.getpid()}"
    try:
        _write(partial, seed, PROFILES[profile], profile)
        for child in sorted(partial.iterdir(), key=lambda child: child.name == CONTRACT_FILE):
            child.rename(path / child.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clear(path: Path) -> None:
    """Empty `path` if what it holds was written here; anything else, such as 148 GB of weights, is left alone."""
    try:
        model_id = read_json_object(path / CONTRACT_FILE).get("model_id")
    except CheckpointError:
        model_id = None
    if not isinstance(model_id, str) or not model_id.startswith(_MODEL_PREFIX):
        raise ValueError(f"{path}: holds something else than a tiny checkpoint; only such a one is replaced")
    for child in path.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def _write(root: Path, seed: int, profile: Profile, name: str) -> None:
    root.mkdir()
    video, audio = _video_vae_config(), _audio_vae_config()
    sizes = Sizes(profile.transformer, profile.text_encoder, VISION, video, audio)
    weights = sizes.weights(Source(seed), gates=profile.gates)
    _write_model(
        root / "transformer",
        {"_class_name": "MiniMaxH3Transformer3DModel", "_diffusers_version": DIFFUSERS_VERSION}
        | asdict(profile.transformer),
        _drawn(weights["transformer"]),
        shards=2,
    )
    _write_model(
        root / "text_encoder",
        _text_encoder_json(profile),
        _drawn(weights["text_encoder"]),
        shards=2,
        stem="model",
    )
    _write_model(
        root / "vae",
        {"_class_name": "AutoencoderKLMiniMaxH3", "_diffusers_version": DIFFUSERS_VERSION} | asdict(video),
        _drawn(weights["vae"]),
    )
    _write_model(
        root / "audio_vae",
        {"_class_name": "AutoencoderKLMiniMaxH3Audio", "_diffusers_version": DIFFUSERS_VERSION} | asdict(audio),
        _drawn(weights["audio_vae"]),
    )
    for folder, shift in (("scheduler", VIDEO_SHIFT), ("audio_scheduler", AUDIO_SHIFT)):
        config = {"_class_name": "MiniMaxH3Scheduler", "_diffusers_version": DIFFUSERS_VERSION, "shift": shift}
        _write_json(root / folder / "scheduler_config.json", config)
    write_tokenizer(root / "tokenizer")
    _write_json(root / "processor" / "preprocessor_config.json", _PREPROCESSOR)
    _write_json(root / "modular_model_index.json", _model_index())
    _write_json(root / "provenance.json", {"base_model": f"tiny://{name}@{seed}"})
    content = _content(root, sorted((root / "transformer").iterdir()))
    _write_json(root / CONTENT_FILE, content)
    _write_json(root / CONTRACT_FILE, _contract(name, profile, str(content["aggregate_sha256"])))


def _drawn(weights: RandomWeights) -> dict[str, Tensor]:
    return {name: weights.get(name) for name in weights.manifest}


def _contract(name: str, profile: Profile, content_sha256: str) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "model_id": f"{_MODEL_PREFIX}{name}",
        "task": "t2av",
        "attention_backend": "VIDEO_SPARSE_ATTN_H3",
        "vsa_kernel": "sm100a",
        "vsa_sparsity": profile.sparsity,
        "vsa_tile_size": TILE_SIZE,
        "dmd_denoising_steps": DENOISING_STEPS,
        "transformer_forwards": len(DENOISING_STEPS),
        "num_inference_steps": len(DENOISING_STEPS) + 1,
        "guidance_scale": 1.0,
        "video_scheduler_shift": VIDEO_SHIFT,
        "audio_scheduler_shift": AUDIO_SHIFT,
        "checkpoint_step": 0,
        "checkpoint_content_sha256": content_sha256,
        "num_gpus": 1,
        "sequence_parallel_size": 1,
        "use_fsdp_inference": False,
        "torch_compile": False,
    }


def _content(root: Path, paths: list[Path]) -> dict[str, object]:
    files = [
        {
            "path": path.relative_to(root).as_posix(),
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in paths
    ]
    return {
        "aggregate_sha256": aggregate([(str(file["path"]), str(file["sha256"])) for file in files]),
        "file_count": len(files),
        "files": files,
    }


def _model_index() -> dict[str, object]:
    components = {
        "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
        "tokenizer": ("transformers", "Qwen2TokenizerFast"),
        "processor": ("transformers", "Qwen3VLProcessor"),
        "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
        "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
        "transformer": ("diffusers", "MiniMaxH3Transformer3DModel"),
        "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
        "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    }
    index: dict[str, object] = {
        "_class_name": PIPELINE_CLASS,
        "_diffusers_version": DIFFUSERS_VERSION,
        "_blocks_class_name": "MiniMaxH3Blocks",
    }
    for folder, (library, kind) in components.items():
        source = {
            "type_hint": [library, kind],
            "pretrained_model_name_or_path": None,
            "subfolder": folder,
            "variant": None,
            "revision": None,
        }
        index[folder] = [library, kind, source]
    return index


_PREPROCESSOR: dict[str, object] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def _text_encoder_json(profile: Profile) -> dict[str, object]:
    text = asdict(profile.text_encoder)
    rope_theta = text.pop("rope_theta")
    ids = {token: 256 + index for index, token in enumerate(QWEN_TOKENS)}
    text |= {
        "model_type": "qwen3_vl_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_theta": rope_theta,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": profile.mrope_section,
            "rope_type": "default",
        },
        "use_cache": True,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": asdict(VISION)
        | {"model_type": "qwen3_vl", "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02},
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
    }


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges, so a prompt has one token per UTF-8 byte, laid out like the published tokenizer.

    As there, the seven tokens that MiniMax-H3 adds to Qwen's stand in tokenizer_config.json alone.
    """
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in QWEN_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in QWEN_WORD_TOKENS])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "additional_special_tokens": [*QWEN_TOKENS[1:], *H3_TOKENS],
            "add_prefix_space": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "errors": "replace",
            "model_max_length": 262144,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": False,
        },
    )
    _write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")


def _write_model(
    folder: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    *,
    shards: int = 1,
    stem: str = "diffusion_pytorch_model",
) -> None:
    """Write config.json and the tensors, in `shards` files of about equal size with an index when there are several."""
    _write_json(folder / "config.json", config)
    if shards == 1:
        _save(dict(tensors), folder / f"{stem}.safetensors")
        return
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    weight_map: dict[str, str] = {}
    position = 0
    for name, tensor in tensors.items():
        part = min(position * shards // total, shards - 1)
        parts[part][name] = tensor
        weight_map[name] = f"{stem}-{part + 1:05}-of-{shards:05}.safetensors"
        position += tensor.nbytes
    for part, held in enumerate(parts, start=1):
        _save(held, folder / f"{stem}-{part:05}-of-{shards:05}.safetensors")
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / f"{stem}.safetensors.index.json", index)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it readable by its owner alone


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
