"""Make freshly initialised reference modules sensitive to every parameter."""

import torch
from torch import nn


def roughen(module: nn.Module, std: float = 0.1) -> None:
    """Move every vector parameter off its constant start (norm weights of 1, biases of 0), in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * std)


def rescale(module: nn.Module, factors: dict[str, float]) -> None:
    """Multiply every parameter whose name contains a key of `factors`, in place."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            for part, factor in factors.items():
                if part in name:
                    parameter.mul_(factor)
