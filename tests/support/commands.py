"""`rushes up` and `rushes demo` as processes of their own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
from rushes_cli.stack.process import ProcessIdentity
from support.waiting import wait_until

RUSHES = [sys.executable, "-P", "-m", "rushes_cli"]


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of Rushes."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RUSHES_")}


def run(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of `rushes` to its end."""
    command = [*RUSHES, *map(str, words)]
    environment = clean_environment() | dict(env or {})
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)


def processes_of(state_dir: Path) -> list[ProcessIdentity]:
    """The processes that a state directory records as running."""
    return [ProcessIdentity(**record) for record in json.loads((state_dir / "processes.json").read_text())]


def descendants(pid: int) -> set[int]:
    """Numbers of all processes below `pid`."""
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(int(fields[1]), set()).add(int(stat.parent.name))
    found: set[int] = set()
    frontier = {pid}
    while frontier := set().union(*(children.get(parent, set()) for parent in frontier)) - found:
        found |= frontier
    return found


class Up:
    """A running `rushes up` that has said that it is ready."""

    def __init__(self, state_dir: Path, env: Mapping[str, str] | None = None) -> None:
        self.state_dir = state_dir
        self.log = state_dir.with_name(f"{state_dir.name}.out")
        self._offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as output:
            self.popen = subprocess.Popen(
                [*RUSHES, "up", "--state", str(state_dir), "--device", "cpu"],
                cwd=state_dir.parent,
                env=clean_environment() | dict(env or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        wait_until(lambda: "Rushes is ready" in self.output() or self.popen.poll() is not None, timeout_seconds=120)
        assert self.popen.poll() is None, self.output()
        url, key = re.search(r"URL +(\S+)", self.output()), re.search(r"API key +(\S+)", self.output())
        assert url is not None
        assert key is not None
        headers = {"Authorization": f"Bearer {key[1]}"}
        self.client = httpx.Client(base_url=url[1], headers=headers, trust_env=False, timeout=30)

    def output(self) -> str:
        """What this run has printed so far."""
        return self.log.read_bytes()[self._offset :].decode()

    def video(self, video_id: str) -> dict[str, Any]:
        return self.client.get(f"/videos/{video_id}").raise_for_status().json()

    def end(self, signum: signal.Signals) -> int:
        """Send a signal and return the exit status."""
        self.popen.send_signal(signum)
        return self.popen.wait(90)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.popen.kill()
        self.popen.wait()
