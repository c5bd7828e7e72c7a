"""Video VAE decoder: a transformer over the latents of one tile of one temporal unit.

Shapes: C latent channels, T latent frames of the unit, Y x X latents of the canvas, t x y x x those of a tile (t = T);
B tiles at a time, N = t*y*x + suffix tokens, H heads, D head dimension, M = H*D the width.

x_BNM carries the residual in fp32, x_SM as rows S = B*N; linear layers and attention run in the compute dtype.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from rushes_kernels.heads_attention import attend_heads
from rushes_kernels.linear import gated_linear, project_heads
from rushes_kernels.norm import Update, norm_rows_
from rushes_kernels.pictures import stitch_patches
from rushes_kernels.plain import may_run_kernel
from torch import Tensor

from rushes_worker.checkpoint.configs import VideoVaeConfig
from rushes_worker.checkpoint.weights import WeightSource
from rushes_worker.model.video_tiles import TileGrid, stitch
from rushes_worker.model.video_units import TemporalUnits

# On the CPU one tile at a time keeps its pixels in the cache and its memory bounded.
CPU_TILE_BATCH = 1


class VideoVaeDecoder:
    """Decodes normalised video latents, one temporal unit at a time."""

    def __init__(
        self, config: VideoVaeConfig, weights: WeightSource, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """Load the decoder half of the VAE.

        Args:
            weights: the tensors of the vae component; only `post_quant_conv` and `decoder.*` are read.
            dtype: of linear layers and attention. Residual, norms, scales and the layers that read latents are fp32.

        Raises:
            ValueError: the rotary channels of a head do not divide over three axes.
        """
        self.config = config
        self.units = TemporalUnits.from_config(config)
        self.device = torch.device(device)
        self.dtype = dtype
        self._rotary_frequencies = _rotary_frequencies(config).to(self.device)

        def load(name: str) -> Tensor:
            return weights.get(name).to(self.device, torch.float32)

        def linear(*names: str) -> _Linear:
            return _Linear(
                torch.cat([weights.get(f"{name}.weight").to(self.device, dtype) for name in names]),
                torch.cat([weights.get(f"{name}.bias").to(self.device, dtype) for name in names]),
            )

        self._mean = torch.tensor(config.latents_mean, device=self.device)
        self._std = torch.tensor(config.latents_std, device=self.device)
        self._post_quant = _Linear(load("post_quant_conv.weight").flatten(1), load("post_quant_conv.bias"))
        self._proj_in = _Linear(load("decoder.proj_in.weight"), load("decoder.proj_in.bias"))
        # the registers are followed by one token of zeros
        self._suffix = F.pad(load("decoder.register_tokens")[0], (0, 0, 0, 1))
        self._blocks = [
            _Block(config, f"decoder.transformer_blocks.{i}", load, linear) for i in range(config.decoder_num_layers)
        ]
        self._norm_out = _Linear(load("decoder.norm_out.weight"), load("decoder.norm_out.bias"))
        self._proj_out = linear("decoder.proj_out")

    def decode_unit(
        self, latents_CTYX: Tensor, *, tile_batch: int | None = None, canvas: Tensor | None = None
    ) -> Tensor:
        """Decode one temporal unit of the canvas, tile by tile, and stitch it.

        Args:
            latents_CTYX: (C, unit_latents, Y, X), normalised as the diffusion model leaves them.
            tile_batch: tiles per call of the transformer; None means all on CUDA and one on the CPU. The result
                depends on it only by rounding.
            canvas: written instead of a new tensor.

        Returns:
            (3, unit_frames, H, W) fp32, H and W being Y and X times the spatial compression: ImageNet-normalised RGB
            with the unit's padding frames; `units.split` cuts it.

        Raises:
            ValueError: the latents have another number of channels or frames than a unit.
        """
        expected = (self.config.latent_channels, self.units.unit_latents)
        if latents_CTYX.ndim != 4 or tuple(latents_CTYX.shape[:2]) != expected:
            raise ValueError(f"latents of shape {tuple(latents_CTYX.shape)}, expected {expected} and the canvas")
        step = self.config.spatial_compression
        grid = TileGrid(latents_CTYX.shape[2] * step, latents_CTYX.shape[3] * step, step)
        latents_TYXC = latents_CTYX.to(self.device, torch.float32).permute(1, 2, 3, 0)
        latents_TYXC = F.linear(latents_TYXC * self._std + self._mean, *self._post_quant)
        tiles = grid.cut(latents_TYXC.permute(3, 0, 1, 2))
        if tile_batch is None:
            tile_batch = len(tiles) if self.device.type == "cuda" else CPU_TILE_BATCH
        if may_run_kernel("stitch_patches", tiles):
            return self._decode_at_once(tiles, tile_batch, grid, canvas)
        return stitch(self._decode_tiles(tiles, tile_batch), grid, canvas)

    def _decode_at_once(self, tiles: Tensor, tile_batch: int, grid: TileGrid, canvas: Tensor | None) -> Tensor:
        """The canvas, straight from the patches of all tiles."""
        config = self.config
        cos, sin = self._rotary(tiles.shape[2:])
        patches = [self._patches(batch, cos, sin) for batch in tiles.split(tile_batch)]
        if canvas is None:
            canvas = tiles.new_empty(config.out_channels, self.units.unit_frames, grid.height, grid.width)
        return stitch_patches(
            patches[0] if len(patches) == 1 else torch.cat(patches),
            grid.tops,
            grid.lefts,
            (grid.tile_height, grid.tile_width),
            config.spatial_compression,
            canvas,
        )

    def _decode_tiles(self, tiles: Tensor, tile_batch: int) -> Iterator[Tensor]:
        """Pixels (3, 4t, 16y, 16x) fp32 of every tile of (tiles, C, t, y, x)."""
        cos, sin = self._rotary(tiles.shape[2:])
        for batch in tiles.split(tile_batch):
            yield from self._decode_batch(batch, cos, sin)

    def _decode_batch(self, latents_BCtyx: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        _, _, t, y, x = latents_BCtyx.shape
        patches = self._patches(latents_BCtyx, cos, sin)[:, : t * y * x].float()
        step = self.config.spatial_compression
        return rearrange(
            patches,
            "B (t y x) (rgb dt dy dx) -> B rgb (t dt) (y dy) (x dx)",
            t=t,
            y=y,
            rgb=self.config.out_channels,
            dy=step,
            dx=step,
        )

    def _patches(self, latents_BCtyx: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, N, patch) in the compute dtype: what every token stands for, (rgb, dt, dy, dx); the suffix comes last."""
        B = len(latents_BCtyx)
        tokens = F.linear(rearrange(latents_BCtyx, "B C t y x -> B (t y x) C"), *self._proj_in)
        tokens = torch.cat([tokens, self._suffix.expand(B, -1, -1)], dim=1)  # (B, N, M)
        due = None
        for block in self._blocks:
            due = block(tokens, due, cos, sin)
        normed = norm_rows_(
            tokens.flatten(0, 1),
            self._norm_out.weight,
            self.config.decoder_norm_eps,
            update=due,
            shift_MC=self._norm_out.bias[None],
            centred=True,
            dtype=self.dtype,
        )
        return F.linear(normed, *self._proj_out).unflatten(0, (B, -1))

    def _rotary(self, sizes: torch.Size) -> tuple[Tensor, Tensor]:
        """cos and sin (N, rotary channels / 2) fp32: t, y, x positions in (-1, 1), the suffix at the origin."""
        axes = [(torch.arange(size, device=self.device) + 0.5) * 2 / size - 1 for size in sizes]
        positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)
        positions = F.pad(positions, (0, 0, 0, len(self._suffix)))
        angles = 2 * math.pi * positions.unsqueeze(-1) * self._rotary_frequencies
        angles = angles.flatten(1)
        return angles.cos(), angles.sin()


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor


