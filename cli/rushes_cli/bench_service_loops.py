"""How `rushes bench service` sends its requests: by clients that wait for their clips, or at times that are set."""

import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import accumulate
from typing import Any, ClassVar
from uuid import uuid4

from rushes_core.errors import RushesError
from rushes_core.fields import MAX_SEED
from rushes_core.states import FINAL_STATES

from rushes_cli.bench_service_shapes import Shape
from rushes_cli.campaigns.client import PASSING, Client, Refused, Unreachable

WAIT_SECONDS = 30
"""How long one question for a clip's state may take to be answered."""
POLL_SECONDS = 1.0
"""Between two questions where the API has no seat for those who wait, or a proxy takes the wish to wait away."""
REFUSED = "refused"
"""Status of a request that the API did not take for a limit of key or queue."""
UNKNOWN = "unknown"
"""Status of a request whose end was not heard of: the API was away for too long, or does not tell of it any more."""
ORIGIN = "rushes bench service"
"""What the metadata of every job says of it."""
_FINAL = frozenset(state.public_status for state in FINAL_STATES)


@dataclass(frozen=True, slots=True)
class Sending:
    """A request as it is sent."""

    number: int
    """Of its run, from 0."""
    shape: Shape
    due: float
    """When it had to be sent, by the monotonic clock."""
    late: float
    """Seconds from then until it was."""
    sent_at: datetime


@dataclass(frozen=True, slots=True)
class Done:
    """How a request ended. All in seconds: `latency` from when it was due, `queued` and `ran` as the service tells."""

    sending: Sending
    status: str
    code: str | None
    """Of the error, unless it completed."""
    latency: float
    queued: float | None = None
    ran: float | None = None
    attempt: int = 0
    video_id: str | None = None


