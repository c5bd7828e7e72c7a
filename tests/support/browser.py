"""A headless Chromium, driven over its debugging pipe: JSON, each message ended by a zero byte."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_MOVE_DESCRIPTORS = """
import os, sys
commands, answers = os.dup(int(sys.argv[1])), os.dup(int(sys.argv[2]))
while answers < 5 or commands < 5:
    commands, answers = os.dup(commands), os.dup(answers)
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    """The command of a Chromium that is installed here: `CHROMIUM`, or one of `NAMES`."""
    named = os.environ.get("CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page, from `with` to its end.

    Args:
        folder: for its profile.
        headers: sent with every request of the page.
    """

    def __init__(self, command: str, folder: Path, headers: dict[str, str]) -> None:
        self._command = command
        self._folder = folder
        self._headers = headers
        self._number = 0
        self._received = b""
        self._session: str | None = None

    def __enter__(self) -> Self:
        # the browser reads commands from descriptor 3 and answers on 4
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()
        arguments = [
            self._command,
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder}",
            "--autoplay-policy=no-user-gesture-required",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-sync",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MOVE_DESCRIPTORS, str(its_in), str(its_out), *arguments],
            pass_fds=(its_in, its_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_in)
        os.close(its_out)
        try:
            targets = self._call("Target.getTargets")["targetInfos"]
            page = next(target["targetId"] for target in targets if target["type"] == "page")
            self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
            self._call("Network.enable")
            self._call("Network.setExtraHTTPHeaders", headers=self._headers)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def open(self, url: str) -> None:
        """Show the page at `url`."""
        answer = self._call("Page.navigate", url=url)
        assert "errorText" not in answer, answer

    def run(self, script: str) -> Any:
        """What the body of an asynchronous function returns in the page.

        Raises:
            AssertionError: it threw something.
        """
        answer = self._call(
            "Runtime.evaluate", expression=f"(async () => {{{script}}})()", awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _call(self, method: str, *, seconds: float = 120.0, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + seconds
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            readable, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, "the browser does not answer"
            received = os.read(self._in, 65_536)
            assert received, "the browser has ended"
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)
