"""Reading server-sent events as a browser does."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    data: dict[str, Any]
    id: str | None


class Stream:
    """One connection. Iterating gives its events; comments and the pause before a reconnect are noted."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.num_comments = 0
        self.retry_ms: int | None = None
        self._lines = response.iter_lines()

    def __iter__(self) -> Iterator[Event]:
        fields: dict[str, str] = {}
        for line in self._lines:
            if line.startswith(":"):
                self.num_comments += 1
            elif line:
                name, _, value = line.partition(": ")
                fields[name] = value
            else:
                if "retry" in fields:
                    self.retry_ms = int(fields["retry"])
                if "data" in fields:
                    yield Event(fields["event"], json.loads(fields["data"]), fields.get("id"))
                fields = {}

    def next(self, name: str | None = None) -> Event:
        """The next event, or the next of this name; an assertion fails when the stream ends before it."""
        for event in self:
            if name in (None, event.name):
                return event
        raise AssertionError(f"the stream ended without {name or 'an event'}")

    def next_comment(self) -> None:
        """Return when one more comment has come."""
        for line in self._lines:
            if line.startswith(":"):
                self.num_comments += 1
                return
        raise AssertionError("the stream ended without a comment")


@contextmanager
def events_of(client: httpx.Client, video_id: str, *, last: str | None = None) -> Iterator[Stream]:
    """The events of a video, after the one with id `last` if given."""
    headers = {} if last is None else {"Last-Event-ID": last}
    with client.stream("GET", f"/v1/videos/{video_id}/events", headers=headers) as response:
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response)
