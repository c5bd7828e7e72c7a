"""The embedded stack with its real servers: data outlives restarts, passwords hold, nothing is left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from botocore.exceptions import ClientError
from rushes_cli.stack import EmbeddedStack, StackError
from rushes_cli.stack.process import ProcessIdentity, end_leftovers
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from support.stack import SharedStack, libpq_url, s3_client
from support.waiting import wait_until

LAUNCHER = textwrap.dedent(
    """
    import json, sys, time
    from rushes_cli.stack import EmbeddedStack
    stack = EmbeddedStack(sys.argv[1])
    stack.start()
    print(json.dumps(stack.settings_env), flush=True)
    time.sleep(600)
    """
)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator["Launcher"]:
    launcher = Launcher(tmp_path / "state")
    yield launcher
    launcher.kill()


class Launcher:
    """A process of its own that runs a stack and can be killed."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.popen = subprocess.Popen([sys.executable, "-c", LAUNCHER, state_dir], stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        self.env: dict[str, str] = json.loads(self.popen.stdout.readline())

    @property
    def servers(self) -> list[ProcessIdentity]:
        records = json.loads((self.state_dir / "processes.json").read_text())
        return [ProcessIdentity(**record) for record in records if record["name"] != "initdb"]

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


def store_everywhere(env: dict[str, str]) -> None:
    with psycopg.connect(libpq_url(env)) as connection:
        connection.execute("CREATE TABLE kept (note text)")
        connection.execute("INSERT INTO kept VALUES ('a row')")
    with redis.Redis.from_url(env["RUSHES_REDIS_URL"]) as client:
        client.set("kept", "a key")
    s3_client(env).put_object(
        Bucket=env["RUSHES_S3_BUCKET"], Key="kept", Body=b"an object", ContentType="video/mp4", Metadata={"job": "1"}
    )


def found_everywhere(env: dict[str, str]) -> list[Any]:
    with psycopg.connect(libpq_url(env)) as connection:
        row = connection.execute("SELECT note FROM kept").fetchone()
    with redis.Redis.from_url(env["RUSHES_REDIS_URL"]) as client:
        key = client.get("kept")
    answer = s3_client(env).get_object(Bucket=env["RUSHES_S3_BUCKET"], Key="kept")
    return [row, key, answer["Body"].read(), answer["ContentType"], answer["Metadata"]]


EVERYTHING = [("a row",), b"a key", b"an object", "video/mp4", {"job": "1"}]


def test_restart_keeps_rows_keys_and_objects(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path) as stack:
        store_everywhere(stack.settings_env)
        passwords = stack.secrets
    with EmbeddedStack(tmp_path) as stack:
        assert found_everywhere(stack.settings_env) == EVERYTHING
        assert stack.secrets == passwords


def test_killed_launcher_leaves_no_server_and_loses_nothing(launcher: Launcher) -> None:
    store_everywhere(launcher.env)
    servers = launcher.servers
    assert {server.name for server in servers} == {"postgres", "valkey", "seaweedfs"}
    launcher.kill()
    wait_until(lambda: not any(server.is_alive() for server in servers))
    with EmbeddedStack(launcher.state_dir) as stack:
        assert found_everywhere(stack.settings_env) == EVERYTHING


def test_servers_killed_together_with_their_launcher_start_again_with_all_data(launcher: Launcher) -> None:
    store_everywhere(launcher.env)
    for server in launcher.servers:
        os.kill(server.pid, signal.SIGKILL)
    launcher.kill()
    with EmbeddedStack(launcher.state_dir) as stack:
        assert found_everywhere(stack.settings_env) == EVERYTHING


def test_dead_server_is_reported_with_its_name_and_log(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path) as stack:
        stack.check_running()
        records = json.loads((tmp_path / "processes.json").read_text())
        os.kill(next(record["pid"] for record in records if record["name"] == "valkey"), signal.SIGKILL)
        with pytest.raises(StackError, match=r"valkey ended with status -9; last lines of .*valkey\.log"):
            wait_until(stack.check_running)


def test_second_start_on_the_same_state_names_the_holder(launcher: Launcher) -> None:
    with pytest.raises(StackError, match=f"is in use by process {launcher.popen.pid};"):
        EmbeddedStack(launcher.state_dir).start()
    assert all(server.is_alive() for server in launcher.servers)
    assert launcher.popen.poll() is None


def test_works_below_a_long_path_with_spaces_and_commas(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path / ("a path, with 'quotes' " + "x" * 150) / "state") as stack:
        store_everywhere(stack.settings_env)
        assert found_everywhere(stack.settings_env) == EVERYTHING


def test_taken_ports_are_given_up_for_others(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path) as stack:
        store_everywhere(stack.settings_env)
    ports = json.loads((tmp_path / "ports.json").read_text())
    taken = [socket.create_server(("127.0.0.1", port)) for port in ports.values()]
    try:
        with EmbeddedStack(tmp_path) as stack:
            assert found_everywhere(stack.settings_env) == EVERYTHING
    finally:
        for listener in taken:
            listener.close()


