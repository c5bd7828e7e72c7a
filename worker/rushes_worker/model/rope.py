"""Rotary angles over the (time, height, width) positions of the packed sequence.

The three axes share one set of frequencies theta^(-j/R'), j = 0..R'-1. A row's angles are those of its time, then its
height, then its width (FastH3 reference; positions are rounded to fp32 before they are multiplied).

Shapes: S packed rows, R' frequencies per axis, R = 3R' rotary angles per row.
"""

import torch
from torch import Tensor


def rotary_table(positions_S3: Tensor, freq_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every row's angles.

    Args:
        positions_S3: (S, 3) float64, columns time, height, width.
        freq_dim: frequencies per axis.

    Returns:
        Two (S, 3 * freq_dim) fp32 tensors on the device of the positions.
    """
    exponents = torch.arange(0, 2 * freq_dim, 2, dtype=torch.float32, device=positions_S3.device) / (2 * freq_dim)
    angles_SR = (positions_S3.float()[:, :, None] * (1.0 / theta**exponents)).flatten(1)
    return angles_SR.cos(), angles_SR.sin()
