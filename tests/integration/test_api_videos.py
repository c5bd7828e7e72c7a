"""Videos on real servers: create, look, list, delete."""

import json
import re
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from rushes_api.app import create_app
from rushes_core import backlog
from rushes_core.ids import new_video_id
from rushes_core.settings import Settings
from sqlalchemy.engine import make_url
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from support.api import API_KEY, AUTHORIZED, JobDriver, multipart
from support.checkpoints import tiny_checkpoint
from support.stack import SharedStack

OPENAI_MEMBERS = {
    "id",
    "object",
    "created_at",
    "completed_at",
    "expires_at",
    "status",
    "progress",
    "model",
    "prompt",
    "seconds",
    "size",
    "remixed_from_video_id",
    "error",
}


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    # no Redis: nothing that the API does may need it
    return stack.settings(
        checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("api")),
        api_key=API_KEY,
        redis_url="redis://127.0.0.1:1/0",
    )


def create(client: TestClient, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/videos", json={"prompt": "a dog", **body})
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


def get(client: TestClient, video_id: str) -> dict[str, Any]:
    response = client.get(f"/v1/videos/{video_id}")
    assert response.status_code == 200, response.text
    video: dict[str, Any] = response.json()
    return video


class TestCreate:
    def test_the_object_is_openais_and_more(self, client: TestClient) -> None:
        video = create(client, seconds="5", size="1280x720", metadata={"client": "acme"})
        assert video.keys() >= OPENAI_MEMBERS
        assert re.fullmatch(r"video_[0-9A-HJKMNP-TV-Z]{26}", video["id"])
        assert (video["object"], video["status"], video["progress"]) == ("video", "queued", 0)
        assert isinstance(video["created_at"], int)
        assert (video["seconds"], video["size"], video["size_requested"]) == ("5", "1344x768", "1280x720")
        assert video["completed_at"] is video["expires_at"] is video["error"] is video["remixed_from_video_id"] is None
        assert video["metadata"] == {"client": "acme"}
        assert (video["attempt"], video["max_attempts"], video["priority"]) == (0, 3, "normal")
        assert video["output"]["num_frames"] == 124
        assert video["output"]["bytes"] is None
        assert video["batch_id"] is video["campaign_id"] is video["custom_id"] is video["eta"] is None
        assert video["webhook"] == {"state": "none", "attempts": 0, "last_status": None}
        assert 0 <= video["seed"] < 2**53

    @pytest.mark.parametrize("seed", [0, 2**53 + 1, 2**63 - 1])
    def test_a_seed_comes_back_exactly(self, client: TestClient, seed: int) -> None:
        video = create(client, seed=seed)
        assert video["seed"] == get(client, video["id"])["seed"] == seed

    def test_a_prompt_comes_back_as_it_was_sent(self, client: TestClient) -> None:
        response = client.post(
            "/v1/videos",
            content=rb'{"prompt": " \ud83d\ude00 <d>Hi</d>\n"}',
            headers={"Content-Type": "application/json"},
        )
        assert get(client, response.json()["id"])["prompt"] == " 😀 <d>Hi</d>\n"

    def test_every_kind_of_body_makes_the_same_job(self, client: TestClient, driver: JobDriver) -> None:
        parts = [("prompt", "a dog"), ("seconds", "5"), ("seed", "12"), ("metadata[a]", "b"), ("size", "480x480")]
        body, headers = multipart(*parts)
        made = [
            create(client, seconds=5, seed=12, metadata={"a": "b"}, size="480x480"),
            client.post("/v1/videos", content=body, headers=headers).json(),
            client.post("/v1/videos", data=dict(parts)).json(),
        ]
        rows = [driver.row(video["id"]) for video in made]
        assert len({json.dumps([r.prompt, r.seed, r.num_frames, r.width, r.request]) for r in rows if r}) == 1

    def test_uniserves_body_makes_a_job_as_well(self, client: TestClient) -> None:
        target = {"short_edge": 480, "aspect_ratio": "9:16", "duration_seconds": 5}
        video = create(client, task="t2va", conditions=[], target=target, seed=1_000)
        assert (video["size"], video["seconds"], video["seed"]) == ("480x832", "5", 1_000)

    def test_the_client_says_how_long_the_clip_is_kept(self, client: TestClient, driver: JobDriver) -> None:
        video = create(client, retention={"anchor": "created_at", "seconds": 7_200})
        assert video["expires_at"] - video["created_at"] in (7_200, 7_201)
        assert get(client, video["id"])["expires_at"] == video["expires_at"]
        row = driver.row(video["id"])
        assert row is not None
        assert row.retain_until == row.created_at + timedelta(seconds=7_200)

    def test_what_is_stored_and_where_goes_to_the_worker(self, client: TestClient, driver: JobDriver) -> None:
        output = {"thumbnail": False, "key_prefix": "acme/spots"}
        row = driver.row(create(client, output=output)["id"])
        assert row is not None
        assert row.request["output"] == output

    @pytest.mark.parametrize(
        "body",
        [
            *({"fps": 30}, {"fps": 23.976}, {"fps": 0}, {"n": 2}, {"guidance_scale": 7}, {"size": "769x1345"}),
            *({"response_format": "b64_json"}, {"webhook_url": "https://a.example"}, {"seconds": 15.1}),
            *({"secnds": 4}, {"Prompt": "x"}, {"extra_body": {"seed": 1}}, {"num_frames": 363}, {"seed": 2**63}),
        ],
        ids=str,
    )
    def test_what_is_refused_leaves_no_row(self, client: TestClient, driver: JobDriver, body: dict[str, Any]) -> None:
        before = driver.num_rows()
        response = client.post("/v1/videos", json={"prompt": "a dog", **body})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == next(iter(body))
        assert driver.num_rows() == before

    def test_the_longest_prompt_is_accepted_and_one_token_more_is_not(self, client: TestClient) -> None:
        assert len(create(client, prompt="犬" * 3_413)["prompt"]) == 3_413
        response = client.post("/v1/videos", json={"prompt": "犬" * 3_414})
        assert response.status_code == 400
        assert "at most 10240 tokens, got 10242" in response.json()["error"]["message"]

    def test_it_is_committed_before_the_answer_leaves(self, api_settings: Settings, driver: JobDriver) -> None:
        committed: list[int] = []

        class Watch:
            def __init__(self, app: ASGIApp) -> None:
                self.app = app

            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                async def watching(message: Message) -> None:
                    if message["type"] == "http.response.start":
                        committed.append(driver.num_rows())
                    await send(message)

                await self.app(scope, receive, watching)

        before = driver.num_rows()
        with TestClient(Watch(create_app(api_settings)), headers=AUTHORIZED) as client:
            create(client)
        assert committed == [before + 1]


class TestRetrieve:
    def test_each_state_is_shown_as_it_is(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        video_id = create(client, seconds=5)["id"]
        driver.claim(video_id)
        assert get(client, video_id)["status"] == "in_progress"

        video_id = create(client, seconds=5)["id"]
        job = driver.start(video_id)
        driver.report(job, phase="denoising", completed_steps=4, progress=46)
        running = get(client, video_id)
        assert (running["status"], running["phase"], running["progress"]) == ("in_progress", "denoising", 46)
        assert running["progress_detail"] == {
            "completed_steps": 4,
            "total_steps": 8,
            "message": "Denoising, 4 of 8 steps done",
        }
        assert running["attempt"] == 1
        assert running["timing"]["queued_s"] >= 0
        assert running["queue"] == {"position": None, "ahead": None, "reason": None}

        video_id = create(client, seconds=5)["id"]
        driver.complete(video_id, b"clip", tmp_path)
        done = get(client, video_id)
        assert (done["status"], done["progress"], done["phase"], done["error"]) == ("completed", 100, None, None)
        assert done["created_at"] <= done["completed_at"]
        assert done["output"]["bytes"] == 4
        assert re.fullmatch("[0-9a-f]{64}", done["output"]["sha256"])
        assert done["timing"]["phases"] == {"denoising": 1.5}
        assert done["timing"]["run_s"] >= 0

    def test_a_failed_one_is_found_with_its_error(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        driver.fail(video_id, code="out_of_memory", message="The decoder ran out of memory.")
        failed = get(client, video_id)
        assert failed["status"] == "failed"
        assert failed["error"] == {
            "code": "out_of_memory",
            "message": "The decoder ran out of memory.",
            "stage": "decoding",
            "retryable": False,
        }
        assert failed["completed_at"] is None

    def test_one_that_will_run_again_waits_without_an_error(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        driver.lose(video_id)
        waiting = get(client, video_id)
        assert (waiting["status"], waiting["error"], waiting["attempt"]) == ("queued", None, 1)
        assert waiting["queue"]["reason"] == "retrying"

    def test_the_queue_of_its_project_may_be_paused(self, api_settings: Settings, driver: JobDriver) -> None:
        with driver.engine.begin() as connection:
            connection.execute(backlog.pause_queue("default"))
        try:
            with TestClient(create_app(api_settings), headers=AUTHORIZED) as client:
                video_id = create(client)["id"]
                assert get(client, video_id)["queue"]["reason"] == "paused"
        finally:
            with driver.engine.begin() as connection:
                connection.execute(backlog.resume_queue("default"))

    def test_a_waiting_one_has_a_place_in_the_queue(self, client: TestClient) -> None:
        first = get(client, create(client, priority="bulk")["id"])
        second = get(client, create(client, priority="bulk")["id"])
        assert second["queue"]["ahead"] == first["queue"]["ahead"] + 1
        assert second["queue"]["position"] == second["queue"]["ahead"] + 1
        urgent = get(client, create(client, priority="interactive")["id"])
        # what other tests had waiting may still be counted
        assert urgent["queue"]["ahead"] < second["queue"]["ahead"]

    def test_clients_are_told_when_to_ask_again(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        video_id = create(client)["id"]
        hint = client.get(f"/v1/videos/{video_id}").headers["openai-poll-after-ms"]
        assert re.fullmatch("[0-9]+", hint)
        assert 1_000 <= int(hint) <= 10_000
        driver.complete(video_id, b"clip", tmp_path)
        assert "openai-poll-after-ms" not in client.get(f"/v1/videos/{video_id}").headers

    @pytest.mark.parametrize(
        "video_id",
        [
            new_video_id(),
            new_video_id().lower(),
            "video_",
            "x",
            "video_01%00",
            "%ED%A0%80",
            "video_" + "Z" * 26,
            "0" * 500,
        ],
    )
    def test_one_that_does_not_exist_is_not_found(self, client: TestClient, video_id: str) -> None:
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
            response = client.request(method, f"/v1/videos/{video_id}{path}")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "video_not_found"

    def test_nothing_of_the_machine_shows(
        self, client: TestClient, driver: JobDriver, tmp_path: Path, api_settings: Settings
    ) -> None:
        video_id, failed = (create(client)["id"] for _ in range(2))
        driver.complete(video_id, b"clip", tmp_path)
        driver.fail(
            failed, code="generation_failed", message="OSError: /home/render/x.mp4 at http://10.0.0.5:9000/clips"
        )
        answers = [
            client.get(f"/v1/videos/{video_id}{what}")
            for what in ("", "/attempts", "/events", "/content?variant=audio")
        ]
        answers += [
            client.get(f"/v1/{what}") for what in ("videos", "capabilities", "models", "queue", f"videos/{failed}")
        ]
        answers.append(client.post(f"/v1/videos/{video_id}/remix", json={"prompt": "a cat"}))
        answers.append(client.post("/v1/videos/validate", json={"prompt": "a dog"}))
        store = f":{make_url(api_settings.s3_endpoint_url).port}"
        traces = ("file://", "/tmp", "/mnt", "/home", "127.0.0.1", "10.0.0.5", socket.gethostname(), store)
        for answer in answers:
            for trace in (*traces, driver.OWNER, driver.store.bucket, "results/", str(api_settings.checkpoint)):
                assert trace not in answer.text, (answer.url, trace)


class TestCompat:
    """Clients that know OpenAI's four words of a status only."""

    @pytest.fixture
    def cancelled(self, client: TestClient) -> str:
        video_id: str = create(client)["id"]
        client.post(f"/v1/videos/{video_id}/cancel")
        return video_id

    def test_a_cancelled_one_has_failed_with_the_same_error(self, client: TestClient, cancelled: str) -> None:
        ours = get(client, cancelled)
        theirs = client.get(f"/v1/videos/{cancelled}?compat=openai").json()
        assert (ours["status"], theirs["status"]) == ("cancelled", "failed")
        assert ours["error"] == theirs["error"]

    def test_lists_show_and_find_it_so(self, client: TestClient, cancelled: str) -> None:
        listed = client.get("/v1/videos?compat=openai&status=failed&limit=1").json()
        assert (listed["first_id"], listed["data"][0]["status"]) == (cancelled, "failed")
        assert cancelled not in client.get("/v1/videos?status=failed&limit=100").text

    def test_a_new_one_is_shown_as_ever(self, client: TestClient) -> None:
        response = client.post("/v1/videos?compat=openai", json={"prompt": "a dog"})
        assert (response.status_code, response.json()["status"]) == (200, "queued")

    def test_there_is_one_other_way_to_show_them(self, client: TestClient, cancelled: str) -> None:
        response = client.get(f"/v1/videos/{cancelled}?compat=azure")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "compat")


class TestDelete:
    def test_a_finished_one_is_gone(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        video_id = create(client)["id"]
        driver.complete(video_id, b"clip", tmp_path)
        for _ in range(2):
            response = client.delete(f"/v1/videos/{video_id}")
            assert response.status_code == 200
            assert response.json() == {"id": video_id, "object": "video.deleted", "deleted": True}
        listed = client.get("/v1/videos?limit=100").json()["data"]
        assert video_id not in [video["id"] for video in listed]

    def test_a_waiting_one_is_cancelled(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        client.delete(f"/v1/videos/{video_id}")
        row = driver.row(video_id)
        assert row is not None
        assert row.state == "cancelled"

    @pytest.mark.parametrize(
        ("method", "what"),
        [("GET", ""), ("GET", "/content"), ("GET", "/attempts"), ("POST", "/cancel"), ("POST", "/retry")],
    )
    def test_a_tombstone_is_left_that_says_so(self, client: TestClient, method: str, what: str) -> None:
        video_id = create(client)["id"]
        client.delete(f"/v1/videos/{video_id}")
        response = client.request(method, f"/v1/videos/{video_id}{what}")
        assert (response.status_code, response.json()["error"]["code"]) == (410, "video_deleted")

    def test_to_delete_again_changes_nothing(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        client.delete(f"/v1/videos/{video_id}")
        first = driver.row(video_id)
        client.delete(f"/v1/videos/{video_id}")
        again = driver.row(video_id)
        assert first is not None
        assert again is not None
        assert first.deleted_at is not None
        assert first.deleted_at == again.deleted_at

    def test_a_running_one_is_asked_to_stop(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        driver.start(video_id)
        assert client.delete(f"/v1/videos/{video_id}").status_code == 200
        row = driver.row(video_id)
        assert row is not None
        assert row.state == "running"
        assert row.cancel_requested_at is not None


@pytest.fixture
def videos(client: TestClient) -> list[str]:
    return [create(client, priority="bulk")["id"] for _ in range(5)]


class TestList:
    def test_the_newest_come_first(self, client: TestClient, videos: list[str]) -> None:
        page = client.get("/v1/videos?limit=2").json()
        assert page["object"] == "list"
        assert [video["id"] for video in page["data"]] == [videos[4], videos[3]]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (videos[4], videos[3], True)

    @pytest.mark.parametrize("order", ["asc", "desc"])
    def test_pages_hold_every_video_once(self, client: TestClient, videos: list[str], order: str) -> None:
        found: list[str] = []
        after = ""
        while True:
            page = client.get(f"/v1/videos?limit=3&order={order}{after}").json()
            found += [video["id"] for video in page["data"]]
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert found == sorted(set(found), reverse=order == "desc")
        assert set(videos) <= set(found)

    def test_a_page_beyond_the_end_is_empty(self, client: TestClient, videos: list[str]) -> None:
        page = client.get(f"/v1/videos?order=asc&after={new_video_id()}").json()
        assert page == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}

    def test_a_cursor_that_was_deleted_still_works(self, client: TestClient) -> None:
        older, deleted = (create(client)["id"] for _ in range(2))
        client.delete(f"/v1/videos/{deleted}")
        page = client.get(f"/v1/videos?limit=1&after={deleted}").json()
        assert page["first_id"] == older

    def test_it_is_filtered_by_status(self, client: TestClient, driver: JobDriver) -> None:
        video_id = create(client)["id"]
        driver.fail(video_id, code="generation_failed", message="no")
        page = client.get("/v1/videos?status=failed").json()
        assert page["first_id"] == video_id
        assert {video["status"] for video in page["data"]} == {"failed"}

    @pytest.mark.parametrize(
        ("query", "param"),
        [
            ("after=x", "after"),
            ("after=video_x", "after"),
            ("after=", "after"),
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("limit=x", "limit"),
            ("limit=%EF%BC%91", "limit"),
            ("limit=-1", "limit"),
            (f"limit={'9' * 5000}", "limit"),
            ("order=up", "order"),
            ("status=canceled", "status"),
            ("status=claimed", "status"),
            ("befor=x", "befor"),
            ("limit=1&limit=2", "limit"),
            ("%ED%A0%80=1", "\\ufffd\\ufffd\\ufffd"),
        ],
        ids=lambda value: value[:20],
    )
    def test_a_wrong_parameter_is_named(self, client: TestClient, query: str, param: str) -> None:
        response = client.get(f"/v1/videos?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
