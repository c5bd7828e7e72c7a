"""RMSNorm over the last dimension, alone and followed by the AdaLN modulation or the rotary rotation.

    norm(x)     = x * rsqrt(mean(x^2) + eps) * weight
    modulate    = norm(x) * (1 + scale) + shift
    rotate      = the first 2R channels of each head turned by (cos, sin), channel j paired with channel j + R

Everything inside one function is fp32 and rounded once, to the dtype of the input.

Shapes: S rows, C channels, H heads, D head dimension, R rotary angles.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of `x` (..., C) by its root mean square and scale by `weight` (C,).

    Returns:
        (..., C), the dtype of `x`.
    """
    return _normalised(x, weight, eps).to(x.dtype)


def rms_norm_modulate(x_SC: Tensor, weight_C: Tensor, scale_C: Tensor, shift_C: Tensor, eps: float) -> Tensor:
    """`rms_norm`, then one scale and shift for all rows.

    Args:
        x_SC: (S, C) bf16 or fp32.
        weight_C, scale_C, shift_C: (C,).

    Returns:
        (S, C), the dtype of `x_SC`.
    """
    return torch.addcmul(shift_C.float(), _normalised(x_SC, weight_C, eps), 1 + scale_C.float()).to(x_SC.dtype)


def rms_norm_rotate(x_SHD: Tensor, weight_D: Tensor, cos_SR: Tensor, sin_SR: Tensor, eps: float) -> Tensor:
    """`rms_norm` of every head, then the rotary rotation; channels from 2R on are only normalised.

    Args:
        x_SHD: (S, H, D) bf16 or fp32.
        weight_D: (D,).
        cos_SR, sin_SR: (S, R) fp32, 2R <= D.

    Returns:
        (S, H, D), the dtype of `x_SHD`.
    """
    R = cos_SR.shape[-1]
    normed_SHD = _normalised(x_SHD, weight_D, eps)
    x1, x2, rest = normed_SHD.split([R, R, x_SHD.shape[-1] - 2 * R], dim=-1)
    cos, sin = cos_SR[:, None], sin_SR[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1).to(x_SHD.dtype)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