@dataclass
class Loop(ABC):
    """Requests that are sent and waited for. Those who inherit say when."""

    client: Client
    cleaner: Client
    """The same API, asked for less long."""
    shapes: Sequence[Shape]
    """Of the requests, in order."""
    first_seed: int
    name: str
    on_end: Callable[[Done], None] | None = None
    """Told of every request when it ends, one at a time."""
    done: list[Done] = field(default_factory=list[Done])
    seconds: float = 0.0
    """From the first request to the last clip, or until it was broken off."""
    sent_again: int = 0
    """How often a request for a clip was."""

    passing: ClassVar[Collection[int]] = PASSING
    """Status codes after which a request is sent again."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._tag = uuid4().hex
        self._open: set[str] = set()

    @property
    def is_complete(self) -> bool:
        return len(self.done) == len(self.shapes) and all(one.status != UNKNOWN for one in self.done)

    @property
    @abstractmethod
    def num_threads(self) -> int:
        """Requests that are open at once."""

    @abstractmethod
    def about(self) -> dict[str, float]:
        """What the load is, for people."""

    def go(self) -> None:
        """Send every request; whatever ends this early, what is open then is cancelled.

        Raises:
            Refused, Unreachable: the API does not take a request, or does not answer.
        """
        began = time.monotonic()
        with ThreadPoolExecutor(self.num_threads, thread_name_prefix="client") as clients:
            try:
                ended, _ = wait(self._begin(clients), return_when=FIRST_EXCEPTION)
                for one in ended:
                    one.result()
            except BaseException:
                self._stop.set()
                self._cancel(sorted(self._open))
                raise
            finally:
                self.seconds = time.monotonic() - began

    def delete(self) -> None:
        """Every job and clip of this run, also one whose acceptance was never heard of.

        Raises:
            RushesError: some stay.
        """
        left, why = 0, ""
        try:
            ids = [video["id"] for video in self.cleaner.pages("/v1/videos", limit=100, **{"metadata[run]": self._tag})]
        except (Refused, Unreachable) as error:
            raise RushesError(
                f"the clips with the metadata run={self._tag} are not deleted, and those that wait will be rendered: "
                f"{error}; GET /v1/videos?metadata[run]={self._tag} lists them"
            ) from None
        for video_id in ids:
            try:
                self.cleaner.delete(f"/v1/videos/{video_id}")
            except Refused as error:
                left, why = left + 1, str(error)
            except Unreachable as error:
                left, why = len(ids), str(error)
                break
        if left:
            raise RushesError(
                f"of {len(ids)} clips with the metadata run={self._tag} up to {left} are not deleted: {why}"
            )

    @abstractmethod
    def _begin(self, clients: ThreadPoolExecutor) -> list[Future[None]]:
        """Send the requests, or have them sent."""

    @contextmanager
    def _alone_in_failing(self) -> Iterator[None]:
        """Whatever one request met, the others would."""
        try:
            yield
        except BaseException:
            self._stop.set()
            raise

    def _have_rendered(self, number: int, due: float | None = None) -> None:
        """
        Args:
            due: now unless it is given.
        """
        now = time.monotonic()
        due = now if due is None else due
        sending = Sending(number, self.shapes[number], due, now - due, datetime.now(UTC))
        video: dict[str, Any] = {}
        try:
            video = self._post(sending)
            while video["status"] not in _FINAL:
                if self._stop.is_set():
                    self._cancel([video["id"]])
                    return
                asked = time.monotonic()
                video = self.client.wait(f"/v1/videos/{video['id']}", WAIT_SECONDS)
                if video["status"] not in _FINAL and time.monotonic() - asked < POLL_SECONDS:
                    self._stop.wait(POLL_SECONDS)
        except Unreachable as error:
            if video or error.refused is None or error.refused.status != HTTPStatus.TOO_MANY_REQUESTS:
                self._end_unheard(sending, "api_away", video)
                raise
            self._end(Done(sending, REFUSED, error.refused.code, time.monotonic() - due))
            return
        except Refused as error:
            if video:
                self._end_unheard(sending, error.code, video)
            if video or error.status != HTTPStatus.TOO_MANY_REQUESTS:
                raise
            self._end(Done(sending, REFUSED, error.code, time.monotonic() - due))
            return
        if self._stop.is_set() and video["status"] == "cancelled":
            # by this run, which was broken off: that tells nothing of the service
            return
        timing, error = video.get("timing") or {}, video.get("error") or {}
        self._end(
            Done(
                sending,
                video["status"],
                error.get("code"),
                time.monotonic() - due,
                timing.get("queued_s"),
                timing.get("run_s"),
                video.get("attempt", 1),
                video["id"],
            )
        )

    def _end_unheard(self, sending: Sending, code: str | None, video: dict[str, Any]) -> None:
        self._end(Done(sending, UNKNOWN, code, time.monotonic() - sending.due, video_id=video.get("id")))

    def _post(self, sending: Sending) -> dict[str, Any]:
        seed = (self.first_seed + sending.number) % (MAX_SEED + 1)
        own = {"seed": seed, "metadata": {"made_by": ORIGIN, "run": self._tag}}
        video = self.client.post(
            "/v1/videos", sending.shape.body | own, passing=self.passing, on_repeat=self._note_repeat
        )
        with self._lock:
            self._open.add(video["id"])
        return video

    def _note_repeat(self) -> None:
        with self._lock:
            self.sent_again += 1

    def _end(self, done: Done) -> None:
        with self._lock:
            if done.status != UNKNOWN:
                self._open.discard(done.video_id or "")
            self.done.append(done)
            if self.on_end is not None:
                self.on_end(done)
            count = len(self.done)
        how = "" if done.status == "completed" else f", {done.status} ({done.code})"
        title = done.sending.shape.title
        print(f"{self.name}: {count} of {len(self.shapes)}, {title}: {done.latency:.2f} s{how}", file=sys.stderr)

    def _cancel(self, ids: Sequence[str]) -> None:
        # the API may be away: then there is nothing more to be done
        with suppress(Unreachable):
            for video_id in ids:
                # it may have ended meanwhile
                with suppress(Refused):
                    self.cleaner.post(f"/v1/videos/{video_id}/cancel")


@dataclass
class ClosedLoop(Loop):
    """Clients that each send a request, wait for its clip and send the next one."""

    concurrency: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._numbers = iter(range(len(self.shapes)))

    @property
    def num_threads(self) -> int:
        return self.concurrency

    def about(self) -> dict[str, float]:
        return {"concurrency": self.concurrency}

    def _begin(self, clients: ThreadPoolExecutor) -> list[Future[None]]:
        return [clients.submit(self._be_client) for _ in range(self.concurrency)]

    def _be_client(self) -> None:
        with self._alone_in_failing():
            while not self._stop.is_set() and (number := self._take()) is not None:
                self._have_rendered(number)

    def _take(self) -> int | None:
        with self._lock:
            return next(self._numbers, None)


@dataclass
class OpenLoop(Loop):
    """Requests that are sent when they are due, whatever became of those before.

    One that the API refuses for a limit has ended: as another user's would, the next one comes at its time.
    """

    arrivals: Sequence[float] = ()
    """When each is due, in seconds from the first."""
    rate: float = 1.0
    burstiness: float = 1.0
    max_concurrency: int = 1
    """Requests that may be open at once. What is due beyond them is sent late."""

    passing = PASSING - {HTTPStatus.TOO_MANY_REQUESTS}

    @property
    def num_threads(self) -> int:
        return min(self.max_concurrency, len(self.shapes))

    def about(self) -> dict[str, float]:
        return {
            "request_rate": self.rate,
            "burstiness": self.burstiness,
            "max_concurrency": self.max_concurrency,
        }

    def _begin(self, clients: ThreadPoolExecutor) -> list[Future[None]]:
        began = time.monotonic()
        sent = []
        for number, arrival in enumerate(self.arrivals):
            if self._stop.wait(max(0.0, began + arrival - time.monotonic())):
                break
            sent.append(clients.submit(self._send, number, began + arrival))
        return sent

    def _send(self, number: int, due: float) -> None:
        with self._alone_in_failing():
            # it may have waited for a thread
            if not self._stop.is_set():
                self._have_rendered(number, due)


def arrivals(count: int, *, rate: float, burstiness: float, order: random.Random) -> list[float]:
    """When `count` requests are due, in seconds from the first.

    Gaps are of a gamma distribution with the shape `burstiness`, of which 1 is that of a Poisson process, and stretched
    so that the last is due when it would be at even gaps: a few requests have the same rate as many.
    """
    gaps = [order.gammavariate(burstiness, 1.0) for _ in range(count - 1)]
    stretch = (count - 1) / rate / (sum(gaps) or 1.0)
    return [0.0, *accumulate(gap * stretch for gap in gaps)]
