"""`rushes campaign` without an API: what its flags mean, what is shown, and what files are called."""

import hashlib
import json
import socket
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rushes_cli.campaigns import flags, manifest
from rushes_cli.campaigns.client import Client, Unreachable, from_environment
from rushes_cli.campaigns.download import (
    Clip,
    clip_of,
    range_headers,
    resume,
)
from rushes_cli.campaigns.shown import (
    bytes_text,
    counts_text,
    describe,
    duration_text,
    items_text,
    plain,
    report_lines,
)
from rushes_cli.main import UsageError, main

CAMPAIGN_ID = "batch_01K0Z8W5T3N9F6Q2RJ4XCB7MEH"
COUNTS = {"total": 1200, "completed": 310, "failed": 4, "queued": 880, "in_progress": 4, "cancelled": 2, "expired": 0}
DATA = bytes(range(256)) * 2_000


class TestSubmit:
    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (["--on-failure", "cancel"], "max_failures, which is missing"),
            (["--on-failure", "cancel", "--max-failures", "none"], "max_failures, which is missing"),
            (["--window", "22:00-22:00 UTC"], "window.end must differ from start"),
            (["--default", "prompt=waves"], "defaults.prompt is not supported"),
            (["--completion-window", "5m"], "completion_window must be between 1h and 30d"),
            (["--max-attempts", "11"], "max_attempts must be less than or equal to 10"),
        ],
    )
    def test_what_cannot_be_meant_is_refused_before_anything_is_sent(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        options: list[str],
        problem: str,
    ) -> None:
        # nobody listens there
        monkeypatch.setenv("RUSHES_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("RUSHES_KEY", "key")
        lines = tmp_path / "lines.jsonl"
        lines.write_text('{"prompt": "waves"}\n')
        assert main(["campaign", "submit", str(lines), *options]) == 2
        assert problem in capsys.readouterr().err


class TestFlags:
    @pytest.mark.parametrize(
        ("text", "wanted"),
        [
            (
                "22:00-06:00 mo-fr Europe/Berlin",
                {"start": "22:00", "end": "06:00", "days": ["mo", "tu", "we", "th", "fr"], "timezone": "Europe/Berlin"},
            ),
            (
                "UTC fr-mo stop 23:30-05:15",
                {
                    "start": "23:30",
                    "end": "05:15",
                    "days": ["mo", "fr", "sa", "su"],
                    "timezone": "UTC",
                    "on_close": "stop",
                },
            ),
            ("20:00-08:00 America/New_York", {"start": "20:00", "end": "08:00", "timezone": "America/New_York"}),
            ("20:00-08:00 SA,we UTC", {"start": "20:00", "end": "08:00", "timezone": "UTC", "days": ["we", "sa"]}),
        ],
    )
    def test_a_window_has_times_days_and_a_zone_in_any_order(self, text: str, wanted: dict[str, Any]) -> None:
        assert flags.window(text) == wanted

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("22:00-06:00 mo-fr", "lacks a time zone"),
            ("mo-fr Europe/Berlin", "lacks times"),
            ("", "lacks times"),
            ("22:00-06:00 mo-xy UTC", "no day 'xy'"),
            ("22:00-06:00 Europe/Berlni", "'Europe/Berlni'"),
            ("22:00-6:00 UTC", "'22:00-6:00'"),
            ("22:00-06:00 UTC Europe/Berlin", "timezone twice"),
            ("22:00-06:00 UTC ../../etc/passwd", "'../../etc/passwd'"),
        ],
    )
    def test_what_is_wrong_with_a_window_is_named(self, text: str, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            flags.window(text)

    def test_a_budget_is_seconds_or_a_duration(self) -> None:
        assert flags.budget("90000") == {"gpu_seconds": 90_000}
        assert flags.budget("25h") == {"gpu_seconds": 90_000}
        assert flags.budget("1h30m,cancel") == {"gpu_seconds": 5_400, "on_limit": "cancel"}
        for wrong in ("", "0", "-5", "nan", "inf", "25 hours", "25h,explode"):
            with pytest.raises(ValueError, match="must"):
                flags.budget(wrong)

    def test_a_proof_is_a_number_and_perhaps_a_time(self) -> None:
        assert flags.proof("4") == {"count": 4}
        assert flags.proof("4:30m") == {"count": 4, "auto_continue_after": "30m"}
        for wrong in ("", "0", "x", "4:", "4:soon", "-1"):
            with pytest.raises(ValueError, match="must be"):
                flags.proof(wrong)

    def test_a_time_is_one_with_its_zone_or_from_now(self) -> None:
        assert flags.moment("2026-12-01T22:00:00+01:00") == "2026-12-01T21:00:00+00:00"
        away = datetime.fromisoformat(flags.moment("2h")) - datetime.now(UTC)
        assert timedelta(minutes=119) < away <= timedelta(hours=2)
        with pytest.raises(ValueError, match="with its zone"):
            flags.moment("2026-12-01 22:00")

    def test_none_takes_a_limit_away(self) -> None:
        assert flags.or_none(flags.number)("none") is None
        assert flags.or_none(flags.number)("7") == 7
        for wrong in ("0", "-1", "7.5", "None"):
            with pytest.raises(ValueError, match="whole number"):
                flags.or_none(flags.number)(wrong)

    def test_defaults_are_json_where_they_are(self) -> None:
        pairs = [
            flags.pair(one) for one in ("seconds=5", "size=832x480", "prompt_suffix=a=b", 'output={"thumbnail":false}')
        ]
        assert flags.defaults(pairs) == {
            "seconds": 5,
            "size": "832x480",
            "prompt_suffix": "a=b",
            "output": {"thumbnail": False},
        }


class TestUsage:
    @pytest.fixture(autouse=True)
    def _key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RUSHES_URL", "RUSHES_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("RUSHES_KEY", "key")

    def test_a_key_and_an_address_are_asked_for_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        unusable = ("http://user:word@host", "http://host?x=1", "http://host/#f")
        for address in (
            "nonsense",
            "ftp://host",
            "http://",
            "http://host:port",
            "http://host:99999",
            "http://a..b",
            *unusable,
        ):
            monkeypatch.setenv("RUSHES_URL", address)
            with pytest.raises(UsageError, match="RUSHES_URL"):
                from_environment()
        monkeypatch.setenv("RUSHES_URL", "https://render.example/v1/")
        client = from_environment()
        assert client.url == "https://render.example"
        client.close()
        for wrong, problem in ((" ", "RUSHES_KEY is missing"), ("schlüssel", "characters")):
            monkeypatch.setenv("RUSHES_KEY", wrong)
            with pytest.raises(UsageError, match=problem):
                from_environment()
        monkeypatch.setenv("RUSHES_KEY", "")
        monkeypatch.setenv("RUSHES_API_KEY", "operators")
        from_environment().close()

    def test_standard_input_is_no_file(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["campaign", "submit", "-"]) == 2
        assert "not from standard input" in capsys.readouterr().err

    def test_a_file_that_cannot_be_is_named_before_anything_is_sent(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        empty = tmp_path / "empty.csv"
        empty.touch()
        for path, problem in ((tmp_path / "x.csv", "there is no file"), (tmp_path, "is no file"), (empty, "is empty")):
            assert main(["campaign", "submit", str(path)]) == 2
            said = capsys.readouterr().err
            assert problem in said
            assert str(path) in said

    @pytest.mark.parametrize(
        "words",
        [
            ["status", "batch_7"],
            ["items", CAMPAIGN_ID, "--limit", "0"],
            ["approve"],
            ["change", CAMPAIGN_ID, "--budget", "a lot"],
        ],
    )
    def test_wrong_usage_ends_with_status_2(self, words: list[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["campaign", *words])
        assert ended.value.code == 2


class TestNames:
    @pytest.mark.parametrize(
        ("custom_id", "name"),
        [
            ("shot-001", "shot-001.mp4"),
            ("Shot", "Shot~7.mp4"),
            ("con", "con~7.mp4"),
            ("-rf", "rf~7.mp4"),
            ("../夜/a b", "a_b~7.mp4"),
            (None, "line~7.mp4"),
        ],
    )
    def test_a_clip_is_called_as_in_an_archive(self, custom_id: str | None, name: str) -> None:
        assert Clip("video_1", custom_id, 7, 1, "0").name == name

    def test_only_items_with_a_clip_are_fetched(self) -> None:
        output = {"bytes": 7, "sha256": "ab", "deleted_at": None}
        response = {"status_code": 200, "body": {"id": "video_1", "output": output}}
        assert clip_of({"custom_id": "a", "line": 3, "response": response, "error": None}) == Clip(
            "video_1", "a", 3, 7, "ab"
        )
        output["deleted_at"] = 5
        assert clip_of({"custom_id": "a", "line": 3, "response": response, "error": None}) is None
        assert clip_of({"custom_id": "a", "line": 3, "response": None, "error": {"code": "x"}}) is None
        assert clip_of({"custom_id": "a", "line": 3, "response": None, "error": None}) is None


CAMPAIGN: dict[str, Any] = {
    "id": CAMPAIGN_ID,
    "status": "in_progress",
    "hold_reason": "window",
    "progress": 26,
    "request_counts": COUNTS,
    "eta": {"completes_at": 1_796_020_000, "completes_at_latest": 1_796_030_000, "fits_window": True},
}


class TestShown:
    def test_a_line_says_how_far_it_is_and_why_it_waits(self) -> None:
        now = datetime.fromtimestamp(1_796_019_000, UTC).astimezone()
        at = datetime.fromtimestamp(1_796_020_000).astimezone()
        line = describe(CAMPAIGN, now=now)
        assert line.startswith("[######------------------]  26 %  in_progress, outside its window")
        assert "310 completed, 4 failed, 2 cancelled, 4 running, 880 queued of 1,200" in line
        assert f"{at:%H:%M}" in line

    def test_without_a_forecast_there_is_no_time(self) -> None:
        assert "ends" not in describe(CAMPAIGN | {"eta": None})
        nothing = {"completes_at": None, "completes_at_latest": None, "fits_window": None}
        assert "ends" not in describe(CAMPAIGN | {"eta": nothing})

    def test_a_report_says_what_a_file_would_take(self) -> None:
        report = {"lines": 1_200, "valid": 1_198, "invalid": 2, "frames": 148_552, "gpu_seconds": 41_000}
        when = {"completes_at": 1_796_020_000, "completes_at_latest": None, "fits_window": True}
        said = list(report_lines(report | when))
        assert said[:2] == ["1,200 requests: 1,198 good, 2 bad", "148,552 frames, GPU time 11 h 23 min"]
        assert said[2].endswith(", within this window")
        assert "not in this window" in list(report_lines(report | when | {"fits_window": False}))[2]
        assert "unknown" in list(report_lines(report | {"gpu_seconds": None}))[1]
        assert list(report_lines({})) == []

    def test_a_report_says_every_bad_line_that_it_has_and_how_many_more_there_are(self) -> None:
        errors = [{"line": line, "code": "invalid_value", "message": "seconds \x1b"} for line in range(2, 34)]
        report = {"lines": 50, "valid": 10, "invalid": 40, "frames": 7, "gpu_seconds": None, "errors": errors}
        said = list(report_lines(report))
        assert said[2:-1] == [f"line {line}: seconds \\x1b (invalid_value)" for line in range(2, 34)]
        assert said[-1] == "and 8 more bad lines"
        assert list(report_lines(report | {"invalid": 32}))[-1].startswith("line 33")

    def test_a_dry_run_is_called_one(self) -> None:
        dry_run = CAMPAIGN | {
            "status": "completed",
            "dry_run": True,
            "report": {"lines": 32, "valid": 1, "invalid": 31},
        }
        assert "dry run, completed" in describe(dry_run)
        assert items_text(dry_run) == "1 good, 31 bad"
        assert items_text(dry_run | {"report": None}) == "none"
        assert items_text(CAMPAIGN | {"dry_run": False}) == counts_text(COUNTS)

    def test_what_a_terminal_would_obey_is_written_out(self) -> None:
        assert plain("夜 \x1b[2J a\nb") == "夜 \\x1b[2J a\\nb"

    def test_nothing_yet_is_said(self) -> None:
        assert counts_text(dict.fromkeys(COUNTS, 0)) == "nothing yet of 0"

    def test_amounts_are_read_at_a_glance(self) -> None:
        assert [bytes_text(one) for one in (0, 999, 1_000, 1_234_567, 5e9, 5e12)] == [
            "0 B",
            "999 B",
            "1.0 kB",
            "1.2 MB",
            "5.0 GB",
            "5000.0 GB",
        ]
        assert [duration_text(one) for one in (0, 89, 90, 5_340, 5_400, 7_199, 90_000)] == [
            "0 s",
            "89 s",
            "2 min",
            "89 min",
            "1 h 30 min",
            "2 h 00 min",
            "25 h 00 min",
        ]


def clip(data: bytes = DATA, custom_id: str = "shot") -> Clip:
    return Clip("video_1", custom_id, 1, len(data), hashlib.sha256(data).hexdigest())


def test_the_rest_is_asked_for_only_of_the_same_clip() -> None:
    assert "Range" not in range_headers(clip(), 0)
    assert range_headers(clip(), 5)["Range"] == "bytes=5-"


def test_what_is_here_is_hashed_as_far_as_it_goes(tmp_path: Path) -> None:
    part = tmp_path / "part"
    assert resume(part, clip()).offset == 0
    for size in (0, 1, 1_000, len(DATA)):
        part.write_bytes(DATA[:size])
        state = resume(part, clip())
        assert (state.offset, state.digest.hexdigest()) == (size, hashlib.sha256(DATA[:size]).hexdigest())


def test_a_directory_belongs_to_the_campaign_whose_manifest_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert manifest.owner(tmp_path) is None
    open_item = {"custom_id": "a", "response": None, "error": None}
    done = {"custom_id": "b", "response": {"body": {"id": "video_1", "campaign_id": CAMPAIGN_ID}}, "error": None}
    (tmp_path / "manifest.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in (open_item, done)))
    assert manifest.owner(tmp_path) == CAMPAIGN_ID
    monkeypatch.setenv("RUSHES_KEY", "key")
    assert main(["campaign", "download", CAMPAIGN_ID.replace("Z8", "Z9"), str(tmp_path)]) == 2
    assert CAMPAIGN_ID in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", '"a"', "null", '{"response": "a"}', '{"response": {"body": [1]}}', "no JSON"])
def test_what_is_only_called_as_a_manifest_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "manifest.jsonl"
    path.write_text(text)
    monkeypatch.setenv("RUSHES_KEY", "key")
    assert main(["campaign", "download", CAMPAIGN_ID, str(tmp_path)]) == 2
    assert f"{path} is no manifest of a campaign" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.timeout(30)
def test_an_api_that_takes_connections_and_says_nothing_is_not_waited_for_longer_than_one_that_is_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        client = Client(f"http://127.0.0.1:{frozen.getsockname()[1]}", "a-key", patience=0.5)
        with pytest.raises(Unreachable, match="timed out"):
            client.get("/v1/workers")
        client.close()


def test_a_request_is_sent_again_with_its_key_while_the_first_one_has_no_answer() -> None:
    keys: list[str] = []

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            keys.append(self.headers["Idempotency-Key"])
            busy = {"error": {"message": "still being answered", "code": "idempotency_in_progress"}}
            status, answer = (409, busy) if len(keys) < 3 else (200, {"id": "video_1"})
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = Client(f"http://127.0.0.1:{server.server_port}", "a-key")
        assert client.post("/v1/videos", {"prompt": "x"}) == {"id": "video_1"}
        client.close()
        server.shutdown()
    assert len(keys) == 3
    assert len(set(keys)) == 1
