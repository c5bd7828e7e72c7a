"""Random inputs of block-sparse attention, and its truth one query tile at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from rushes_kernels.block_sparse_attention import block_sparse_attention, block_sparse_attention_ref
from rushes_kernels.providers import Provider
from torch import Tensor


@dataclass
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    lists: Tensor
    counts: Tensor
    sizes: Tensor
    num_prefix_tiles: int

    @classmethod
    def random(
        cls,
        *,
        heads: int,
        num_prefix_tiles: int,
        counts: Sequence[int] | Tensor,
        places: int = 64,
        dim: int = 128,
        dtype: torch.dtype = torch.float32,
        device: str = "cuda",
        seed: int = 0,
    ) -> Self:
        """Lists of distinct video tiles in random order, the same `counts` for every head unless they are (heads, V).

        Sizes are random, too; whatever lies past them in k and v is far larger than what counts.
        """
        generator = torch.Generator(device).manual_seed(seed)
        per_head = torch.as_tensor(counts, dtype=torch.int32, device=device)
        per_head = per_head if per_head.ndim == 2 else per_head.expand(heads, -1).contiguous()
        num_video_tiles = per_head.shape[1]
        num_tiles = num_prefix_tiles + num_video_tiles
        order = torch.rand(heads, num_video_tiles, num_video_tiles, generator=generator, device=device).argsort(-1)
        longest = max(per_head.flatten().tolist(), default=0)
        lists = (num_prefix_tiles + order[..., :longest]).int().contiguous()
        sizes = torch.randint(1, places + 1, (num_tiles,), generator=generator, device=device, dtype=torch.int32)
        q, k, v = (
            torch.randn(heads, num_tiles, places, dim, generator=generator, device=device).to(dtype) for _ in range(3)
        )
        padding = torch.arange(places, device=device) >= sizes[:, None]
        k[:, padding] = 100
        v[:, padding] = 1000
        return cls(q, k, v, lists, per_head, sizes, num_prefix_tiles)

    def run(self, provider: Provider, *, check: bool = False) -> Tensor:
        return block_sparse_attention(**self._arguments(), provider=provider, check=check)

    def reference(self) -> Tensor:
        """(heads, tiles, places, dim) fp32, of the inputs as they are."""
        arguments = self._arguments()
        for name in ("q_HnBD", "k_HnBD", "v_HnBD"):
            arguments[name] = arguments[name].float()
        return block_sparse_attention_ref(**arguments)

    def expected_tile(self, head: int, tile: int) -> Tensor:
        """(places, dim) fp32: one query tile of the result, by gathering its keys."""
        keys = list(range(self.num_prefix_tiles))
        if tile < self.num_prefix_tiles:
            keys = list(range(len(self.sizes)))
        else:
            video = tile - self.num_prefix_tiles
            keys += self.lists[head, video, : int(self.counts[head, video])].tolist()
        sizes = self.sizes.tolist()
        if not keys:
            return torch.zeros_like(self.q[head, tile], dtype=torch.float32)
        k, v = (torch.cat([x[head, key, : sizes[key]] for key in keys]).float() for x in (self.k, self.v))
        return (self.q[head, tile].float() @ k.T * k.shape[1] ** -0.5).softmax(-1) @ v

    def _arguments(self) -> dict[str, Tensor | int]:
        names = ["q_HnBD", "k_HnBD", "v_HnBD", "lists_HVL", "counts_HV", "sizes_n", "num_prefix_tiles"]
        return {name: getattr(self, field.name) for name, field in zip(names, fields(self), strict=True)}


def run_on_poisoned_memory(problem: Problem, provider: Provider) -> Tensor:
    """The result, which starts as NaN; in a process of its own."""
    empty_like = torch.empty_like
    torch.empty_like = lambda x: empty_like(x).fill_(torch.nan)
    try:
        return problem.run(provider, check=True)
    finally:
        torch.empty_like = empty_like
