"""What the README and docs/webhooks.md tell people to paste, pasted."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rushes_core.settings import Settings
from support.receiver import Receiver
from support.stack import SharedStack
from support.waiting import wait_until
from support.webhooks import LOCAL, Hooks, SenderThread

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "webhooks.md").read_text()


@pytest.fixture(scope="module")
def settings(stack: SharedStack) -> Settings:
    return stack.settings(**LOCAL)


@pytest.fixture
def hooks(settings: Settings) -> Iterator[Hooks]:
    hooks = Hooks(settings)
    hooks.clear()
    yield hooks
    hooks.close()


def block(text: str, containing: str) -> str:
    """The one block of code with this in it."""
    (found,) = (code for code in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) if containing in code)
    return found


def test_the_receiver_of_the_readme_takes_what_is_signed_and_nothing_else(
    hooks: Hooks, settings: Settings, tmp_path: Path
) -> None:
    code = block(README, "class Receiver")
    # a free port, and word of it
    assert code.count("9000") == 1
    code = code.replace("ThreadingHTTPServer((", "server = ThreadingHTTPServer((").replace("9000", "0")
    code = code.replace(".serve_forever()", "\nprint(server.server_port, flush=True)\nserver.serve_forever()")
    script = tmp_path / "receiver.py"
    script.write_text(code)
    secret = hooks.project_secret()
    with subprocess.Popen(
        [sys.executable, script],
        env=os.environ | {"WEBHOOK_SECRET": secret.text},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            with SenderThread(settings):
                job = hooks.completed(f"http://127.0.0.1:{port}/")
                hooks.wait_for("delivered")
                assert process.stdout.readline() == f"video.completed {job.id} completed\n"
                # signed with the secret of an endpoint, which it does not know
                hooks.register(f"http://127.0.0.1:{port}/")
                other = hooks.completed()
                assert hooks.wait_attempts(1, job_id=other.id).last_status == 400
        finally:
            process.kill()


def test_a_signature_can_be_computed_with_openssl(hooks: Hooks, settings: Settings, tmp_path: Path) -> None:
    script = block(GUIDE, "openssl")
    with Receiver() as receiver, SenderThread(settings):
        _, secret = hooks.register(receiver.url())
        hooks.completed(title="ひまわり 🌻")
        wait_until(lambda: receiver.received)
    (received,) = receiver.received
    (tmp_path / "body").write_bytes(received.body)
    env = {
        "PATH": os.environ["PATH"],
        "WEBHOOK_SECRET": secret.text,
        "id": received.headers["webhook-id"],
        "timestamp": received.headers["webhook-timestamp"],
    }
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert f"v1,{done.stdout.strip()}" == received.headers["webhook-signature"]
