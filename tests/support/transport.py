"""Transports that remember what the other ranks sent, and that play it again without them."""

from collections.abc import Iterator, Sequence

from rushes_worker.transport import Pending, Transport
from torch import Tensor


class Recording:
    """Passes everything on and keeps what arrived, in order."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.arrived: list[Tensor] = []

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        return self._keep(whole, self._inner.all_gather(whole, part))

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Pending:
        return self._keep(received, self._inner.all_to_all(received, sent, receive_counts, send_counts))

    def add_up_(self, x: Tensor) -> None:
        self._inner.add_up_(x)
        self.arrived.append(x.clone())

    def maximum_(self, x: Tensor) -> None:
        self._inner.maximum_(x)
        self.arrived.append(x.clone())

    def swap(self, received: Tensor, sent: Tensor, *, source: int, target: int) -> None:
        self._inner.swap(received, sent, source=source, target=target)
        self.arrived.append(received.clone())

    def _keep(self, x: Tensor, pending: Pending) -> Pending:
        pending.wait()
        self.arrived.append(x.clone())
        return pending


class Replaying:
    """Stands for the other ranks of a run that `Recording` saw."""

    def __init__(self, arrived: Sequence[Tensor]) -> None:
        self._arrived: Iterator[Tensor] = iter(arrived)

    def all_gather(self, whole: Tensor, part: Tensor) -> Pending:
        return self._play(whole)

    def all_to_all(
        self, received: Tensor, sent: Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Pending:
        return self._play(received)

    def add_up_(self, x: Tensor) -> None:
        self._play(x)

    def maximum_(self, x: Tensor) -> None:
        self._play(x)

    def swap(self, received: Tensor, sent: Tensor, *, source: int, target: int) -> None:
        self._play(received)

    @property
    def is_over(self) -> bool:
        return next(self._arrived, None) is None

    def _play(self, x: Tensor) -> "Replaying":
        x.copy_(next(self._arrived))
        return self

    def wait(self) -> None:
        pass