class _Block:
    """Pre-norm attention and SwiGLU, each added to the residual with a learned scale per channel."""

    def __init__(
        self, config: VideoVaeConfig, name: str, load: Callable[[str], Tensor], linear: Callable[..., _Linear]
    ) -> None:
        self._num_heads = config.decoder_num_attention_heads
        self._head_dim = config.decoder_attention_head_dim
        self._eps = config.decoder_norm_eps
        self._norm1 = load(f"{name}.norm1.weight")
        self._norm2 = load(f"{name}.norm2.weight")
        self._scale1 = load(f"{name}.scale1")
        self._scale2 = load(f"{name}.scale2")
        self._to_qkv = linear(f"{name}.attn.to_q", f"{name}.attn.to_k", f"{name}.attn.to_v")
        self._to_out = linear(f"{name}.attn.to_out.0")
        self._ff_in = linear(f"{name}.ff.net.0.proj")
        self._ff_out = linear(f"{name}.ff.net.2")

    def __call__(self, x_BNM: Tensor, due: Update | None, cos: Tensor, sin: Tensor) -> Update:
        """Update (B, N, M) fp32 in place, but for the last addition, which the next norm over it makes.

        Args:
            due: what the block before left to be added.

        Returns:
            What is to be added to `x_BNM`, as rows.
        """
        B = len(x_BNM)
        dtype = self._to_qkv.weight.dtype
        x_SM = x_BNM.flatten(0, 1)
        y_SM = norm_rows_(x_SM, self._norm1, self._eps, update=due, dtype=dtype)
        y_BNM = y_SM.unflatten(0, (B, -1))
        qkv_BNhD = project_heads(y_BNM, *self._to_qkv, self._head_dim, 2 * self._num_heads, cos, sin, self._eps)
        out = rearrange(attend_heads(qkv_BNhD), "B N H D -> (B N) (H D)")
        attended = Update(F.linear(out, *self._to_out), self._scale1[None])

        y_SM = norm_rows_(x_SM, self._norm2, self._eps, update=attended, dtype=dtype)
        return Update(F.linear(gated_linear(y_SM, *self._ff_in), *self._ff_out), self._scale2[None])


def _rotary_frequencies(config: VideoVaeConfig) -> Tensor:
    """Frequencies of one axis: theta^(-j/n) for j < n; three axes fill half of a head's rotary channels."""
    num_rotary = int(config.decoder_attention_head_dim * config.decoder_rope_dim_ratio)
    if num_rotary % 6:
        raise ValueError(
            f"decoder_rope_dim_ratio {config.decoder_rope_dim_ratio} of decoder_attention_head_dim "
            f"{config.decoder_attention_head_dim} gives {num_rotary} rotary channels, which is no multiple of 6"
        )
    num_frequencies = num_rotary // 6
    return config.decoder_rope_theta ** (-torch.arange(num_frequencies, dtype=torch.float32) / num_frequencies)
