"""`rushes bench service`: what it measures of a service, what it leaves there, and how it ends."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.api import API_KEY
from support.commands import RUSHES, clean_environment
from support.service import Service
from support.waiting import wait_until

SMALL = ("--size", "480x480", "--seconds", "4", "--tokens", "9")


def begin(url: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RUSHES, "bench", "service", *words],
        env=clean_environment() | {"RUSHES_URL": url, "RUSHES_KEY": API_KEY},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(url: str, *words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    with begin(url, *words) as command:
        out, err = command.communicate(timeout=120)
    return command.returncode, out, err


@contextmanager
def paused(service: Service) -> Iterator[None]:
    service.http.post("/v1/queue/pause").raise_for_status()
    try:
        yield
    finally:
        service.http.post("/v1/queue/resume").raise_for_status()


def videos(service: Service) -> list[dict[str, object]]:
    """Those that the command made, the newest first."""
    found = service.http.get("/v1/videos", params={"metadata[made_by]": "rushes bench service", "limit": 100})
    return found.raise_for_status().json()["data"]


def test_every_length_is_rendered_as_often_by_so_many_clients(quick_service: Service) -> None:
    lengths = ("--seconds", "4", "5", "--tokens", "9", "70")
    status, out, err = ended(
        quick_service.api.url, *SMALL, *lengths, "--concurrency", "1", "3", "--requests", "4", "--warm-up", "1"
    )
    assert status == 0, err
    runs = [json.loads(line) for line in out.splitlines()]
    assert [run["concurrency"] for run in runs] == [1, 3]
    for run in runs:
        assert (run["requests"], run["completed"], run["failed"]) == (4, 4, {})
        assert list(run["shapes"]) == [f"{seconds} s, {tokens} tokens" for seconds in (4, 5) for tokens in (9, 70)]
        assert (run["complete"], run["retried"], run["sent_again"]) == (True, 0, 0)
        assert run["videos_per_second"] == pytest.approx(4 / run["seconds"], rel=1e-2)
        assert run["frames_per_second"] == pytest.approx((2 * 107 + 2 * 124) / run["seconds"], rel=1e-2)
        for times in (run["latency_s"], run["run_s"], *run["shapes"].values()):
            assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"] <= run["seconds"]
    assert err.count("warm-up: ") == 1
    assert videos(quick_service) == []


def test_clips_stay_where_they_are_to_be_kept(quick_service: Service) -> None:
    status, _, err = ended(
        quick_service.api.url, *SMALL, "--requests", "2", "--warm-up", "0", "--keep", "--priority", "bulk"
    )
    assert status == 0, err
    kept = videos(quick_service)
    for video in kept:
        quick_service.http.delete(f"/v1/videos/{video['id']}").raise_for_status()
    assert [(video["status"], video["priority"]) for video in kept] == [("completed", "bulk")] * 2


@pytest.mark.parametrize(("words", "left"), [((), []), (("--keep",), ["cancelled"] * 3)], ids=["deleted", "kept"])
def test_nothing_is_left_in_the_queue_by_who_breaks_off(
    quick_service: Service, words: tuple[str, ...], left: list[str]
) -> None:
    with paused(quick_service):
        command = begin(
            quick_service.api.url, *SMALL, "--concurrency", "3", "--requests", "5", "--warm-up", "0", *words
        )
        with command:
            wait_until(lambda: len(videos(quick_service)) == 3)
            command.send_signal(signal.SIGINT)
            out, err = command.communicate(timeout=60)
        assert command.returncode == 130
        assert err.splitlines()[-1] == "rushes bench: interrupted; what it had queued is cancelled"
        run = json.loads(out)
        assert (run["complete"], run["completed"], run["latency_s"]) == (False, 0, None)
        kept = videos(quick_service)
        for video in kept:
            quick_service.http.delete(f"/v1/videos/{video['id']}").raise_for_status()
        assert [video["status"] for video in kept] == left
        assert quick_service.http.get("/v1/queue").json()["queued"] == 0


def test_a_clip_that_does_not_complete_is_told_and_the_others_are_measured(quick_service: Service) -> None:
    with paused(quick_service):
        command = begin(quick_service.api.url, *SMALL, "--concurrency", "2", "--requests", "2", "--warm-up", "0")
        wait_until(lambda: len(videos(quick_service)) == 2)
        quick_service.http.post(f"/v1/videos/{videos(quick_service)[0]['id']}/cancel").raise_for_status()
    out, err = command.communicate(timeout=60)
    run = json.loads(out)
    assert (run["completed"], run["failed"]) == (1, {"cancelled_by_user": 1})
    assert command.returncode == 1
    assert err.splitlines()[-1] == "rushes bench: 1 of 2 clips did not complete"


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("--size", "500x500"), 1, "size must be one of"),
        (("--tokens", "12000"), 1, "--tokens 12000: prompt must be at most"),
        (("--priority", "soon"), 1, "priority"),
        (("--seconds", "16"), 2, "--seconds must be between 4 and 15, got 16"),
        (("--tokens", "0"), 2, "--tokens must be in 1..16384, got 0"),
        (("--concurrency", "0"), 2, "--concurrency must be in 1..256, got 0"),
        (
            ("--concurrency", "2", "--requests", "1"),
            2,
            "--requests must be at least the largest --concurrency, 2, got 1",
        ),
        (("--warm-up", "-1"), 2, "--warm-up must be at least 0, got -1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_before_anything_is_queued(
    quick_service: Service, words: tuple[str, ...], status: int, told: str
) -> None:
    found, out, err = ended(quick_service.api.url, *SMALL, *words)
    assert (found, out) == (status, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("rushes bench: ")
    assert told in err
    assert videos(quick_service) == []
