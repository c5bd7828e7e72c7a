"""Root-mean-square and layer norms, alone and with what stands before and behind them in a block.

    norm(x)      = x * rsqrt(mean(x^2) + eps)                   centred: of x - mean(x) instead of x
    norm_rows_   : x <- x + update * gate[tag]                  in place, where there is an update
                   y  = norm(x) * weight * (1 + scale[tag]) + shift[tag]
    rotate       : the first 2R channels of each head turned by (cos, sin), channel j paired with channel j + R

Everything inside one function is fp32. x is rounded once, and y once, from the rounded x.

Shapes: S rows, C channels, H heads, D head dimension, R rotary angles; M tags, the vectors of which a row picks by its
own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rushes_kernels.plain import may_run_kernel


@dataclass(frozen=True, eq=False)
class Update:
    """What a row's residual still lacks: the output of a layer, and the factors of its channels."""

    rows_SC: Tensor
    gate_MC: Tensor


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """Norm and rotation of the heads of q and k, as projected, on their way into attention."""

    q_weight_D: Tensor
    k_weight_D: Tensor
    cos_SR: Tensor
    """(S, R) fp32."""
    sin_SR: Tensor
    """(S, R) fp32."""
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of `x` (..., C) by its root mean square and scale by `weight` (C,).

    Returns:
        (..., C), the dtype of `x`.
    """
    return (_normalised(x, eps) * weight.float()).to(x.dtype)


def norm_rows_(
    x_SC: Tensor,
    weight_C: Tensor,
    eps: float,
    *,
    update: Update | None = None,
    scale_MC: Tensor | None = None,
    shift_MC: Tensor | None = None,
    tags_S: Tensor | None = None,
    centred: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Add what is due to the residual, in place, and return its norm, modulated.

    Args:
        x_SC: (S, C) residual, contiguous, bf16, fp16 or fp32.
        weight_C: (C,); all vectors have one dtype.
        update: rows (S, C) contiguous and gate (M, C).
        scale_MC, shift_MC: (M, C); rows of channels may lie apart, all equally far.
        tags_S: (S,) uint8 below M; without it M is 1.
        centred: layer norm instead of root mean square.
        dtype: of the result, by default that of `x_SC`.

    Returns:
        (S, C).
    """
    if may_run_kernel("norm_rows", x_SC):
        from rushes_kernels.row_kernels import norm_rows, takes_rows

        if takes_rows(x_SC):
            return norm_rows(x_SC, weight_C, eps, update, scale_MC, shift_MC, tags_S, centred, dtype or x_SC.dtype)
    return norm_rows_ref_(
        x_SC,
        weight_C,
        eps,
        update=update,
        scale_MC=scale_MC,
        shift_MC=shift_MC,
        tags_S=tags_S,
        centred=centred,
        dtype=dtype,
    )


def norm_rows_ref_(
    x_SC: Tensor,
    weight_C: Tensor,
    eps: float,
    *,
    update: Update | None = None,
    scale_MC: Tensor | None = None,
    shift_MC: Tensor | None = None,
    tags_S: Tensor | None = None,
    centred: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`norm_rows_` in plain PyTorch."""
    if update is not None:
        gate_SC = _picked(update.gate_MC, tags_S)
        x_SC.copy_(torch.addcmul(x_SC.float(), update.rows_SC.float(), gate_SC))
    y_SC = _normalised(x_SC, eps, centred=centred) * weight_C.float()
    if scale_MC is not None:
        y_SC = y_SC * (1 + _picked(scale_MC, tags_S))
    if shift_MC is not None:
        y_SC = y_SC + _picked(shift_MC, tags_S)
    return y_SC.to(dtype or x_SC.dtype)


def rms_norm_rotate(x_SHD: Tensor, weight_D: Tensor, cos_SR: Tensor, sin_SR: Tensor, eps: float) -> Tensor:
    """`rms_norm` of every head, then the rotary rotation; channels from 2R on are only normalised.

    Args:
        x_SHD: (S, H, D) bf16 or fp32.
        weight_D: (D,).
        cos_SR, sin_SR: (S, R) fp32, 2R <= D.

    Returns:
        (S, H, D), the dtype of `x_SHD`.
    """
    return _rotated(_normalised(x_SHD, eps) * weight_D.float(), cos_SR[:, None], sin_SR[:, None]).to(x_SHD.dtype)


def norm_rotate_heads_(x_BNHD: Tensor, num_heads: int, cos_NR: Tensor, sin_NR: Tensor, eps: float) -> Tensor:
    """Norm without weights and rotation of the first `num_heads` heads of every token, in place.

    Args:
        x_BNHD: (B, N, H, D) contiguous, bf16, fp16 or fp32; every batch has the same N positions.
        cos_NR, sin_NR: (N, R) fp32, 2R <= D.

    Returns:
        `x_BNHD`.
    """
    if may_run_kernel("norm_rotate_heads", x_BNHD):
        from rushes_kernels.row_kernels import norm_rotate_heads, takes_heads

        if takes_heads(x_BNHD, cos_NR.shape[-1]):
            norm_rotate_heads(x_BNHD, num_heads, cos_NR, sin_NR, eps)
            return x_BNHD
    return norm_rotate_heads_ref_(x_BNHD, num_heads, cos_NR, sin_NR, eps)


def norm_rotate_heads_ref_(x_BNHD: Tensor, num_heads: int, cos_NR: Tensor, sin_NR: Tensor, eps: float) -> Tensor:
    """`norm_rotate_heads_` in plain PyTorch."""
    heads_BNHD = x_BNHD[:, :, :num_heads]
    heads_BNHD.copy_(_rotated(_normalised(heads_BNHD, eps), cos_NR[:, None], sin_NR[:, None]))
    return x_BNHD


def _normalised(x: Tensor, eps: float, *, centred: bool = False) -> Tensor:
    x = x.float()
    if centred:
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    R = cos.shape[-1]
    x1, x2, rest = x.split([R, R, x.shape[-1] - 2 * R], dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)


def _picked(vectors_MC: Tensor, tags_S: Tensor | None) -> Tensor:
    """The vector of every row, fp32: (S, C), or (1, C) for all of them."""
    return vectors_MC.float() if tags_S is None else vectors_MC.float()[tags_S.long()]