def test_leftover_of_an_earlier_run_is_ended_and_a_reused_number_is_not() -> None:
    leftover = subprocess.Popen(["sleep", "600"], start_new_session=True)
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        ours = ProcessIdentity.of("leftover", leftover.pid, signal.SIGTERM)
        other = ProcessIdentity.of("stranger", stranger.pid, signal.SIGTERM)
        reused = ProcessIdentity("stranger", other.pid, other.start_ticks - 1, other.boot_id, other.stop_signal)
        end_leftovers([ours, reused])
        assert leftover.wait(10) == -signal.SIGTERM
        assert stranger.poll() is None
    finally:
        for popen in (leftover, stranger):
            popen.kill()
            popen.wait()


def test_leftover_that_ignores_its_stop_signal_is_killed() -> None:
    stubborn = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    end_leftovers([ProcessIdentity.of("stubborn", stubborn.pid, signal.SIGTERM)], timeout_seconds=0.2)
    assert stubborn.wait(10) == -signal.SIGKILL
    stubborn.stdout.close()


def test_secrets_are_readable_by_their_owner_alone(stack: SharedStack) -> None:
    state = stack.embedded.state_dir
    for name in ("secrets.json", "valkey/valkey.conf", "seaweedfs/s3.json"):
        assert (state / name).stat().st_mode & 0o077 == 0, name
    assert (state / "postgres" / "data").stat().st_mode & 0o077 == 0


def test_no_server_listens_beyond_this_machine(stack: SharedStack) -> None:
    servers = [server for server in stack.embedded._servers if server.child]
    listening = {
        address
        for server in servers
        for address in listening_addresses(server.child.popen.pid)  # type: ignore[union-attr]
    }
    assert listening == {"127.0.0.1"}


def listening_addresses(pid: int) -> Iterator[str]:
    """Local addresses of a process's listening TCP sockets."""
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address = fields[1].partition(":")[0]
                assert len(address) == 8, f"IPv6 {address}"
                yield socket.inet_ntoa(bytes.fromhex(address)[::-1])


def test_postgres_refuses_a_wrong_password(stack: SharedStack) -> None:
    url = libpq_url(stack.embedded.settings_env).replace(stack.embedded.secrets.postgres_password, "wrong")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(url)


@pytest.mark.parametrize("password", ["wrong", ""])
def test_valkey_refuses_a_wrong_password(stack: SharedStack, password: str) -> None:
    url = stack.embedded.settings_env["RUSHES_REDIS_URL"].replace(stack.embedded.secrets.redis_password, password)
    with redis.Redis.from_url(url) as client, pytest.raises(redis.exceptions.RedisError, match=r"(?i)auth|password"):
        client.ping()


@pytest.mark.parametrize("name", ["RUSHES_S3_ACCESS_KEY_ID", "RUSHES_S3_SECRET_ACCESS_KEY"])
def test_object_store_refuses_a_wrong_key(stack: SharedStack, name: str) -> None:
    client = s3_client(stack.embedded.settings_env | {name: "wrong"})
    with pytest.raises(ClientError) as refused:
        client.list_objects_v2(Bucket=stack.embedded.settings_env["RUSHES_S3_BUCKET"])
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_unwritable_state_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StackError, match=r"state directory .*file/state cannot be used: Not a directory"):
        EmbeddedStack(tmp_path / "file" / "state").start()


def test_data_of_another_postgres_release_is_refused(tmp_path: Path) -> None:
    with EmbeddedStack(tmp_path):
        pass
    (tmp_path / "postgres" / "data" / "PG_VERSION").write_text("17\n")
    with pytest.raises(StackError, match="made by PostgreSQL 17, and this is PostgreSQL 18"):
        EmbeddedStack(tmp_path).start()
    # the refused start let go of the directory
    with pytest.raises(StackError, match="PostgreSQL 17"):
        EmbeddedStack(tmp_path).start()
    assert json.loads((tmp_path / "processes.json").read_text()) == []


def test_interrupted_first_start_is_repeated(tmp_path: Path) -> None:
    partial = tmp_path / "postgres" / "data.partial"
    partial.mkdir(parents=True)
    (partial / "PG_VERSION").write_text("18\n")
    with EmbeddedStack(tmp_path) as stack:
        store_everywhere(stack.settings_env)
    assert not partial.exists()


def test_settings_reach_every_server(settings: Settings) -> None:
    with psycopg.connect(settings.database_url.replace("+psycopg", "")) as connection:
        assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
    with redis.Redis.from_url(settings.redis_url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.dbsize() == 0
    ObjectStore(settings).check()


def test_callers_environment_does_not_reach_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGPORT", "PGDATA", "S3_BUCKET", "HTTP_PROXY", "http_proxy", "WEED_MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with EmbeddedStack(tmp_path) as stack:
        stack.check_running()


def test_start_from_another_thread_is_refused(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(EmbeddedStack(tmp_path).start)
        with pytest.raises(RuntimeError, match="main thread"):
            starting.result()
