"""Audio VAE decoder: a BigVGAN vocoder from audio latents to a waveform, in fp32 throughout.

Shapes: B = 2 stereo channels as a batch, A latents, C channels of a layer, N samples of a layer.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rushes_worker.checkpoint.configs import AudioVaeConfig
from rushes_worker.checkpoint.weights import WeightSource


class AudioVaeDecoder:
    """Decodes normalised stereo audio latents to samples."""

    def __init__(self, config: AudioVaeConfig, weights: WeightSource, *, device: torch.device | str) -> None:
        """Load the decoder half of the VAE and fold its weight norms.

        Args:
            weights: the tensors of the audio_vae component; only `dec_in_proj` and `decoder.*` are read.

        Raises:
            ValueError: a resampling filter has another length than the twelve taps of the model.
        """
        self.config = config
        self.device = torch.device(device)
        load = _Loader(weights, self.device)
        self._mean = torch.tensor(config.latents_mean, device=self.device).unsqueeze(-1)
        self._std = torch.tensor(config.latents_std, device=self.device).unsqueeze(-1)
        self._in_proj = _Conv(load("dec_in_proj.weight"), load("dec_in_proj.bias"))
        self._conv_pre = load.normed_conv("decoder.conv_pre")
        kernels = config.resblock_kernel_sizes
        self._stages = [
            _Stage(
                rate=rate,
                up=load.normed_conv(f"decoder.ups.{i}.0"),
                blocks=[
                    _AmpBlock(load, f"decoder.resblocks.{len(kernels) * i + j}", dilations)
                    for j, dilations in enumerate(config.resblock_dilation_sizes)
                ],
            )
            for i, rate in enumerate(config.decoder_rates)
        ]
        self._activation_post = _Activation(load, "decoder.activation_post")
        self._conv_post = load.normed_conv("decoder.conv_post", has_bias=False)

    def decode(self, latents_BCA: Tensor) -> Tensor:
        """The waveform of a soundtrack.

        Args:
            latents_BCA: (2, latent_channels, A), normalised as the diffusion model leaves them, left channel first.

        Returns:
            (2, A * hop) fp32 in [-1, 1] at the model's sampling rate.

        Raises:
            ValueError: the latents have another shape.
        """
        if latents_BCA.ndim != 3 or latents_BCA.shape[1] != self.config.latent_channels:
            raise ValueError(
                f"audio latents of shape {tuple(latents_BCA.shape)}, expected [2, {self.config.latent_channels}, A]"
            )
        # cuDNN would round the operands of fp32 convolutions to TF32, which is audible here
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, fp32_precision="ieee"):
            x_BCN = latents_BCA.to(self.device, torch.float32) * self._std + self._mean
            x_BCN = self._conv_pre(self._in_proj(x_BCN))
            for stage in self._stages:
                x_BCN = stage(x_BCN)
            x_BCN = self._conv_post(self._activation_post(x_BCN))
        return x_BCN.squeeze(1).clamp_(-1.0, 1.0)


class _Conv(NamedTuple):
    """A convolution that keeps the length."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x_BCN: Tensor, dilation: int = 1) -> Tensor:
        padding = dilation * (self.weight.shape[-1] - 1) // 2
        return F.conv1d(x_BCN, self.weight, self.bias, padding=padding, dilation=dilation)


class _Loader:
    def __init__(self, weights: WeightSource, device: torch.device) -> None:
        self._weights = weights
        self._device = device

    def __call__(self, name: str) -> Tensor:
        return self._weights.get(name).to(self._device, torch.float32)

    def normed_conv(self, name: str, has_bias: bool = True) -> _Conv:
        """A convolution stored as g and v: w = g * v / |v|, with the norm over all dimensions but the first."""
        v = self(f"{name}.weight_v")
        weight = self(f"{name}.weight_g") * v / torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True)
        return _Conv(weight, self(f"{name}.bias") if has_bias else None)


