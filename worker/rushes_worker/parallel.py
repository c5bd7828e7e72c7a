"""Sequence parallelism: the ranks of a replica share the rows of a sequence and swap rows for heads around attention.

Rows are dealt in equal runs of r = ceil(S / size) packed rows; the last runs may be short or empty. A collective that
needs equal parts pads a short run with zeros on the wire and cuts the padding off again, so a model never sees a row
that is not in the sequence.

Shapes: S packed rows, s this rank's rows, r rows of a whole run; C columns; H heads, h = H / size this rank's heads,
D head dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rushes_worker.transport import GroupTransport, Transport

CHUNK_ROWS = 8_192
"""Rows of all ranks together that travel at a time: products over them fill a GPU, and the first land early."""

TRADE_PARTS = 2
"""Parts of a run that come back from attention one after the other: the last ones travel while the first are used."""


@dataclass(frozen=True, slots=True)
class TradePart:
    """What one transfer of a `Trade` moves."""

    rows: slice
    """Of this rank's run."""
    sent: slice
    """Of the buffer."""
    send_counts: tuple[int, ...]
    """Rows for each rank, none for this one."""
    receive_counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Trade:
    """Where attention leaves the rows of this rank's heads so that they need not be moved before they travel.

    The buffer is (N, h, D). In front lie this rank's rows with room for all heads: they are read as (s, H * D). Behind
    them lie the rows of the others, part by part and rank by rank.
    """

    num_rows: int
    num_own: int
    buffer_rows: int
    """N."""
    places_S: Tensor | None
    """(S,) int64: the row of the buffer that each packed row goes to; None is packed order."""
    parts: tuple[TradePart, ...]


class SequenceParallel:
    """This rank's place among the ranks of a replica, and the collectives between them.

    Args:
        device: where the tensors of collectives lie.
        transport: moves what collectives move; a single rank needs none.
        chunk_rows: rows of each rank that `land_rows` moves at a time; the same on every rank. None: its share of
            `CHUNK_ROWS`.
        trade_parts: parts in which `land_trade` moves a run; the same on every rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device | str,
        transport: Transport | None = None,
        *,
        chunk_rows: int | None = None,
        trade_parts: int = TRADE_PARTS,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in 0..{size - 1}, got {rank}")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._transport: Transport = transport or GroupTransport()
        self._chunk_rows = chunk_rows or CHUNK_ROWS // size
        self._trade_parts = trade_parts

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
        return cls(rank, size, device, GroupTransport.connect(rank, size, device, init_method))

    def own_rows(self, num_rows: int) -> slice:
        """The run of a sequence of `num_rows` rows that this rank holds; it may be empty."""
        return self._rows_of(self.rank, num_rows)

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
        self._transport.all_gather(whole, padded_rC).wait()
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
            transfers.append((first, chunk, self._transport.all_gather(chunk, part)))
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
            self._transport.add_up_(x)
        return x

    def plan_trade(self, num_rows: int) -> Trade:
        """How `land_trade` moves S = `num_rows` rows, which is the same for every block of a model."""
        own = self.own_rows(num_rows)
        num_own = own.stop - own.start
        if self.size == 1:
            return Trade(num_rows, num_own, num_own, None, ())
        run = -(-num_rows // self.size)
        part_rows = max(1, -(-run // self._trade_parts))
        # arithmetic of the device alone: a graph that is captured keeps it
        places_S = torch.empty(num_rows, dtype=torch.int64, device=self.device)

        def place(rows: slice, start: int, step: int) -> None:
            count = rows.stop - rows.start
            torch.arange(start, start + count * step, step, out=places_S[rows])

        if num_own:
            place(own, self.rank, self.size)
        parts = []
        sent = num_own * self.size
        for first in range(0, run, part_rows):
            start = sent
            send_counts = [0] * self.size
            for rank in range(self.size):
                theirs = self._rows_of(rank, num_rows)
                rows = slice(min(theirs.start + first, theirs.stop), min(theirs.start + first + part_rows, theirs.stop))
                count = rows.stop - rows.start
                if rank != self.rank and count:
                    place(rows, sent, 1)
                    send_counts[rank] = count
                    sent += count
            mine = slice(min(first, num_own), min(first + part_rows, num_own))
            receive_counts = [mine.stop - mine.start] * self.size
            receive_counts[self.rank] = 0
            parts.append(TradePart(mine, slice(start, sent), tuple(send_counts), tuple(receive_counts)))
        return Trade(num_rows, num_own, sent, places_S, tuple(parts))

    def land_trade(self, out_NhD: Tensor, trade: Trade) -> Iterator[tuple[slice, Tensor]]:
        """Trade all rows of this rank's heads for all heads of this rank's rows.

        All transfers are under way before the first part is handed out, and each part is to be used on the current
        stream, as those of `land_rows`.

        Args:
            out_NhD: contiguous, filled as `trade` says. Its front is completed with the others' heads.

        Returns:
            Parts (rows, H * D) of this rank's rows, in order, each with the rows of the run that it is.
        """
        if self.size == 1:
            whole = [out_NhD.flatten(1)]
            # it is freed when who takes it lets it go
            del out_NhD
            yield slice(0, trade.num_own), whole.pop()
            return
        width = out_NhD.shape[1] * out_NhD.shape[2]
        out_NC = out_NhD.view(trade.buffer_rows, width)
        own_snC = out_NC[: trade.num_own * self.size].view(trade.num_own, self.size, width)
        transfers = []
        for part in trade.parts:
            received = out_NC.new_empty(sum(part.receive_counts), width)
            transfer = self._transport.all_to_all(received, out_NC[part.sent], part.receive_counts, part.send_counts)
            transfers.append((part.rows, received, transfer))
        for rows, received, transfer in transfers:
            transfer.wait()
            if rows.start == rows.stop:
                continue
            others_snC = received.view(self.size - 1, rows.stop - rows.start, width).transpose(0, 1)
            landed_snC = own_snC[rows]
            landed_snC[:, : self.rank] = others_snC[:, : self.rank]
            landed_snC[:, self.rank + 1 :] = others_snC[:, self.rank :]
            yield rows, landed_snC.flatten(1)

    def pass_on(self, x: Tensor) -> Tensor:
        """Give `x` to the next rank and return what the previous one gave; the last rank gives to the first."""
        if self.size == 1:
            return x
        received = torch.empty_like(x)
        self._transport.swap(
            received, x.contiguous(), source=(self.rank - 1) % self.size, target=(self.rank + 1) % self.size
        )
        return received

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on at least one rank; every rank gets the same answer."""
        if self.size == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32, device=self.device)
        self._transport.maximum_(flags)
        return bool(flags.item())

    def _rows_of(self, rank: int, num_rows: int) -> slice:
        run = -(-num_rows // self.size)
        return slice(min(rank * run, num_rows), min((rank + 1) * run, num_rows))
