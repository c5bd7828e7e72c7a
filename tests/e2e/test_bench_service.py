"""`rushes bench service`: what it measures of a service, what it leaves there, and how it ends."""

import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rushes_cli.bench_service_loops import ClosedLoop
from rushes_cli.bench_service_shapes import Shape
from rushes_cli.campaigns.client import Client, Unreachable
from support.api import API_KEY
from support.commands import RUSHES, clean_environment
from support.forwarder import Forwarder
from support.service import Service
from support.waiting import wait_until

SMALL = ("--size", "480x480", "--seconds", "4", "--tokens", "9")


def begin(url: str, *words: str, key: str = API_KEY) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*RUSHES, "bench", "service", *words],
        env=clean_environment() | {"RUSHES_URL": url, "RUSHES_KEY": key},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(url: str, *words: str, key: str = API_KEY) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    with begin(url, *words, key=key) as command:
        out, err = command.communicate(timeout=240)
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


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
            out, err = command.communicate(timeout=240)
        assert command.returncode == 130
        assert err.splitlines()[-1] == "rushes bench: interrupted; what it had queued is cancelled"
        run = json.loads(out)
        assert (run["complete"], run["completed"], run["latency_s"]) == (False, 0, None)
        assert run["failed"] == {}
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
    out, err = command.communicate(timeout=240)
    run = json.loads(out)
    assert (run["completed"], run["failed"]) == (1, {"cancelled_by_user": 1})
    assert command.returncode == 1
    assert err.splitlines()[-1] == "rushes bench: 1 of 2 clips did not complete"


def test_requests_are_sent_when_they_are_due_whatever_became_of_those_before(
    quick_service: Service, tmp_path: Path
) -> None:
    out = tmp_path / "requests.jsonl"
    words = ("--request-rate", "20", "--burstiness", "1000", "--requests", "6", "--warm-up", "0", "--out", str(out))
    with paused(quick_service):
        command = begin(quick_service.api.url, *SMALL, *words)
        wait_until(lambda: len(videos(quick_service)) == 6)
        assert lines_of(out) == []
    stdout, err = command.communicate(timeout=240)
    assert command.returncode == 0, err
    run = json.loads(stdout)
    assert (run["request_rate"], run["burstiness"], run["max_concurrency"]) == (20, 1000, 512)
    assert "concurrency" not in run
    assert (run["requests"], run["completed"], run["complete"], run["failed"]) == (6, 6, True, {})
    requests = sorted(lines_of(out), key=lambda line: line["number"])
    assert [(one["run"], one["number"], one["status"], one["code"]) for one in requests] == [
        ("R=20", number, "completed", None) for number in range(6)
    ]
    assert {(one["seconds"], one["tokens"], one["size"], one["attempt"]) for one in requests} == {(4, 9, "480x480", 1)}
    assert max(one["late_s"] for one in requests) == pytest.approx(run["late_s"]["max"], abs=1e-3)
    assert max(one["latency_s"] for one in requests) == pytest.approx(run["latency_s"]["max"], abs=1e-3)
    for one in requests:
        assert one["latency_s"] > one["queued_s"] + one["run_s"] - 0.1
        assert one["late_s"] >= 0
    due = [datetime.fromisoformat(one["submitted_at"]).timestamp() - one["late_s"] for one in requests]
    # the rate of many, whatever the gaps are
    assert due[-1] - due[0] == pytest.approx(5 / 20, abs=1)
    assert videos(quick_service) == []


def test_time_that_a_request_was_sent_late_is_part_of_its_latency(quick_service: Service, tmp_path: Path) -> None:
    out = tmp_path / "requests.jsonl"
    words = ("--request-rate", "50", "--max-concurrency", "1", "--requests", "3", "--warm-up", "1", "--out", str(out))
    status, stdout, err = ended(quick_service.api.url, *SMALL, *words)
    assert status == 0, err
    assert err.count("warm-up: ") == 1
    first, second, third = lines_of(out)
    for before, after in ((first, second), (second, third)):
        assert after["late_s"] > before["late_s"]
        assert after["latency_s"] > before["latency_s"]
        assert after["latency_s"] >= after["late_s"] + after["run_s"]
    assert json.loads(stdout)["late_s"]["max"] == pytest.approx(third["late_s"], abs=1e-3)


