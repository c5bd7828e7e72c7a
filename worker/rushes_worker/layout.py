"""How a worker spends its devices: replicas, and the ranks of each."""

import re
from dataclasses import dataclass
from typing import Self

MODEL_HEADS = 56
"""Attention heads of the released transformer: ranks split them evenly."""

SERVED_DEGREES = tuple(s for s in range(1, 9) if MODEL_HEADS % s == 0)
MAX_REPLICAS = 64
NODES = 2
"""Machines that the ranks of one replica may be spread over."""

_PATTERN = re.compile(r"r([0-9]{1,3})s([0-9]{1,3})")


@dataclass(frozen=True, slots=True)
class Layout:
    """`r2s4`: two replicas of four ranks each; a rank has a device to itself."""

    replicas: int
    sp: int
    """Sequence-parallel degree: ranks that share one job."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The layout that `text` names.

        Raises:
            ValueError: `text` is not of the form `rRsS`, or a number is out of range.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(f"layout {text!r}: expected rRsS, R replicas of S ranks each, for example r1s1 or r2s4")
        replicas, sp = int(match[1]), int(match[2])
        if not 1 <= replicas <= MAX_REPLICAS:
            raise ValueError(f"layout {text!r}: replicas must be in 1..{MAX_REPLICAS}, got {replicas}")
        if sp not in SERVED_DEGREES:
            degrees = ", ".join(map(str, SERVED_DEGREES))
            raise ValueError(
                f"layout {text!r}: s must be one of {degrees}, the ways to split {MODEL_HEADS} attention heads evenly, "
                f"got {sp}"
            )
        return cls(replicas, sp)

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas together."""
        return self.replicas * self.sp

    def ranks_per_node(self, nodes: int) -> int:
        """Ranks that each of `nodes` machines runs.

        Raises:
            ValueError: the ranks cannot be spread over so many.
        """
        if nodes == 1:
            return self.num_ranks
        if nodes != NODES:
            raise ValueError(f"nodes must be 1 or {NODES}, got {nodes}")
        if self.replicas != 1 or self.sp % nodes:
            raise ValueError(f"layout {self} over {nodes} nodes: expected one replica of an even number of ranks")
        return self.sp // nodes

    def __str__(self) -> str:
        return f"r{self.replicas}s{self.sp}"
