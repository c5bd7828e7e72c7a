"""The state directory of an embedded stack: one owner at a time, its passwords, ports, processes and logs.

lock           held with flock by the process that runs the stack; holds its number
secrets.json   passwords and keys, made once, mode 0600
ports.json     the ports of the last start, taken again when they are free
processes.json the processes of the last start, so that leftovers can be ended
logs/  postgres/  valkey/  seaweedfs/
"""

import fcntl
import json
import os
import secrets
from base64 import urlsafe_b64encode
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rushes_cli.stack.errors import StackError
from rushes_cli.stack.process import Child, ProcessIdentity, end_leftovers


@dataclass(frozen=True)
class Secrets:
    """Random, made at the first start on a state directory and kept."""

    postgres_password: str
    redis_password: str
    s3_access_key_id: str
    s3_secret_access_key: str
    api_key: str
    webhook_key: str

    @classmethod
    def random(cls) -> "Secrets":
        return cls(
            postgres_password=secrets.token_hex(24),
            redis_password=secrets.token_hex(24),
            s3_access_key_id=secrets.token_hex(10).upper(),
            s3_secret_access_key=secrets.token_hex(24),
            api_key=f"rushes-{secrets.token_hex(20)}",
            webhook_key=urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        )


class StateDirectory:
    """Usable between `acquire` and `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.logs = self.path / "logs"
        self._lock: int | None = None
        self._children: dict[str, ProcessIdentity] = {}

    def acquire(self) -> None:
        """Make the directory, become its only user, and end what an earlier user left running.

        Raises:
            StackError: the directory cannot be written, belongs to another user, or is in use.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            self._lock = self._take_lock()
            self.logs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self.release()
            raise StackError(
                f"state directory {self.path} cannot be used: {error.strerror or error}; choose another with --state"
            ) from error
        end_leftovers(ProcessIdentity(**record) for record in self._read("processes.json") or [])
        self._write("processes.json", [])

    def release(self) -> None:
        """Let another process use the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def secrets(self) -> Secrets:
        """The stored secrets; made at the first call."""
        stored = self._read("secrets.json") or {}
        complete = asdict(Secrets.random()) | {f.name: stored[f.name] for f in fields(Secrets) if f.name in stored}
        if complete != stored:
            self._write("secrets.json", complete)
        return Secrets(**complete)

    def last_port(self, name: str) -> int | None:
        """The port that server `name` had at its last start."""
        return (self._read("ports.json") or {}).get(name)

    def remember_port(self, name: str, port: int) -> None:
        self._write("ports.json", (self._read("ports.json") or {}) | {name: port})

    def remember_child(self, child: Child) -> None:
        """Record a running child, in place of an earlier one of the same name."""
        self._children[child.name] = child.identity
        self._write("processes.json", [asdict(identity) for identity in self._children.values()])

    def forget_children(self) -> None:
        self._children.clear()
        self._write("processes.json", [])

    def _check_owner(self) -> None:
        owner = (self.path / "secrets.json" if (self.path / "secrets.json").exists() else self.path).stat().st_uid
        if owner != os.geteuid() and (self.path / "secrets.json").exists():
            raise StackError(
                f"state directory {self.path} was made by user {owner}, and this is user {os.geteuid()}; "
                "run as that user or choose another with --state"
            )

    def _take_lock(self) -> int:
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 32, 0).decode().strip() or "another process"
            os.close(lock)
            raise StackError(
                f"state directory {self.path} is in use by process {holder}; stop it or choose another with --state"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None

    def _write(self, name: str, value: object) -> None:
        partial = self.path / f"{name}.partial"
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path / name)
