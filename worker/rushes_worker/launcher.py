"""What `rushes worker` does: check everything that can be checked, then keep one supervisor per replica running."""

import ast
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rushes_core.contract import InferenceContract, load_contract
from rushes_core.errors import (
    CheckpointError,
    CheckpointUnreadable,
    ObjectMissing,
    SchemaMismatch,
    StorageError,
    StorageRefused,
    with_variable,
)
from rushes_core.log import configure_logging, get_logger
from rushes_core.schema import check_schema
from rushes_core.setting_rules import listed, variable
from rushes_core.settings import Settings
from rushes_core.signals import ENDING
from rushes_core.storage import ObjectStore

from rushes_worker.assignment import EXIT_NAME_TAKEN, EXIT_UNFIT, Assignment
from rushes_worker.child import how_it_ended, settings_environment, spawn
from rushes_worker.devices import Devices, find_devices
from rushes_worker.layout import NODES, Layout
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.media.trial import try_encoder
from rushes_worker.network import interface_of
from rushes_worker.node_link import secret_of
from rushes_worker.pipeline.options import SYNTHETIC, check_devices_serve, check_options, seed_of
from rushes_worker.scratch import check_directory
from rushes_worker.stopping import ignore_signals, on_stop

log = get_logger(__name__)

_TICK_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 30.0
_STEADY_SECONDS = 60.0
"""A supervisor that ran this long was not in a crash loop."""
_STOP_MARGIN_SECONDS = 60.0
"""How much longer than the grace period a supervisor may take to leave before it is killed."""


@dataclass
class _Replica:
    assignment: Assignment
    process: subprocess.Popen[bytes] | None = None
    refusal: int = -1
    """Where it says why it cannot serve."""
    started_at: float = 0.0
    failures: int = 0
    has_run: bool = False
    """A supervisor of it ended, and not for its name: whoever has that now took it meanwhile."""
    start_at: float = field(default_factory=time.monotonic)


class Refusals:
    """Prints why a worker's supervisors refuse to serve, each reason once."""

    def __init__(self) -> None:
        self._told: set[str | int] = set()

    def tell(self, status: int, why: str) -> None:
        """
        Args:
            status: that of the supervisor, which has ended.
            why: empty: it did not refuse.
        """
        # every replica of a worker finds its name with another one
        reason = status if status == EXIT_NAME_TAKEN else why
        if why and reason not in self._told:
            self._told.add(reason)
            print(f"rushes worker: {why}", file=sys.stderr, flush=True)


