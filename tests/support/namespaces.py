"""A second machine that is none: a network namespace of its own, and a cable to it that can be pulled."""

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self


def may_make_namespaces() -> bool:
    """Whether this process can make network namespaces and links between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"rushes-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    link = ["ip", "-n", name, "link", "add", "name", "a", "type", "veth", "peer", "name", "b"]
    made = subprocess.run(link, capture_output=True)
    _ip("netns", "delete", name)
    return made.returncode == 0


class SecondMachine:
    """A namespace that sees nothing of this machine but the other end of one link."""

    def __init__(self) -> None:
        number = os.getpid() % 16_000
        self.name = f"rushes-{os.getpid()}"
        self._here, self._there = f"rush{number}a", f"rush{number}b"
        network = f"10.213.{number // 64}.{number % 64 * 4}"
        first = int(network.rpartition(".")[2])
        self.address_here, address_there = (f"{network.rpartition('.')[0]}.{first + i}" for i in (1, 2))
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", "name", self._here, "type", "veth", "peer", "name", self._there, "netns", self.name)
            _ip("address", "add", f"{self.address_here}/30", "dev", self._here)
            _ip("link", "set", self._here, "up")
            _ip("-n", self.name, "address", "add", f"{address_there}/30", "dev", self._there)
            _ip("-n", self.name, "link", "set", "lo", "up")
            self.plug_in()
        except BaseException:
            self._remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def command(self) -> list[str]:
        """What a command is put behind to run there, in the process that is started."""
        return ["ip", "netns", "exec", self.name]

    def pull_out(self) -> None:
        """From now on nothing that either side sends arrives, and neither is told."""
        _ip("-n", self.name, "link", "set", self._there, "down")

    def plug_in(self) -> None:
        _ip("-n", self.name, "link", "set", self._there, "up")

    def _remove(self) -> None:
        # with a namespace, it would be gone some time later
        subprocess.run(["ip", "link", "delete", self._here], capture_output=True)
        _ip("netns", "delete", self.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
