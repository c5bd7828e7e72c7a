"""A client that writes every call down, and the load that it makes while faults happen."""

import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
from support.api import API_KEY
from support.faults.canvas import SIZE
from support.faults.history import History

CLIENT_TIMEOUT_SECONDS = 15.0


class Client:
    """Calls the API and writes every call down. Any thread may use it."""

    def __init__(self, url: str, history: History, *, secret: str = API_KEY, name: str = "key") -> None:
        self._history = history
        headers = {"Authorization": f"Bearer {secret}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=CLIENT_TIMEOUT_SECONDS, trust_env=False)
        self._lock = threading.Lock()
        self._count = 0
        self._name = name

    def create(
        self, prompt: str = "a wave", *, key: str | None = None, poison: bool = False, tries: int = 1, **fields: Any
    ) -> str | None:
        """Post a job, again under the same key while the answer is unknown or 503; its id once it is accepted."""
        with self._lock:
            self._count += 1
            key = key or f"{self._name}-{self._count}"
        body = {"prompt": prompt, "seconds": "4", "size": SIZE, "seed": 7, "metadata": {"key": key}} | fields
        for attempt in range(tries):
            if attempt:
                time.sleep(min(1.0, 0.2 * 2**attempt))
            answer = self._call(
                "create", "POST", "/v1/videos", json=body, headers={"Idempotency-Key": key}, key=key, poison=poison
            )
            if answer is not None and answer.is_success:
                video_id: str = answer.json()["id"]
                return video_id
        return None

    def cancel(self, job_id: str) -> httpx.Response | None:
        return self._call("cancel", "POST", f"/v1/videos/{job_id}/cancel", job=job_id)

    def delete(self, job_id: str) -> httpx.Response | None:
        return self._call("delete", "DELETE", f"/v1/videos/{job_id}", job=job_id)

    def retry(self, job_id: str) -> httpx.Response | None:
        return self._call("retry", "POST", f"/v1/videos/{job_id}/retry", job=job_id)

    def get(self, job_id: str) -> httpx.Response | None:
        return self._call("get", "GET", f"/v1/videos/{job_id}", job=job_id)

    def content(self, job_id: str) -> httpx.Response | None:
        return self._call("get", "GET", f"/v1/videos/{job_id}/content", job=job_id)

    def send_campaign(self, data: bytes, *, key: str, bad: Sequence[int]) -> str:
        """Send a file of lines, again under the same key while the answer is unknown or 503; the campaign's id.

        Args:
            bad: the lines of it that cannot become jobs, from 1.
        """
        headers = {"Idempotency-Key": key, "Content-Type": "application/jsonl"}
        told = {"key": key, "lines": len(data.splitlines()), "bad": list(bad)}
        for _ in range(20):
            answer = self._call("campaign", "POST", "/v1/campaigns", content=data, headers=headers, **told)
            if answer is not None and answer.is_success:
                batch_id: str = answer.json()["id"]
                return batch_id
            time.sleep(0.5)
        raise TimeoutError("no campaign was accepted")

    def change_campaign(self, batch_id: str, what: str, **members: Any) -> httpx.Response | None:
        """`what` is the last part of the path: `pause`, `cancel`, `retry_failed`."""
        path = f"/v1/campaigns/{batch_id}/{what}"
        return self._call(f"campaign {what}", "POST", path, job=batch_id, json=members or None)

    def ask(self, method: str, path: str, **members: Any) -> dict[str, Any]:
        """Something that an operator does; it must work."""
        answer = self._http.request(method, path, json=members or None)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def close(self) -> None:
        self._http.close()

    def _call(
        self,
        op: str,
        method: str,
        path: str,
        *,
        job: str | None = None,
        json: Any = None,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        **data: Any,
    ) -> httpx.Response | None:
        began = time.monotonic()
        self._history.add(op, "invoke", proc="client", job=job, **data)
        try:
            answer = self._http.request(method, path, json=json, content=content, headers=headers)
        except httpx.HTTPError as error:
            seconds = time.monotonic() - began
            self._history.add(op, "info", proc="client", job=job, seconds=seconds, error=repr(error), **data)
            return None
        seconds = time.monotonic() - began
        phase = "ok" if answer.is_success else "info" if answer.status_code >= 500 else "fail"
        code = None
        if answer.is_success and op in ("create", "campaign"):
            job = answer.json()["id"]
        elif not answer.is_success:
            with suppress(ValueError, KeyError, TypeError):
                code = answer.json()["error"]["code"]
        self._history.add(
            op, phase, proc="client", job=job, seconds=seconds, status=answer.status_code, code=code, **data
        )
        return answer


@dataclass
class Load:
    """Jobs that a thread posts while faults happen: short ones, some cancelled, retried, deleted or soon too late."""

    client: Client
    random: random.Random
    count: int
    gap_seconds: float = 0.15
    cancels: float = 0.1
    retries: float = 0.4
    """Share of the cancelled ones."""
    deletes: float = 0.08
    deadlines: float = 0.05
    step_seconds: tuple[float, float] = (0.0, 0.06)
    tries: int = 20
    priorities: Sequence[str] = ("interactive", "normal", "bulk")
    accepted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def join(self) -> None:
        self._thread.join()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for _ in range(self.count):
            if self._stop.is_set():
                return
            step = self.random.uniform(*self.step_seconds)
            priority = self.random.choice(self.priorities)
            fate = self.random.random()
            late = {"deadline": int(time.time()) + 2} if fate > 1 - self.deadlines and self.cancels else {}
            prompt = f"a wave [step {step:.3f}]"
            job_id = self.client.create(prompt, tries=self.tries, priority=priority, **late)
            if job_id is not None:
                self.accepted.append(job_id)
                if fate < self.cancels:
                    self._stop.wait(self.random.uniform(0, 0.5))
                    self.client.cancel(job_id)
                    if self.random.random() < self.retries:
                        self._stop.wait(self.random.uniform(0, 0.5))
                        self.client.retry(job_id)
                elif fate < self.cancels + self.deletes:
                    self._stop.wait(self.random.uniform(0, 0.5))
                    self.client.delete(job_id)
            self._stop.wait(self.gap_seconds)
