"""Random weights under the published names, scaled so that every stage matters to the result.

Normalisation weights are off their usual 1, residual branches carry signal, the picture has variance and the sound an
ordinary level.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rushes_worker.checkpoint.configs import (
    AudioVaeConfig,
    TextEncoderConfig,
    TransformerConfig,
    VideoVaeConfig,
    VisionConfig,
)
from rushes_worker.checkpoint.manifest import (
    RESAMPLING_TAPS,
    Manifest,
    TensorSpec,
    audio_vae_tensors,
    text_encoder_tensors,
    transformer_tensors,
    video_vae_tensors,
)

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Source:
    """Draws every tensor from a generator of its own, so one may change without the others."""

    seed: int
    device: torch.device | str = "cpu"

    def generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def randn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """fp32; the same for one seed, name and kind of device."""
        return torch.randn(shape, generator=self.generator(name), device=self.device)

    def normal(self, name: str, spec: TensorSpec, mean: float, deviation: float) -> Tensor:
        return mean + deviation * self.randn(name, spec.shape)

    def plain(self, name: str, spec: TensorSpec, gain: float = 1.0) -> Tensor:
        """Fan-in scaled weights, small biases, norm weights near but not at 1."""
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "norm3.weight", "norm_out.weight")):
            return self.normal(name, spec, 1.0, 0.1)
        if len(spec.shape) == 1:
            return self.normal(name, spec, 0.0, 0.02)
        return self.normal(name, spec, 0.0, gain / math.sqrt(math.prod(spec.shape[1:])))


Rule = Callable[[Source, str, TensorSpec], Tensor]
"""The tensor of a name, before it is rounded to the dtype that it is stored in."""


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A `WeightSource` that draws a tensor whenever it is asked for it, on the source's device."""

    manifest: Manifest
    rule: Rule
    source: Source

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        spec = self.manifest[name]
        tensor = self.rule(self.source, name, spec).to(_DTYPES[spec.dtype])
        if rows is not None:
            tensor = tensor[rows]
        return (tensor if columns is None else tensor[:, columns]).contiguous()


def transformer_rule(*, gates: bool = True) -> Rule:
    """Without `gates` all sparse-attention gates are zero, which makes the coarse branch vanish."""

    def rule(source: Source, name: str, spec: TensorSpec) -> Tensor:
        if name.endswith((".norm_q.weight", ".norm_k.weight")):
            # above 1, or attention over thousands of rows is so flat that a wrong position or mask would not show
            return source.normal(name, spec, 1.8, 0.2)
        if name.endswith("to_gate_compress.weight"):
            return source.plain(name, spec, 0.7) if gates else torch.zeros(spec.shape, device=source.device)
        if ".adaln_proj." in name:
            return source.plain(name, spec, 0.8) if spec.shape[1:] else source.normal(name, spec, 0.2, 0.3)
        return source.plain(name, spec)

    return rule


def text_encoder_rule(source: Source, name: str, spec: TensorSpec) -> Tensor:
    if name.endswith("embed_tokens.weight"):
        return source.normal(name, spec, 0.0, 1.0)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return source.normal(name, spec, 1.5, 0.2)
    if name.endswith("layernorm.weight"):
        return source.normal(name, spec, 1.0, 0.1)
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        # fifty residual additions: each is kept small, or the last few layers would drown the prompt
        return source.plain(name, spec, 0.5)
    return source.plain(name, spec)


def video_vae_rule(config: VideoVaeConfig) -> Rule:
    def rule(source: Source, name: str, spec: TensorSpec) -> Tensor:
        if name.endswith((".scale1", ".scale2")):
            return source.normal(name, spec, 0.3, 0.3)
        if name.endswith("register_tokens"):
            return source.normal(name, spec, 0.0, 1.0)
        if name == "decoder.proj_out.weight":
            return _smooth_patches(source, name, config)
        return source.plain(name, spec)

    return rule


