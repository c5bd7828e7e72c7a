"""Prompt in, refined text rows out: text encoder and refiner, one graph for each number of text rows.

Shapes: L tokens, padded to the rows of the capacity; C hidden channels of the transformer.
"""

from collections.abc import Sequence
from functools import partial

import torch
from rushes_core.captures import CAPACITY_STEP

from rushes_worker.model.text_encoder import TextEncoder
from rushes_worker.model.transformer import Transformer
from rushes_worker.pipeline.graphs import Graphs
from rushes_worker.pipeline.slots import RequestSlot

MAX_SPARE_SHARE = 0.02
"""Of a clip's rows: a device works on spare rows as on all others, and a graph saves less time than that."""


def capacity_for(num_tokens: int, capacities: Sequence[int], *, other_rows: int) -> int:
    """Text rows for a prompt: the least capacity that holds it, or whole tiles if that has many more rows.

    Args:
        other_rows: rows of sound and picture.
    """
    whole_tiles = -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP
    capacity = min((capacity for capacity in capacities if capacity >= num_tokens), default=whole_tiles)
    return capacity if capacity - whole_tiles <= MAX_SPARE_SHARE * (whole_tiles + other_rows) else whole_tiles


class TextStage:
    """Encodes prompts into slots.

    Args:
        max_rows: what the longest prompt takes.
    """

    def __init__(self, encoder: TextEncoder, transformer: Transformer, graphs: Graphs, *, max_rows: int) -> None:
        self._encoder = encoder
        self._transformer = transformer
        self._graphs = graphs
        device = encoder.device
        on_cuda = device.type == "cuda"
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._tokens_on_host = torch.zeros(max_rows, dtype=torch.int64, pin_memory=on_cuda)
        self._length = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows = transformer.new_rows(max_rows)
        self._sent = torch.cuda.Event() if on_cuda else None

    def encode(self, token_ids: Sequence[int], slot: RequestSlot) -> None:
        """Fill the slot's text rows; called by all ranks."""
        capacity = slot.text_capacity
        self._load(token_ids, capacity)
        self._length.copy_(slot.length)
        self._graphs.run(("text", capacity), partial(self._work, capacity))
        slot.text_rows.copy_(self._rows[:capacity])

    def prepare(self, capacity: int) -> None:
        """Capture the graph of a capacity."""
        self._load([0], capacity)
        self._length.fill_(1)
        # there is no shorter way to call all its kernels
        self._graphs.prepare(("text", capacity), partial(self._work, capacity), partial(self._work, capacity))

    def _load(self, token_ids: Sequence[int], capacity: int) -> None:
        if self._sent is not None:
            # the ids of the prompt before may still be on their way
            self._sent.synchronize()
        self._tokens_on_host[:capacity].zero_()
        self._tokens_on_host[: len(token_ids)] = torch.tensor(token_ids)
        self._tokens[:capacity].copy_(self._tokens_on_host[:capacity], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def _work(self, capacity: int) -> None:
        states = self._encoder.forward(self._tokens[:capacity])
        self._rows[:capacity].copy_(self._transformer.refine(states, self._length))
