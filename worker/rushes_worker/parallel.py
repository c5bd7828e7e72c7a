"""Sequence parallelism: the ranks of a replica share the rows of a sequence and swap rows for heads around attention.

Rows are dealt in equal runs of r = ceil(S / size) packed rows; the last runs may be short or empty. Collectives pad a
short run with zeros on the wire and cut the padding off again, so a model never sees a row that is not in the sequence.

Shapes: S packed rows, s this rank's rows, r rows of a whole run; C columns; H heads, h = H / size this rank's heads,
D head dimension.
"""

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

COLLECTIVE_TIMEOUT = timedelta(minutes=10)

CHUNK_ROWS = 2_048
"""Rows of each rank that travel at a time: products over this many rows fill a GPU, and the first land early."""

# torch 2.13 renamed it; the new name is the one that does not warn
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SequenceParallel:
    """This rank's place among the ranks of a replica, and the collectives between them.

    Args:
        device: where the tensors of collectives lie.
        group: None is the process's default group; a single rank needs none.
        chunk_rows: rows of each rank that `land_rows` moves at a time; the same on every rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        *,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in 0..{size - 1}, got {rank}")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._group = group
        self._chunk_rows = chunk_rows

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "SequenceParallel":
        """One rank that holds everything; its collectives copy nothing."""
        return cls(0, 1, device)

    @classmethod
    def connect(
        cls, rank: int, size: int, device: torch.device | str, *, init_method: str = "env://"
    ) -> "SequenceParallel":
        """Join the default process group, which is created unless this process already has it: NCCL on CUDA, else gloo.

        Raises:
            ValueError: the process group has another rank or size.
        """
        if size == 1:
            return cls.single(device)
        device = torch.device(device)
        if not dist.is_initialized():
            on_cuda = device.type == "cuda"
            dist.init_process_group(
                "nccl" if on_cuda else "gloo",
                init_method=init_method,
                rank=rank,
                world_size=size,
                timeout=COLLECTIVE_TIMEOUT,
                device_id=device if on_cuda else None,
            )
        if (dist.get_rank(), dist.get_world_size()) != (rank, size):
            raise ValueError(
                f"this is to be rank {rank} of {size}, but the process group says rank {dist.get_rank()} of "
                f"{dist.get_world_size()}"
            )
        return cls(rank, size, device)

    def own_rows(self, num_rows: int) -> slice:
        """The run of a sequence of `num_rows` rows that this rank holds; it may be empty."""
        run = -(-num_rows // self.size)
        return slice(min(self.rank * run, num_rows), min((self.rank + 1) * run, num_rows))

    def own_heads(self, num_heads: int) -> slice:
        """The heads that this rank attends with.

        Raises:
            ValueError: the ranks do not divide the heads.
        """
        if num_heads % self.size:
            allowed = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
            raise ValueError(
                f"{num_heads} attention heads cannot be split over {self.size} ranks: their number must be one of "
                f"{allowed}"
            )
        return self.own_share(num_heads)

    def own_share(self, count: int) -> slice:
        """This rank's part of `count` things that the ranks need not divide evenly; it may be empty."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather_rows(self, x_sC: Tensor, num_rows: int) -> Tensor:
        """The whole (S, C) of which every rank holds the run (s, C)."""
        if self.size == 1:
            return x_sC
        run = -(-num_rows // self.size)
        padded_rC = F.pad(x_sC, (0, 0, 0, run - len(x_sC)))
        whole = x_sC.new_empty(self.size * run, x_sC.shape[1])
        _all_gather(whole, padded_rC, group=self._group)
        return whole[:num_rows]

    def land_rows(self, x_sC: Tensor, num_rows: int) -> Iterator[tuple[slice, Tensor]]:
        """The whole (S, C) in pieces, each with the rows that it is: this rank's at once, the others' as they land.

        All transfers are under way before the first piece is handed out. A piece is to be used on the current stream,
        which waits for that piece alone; what is computed between two pieces hides the transfer of the next.
        """
        own = self.own_rows(num_rows)
        if self.size == 1:
            yield own, x_sC
            return
        run = -(-num_rows // self.size)
        padded_rC = F.pad(x_sC, (0, 0, 0, run - len(x_sC))) if len(x_sC) < run else x_sC.contiguous()
        landing = x_sC.new_empty(self.size * run, x_sC.shape[1])
        transfers = []
        for first in range(0, run, self._chunk_rows):
            part = padded_rC[first : first + self._chunk_rows]
            chunk = landing[self.size * first : self.size * (first + len(part))]
            transfers.append((first, chunk, _all_gather(chunk, part, group=self._group, async_op=True)))
        if len(x_sC):
            yield own, x_sC
        for first, chunk, transfer in transfers:
            transfer.wait()
            for rank, part in enumerate(chunk.chunk(self.size)):
                start = rank * run + first
                stop = min(start + len(part), num_rows)
                if rank != self.rank and start < stop:
                    yield slice(start, stop), part[: stop - start]

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of what every rank passes, which overwrites `x`; the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(x, group=self._group)
        return x

    def heads_to_rows(self, x_ShD: Tensor) -> Tensor:
        """Trade all rows of this rank's heads for all heads of this rank's rows: (S, h, D) to (s, H * D)."""
        num_rows = len(x_ShD)
        if self.size == 1:
            return x_ShD.flatten(1)
        run = -(-num_rows // self.size)
        sent = F.pad(x_ShD.flatten(1), (0, 0, 0, self.size * run - num_rows))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        rows_rC = rearrange(received, "(n r) c -> r (n c)", n=self.size)
        own = self.own_rows(num_rows)
        return rows_rC[: own.stop - own.start]

    def pass_on(self, x: Tensor) -> Tensor:
        """Give `x` to the next rank and return what the previous one gave; the last rank gives to the first."""
        if self.size == 1:
            return x
        received = torch.empty_like(x)
        sends = [
            dist.P2POp(dist.isend, x.contiguous(), (self.rank + 1) % self.size, self._group),
            dist.P2POp(dist.irecv, received, (self.rank - 1) % self.size, self._group),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        return received

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on at least one rank; every rank gets the same answer."""
        if self.size == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32, device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)
        return bool(flags.item())
