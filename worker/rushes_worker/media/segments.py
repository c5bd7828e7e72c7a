"""The segments of one clip, encoded side by side by threads of the media process.

Threads, not processes: what takes the time (conversion, encoder, decoder, sums over planes) runs without the GIL,
frames are shared as they lie in the file of their unit, and a clip's process is still the only thing to end.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rushes_worker.media.segment import Segment, SegmentEncoder
from rushes_worker.media.times import Spans


class Segments:
    """Takes the frames of a clip in order and encodes the segments that they belong to, some at once.

    Args:
        plan: frames of each segment.
        make: an encoder for the segment that begins with this frame.
        encoders: segments that are worked on at once.
        on_failure: told once, from a thread, that `in_order` will raise.
        spans: told when which frames were encoded.
    """

    def __init__(
        self,
        plan: Iterable[range],
        make: Callable[[int], SegmentEncoder],
        *,
        encoders: int,
        on_failure: Callable[[], None],
        spans: Spans,
    ) -> None:
        self._threads = ThreadPoolExecutor(encoders, thread_name_prefix="segment")
        self._lanes = [_Lane(frames, make, spans) for frames in plan]
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._given_up = threading.Event()
        self._next = 0
        self.failure: Exception | None = None
        """What the first segment that failed failed of."""

    def add(self, frames: np.ndarray) -> None:
        """The next frames of the clip, [f, ...]; they must not change before they are encoded."""
        start, stop = self._next, self._next + len(frames)
        self._next = stop
        for lane in self._lanes:
            low, high = max(start, lane.frames.start), min(stop, lane.frames.stop)
            if low < high and lane.put(frames[low - start : high - start]):
                self._threads.submit(self._work, lane)

    def in_order(self) -> Iterator[Segment]:
        """Every segment, each as soon as it and all before it are finished. All frames of the clip must be added.

        Raises:
            MediaError, ValueError: a segment could not be made.
        """
        for lane in self._lanes:
            with self._changed:
                while lane.segment is None and self.failure is None:
                    self._changed.wait()
            if self.failure is not None:
                raise self.failure
            assert lane.segment is not None
            yield lane.segment

    def close(self) -> None:
        """Give up what is not encoded yet, and end the threads: within the time of a few frames. What encoders held is
        free then.
        """
        self._given_up.set()
        self._threads.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()

    def _work(self, lane: "_Lane") -> None:
        try:
            is_finished = lane.work(self._given_up)
        except Exception as error:
            self._given_up.set()
            with self._changed:
                is_first = self.failure is None
                self.failure = self.failure or error
                self._changed.notify_all()
            if is_first:
                self._on_failure()
            return
        if is_finished:
            with self._changed:
                self._changed.notify_all()
            # what the last one holds is free once the clip is told as finished
            if lane is not self._lanes[-1]:
                lane.close()


class _Lane:
    """One segment: its frames are encoded one after another, by whichever thread is free."""

    def __init__(self, frames: range, make: Callable[[int], SegmentEncoder], spans: Spans) -> None:
        self.frames = frames
        self._spans = spans
        self.segment: Segment | None = None
        """Once it is finished."""
        self._make = make
        self._lock = threading.Lock()
        self._pieces: deque[np.ndarray] = deque()
        self._is_busy = False
        self._num_missing = len(frames)
        self._encoder: SegmentEncoder | None = None

    def put(self, piece: np.ndarray) -> bool:
        """Have `piece` encoded; whether a thread must be sent to `work`."""
        with self._lock:
            self._pieces.append(piece)
            idle, self._is_busy = not self._is_busy, True
        return idle

    def work(self, given_up: threading.Event) -> bool:
        """Encode what there is, until it is `given_up`; whether that was the last of the segment."""
        is_finished = False
        while (piece := self._take()) is not None:
            start = self.frames.stop - self._num_missing
            with self._spans.note(f"frames {start}-{start + len(piece) - 1}"):
                is_finished = self._encode(piece, given_up)
        return is_finished

    def close(self) -> None:
        """Forget what is not finished, and free what was taken. Call it when no thread is at work."""
        self._pieces.clear()
        if self._encoder is not None:
            self._encoder.close()
            self._encoder = None

    def _encode(self, piece: np.ndarray, given_up: threading.Event) -> bool:
        """Whether the segment is finished with that."""
        if self._encoder is None:
            self._encoder = self._make(self.frames.start)
        for frame in piece:
            if given_up.is_set():
                return False
            self._encoder.add(frame)
        self._num_missing -= len(piece)
        if self._num_missing:
            return False
        self.segment = self._encoder.finish()
        return True

    def _take(self) -> np.ndarray | None:
        with self._lock:
            if self._pieces:
                return self._pieces.popleft()
            self._is_busy = False
            return None
