from typing import Any

import pytest
from rushes_cli.workers import row

WORKER: dict[str, Any] = {
    "name": "host-r0",
    "status": "busy",
    "layout": "r2s2",
    "model": "fasth3",
    "checkpoint": {"model_id": "FastVideo/FastH3", "revision": "516323fa396fa5df"},
    "precision": "transformer bfloat16, text encoder bfloat16, video VAE float16",
    "stage": "denoising",
    "loading": None,
    "job_id": "video_1",
    "rank_groups": 3,
    "restarts": 2,
    "devices": [
        {"name": "a", "memory_used_bytes": 1 << 30, "memory_total_bytes": 8 << 30},
        {"name": "b", "memory_used_bytes": 6 << 30, "memory_total_bytes": 8 << 30},
    ],
    "last_seen_at": 100,
    "silent_seconds": None,
}
LOADING = {"stage": "loading transformer", "percent": 43, "gb_per_second": 21.46, "seconds_left": 3.2}


def test_row_tells_what_a_replica_is_and_does() -> None:
    assert row(WORKER, now=103.4) == (
        "host-r0",
        "busy",
        "r2s2",
        "FastVideo/FastH3@516323fa396f",
        "transformer bfloat16, text encoder bfloat16, video VAE float16",
        "denoising",
        "video_1",
        "3",
        "2",
        "6.0 of 8.0 GiB",
        "3 s ago",
    )


@pytest.mark.parametrize(
    ("changes", "column", "expected"),
    [
        ({"precision": "transformer float32, text encoder float32"}, 4, "float32"),
        ({"checkpoint": {"model_id": "tiny", "revision": None}}, 3, "tiny"),
        ({"checkpoint": None}, 3, "fasth3"),
        ({"precision": None}, 4, "-"),
        ({"stage": None}, 5, "-"),
        ({"devices": []}, 9, "-"),
        ({"status": "silent", "silent_seconds": 31}, 10, "31 s ago"),
        ({"status": "lost", "silent_seconds": 359}, 10, "5 min ago"),
        ({"status": "lost", "silent_seconds": 3_780}, 10, "1 h 3 min ago"),
        ({"loading": LOADING}, 5, "loading transformer, 43 %, 21.5 GB/s, 3 s left"),
        ({"stage": None, "trouble": "/weights: Input/output error\nand more"}, 5, "/weights: Input/output error"),
        (
            {"loading": LOADING, "trouble": "/weights: Input/output error"},
            5,
            "loading transformer, 43 %, 21.5 GB/s, 3 s left",
        ),
        ({"loading": LOADING | {"gb_per_second": None, "seconds_left": None}}, 5, "loading transformer, 43 %"),
    ],
)
def test_what_is_not_known_is_left_out(changes: dict[str, Any], column: int, expected: str) -> None:
    assert row(WORKER | changes, now=100)[column] == expected


def test_a_worker_is_shown_that_an_api_of_the_release_before_told_of() -> None:
    older = {name: value for name, value in WORKER.items() if name not in ("loading", "silent_seconds")}
    assert row(older, now=103.4) == row(WORKER, now=103.4)
