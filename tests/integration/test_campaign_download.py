"""Clips of a campaign that are fetched from servers which break off, refuse ranges, or send something else."""

import hashlib
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rushes_cli.campaigns import manifest
from rushes_cli.campaigns.client import Client
from rushes_cli.campaigns.download import Clip, Fetcher, NotFetched, alone_in, fetch_all
from rushes_core.errors import RushesError

DATA = bytes(range(256)) * 2_000


class Store:
    """A server that answers for clips as the API does, and as it is told to for the next requests."""

    def __init__(self) -> None:
        self.data = DATA
        self.requests: list[dict[str, str]] = []
        self.plan: list[str] = []


@contextmanager
def serving(store: Store) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            store.requests.append({name.lower(): value for name, value in self.headers.items()} | {"path": self.path})
            step = store.plan.pop(0) if store.plan else "whole"
            etag = f'"{hashlib.sha256(store.data).hexdigest()}"'
            if step == "redirect":
                return self._answer(302, b"", {"Location": f"http://{self.headers['Host']}/signed"})
            if step == "away":
                return self._answer(503, b"{}", {"Retry-After": "0"})
            if refused := {"gone": 410, "unknown": 404, "refused": 401}.get(step):
                body = b'{"error": {"message": "the clip was removed", "code": "video_expired"}}'
                return self._answer(refused, body, {})
            wanted = self.headers.get("Range")
            is_same = self.path == "/signed" or self.headers.get("If-Range") == etag
            if wanted is not None and is_same and step != "ignores ranges":
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                total = len(store.data)
                headers = {"Content-Range": f"bytes {start}-{total - 1}/{total}", "ETag": etag}
                return self._answer(206, store.data[start:], headers, cut=step == "cut")
            return self._answer(200, store.data, {"ETag": etag}, cut=step == "cut")

        def _answer(self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = cut

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def clip(data: bytes = DATA, custom_id: str = "shot") -> Clip:
    return Clip("video_1", custom_id, 1, len(data), hashlib.sha256(data).hexdigest())


class TestDownload:
    @pytest.fixture
    def store(self) -> Store:
        return Store()

    @pytest.fixture
    def fetcher(self, store: Store, tmp_path: Path) -> Iterator[Fetcher]:
        with serving(store) as url:
            client = Client(url, "key")
            yield Fetcher(client, tmp_path)
            client.close()

    def test_a_whole_clip_gets_its_name(self, fetcher: Fetcher, tmp_path: Path) -> None:
        fetcher.fetch(clip())
        assert [one.name for one in tmp_path.iterdir()] == ["shot.mp4"]
        assert (tmp_path / "shot.mp4").read_bytes() == DATA
        assert fetcher.is_here(clip(), verify=True)

    def test_what_is_here_in_part_goes_on_behind_it(self, fetcher: Fetcher, store: Store, tmp_path: Path) -> None:
        (tmp_path / "shot.mp4.part").write_bytes(DATA[:1_000])
        fetcher.fetch(clip())
        (asked,) = store.requests
        assert asked["range"] == "bytes=1000-"
        assert asked["if-range"] == f'"{hashlib.sha256(DATA).hexdigest()}"'
        assert (tmp_path / "shot.mp4").read_bytes() == DATA

    def test_an_answer_that_breaks_off_is_gone_on_with(self, fetcher: Fetcher, store: Store, tmp_path: Path) -> None:
        store.plan = ["cut", "cut", "away", "whole"]
        fetcher.fetch(clip())
        starts = [int(one.get("range", "bytes=0-").removeprefix("bytes=").rstrip("-")) for one in store.requests]
        assert starts == sorted(starts)
        assert starts[-1] >= len(DATA) // 2
        assert (tmp_path / "shot.mp4").read_bytes() == DATA

    def test_the_rest_is_fetched_where_the_api_sends_it_without_the_key(
        self, fetcher: Fetcher, store: Store, tmp_path: Path
    ) -> None:
        (tmp_path / "shot.mp4.part").write_bytes(DATA[:1_000])
        store.plan = ["redirect"]
        fetcher.fetch(clip())
        asked, signed = store.requests
        assert "authorization" in asked
        assert (signed["path"], signed["range"]) == ("/signed", "bytes=1000-")
        assert "authorization" not in signed
        # the store has other ETags
        assert "if-range" not in signed
        assert (tmp_path / "shot.mp4").read_bytes() == DATA

    def test_a_server_without_ranges_sends_it_all_again(self, fetcher: Fetcher, store: Store, tmp_path: Path) -> None:
        (tmp_path / "shot.mp4.part").write_bytes(DATA[:1_000])
        store.plan = ["ignores ranges"]
        fetcher.fetch(clip())
        assert (tmp_path / "shot.mp4").read_bytes() == DATA

    def test_a_beginning_of_something_else_is_thrown_away(self, fetcher: Fetcher, store: Store, tmp_path: Path) -> None:
        (tmp_path / "shot.mp4.part").write_bytes(b"x" * 1_000)
        fetcher.fetch(clip())
        assert len(store.requests) == 2
        assert (tmp_path / "shot.mp4").read_bytes() == DATA

    def test_a_part_that_is_too_long_is_thrown_away(self, fetcher: Fetcher, tmp_path: Path) -> None:
        (tmp_path / "shot.mp4.part").write_bytes(DATA + b"x")
        fetcher.fetch(clip())
        assert (tmp_path / "shot.mp4").read_bytes() == DATA

    def test_bytes_that_are_not_the_clips_never_get_its_name(
        self, fetcher: Fetcher, store: Store, tmp_path: Path
    ) -> None:
        store.data = DATA[:-1] + b"x"
        with pytest.raises(NotFetched, match="another SHA-256"):
            fetcher.fetch(clip())
        assert not (tmp_path / "shot.mp4").exists()

    @pytest.mark.parametrize("step", ["gone", "unknown"])
    def test_a_clip_that_is_gone_says_why_and_leaves_nothing(
        self, fetcher: Fetcher, store: Store, tmp_path: Path, step: str
    ) -> None:
        (tmp_path / "shot.mp4.part").write_bytes(DATA[:1_000])
        store.plan = [step]
        with pytest.raises(NotFetched, match="the clip was removed"):
            fetcher.fetch(clip())
        assert len(store.requests) == 1
        assert not list(tmp_path.iterdir())

    def test_a_key_that_is_refused_costs_nothing_of_what_is_here(
        self, fetcher: Fetcher, store: Store, tmp_path: Path
    ) -> None:
        (tmp_path / "shot.mp4.part").write_bytes(DATA[:1_000])
        store.plan = ["refused"]
        with pytest.raises(NotFetched):
            fetcher.fetch(clip())
        assert (tmp_path / "shot.mp4.part").read_bytes() == DATA[:1_000]

    def test_a_directory_that_is_called_as_a_clip_is_named(
        self, fetcher: Fetcher, store: Store, tmp_path: Path
    ) -> None:
        (tmp_path / "shot.mp4").mkdir()
        with pytest.raises(NotFetched, match=r"shot\.mp4 is a directory"):
            fetcher.fetch(clip())
        assert [one.name for one in tmp_path.iterdir()] == ["shot.mp4"]
        assert not store.requests

    def test_a_directory_takes_one_download_at_a_time(self, tmp_path: Path) -> None:
        with alone_in(tmp_path), pytest.raises(RushesError, match="another download"), alone_in(tmp_path):
            pass
        with alone_in(tmp_path):
            assert not list(tmp_path.iterdir())

    def test_a_manifest_that_cannot_be_written_leaves_nothing(self, store: Store, tmp_path: Path) -> None:
        # as much as is read at once: a client that leaves in the middle is an error in the server
        store.data = bytes(2_000)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with serving(store) as url:
            client = Client(url, "key")
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
            try:
                with pytest.raises(OSError, match=r"manifest\.jsonl"):
                    manifest.save(client, "batch_1", tmp_path / "manifest.jsonl", form="jsonl")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
                client.close()
        assert not list(tmp_path.iterdir())

    def test_a_changed_file_is_seen_only_when_it_is_read_again(self, fetcher: Fetcher, tmp_path: Path) -> None:
        (tmp_path / "shot.mp4").write_bytes(b"x" * len(DATA))
        assert fetcher.is_here(clip(), verify=False)
        assert not fetcher.is_here(clip(), verify=True)
        (tmp_path / "shot.mp4").write_bytes(DATA[:-1])
        assert not fetcher.is_here(clip(), verify=False)

    def test_many_come_beside_each_other_and_one_that_fails_stops_none(
        self, fetcher: Fetcher, store: Store, tmp_path: Path
    ) -> None:
        clips = [clip(custom_id=f"shot-{number}") for number in range(20)]
        broken = Clip("video_2", "broken", 2, len(DATA), "0" * 64)
        ended = dict(fetch_all(fetcher, [broken, *clips], parallel=4, tick=lambda: None))
        assert {one for one, reason in ended.items() if reason is None} == set(clips)
        assert "SHA-256" in (ended[broken] or "")
        assert len(list(tmp_path.glob("*.mp4"))) == 20

    def test_a_stop_keeps_what_came_and_leaves_nothing_running(
        self, fetcher: Fetcher, store: Store, tmp_path: Path
    ) -> None:
        class Interrupt(BaseException):
            pass

        def interrupt() -> None:
            raise Interrupt

        with pytest.raises(Interrupt):
            for _ in fetch_all(fetcher, [clip()], parallel=2, tick=interrupt):
                pass
        assert not [one for one in threading.enumerate() if one.name.startswith("fetch")]
