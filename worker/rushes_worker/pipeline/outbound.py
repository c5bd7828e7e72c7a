"""Results on their way from the device to whoever takes them: through host memory that is allocated once."""

import torch
from rushes_core.errors import NotFinite
from torch import Tensor

from rushes_worker.pipeline.base import Reporter
from rushes_worker.pixels import PixelFormat

RING_SIZE = 2
"""Results under way at once: one is handed over while the next is computed."""


class HostRing:
    """Host memory that results are copied to in turn. Each is to be handed over before the next but one is copied.

    Args:
        num_elements: of the largest result that is expected.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        # pageable memory would make the host wait, and copy at a tenth of the speed
        self._pinned = device.type == "cuda"
        self._dtype = dtype
        self._turn = 0
        self._buffers = [self._new(num_elements) for _ in range(RING_SIZE)]
        self._flags = torch.ones(RING_SIZE, 1, dtype=torch.bool, pin_memory=self._pinned)

    def copy(self, values: Tensor, flag: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of both on the CPU; from CUDA they are there when what the stream holds now is done."""
        self._turn = (self._turn + 1) % RING_SIZE
        if values.numel() > len(self._buffers[self._turn]):
            self._buffers[self._turn] = self._new(values.numel())
        there = self._buffers[self._turn][: values.numel()].view(values.shape)
        return there.copy_(values, non_blocking=True), self._flags[self._turn].copy_(flag, non_blocking=True)

    def _new(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=self._dtype, pin_memory=self._pinned)


class Outbound:
    """A result of this rank on its way to the host, or none.

    Args:
        what: all ranks decode in this round, for people.
        ring: where it is copied to; None: there is no result.
        unit: None for the sound.
        pixels: what frames are.
    """

    def __init__(
        self,
        what: str,
        ring: HostRing | None = None,
        values: Tensor | None = None,
        is_finite: Tensor | None = None,
        *,
        unit: int | None = None,
        pixels: PixelFormat = PixelFormat.RGB24,
    ) -> None:
        self.what = what
        self._unit = unit
        self._pixels = pixels
        self._values = self._flag = self._copied = None
        if ring is not None and values is not None and is_finite is not None:
            self._values, self._flag = ring.copy(values, is_finite)
            if values.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record()

    @property
    def is_finite(self) -> bool:
        """After `wait`."""
        return self._flag is None or bool(self._flag)

    @property
    def is_here(self) -> bool:
        """Whether `wait` would return at once."""
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def hand_to(self, reporter: Reporter) -> None:
        """After `wait`."""
        if self._values is None:
            return
        if self._unit is None:
            reporter.audio(self._values.numpy())
        else:
            reporter.frames(self._unit, self._values.numpy(), self._pixels)


class Handover:
    """What one rank decoded last; implements `pipeline.base.Remainder`."""

    def __init__(self, outbound: Outbound, reporter: Reporter) -> None:
        self._outbound = outbound
        self._reporter = reporter

    @property
    def is_done(self) -> bool:
        return self._outbound.is_here

    def hand_over(self) -> None:
        """
        Raises:
            NotFinite: it is not finite; on this rank alone, which waits for no other any more.
        """
        self._outbound.wait()
        if not self._outbound.is_finite:
            raise NotFinite(f"decoded {self._outbound.what} are not finite", stage="decoding")
        self._outbound.hand_to(self._reporter)
