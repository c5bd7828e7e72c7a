"""A job that is posted with a `webhook_url` to the notice that it is completed, through every process."""

import json
import os
import socket
from pathlib import Path

import pytest
from openai import OpenAI
from standardwebhooks import Webhook
from support.receiver import Receiver
from support.service import Service
from support.webhooks import SenderProcess
from support.worker import eventually

TITLE = 'ひまわり 🌻 "día"\nline'


@pytest.fixture
def service(quick_service: Service) -> Service:
    return quick_service


def test_a_completed_video_is_told_signed_to_the_url_of_its_request(service: Service, tmp_path: Path) -> None:
    secret = service.http.post("/v1/webhook_secret/rotate").raise_for_status().json()["signing_secret"]
    with Receiver() as receiver, SenderProcess(service.settings, tmp_path / "sender.log"):
        posted = service.post(
            prompt=f"A sign says {TITLE}",
            metadata={"title": TITLE},
            webhook_url=receiver.url("/done"),
            webhook_events=["video.started", "video.completed"],
        )
        assert posted["webhook"] == {"state": "pending", "attempts": 0, "last_status": None}
        service.wait_completed(posted["id"])
        eventually(lambda: service.get(posted["id"])["webhook"]["state"] == "delivered")
    started, completed = sorted(receiver.at("/done"), key=lambda one: json.loads(one.body)["data"]["sequence"])
    for received in (started, completed):
        Webhook(secret).verify(received.body, received.signed)
    assert json.loads(started.body)["type"] == "video.started"
    event = OpenAI(api_key="none", webhook_secret=secret).webhooks.unwrap(completed.body, completed.headers)
    assert event.type == "video.completed"
    data = json.loads(completed.body)["data"]
    assert (data["id"], data["status"], data["metadata"]) == (posted["id"], "completed", {"title": TITLE})
    content = service.http.get(data["content_url"])
    assert content.status_code == 200
    for inside in ("file://", "/tmp", "/mnt", "/home", os.uname().nodename, socket.gethostname(), "127.0.0.1"):
        assert inside.encode() not in completed.body
    assert service.get(posted["id"])["webhook"] == {"state": "delivered", "attempts": 1, "last_status": 200}
