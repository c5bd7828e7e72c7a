"""Settings of every Rushes process, read once from the environment (`RUSHES_*`)."""

from base64 import b64decode, urlsafe_b64decode
from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from rushes_core.captures import parse_capacities, parse_captures
from rushes_core.setting_rules import (
    PREFIX,
    InvalidSettings,
    check_buckets,
    check_database_url,
    check_endpoint,
    check_hosts,
    check_own_origin,
    check_page_origins,
    check_redis_url,
    check_region,
    listed,
    problems,
    stripped,
    variable,
)

MAX_BYTES = 1 << 62
"""What counts of bytes may be at most: they are added to others in 64 bits."""
MAX_SECONDS = 604_800.0
"""A week: what is to take longer than that is a mistake, and the clocks that wait for it have ends."""


def _no_empty_path(value: Any) -> Any:
    # it would be the working directory, which nobody meant
    if value == "":
        raise ValueError("must be a path, got ''")
    return value


NonEmpty = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Directory = Annotated[Path, BeforeValidator(_no_empty_path)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
SecondsOrNone = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Endpoint = Annotated[str, AfterValidator(check_endpoint)]

CLIENTS_VARIABLES = ("RUSHES_URL", "RUSHES_KEY")
"""What clients keep in the same environment."""


class ContentDelivery(StrEnum):
    """How a finished clip reaches a client."""

    PROXY = "proxy"
    """The API streams it from the object store."""
    REDIRECT = "redirect"
    """The API answers 302 to a presigned URL of the object store."""


class DatabaseSettings(BaseSettings):
    """What it takes to reach the database, for commands that need nothing else."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="ignore",
        # an error would show the start of the database's URL, password and all
        hide_input_in_errors=True,
    )

    database_url: Annotated[NonEmpty, AfterValidator(check_database_url), Field(repr=False)]
    """SQLAlchemy URL of Postgres with the psycopg driver: `postgresql+psycopg://user:password@host:port/name`."""


class Settings(DatabaseSettings):
    """One frozen object per process; nothing else reads the environment."""

    redis_url: Annotated[NonEmpty, AfterValidator(check_redis_url), Field(repr=False)]
    """URL of Redis or Valkey, `redis://` or `rediss://`, with password and database number."""

    s3_bucket: Annotated[NonEmpty, AfterValidator(check_buckets)]
    """Bucket that finished clips are stored in."""
    s3_output_buckets: Annotated[str, AfterValidator(check_buckets)] = ""
    """Other buckets of the same store that a request may name, separated by commas."""
    s3_endpoint_url: Endpoint = ""
    """Endpoint of an S3-compatible store; empty: AWS."""
    s3_public_endpoint_url: Endpoint = ""
    """Endpoint as clients reach it, used to sign download URLs; empty: the same as `RUSHES_S3_ENDPOINT_URL`."""
    s3_region: Annotated[NonEmpty, AfterValidator(check_region)] = "us-east-1"
    """Region that requests are signed for."""
    s3_access_key_id: Annotated[str, BeforeValidator(stripped)] = ""
    """Empty: boto3's own chain of credential sources."""
    s3_secret_access_key: Annotated[SecretStr, BeforeValidator(stripped)] = SecretStr("")
    """Belongs to `RUSHES_S3_ACCESS_KEY_ID`."""
    s3_addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """`auto` is path style for a custom endpoint, virtual-hosted for AWS."""

    checkpoint: Directory
    """Directory of the checkpoint. The API reads only its JSON files and tokenizer; a worker reads all of it."""
    model_name: str = ""
    """Name that clients call the model by; empty: the checkpoint's own `model_id`."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=16_384)] = 10_240
    """Longest prompt that is accepted, in tokens of the checkpoint's tokenizer."""

    api_key: SecretStr = SecretStr("")
    """The operator's bearer key: project `default`, every scope, no limits. The API does not start without one."""
    api_origin: Annotated[str, AfterValidator(check_own_origin)] = ""
    """Origin at which clients reach the API, `https://host`; guards against redirects to itself, and begins addresses
    of clips, when it is set."""
    cors_origins: Annotated[str, AfterValidator(check_page_origins)] = ""
    """Origins of web pages that may call the API, separated by commas; `*`: all of them; empty: none."""
    content_delivery: ContentDelivery = ContentDelivery.PROXY
    """`proxy`: the API streams clips from the store; `redirect`: it answers 302 to a presigned URL."""
    presigned_url_seconds: Annotated[int, Field(ge=60, le=86_400)] = 900
    """How long a presigned download URL works."""
    api_max_body_bytes: Annotated[int, Field(ge=1_024, le=1_073_741_824)] = 1_048_576
    """Largest request body that is read."""
    api_max_connections: Annotated[int, Field(ge=10, le=100_000)] = 2_000
    """Connections that one API process serves at once; on more, requests are answered 503. Each is an open file."""
    api_keepalive_seconds: Annotated[int, Field(ge=1, le=86_400)] = 75
    """How long a connection may lie idle before the API closes it; half of `RUSHES_API_MAX_CONNECTIONS` may at once."""
    api_max_waiting: Annotated[int, Field(ge=1, le=100_000)] = 1_000
    """Requests of one API process that may wait for jobs at once: events, `Prefer: wait`, `/v1/videos/sync`."""
    api_max_waiting_per_key: Annotated[int, Field(ge=1, le=100_000)] = 250
    """The same for one API key in one process."""
    files_max_bytes: Annotated[int, Field(ge=1, le=53_687_091_200)] = 209_715_200
    """Largest file that `POST /v1/files` takes."""
    files_max_count: Annotated[int, Field(ge=1, le=10_000_000)] = 1_000
    """Files that a project may have at once."""
    files_max_total_bytes: Annotated[int, Field(ge=1, le=MAX_BYTES)] = 10_737_418_240
    """What the files of a project may have together."""
    campaign_max_lines: Annotated[int, Field(ge=1, le=10_000_000)] = 1_000_000
    """Lines that the file of a campaign may have."""
    campaign_max_bytes: Annotated[int, Field(ge=1, le=53_687_091_200)] = 2_147_483_648
    """Bytes that it may have when it is not compressed."""
    campaign_max_line_bytes: Annotated[int, Field(ge=1_024, le=16_777_216)] = 1_048_576
    """Longest line of it that is read; a longer one is an error of that line."""
    campaign_max_queued: Annotated[int, Field(ge=1, le=1_000_000_000)] = 2_000_000
    """Jobs that the campaigns of a project may have waiting together."""
    metrics_open: bool = False
    """Whether `GET /metrics` needs no key; otherwise it takes one with the scope `admin`."""
    sync_timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """How long `POST /v1/videos/sync` waits for the clip before it answers 504."""

    webhook_key: SecretStr = SecretStr("")
    """Key that webhook secrets are encrypted with: 32 random bytes in URL-safe base64. Several, separated by commas:
    the first encrypts, all decrypt. Empty: webhooks are refused."""
    webhook_ed25519_key: SecretStr = SecretStr("")
    """Private key that signs webhooks beside each secret: 32 random bytes in base64. Several, separated by commas: the
    first signs, all are in `/.well-known/jwks.json`."""
    webhook_http: bool = False
    """Whether webhooks may go to `http://` URLs."""
    webhook_ports: Annotated[str, StringConstraints(pattern="^[0-9]{1,5}(,[0-9]{1,5})*$")] = "443,8443"
    """Ports that webhooks may go to, separated by commas."""
    webhook_hosts: Annotated[str, AfterValidator(check_hosts)] = ""
    """The only hosts that webhooks may go to, separated by commas; `*.example.com`: every name below it. Empty: any."""
    webhook_networks: str = ""
    """Private networks that webhooks may go to besides public addresses, such as `10.1.0.0/16`, separated by commas."""
    webhook_strict: bool = False
    """Whether a job's `webhook_url` must be at the origin of a registered endpoint of its project."""
    webhook_loopback: bool = False
    """For tests and trials: webhooks may go to this machine, over `http://` and to any port. Refused unless the
    database, Redis, the store and the API are on this machine too."""
    webhook_timeout_seconds: Annotated[float, Field(ge=0.1, le=30)] = 15.0
    """How long one delivery may take, from the look-up of the name to the end of the answer."""
    webhook_concurrency: Annotated[int, Field(ge=1, le=100)] = 4
    """Deliveries to one endpoint at once."""

    pool: Annotated[str, StringConstraints(pattern="^[a-z0-9-]{1,32}$")] = "default"
    """Pool of workers that this worker joins and that this dispatcher wakes."""
    lease_seconds: Annotated[int, Field(ge=3, le=86_400)] = 30
    """How long a replica may be silent before its job is given to another."""
    heartbeat_seconds: Seconds = 5.0
    """How often a replica renews its lease."""
    poll_seconds: Seconds = 1.5
    """How often an idle replica looks for work when no hint arrives, before jitter."""
    dispatch_seconds: Seconds = 0.25
    """How often the dispatcher opens held jobs and sends hints."""
    patience_seconds: Seconds = 600.0
    """How long a job of the class `normal` or `bulk` may be passed over before one claim in twenty looks for it
    first."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Attempts that a job gets before it fails."""
    worker_name: Annotated[str, StringConstraints(pattern="^[A-Za-z0-9._-]{0,100}$")] = ""
    """Name of this worker that outlives its restarts, different from every other's; empty: the name of the host. A
    worker with the name of one that is up does not start."""
    retention_days: Annotated[int, Field(ge=0, le=36_500)] = 0
    """Days after which the clip of a completed job is removed from the store; 0: never."""
    sweep_orphans: bool = False
    """Whether the dispatcher removes objects that no job points at; `rushes sweep --orphans` lists them."""
    orphan_age_seconds: Annotated[int, Field(ge=3_600, le=31_536_000)] = 86_400
    """How old an object or an unfinished upload must be before it is removed as an orphan."""
    shutdown_grace_seconds: SecondsOrNone = 120.0
    """How long a worker that was asked to stop may go on with its running job before it gives the job back."""
    start_timeout_seconds: Seconds = 1_800.0
    """How long a rank group may load without any progress."""
    stage_timeout_seconds: Seconds = 300.0
    """How long a rank group may go without progress on a job, or the encoder without a clip, before it is ended. For
    a clip of up to 124 frames of 1344x768; larger ones get in proportion."""
    encoding_timeout_seconds: SecondsOrNone = 0.0
    """The same for the text encoder, whatever the clip; 0: `RUSHES_STAGE_TIMEOUT_SECONDS`."""
    step_timeout_seconds: SecondsOrNone = 0.0
    """The same for one denoise step; 0: `RUSHES_STAGE_TIMEOUT_SECONDS`."""
    decoding_timeout_seconds: SecondsOrNone = 0.0
    """The same for one decoded temporal unit, or the soundtrack; 0: `RUSHES_STAGE_TIMEOUT_SECONDS`."""
    muxing_timeout_seconds: SecondsOrNone = 0.0
    """The same for what the encoder has left to do after the last frame; 0: `RUSHES_STAGE_TIMEOUT_SECONDS`."""
    upload_timeout_seconds: Seconds = 600.0
    """How long a finished clip waits for an object store that is away before its job is given another attempt."""
    spool_jobs: Annotated[int, Field(ge=1, le=1_000)] = 4
    """Jobs that a replica may hold at once, finished clips that wait for the object store included; it renders on
    until there are as many. 1: each clip is stored before the next job is claimed."""
    spool_bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)] = 4_294_967_296
    """Finished clips that wait for the object store may take this much of the scratch directory before the replica
    stops claiming."""
    scratch_free_bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)] = 536_870_912
    """A replica claims nothing while its scratch directory has less room than this."""
    drain_after_crashes: Annotated[int, Field(ge=1, le=1_000)] = 3
    """Different jobs that a replica may crash on within half an hour before it takes no more and waits for a person."""
    node_host: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.:-]{0,253}$")] = ""
    """Address of this machine in the private network between the two nodes of a replica; needed with `--nodes 2`."""
    node_port: Annotated[int, Field(ge=1, le=65_535)] = 29_400
    """Port at that address where the first node waits for the one that joins."""
    node_secret: SecretStr = SecretStr("")
    """What the nodes of a replica prove to each other, at least 16 characters; needed with `--nodes 2` and `--join`."""
    pipeline: Annotated[NonEmpty, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] = (
        "rushes_worker.pipeline.fasth3:FastH3Pipeline"
    )
    """`module:callable` that builds the pipeline of a rank."""
    pipeline_options: str = ""
    """Options of that pipeline, by commas: `precision=fp8`, feed-forward layers in 8 bits on GPUs of compute capability
    9.0 or more (on the CPU, to test it), `bf16` if it is not said; `attention=hopper`, `triton` or `torch`;
    `pixels=yuv420p` or `rgb24`, what ranks hand frames over as. Empty: the device decides. A worker without the GPU
    that one needs does not start."""
    text_capacities: str = "1024,4096,10240"
    """Rows that prompts share CUDA graphs for, by commas: multiples of 64 up to 16384, 16 at most. A prompt takes the
    fewest that hold its tokens, unless they add more than 2 % to the clip's rows; then as many times 64 as it needs."""
    capture: str = ""
    """Shapes whose CUDA graphs a worker captures at start, by commas: `1344x768x124`, width, height and frames, for
    all text capacities, or `1344x768x124x1024` for one. Others are captured when they are first rendered."""
    graph_bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)] = 4_294_967_296
    """GPU memory of a rank that CUDA graphs may take; those least recently used are dropped. 0: no graphs."""
    scratch: Directory = Path(gettempdir())
    """Directory for raw frames and unfinished files; each replica makes one of its own below it. An API process has at
    most eight parts of uploads there, 5 MiB each."""

    encoder: Literal["libx264", "h264_nvenc"] = "libx264"
    """H.264 encoder: `libx264`, or `h264_nvenc` where the worker's GPU has NVENC; data-centre GPUs often have none."""
    encoder_preset: Annotated[str, StringConstraints(pattern="^[a-z0-9]*$")] = ""
    """`ultrafast` to `slow` of libx264, `p1` to `p7` of NVENC; empty: `veryfast` and `p4`."""
    encoder_crf: Annotated[int, Field(ge=1, le=51)] = 18
    """Constant rate factor, 1 to 51 (NVENC: its constant quality); lower is better and larger."""
    keyframe_interval: Annotated[int, Field(ge=1, le=240)] = 51
    """Frames between keyframes at most, 1 to 240. As many units of 17 frames as fit are encoded in one piece."""
    encoders: Annotated[int, Field(ge=0, le=64)] = 0
    """Pieces of a clip that a replica encodes at once; 0: half its share of the cores, 8 at most."""
    audio_bitrate: Annotated[int, Field(ge=32_000, le=320_000)] = 144_000
    """Bits per second of the AAC track."""
    provenance: Literal["off", "on", "prompt"] = "on"
    """What a clip's file says of how it was made, as JSON in its comment: `on` model, revision, seed and id of the
    video, `prompt` the prompt too, `off` nothing: then the same request gives the same bytes."""
    flawed_clips: Literal["warn", "fail"] = "warn"
    """A clip that is one flat colour, frozen or silent all along: `warn` stores it and says so in `output.warnings`;
    `fail` ends the attempt as `invalid_output`."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """`DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    log_json: bool = True
    """False: coloured lines for a person at a terminal."""

    @model_validator(mode="after")
    def _lease_outlives_heartbeats(self) -> Self:
        if self.heartbeat_seconds * 2 > self.lease_seconds:
            raise ValueError(
                f"{variable('heartbeat_seconds')}={self.heartbeat_seconds:g} must be at most half of "
                f"{variable('lease_seconds')}={self.lease_seconds}"
            )
        return self

    @model_validator(mode="after")
    def _store_has_both_credentials(self) -> Self:
        given = {
            "s3_access_key_id": self.s3_access_key_id,
            "s3_secret_access_key": self.s3_secret_access_key.get_secret_value(),
        }
        missing = [variable(name) for name, value in given.items() if not value]
        if len(missing) == 1:
            raise ValueError(f"{missing[0]} is missing: the store's access key id and its secret belong together")
        return self

    @model_validator(mode="after")
    def _graphs_are_of_served_shapes(self) -> Self:
        name = "text_capacities"
        try:
            capacities = parse_capacities(self.text_capacities)
            name = "capture"
            parse_captures(self.capture, capacities)
        except ValueError as error:
            raise ValueError(f"{variable(name)}: {error}") from None
        return self

    @model_validator(mode="after")
    def _webhooks_are_safe(self) -> Self:
        check_webhook_settings(self)
        return self

    @property
    def output_buckets(self) -> tuple[str, ...]:
        """Buckets that clips may be stored in, the usual one first."""
        return tuple(dict.fromkeys([self.s3_bucket, *listed(self.s3_output_buckets)]))

    @property
    def gpu_queue(self) -> str:
        """Celery queue that carries this pool's hints."""
        return f"gpu.{self.pool}"


def check_webhook_settings(settings: Settings) -> None:
    """
    Raises:
        ValueError: names what is wrong; keys are not shown.
    """
    for name, decoded in (("webhook_key", urlsafe_b64decode), ("webhook_ed25519_key", b64decode)):
        for key in listed(getattr(settings, name).get_secret_value()):
            try:
                length = len(decoded(key))
            except ValueError:
                length = 0
            if length != 32:
                raise ValueError(f"{variable(name)} must be 32 bytes in base64, each of several separated by commas")
    for port in listed(settings.webhook_ports):
        if not 1 <= int(port) <= 65_535:
            raise ValueError(f"{variable('webhook_ports')} must be in 1..65535, got {port}")
    for network in listed(settings.webhook_networks):
        try:
            parsed = ip_network(network)
        except ValueError as error:
            raise ValueError(f"{variable('webhook_networks')}: {error}") from None
        if not parsed.is_private or parsed.is_loopback or parsed.is_link_local or not parsed.prefixlen:
            raise ValueError(
                f"{variable('webhook_networks')} must be private networks, not of this machine or link, got {network}"
            )
    if settings.webhook_loopback:
        for name in ("database_url", "redis_url", "s3_endpoint_url", "api_origin"):
            url = str(getattr(settings, name))
            # the origin may be unknown; no endpoint of a store means AWS
            if not _is_on_loopback(url) and (url or name != "api_origin"):
                raise ValueError(
                    f"{variable('webhook_loopback')} is for tests and trials: {variable(name)} is not on this machine"
                )


def _is_on_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


@cache
def get_settings() -> Settings:
    """The settings of this process.

    Raises:
        InvalidSettings: a variable is missing or wrong.
    """
    try:
        return Settings()  # pyright: ignore[reportCallIssue]  the fields come from the environment
    except ValidationError as error:
        raise InvalidSettings(problems(error, Settings)) from None


def get_database_settings() -> DatabaseSettings:
    """The part of the settings that says where the database is.

    Raises:
        InvalidSettings: the variable is missing or wrong.
    """
    try:
        return DatabaseSettings()  # pyright: ignore[reportCallIssue]  the field comes from the environment
    except ValidationError as error:
        raise InvalidSettings(problems(error, DatabaseSettings)) from None


def unknown_variables(names: Iterable[str]) -> dict[str, str | None]:
    """Those of the environment's `names` that look like settings and are none, with the setting nearest to each."""
    known = [name.upper() for name in Settings.model_fields]
    clients = [name.removeprefix(PREFIX) for name in CLIENTS_VARIABLES]
    nearest: dict[str, str | None] = {}
    for name in sorted(names):
        word = name.upper().removeprefix(PREFIX)
        if name.upper().startswith(PREFIX) and word not in (*known, *clients):
            found = get_close_matches(word, known, n=1)
            nearest[name] = f"{PREFIX}{found[0]}" if found else None
    return nearest
