"""What both lines of the `openai` package make of requests that a receiver got."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.commands import clean_environment
from support.receiver import Received

OLDER_SDK = Path(sys.prefix) / "openai2"
_SCRIPT = str(Path(__file__).parent / "unwrap.py")


def unwrapped(received: Sequence[Received], secret: str, *, line: int) -> list[dict[str, Any]]:
    """What `client.webhooks.unwrap` of this line of the package makes of each."""
    env = clean_environment() | ({"PYTHONPATH": str(OLDER_SDK)} if line == 2 else {})
    sent = [{"secret": secret, "body": one.body.decode(), "headers": dict(one.headers)} for one in received]
    command = [sys.executable, "-P", _SCRIPT]
    done = subprocess.run(command, env=env, input=json.dumps(sent), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said: list[dict[str, Any]] = json.loads(done.stdout)
    return said
