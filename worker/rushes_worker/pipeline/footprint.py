"""What the weights of a rank take of its device at the least, told before any of them is read."""

from collections.abc import Mapping
from math import prod

import torch

from rushes_worker.checkpoint.directory import Checkpoint

_ONLY_FOR_TABLES = (".adaln_proj.", "time_embedder.", "norm_out.linear.")
"""Modulation is kept as tables of the schedule's steps."""
FEED_FORWARD = "transformer feed-forward"
_OF_FEED_FORWARD = (".ff.",)
_BY_HEADS = (".attn.to_q.", ".attn.to_k.", ".attn.to_v.", ".attn.to_gate_compress.")


def least_weight_bytes(checkpoint: Checkpoint, sp: int, dtypes: Mapping[str, torch.dtype]) -> int:
    """Bytes that every one of `sp` ranks holds at the least.

    Args:
        dtypes: that the weights of `transformer`, `text_encoder` and `vae` are kept in, and those of the feed-forward
            layers of the transformer's blocks.
    """
    text = checkpoint.text_encoder_config
    transformer = {
        name: prod(spec.shape) // (sp if _is_of_block(name, _BY_HEADS) else 1)
        for name, spec in checkpoint.manifest("transformer").items()
        if not _is_in(name, _ONLY_FOR_TABLES)
    }
    feed_forward = sum(count for name, count in transformer.items() if _is_of_block(name, _OF_FEED_FORWARD))
    elements = {
        "transformer": sum(transformer.values()) - feed_forward,
        FEED_FORWARD: feed_forward,
        # the least that a rank can have of its parts, which need not be even
        "text_encoder": _used(checkpoint, "text_encoder")
        * (text.num_key_value_heads // sp)
        // text.num_key_value_heads,
        "vae": _used(checkpoint, "vae"),
    }
    return sum(count * dtypes[name].itemsize for name, count in elements.items())


def check_device_holds(need_bytes: int, device: torch.device, total_bytes: int, sp: int) -> None:
    """Raise `ValueError` when `device` has less memory in all than the weights of one of `sp` ranks take."""
    if need_bytes > total_bytes:
        raise ValueError(
            f"{device} has {total_bytes / 1e9:.1f} GB of memory, the weights of one of {sp} ranks take at least "
            f"{need_bytes / 1e9:.1f} GB: more GPUs have to share a replica (layout rRsS, with a larger S)"
        )


def _used(checkpoint: Checkpoint, component: str) -> int:
    return sum(prod(spec.shape) for spec in checkpoint.manifest(component).values() if spec.used)


def _is_of_block(name: str, parts: tuple[str, ...]) -> bool:
    return name.startswith("transformer_blocks.") and _is_in(name, parts)


def _is_in(name: str, parts: tuple[str, ...]) -> bool:
    return any(part in name for part in parts)