class Launcher:
    """Keeps the supervisors of one worker running until it is asked to stop or one of them is unfit."""

    def __init__(
        self, settings: Settings, layout: Layout, devices: Devices, contract: InferenceContract, *, nodes: int = 1
    ) -> None:
        self._settings = settings
        self._environment = settings_environment(settings)
        self._stop = threading.Event()
        self._refusals = Refusals()
        self._replicas = [
            _Replica(Assignment(layout, replica, devices.kind, devices.of_replica(replica, layout), contract, nodes))
            for replica in range(layout.replicas)
        ]

    def request_stop(self) -> None:
        """Have every supervisor drain. Safe in a signal handler."""
        self._stop.set()

    def run(self) -> int:
        """Returns the exit status: 0 after a drain, 1 when a replica can never serve."""
        while not self._stop.is_set():
            for replica in self._replicas:
                if not self._keep_running(replica):
                    self._drain()
                    return 1
            self._stop.wait(_TICK_SECONDS)
        return self._drain()

    def _keep_running(self, replica: _Replica) -> bool:
        """Start, or start again, what should run; False: it can never serve."""
        now = time.monotonic()
        if replica.process is None:
            if now >= replica.start_at:
                replica.started_at = now
                self._start(replica)
            return True
        status = replica.process.poll()
        if status is None:
            return True
        replica.process = None
        why = _refusal_of(replica)
        if status == EXIT_UNFIT or (status == EXIT_NAME_TAKEN and not replica.has_run):
            self._refusals.tell(status, why)
            return False
        fields = _postpone(replica)
        if status == EXIT_NAME_TAKEN:
            # the others of this worker go on
            log.error("name_taken", reason=why, **fields)
        else:
            replica.has_run = True
            log.error("supervisor_died", ended=how_it_ended(status), **fields)
        return True

    def _start(self, replica: _Replica) -> None:
        try:
            self._spawn(replica)
        except OSError as error:
            # the system has nothing to spare for now, and the others of this worker go on
            log.error("supervisor_not_started", error=str(error), **_postpone(replica))

    def _spawn(self, replica: _Replica) -> None:
        replica.refusal, theirs = os.pipe()
        try:
            replica.process = spawn(
                "rushes_worker.supervisor",
                [str(theirs), *replace(replica.assignment, again=replica.has_run).arguments()],
                env=self._environment,
                pass_fds=(theirs,),
            )
        except OSError:
            os.close(replica.refusal)
            raise
        finally:
            os.close(theirs)

    def _drain(self) -> int:
        """Ask every supervisor to stop and wait; 0 if all left in peace."""
        running = [(replica, replica.process) for replica in self._replicas if replica.process is not None]
        for _, process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._settings.shutdown_grace_seconds + _STOP_MARGIN_SECONDS
        peaceful = True
        for replica, process in running:
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            self._refusals.tell(status, _refusal_of(replica))
            # one that was still starting had no handler for the signal yet, and nothing to give back
            peaceful = peaceful and status in (0, *(-number for number in ENDING))
        return 0 if peaceful else 1


def _postpone(replica: _Replica) -> dict[str, Any]:
    """Have it started again later the more often it ended in a row; what the log says of that."""
    now = time.monotonic()
    replica.failures = 1 if now - replica.started_at > _STEADY_SECONDS else replica.failures + 1
    seconds = min(_MAX_BACKOFF_SECONDS, 2.0 ** (replica.failures - 1))
    replica.start_at = now + seconds
    return {"replica": replica.assignment.replica, "restart_seconds": seconds}


def _refusal_of(replica: _Replica) -> str:
    """Why its supervisor, which has ended, refused to serve; empty: it did not."""
    with os.fdopen(replica.refusal, "rb") as refusal:
        return refusal.read().decode(errors="replace")


def _check_buckets(settings: Settings) -> None:
    """Raise `StorageError` when a bucket is missing or may not be used. A store that is away comes back by itself."""
    for one in ObjectStore(settings).buckets:
        name = variable("s3_bucket" if one.bucket == settings.s3_bucket else "s3_output_buckets")
        try:
            one.check()
        except ObjectMissing as error:
            raise ObjectMissing(f"{name}: bucket {one.bucket} does not exist") from error
        except StorageRefused as error:
            refusal = f"{name}: the credentials of the object store do not open bucket {one.bucket}"
            raise StorageRefused(refusal) from error
        except StorageError as error:
            log.warning("store_unreachable", bucket=one.bucket, error=str(error))


def _check_node(settings: Settings) -> None:
    """Raise `ValueError` when the other node of a replica could not join."""
    if not settings.node_host:
        raise ValueError(f"RUSHES_NODE_HOST is empty: where the other of {NODES} nodes finds this one")
    try:
        interface_of(settings.node_host)
    except ValueError as error:
        raise ValueError(f"RUSHES_NODE_HOST: {error}") from error
    secret_of(settings.node_secret.get_secret_value())