class _Stage(NamedTuple):
    """Upsampling by `rate` to half the channels, then the mean of residual blocks with different kernels."""

    rate: int
    up: _Conv
    blocks: "list[_AmpBlock]"

    def __call__(self, x_BCN: Tensor) -> Tensor:
        padding = (self.up.weight.shape[-1] - self.rate) // 2
        x_BCN = F.conv_transpose1d(x_BCN, self.up.weight, self.up.bias, stride=self.rate, padding=padding)
        total = self.blocks[0](x_BCN)
        for block in self.blocks[1:]:
            total += block(x_BCN)
        return total / len(self.blocks)


class _AmpBlock:
    """Residual pairs of a dilated and a plain convolution, each after an alias-free activation."""

    def __init__(self, load: _Loader, name: str, dilations: tuple[int, ...]) -> None:
        self._dilations = dilations
        self._convs = [
            (load.normed_conv(f"{name}.convs1.{m}"), load.normed_conv(f"{name}.convs2.{m}"))
            for m in range(len(dilations))
        ]
        self._activations = [_Activation(load, f"{name}.activations.{j}") for j in range(2 * len(dilations))]

    def __call__(self, x_BCN: Tensor) -> Tensor:
        for m, dilation in enumerate(self._dilations):
            dilated, plain = self._convs[m]
            y = dilated(self._activations[2 * m](x_BCN), dilation)
            x_BCN = x_BCN + plain(self._activations[2 * m + 1](y))
        return x_BCN


class _Activation:
    """SnakeBeta at twice the sampling rate: upsample, x + sin(e^alpha x)^2 / (e^beta + 1e-9), downsample.

    The doubled signal is kept as its even and its odd samples, two channels of the original length: with that the
    twelve-tap resampling filters are plain convolutions over seven samples, and nothing is interleaved.
    """

    def __init__(self, load: _Loader, name: str) -> None:
        self._frequency = load(f"{name}.act.alpha").exp().view(-1, 1, 1)
        self._gain = (load(f"{name}.act.beta").exp() + 1e-9).reciprocal().view(-1, 1, 1)
        up = _taps(load(f"{name}.upsample.filter"), f"{name}.upsample.filter")
        down = _taps(load(f"{name}.downsample.lowpass.filter"), f"{name}.downsample.lowpass.filter")
        # even sample n sees x[n-3..n+2], odd sample n sees x[n-2..n+3]; (2, 1, 7). Upsampling by two halves the level.
        even, odd = 2 * up[1::2].flip(0), 2 * up[0::2].flip(0)
        self._up = torch.stack([F.pad(even, (0, 1)), F.pad(odd, (1, 0))]).unsqueeze(1)
        # output n sees even[n-2..n+3] and odd[n-3..n+2]; (1, 2, 7)
        self._down = torch.stack([F.pad(down[1::2], (1, 0)), F.pad(down[0::2], (0, 1))]).unsqueeze(0)

    def __call__(self, x_BCN: Tensor) -> Tensor:
        B, C, N = x_BCN.shape
        x = F.pad(x_BCN.reshape(B * C, 1, N), (3, 3), mode="replicate")
        phases = F.conv1d(x, self._up).view(B, C, 2, N)
        phases = phases + (phases * self._frequency).sin().square() * self._gain
        # beyond its ends the doubled signal repeats its first sample, an even one, and its last, an odd one
        before = phases[:, :, :1, :1].expand(B, C, 2, 3)
        after = phases[:, :, 1:, -1:].expand(B, C, 2, 3)
        phases = torch.cat([before, phases, after], dim=-1).view(B * C, 2, N + 6)
        return F.conv1d(phases, self._down).view(B, C, N)


def _taps(stored: Tensor, name: str) -> Tensor:
    taps = stored.flatten()
    if len(taps) != 12:
        raise ValueError(f"{name} has {len(taps)} taps, expected 12")
    return taps