def _smooth_patches(source: Source, name: str, config: VideoVaeConfig) -> Tensor:
    """[3 * 4 * 16 * 16, dim]: every feature paints a smooth patch, so the picture is not per-pixel noise.

    Noise would cost the H.264 encoder more than the whole model costs on a tiny checkpoint.
    """
    extents = (config.temporal_compression, config.spatial_compression, config.spatial_compression)
    modes = torch.zeros(0, *extents)
    for orders, amplitude in (((0, 0, 0), 0.8), ((0, 0, 1), 0.4), ((0, 1, 0), 0.4), ((0, 1, 1), 0.2), ((1, 0, 0), 0.2)):
        axes = [
            torch.cos(math.pi * order * (torch.arange(extent) + 0.5) / extent)
            for order, extent in zip(orders, extents, strict=True)
        ]
        modes = torch.cat([modes, amplitude * torch.einsum("t,h,w->thw", *axes)[None]])
    shape = (config.out_channels, len(modes), config.decoder_dim)
    mixing = source.randn(name, shape) / math.sqrt(config.decoder_dim)
    return torch.einsum("cmd,mthw->cthwd", mixing, modes.to(source.device)).reshape(-1, config.decoder_dim)


_LOUDNESS = 0.04
"""Gain of the last convolution; puts the soundtrack's RMS near 0.1, far from a whisper and from clipping."""


def audio_vae_rule(config: AudioVaeConfig) -> Rule:
    def rule(source: Source, name: str, spec: TensorSpec) -> Tensor:
        if name.endswith(".filter"):
            return _resampling_filter().to(source.device)
        if name.endswith("zero_k_bias"):
            return torch.zeros(spec.shape, device=source.device)
        if name.endswith((".alpha", ".beta")):
            log_space = name.startswith("decoder.")
            return source.normal(name, spec, 0.0 if log_space else 1.0, 0.1)
        if name.endswith("_bias"):
            return source.normal(name, spec, 0.0, 0.02)
        if name.endswith(".weight_g"):
            return source.normal(name, spec, 1.0, 0.05) * _gain(name, config)
        weight = source.plain(name, spec)
        if name == "decoder.conv_post.weight_v":
            # without a constant part the last convolution lets no DC offset of the activations through
            weight -= weight.mean(dim=-1, keepdim=True)
        return weight

    return rule


def _gain(name: str, config: AudioVaeConfig) -> float:
    """The weight-norm gain that keeps the variance of a layer's input, less in residual branches."""
    if name.startswith("decoder.ups."):
        return math.sqrt(config.decoder_rates[int(name.split(".")[2])] / 2)
    if name.startswith("decoder.conv_post."):
        return _LOUDNESS
    return 0.4 if ".convs2." in name else 1.0


def _resampling_filter() -> Tensor:
    """[1, 1, 12] Kaiser-windowed sinc, cutoff 0.25, half width 0.3, normalised to sum 1 (Kaiser's design formulas)."""
    attenuation = 2.285 * (RESAMPLING_TAPS // 2 - 1) * math.pi * 4 * 0.3 + 7.95
    beta = 0.5842 * (attenuation - 21) ** 0.4 + 0.07886 * (attenuation - 21)
    window = torch.kaiser_window(RESAMPLING_TAPS, periodic=False, beta=beta)
    taps = window * torch.sinc(0.5 * (torch.arange(RESAMPLING_TAPS) - (RESAMPLING_TAPS - 1) / 2))
    return (taps / taps.sum()).view(1, 1, -1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of all components of a checkpoint."""

    transformer: TransformerConfig
    text_encoder: TextEncoderConfig
    vision: VisionConfig
    video_vae: VideoVaeConfig
    audio_vae: AudioVaeConfig

    def weights(self, source: Source, *, gates: bool = True) -> dict[str, RandomWeights]:
        """By component; `gates` as for `transformer_rule`."""
        drawn: dict[str, tuple[Manifest, Rule]] = {
            "transformer": (transformer_tensors(self.transformer), transformer_rule(gates=gates)),
            "text_encoder": (text_encoder_tensors(self.text_encoder, self.vision), text_encoder_rule),
            "vae": (video_vae_tensors(self.video_vae), video_vae_rule(self.video_vae)),
            "audio_vae": (audio_vae_tensors(self.audio_vae), audio_vae_rule(self.audio_vae)),
        }
        return {name: RandomWeights(manifest, rule, source) for name, (manifest, rule) in drawn.items()}