def test_what_the_api_turns_away_is_an_outcome_and_is_not_sent_again(quick_service: Service, tmp_path: Path) -> None:
    out = tmp_path / "requests.jsonl"
    limited = quick_service.http.post("/v1/api_keys", json={"name": "bench", "max_queued": 2}).raise_for_status().json()
    words = ("--request-rate", "50", "--requests", "5", "--warm-up", "0", "--out", str(out))
    with paused(quick_service):
        command = begin(quick_service.api.url, *SMALL, *words, key=limited["secret"])
        wait_until(lambda: out.exists() and len(lines_of(out)) == 3)
        turned_away = lines_of(out)
    stdout, err = command.communicate(timeout=240)
    assert {(one["status"], one["code"], one["id"], one["run_s"]) for one in turned_away} == {
        ("refused", "queue_full", None, None)
    }
    run = json.loads(stdout)
    assert (run["completed"], run["failed"], run["sent_again"]) == (2, {"queue_full": 3}, 0)
    assert command.returncode == 1
    assert err.splitlines()[-1] == "rushes bench: 3 of 5 clips did not complete"
    assert [one["status"] for one in lines_of(out)[3:]] == ["completed"] * 2


def test_a_run_that_is_broken_off_leaves_the_lines_of_what_had_ended(quick_service: Service, tmp_path: Path) -> None:
    out = tmp_path / "requests.jsonl"
    out.write_text('{"run": "before"}\n')
    words = ("--request-rate", "0.5", "--requests", "50", "--warm-up", "0", "--out", str(out))
    with begin(quick_service.api.url, *SMALL, *words) as command:
        wait_until(lambda: len(lines_of(out)) == 2)
        command.send_signal(signal.SIGTERM)
        stdout, err = command.communicate(timeout=240)
    assert command.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1] == "rushes bench: interrupted; what it had queued is cancelled"
    assert [one["run"] for one in lines_of(out)][:2] == ["before", "R=0.5"]
    run = json.loads(stdout)
    assert (run["complete"], run["completed"], run["requests"]) == (False, len(lines_of(out)) - 1, 50)
    assert run["failed"] == {}
    assert videos(quick_service) == []
    assert quick_service.http.get("/v1/queue").json()["queued"] == 0


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("--size", "500x500"), 2, "--size must be one of"),
        (("--tokens", "12000"), 1, "--tokens 12000: prompt must be at most"),
        (("--priority", "soon"), 2, "--priority must be one of"),
        (("--seconds", "16"), 2, "--seconds must be between 4 and 15, got 16"),
        (("--tokens", "0"), 2, "--tokens must be in 1..16384, got 0"),
        (("--concurrency", "0"), 2, "--concurrency must be in 1..256, got 0"),
        (
            ("--concurrency", "2", "--requests", "1"),
            2,
            "--requests must be at least the largest --concurrency, 2, got 1",
        ),
        (("--warm-up", "-1"), 2, "--warm-up must be at least 0, got -1"),
        (("--request-rate", "0"), 2, "--request-rate must be above 0 and at most 1000, got 0"),
        (("--request-rate", "nan"), 2, "--request-rate must be above 0 and at most 1000, got nan"),
        (("--request-rate", "1", "--requests", "0"), 2, "--requests must be at least 1, got 0"),
        (("--request-rate", "1", "--burstiness", "0"), 2, "--burstiness must be in 0.01..1,000,000, got 0"),
        (("--request-rate", "1", "--max-concurrency", "901"), 2, "--max-concurrency must be in 1..900, got 901"),
        (("--burstiness", "1"), 2, "--burstiness belongs to --request-rate"),
        (("--max-concurrency", "1"), 2, "--max-concurrency belongs to --request-rate"),
        (("--out", "/no/such/lines"), 2, "--out /no/such/lines: there is no folder /no/such"),
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


def test_a_clip_whose_end_is_not_heard_of_is_told_as_such(quick_service: Service) -> None:
    with Forwarder(quick_service.api.url) as door, paused(quick_service):
        door.open()
        client, cleaner = (Client(door.url, API_KEY, patience=3.0) for _ in range(2))
        body = {"prompt": "a wave", "size": "480x480", "seconds": "4"}
        loop = ClosedLoop(client, cleaner, [Shape(4, 9, body)], 0, "C=1")
        with ThreadPoolExecutor(1) as thread:
            run = thread.submit(loop.go)
            wait_until(lambda: len(videos(quick_service)) == 1)
            door.shut()
            with pytest.raises(Unreachable, match="given up after 3 s"):
                run.result()
        (left,) = videos(quick_service)
        (done,) = loop.done
        assert (done.status, done.code, done.video_id) == ("unknown", "api_away", left["id"])
        assert loop.sent_again == 0
        assert not loop.is_complete
        door.open()
        loop.delete()
        assert videos(quick_service) == []
        client.close()
        cleaner.close()
