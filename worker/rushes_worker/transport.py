"""What moves the bytes of collectives: a process group, or copies that stand for one."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVE_TIMEOUT = timedelta(minutes=10)

# torch 2.13 renamed it; the new name is the one that does not warn
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Have the current stream, on the CPU this thread, wait for it."""
        ...


class Transport(Protocol):
    """The collectives of `SequenceParallel`; every rank calls the same ones in the same order.

    All tensors are contiguous and lie on one device. Nothing waits on the host but for CPU tensors.
    """

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        """Every rank's `part` (r, C), by rank, into `whole` (size * r, C)."""
        ...

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Pending:
        """Rows of `sent` to each rank and rows from each rank into `received`, both by rank."""
        ...

    def add_up_(self, x: Tensor) -> None:
        """Every rank's `x` becomes the sum of all."""
        ...

    def maximum_(self, x: Tensor) -> None:
        """Every rank's `x` becomes the maximum of all."""
        ...

    def swap(self, received: Tensor, sent: Tensor, *, source: int, target: int) -> None:
        """`sent` to rank `target`, and what rank `source` sends here into `received`."""
        ...


class GroupTransport:
    """The collectives of a process group, by default of the process's own."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @classmethod
    def connect(cls, rank: int, size: int, device: torch.device, init_method: str) -> Self:
        """Join the default process group, which is created unless this process already has it: NCCL on CUDA, else gloo.

        Raises:
            ValueError: the process group has another rank or size.
        """
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
        return cls()

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        return _pending(_all_gather(whole, part, group=self._group, async_op=True))

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Pending:
        return _pending(
            dist.all_to_all_single(
                received, sent, list(receive_counts), list(send_counts), group=self._group, async_op=True
            )
        )

    def add_up_(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self._group)

    def maximum_(self, x: Tensor) -> None:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self._group)

    def swap(self, received: Tensor, sent: Tensor, *, source: int, target: int) -> None:
        operations = [
            dist.P2POp(dist.isend, sent, target, self._group),
            dist.P2POp(dist.irecv, received, source, self._group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class LocalCopies:
    """Stands for the other ranks on one device: what would come from them is copied from what goes to them.

    As many bytes are written as would arrive; their values mean nothing.
    """

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        _fill(whole, part)
        return _Done()

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Pending:
        assert (sum(receive_counts), sum(send_counts)) == (len(received), len(sent))
        _fill(received, sent)
        return _Done()

    def add_up_(self, x: Tensor) -> None:
        x.copy_(x.clone())

    def maximum_(self, x: Tensor) -> None:
        pass

    def swap(self, received: Tensor, sent: Tensor, *, source: int, target: int) -> None:
        received.copy_(sent)


class _Done:
    def wait(self) -> None:
        pass


def _fill(received: Tensor, sent: Tensor) -> None:
    """Over and over again from the start of `sent`, until `received` is full."""
    if not len(sent):
        received.zero_()
        return
    for part in received.split(len(sent)):
        part.copy_(sent[: len(part)])


def _pending(work: dist.Work | None) -> Pending:
    assert work is not None
    return work