def check_pipeline(pipeline: str) -> None:
    """Raise `ValueError` when no rank could import `pipeline`. Its module is looked at and not loaded: that may take a
    GPU."""
    module, colon, name = pipeline.partition(":")
    if not (module and colon and name.isidentifier()):
        raise ValueError(f"RUSHES_PIPELINE={pipeline} is no module:callable")
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ValueError(f"RUSHES_PIPELINE={pipeline} cannot be imported: {error}") from error
    if found is None:
        raise ValueError(f"RUSHES_PIPELINE={pipeline} cannot be imported: no module {module}")
    if found.origin is None or not found.origin.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(found.origin).read_bytes())
    except SyntaxError as error:
        where = f"{found.origin}, line {error.lineno}"
        raise ValueError(f"RUSHES_PIPELINE={pipeline} cannot be imported: {where}: {error.msg}") from error
    if not any(
        isinstance(node, ast.Name | ast.alias | ast.ClassDef | ast.FunctionDef) and name == _named(node)
        for node in ast.walk(tree)
    ):
        raise ValueError(f"RUSHES_PIPELINE={pipeline} cannot be imported: {found.origin} names no {name}")


def _named(node: ast.Name | ast.alias | ast.ClassDef | ast.FunctionDef) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return (node.asname or node.name) if isinstance(node, ast.alias) else node.name


def with_synthetic_weights(settings: Settings, weights: str) -> Settings:
    """Settings whose ranks draw random weights of the released sizes instead of reading the checkpoint's.

    Args:
        weights: `synthetic` or `synthetic:SEED`.

    Raises:
        ValueError: it is neither.
    """
    seed = seed_of(weights)
    log.warning(
        "weights_synthetic",
        seed=seed,
        meaning="clips are noise: weights are random, and of the checkpoint only contract and tokenizer count",
    )
    options = listed(settings.pipeline_options)
    return settings.model_copy(update={"pipeline_options": ",".join([*options, f"weights={SYNTHETIC}:{seed}"])})


def run(settings: Settings, *, layout: str, device: str = "auto", nodes: int = 1, weights: str | None = None) -> int:
    """Run a worker until SIGTERM or SIGINT; returns its exit status. Call from the main thread.

    What is wrong with layout, checkpoint, devices, scratch directory, schema, encoder or buckets is printed, and
    nothing is claimed; the status is 2 for what the operator gave and 1 for what refuses it.

    Args:
        layout: `rRsS`, R replicas of S ranks each.
        device: `cpu`, `cuda`, or `auto`: CUDA where there is any.
        nodes: machines that share the ranks of the one replica; this is the first, the other joins it.
        weights: `synthetic` or `synthetic:SEED`; None: the checkpoint's.
    """
    configure_logging(settings.log_level, json=settings.log_json)
    on_stop(_leave)
    try:
        if weights is not None:
            settings = with_synthetic_weights(settings, weights)
        wanted = Layout.parse(layout)
        check_pipeline(settings.pipeline)
        options = check_options(settings)
        contract = load_contract(settings.checkpoint)
        devices = find_devices(wanted, device, nodes=nodes)
        if weights and devices.kind != "cuda":
            raise ValueError(f"--weights {weights} draws weights of the released sizes on a GPU, found none")
        check_devices_serve(options, devices)
        if nodes > 1:
            _check_node(settings)
        check_directory(settings.scratch)
        check_schema(settings)
        encoder = EncoderSettings.of(settings, replicas=wanted.replicas)
        try_encoder(encoder, settings.scratch, device=next(iter(devices.visible), ""))
        _check_buckets(settings)
    except (ValueError, CheckpointError, CheckpointUnreadable, SchemaMismatch, StorageError) as error:
        print(f"rushes worker: {with_variable(error)}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ValueError) else 1
    launcher = Launcher(settings, wanted, devices, contract, nodes=nodes)

    def on_signal(signum: int, frame: FrameType | None) -> None:
        launcher.request_stop()

    on_stop(on_signal)
    log.info("worker_started", layout=str(wanted), device=devices.kind, visible=devices.visible, nodes=nodes)
    status = launcher.run()
    log.info("worker_stopped", status=status)
    ignore_signals()
    return status


def _leave(signum: int, frame: FrameType | None) -> None:
    """Nothing is started yet; what is being tried tidies up after itself."""
    sys.exit(128 + signum)
