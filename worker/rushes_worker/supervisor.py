"""The supervisor of one replica: claims jobs, keeps their leases, and keeps a rank group alive to render them.

Started by `child.spawn`, one per replica. It never loads torch and never touches
CUDA: what a broken driver or a crashed kernel takes down are the ranks, which it replaces.

Threads: the main thread talks to the ranks and starts every child, which the kernel ends with it; the claimer claims
one job ahead; the heartbeat keeps leases; Celery receives hints; each attempt whose ranks are done has a thread that
ends it, and a publication that uploads.
"""

import multiprocessing.connection
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from types import FrameType
from typing import Any

import structlog
from rushes_core.contract import InferenceContract
from rushes_core.log import configure_logging, get_logger
from rushes_core.served_model import model_name
from rushes_core.settings import Settings, get_settings
from rushes_core.storage import ObjectStore

from rushes_worker.assignment import EXIT_NAME_TAKEN, EXIT_UNFIT, MAX_REFUSAL_BYTES, Assignment
from rushes_worker.attempt import Workshop
from rushes_worker.child import end_with_parent
from rushes_worker.claimer import Claimer
from rushes_worker.commands import Loading, Ready
from rushes_worker.crashes import Crashes
from rushes_worker.deadlines import Deadlines
from rushes_worker.group import GroupLost, GroupNotLoaded, GroupPlan, GroupUnfit, RankGroup
from rushes_worker.heartbeat import Heartbeat
from rushes_worker.hints import HintListener
from rushes_worker.ledger import Claim, Ledger
from rushes_worker.media.pool import MediaPool
from rushes_worker.media.process import MediaProcess
from rushes_worker.media.settings import EncoderSettings
from rushes_worker.name import NameTaken, claim_name, process_detail
from rushes_worker.node_link import NodeLink, Welcome, secret_of
from rushes_worker.node_port import NodePort
from rushes_worker.pipeline.options import check_options, options_of, revision_of
from rushes_worker.runner import Runner
from rushes_worker.scratch import Scratch
from rushes_worker.spool import Spool
from rushes_worker.stage_times import StageTimes
from rushes_worker.stopping import Stopping, on_stop
from rushes_worker.storable import storable
from rushes_worker.wake import Wake

log = get_logger("rushes_worker.supervisor")

_MAX_BACKOFF_SECONDS = 30.0
_SHOW_SECONDS = 2.0
"""How often the progress of a load is logged and shown."""
_MAX_TROUBLE = 500
"""Characters that are shown of why a rank group ended."""


class Supervisor:
    """One replica, from start to stop."""

    def __init__(self, settings: Settings, assignment: Assignment) -> None:
        contract = assignment.contract
        self._settings = settings
        # what stands before '#' is the same after every restart: a job remembers which replicas it crashed
        name = settings.worker_name or socket.gethostname()
        self._replica_id = f"{name}-r{assignment.replica}#{os.getpid()}-{secrets.token_hex(2)}"
        self._wake, self._claimer_wake = Wake(), Wake()
        self._stopping = Stopping(settings.shutdown_grace_seconds)
        on_stop(self._on_signal)
        model = model_name(settings, contract)
        self._row: dict[str, Any] = {
            "pool": settings.pool,
            "layout": str(assignment.layout),
            "model": model,
            "device": assignment.kind,
            "state": "starting",
            "epoch": 0,
            "job_id": None,
            "detail": process_detail(),
        }
        self._port = _node_port(settings, assignment, contract, on_change=self._poke)
        claim_name(settings, self._replica_id, self._row, sleep=self._sleep)
        self._scratch = Scratch(settings.scratch, free_bytes=settings.scratch_free_bytes)
        self._plan = _plan(settings, assignment, contract)
        self._epoch = 0
        self._failures = 0
        self._may_have_served = assignment.again
        self._trouble: str | None = None
        """Why the last rank group ended; None when there was none, or another one is ready."""
        served = contract
        if instead := revision_of(self._plan.options):
            served = replace(contract, checkpoint_content_sha256=None, base_model_revision=instead)
        revision = served.checkpoint_content_sha256 or served.base_model_revision
        self._checkpoint = {"model_id": contract.model_id, "revision": revision}
        self._heartbeat = Heartbeat(
            settings,
            replica_id=self._replica_id,
            replica=self._row,
            on_change=self._poke,
            is_stopping=lambda: self._stopping.requested,
        )
        self._ledger = Ledger(settings, replica_id=self._replica_id, model=model)
        self._hints = HintListener(settings, replica_id=self._replica_id, on_hint=self._on_hint)
        encoder = EncoderSettings.of(settings, replicas=assignment.layout.replicas)
        device = next(iter(assignment.visible), "")
        self._media = MediaPool(lambda: MediaProcess(encoder, device=device))
        self._spool = Spool(max_jobs=settings.spool_jobs, max_bytes=settings.spool_bytes, on_change=self._poke)
        self._crashes = Crashes(settings.drain_after_crashes)
        workshop = Workshop(
            contract=served,
            provenance=settings.provenance,
            deadlines=Deadlines.of(settings),
            ledger=self._ledger,
            heartbeat=self._heartbeat,
            media=self._media,
            store=ObjectStore(settings),
            scratch=self._scratch,
            spool=self._spool,
            crashes=self._crashes,
            stopping=self._stopping,
            wake=self._wake,
            stage_times=StageTimes(self._ledger.measured_phases),
        )
        self._runner = Runner(workshop, take_ahead=self._take_ahead, on_turn=self._show_turn)
        self._claimer = Claimer(
            settings,
            ledger=self._ledger,
            heartbeat=self._heartbeat,
            stopping=self._stopping,
            has_room=self._runner.has_room,
            on_claim=self._wake.poke,
            wake=self._claimer_wake,
            replica_id=self._replica_id,
        )

    def run(self) -> int:
        """Serve until SIGTERM; returns the exit status.

        Raises:
            GroupUnfit: the ranks can never be loaded as asked.
        """
        structlog.contextvars.bind_contextvars(replica=self._replica_id)
        if self._port is not None:
            self._port.start()
        log.info("replica_started", sp=self._plan.sp, device=self._plan.kind, visible=self._plan.visible)
        self._heartbeat.start()
        self._claimer.start()
        self._hints.start()
        try:
            while not self._stopping.requested:
                if self._crashes.too_many:
                    self._drain_itself()
                else:
                    self._serve_one_epoch()
        finally:
            self._close()
        return 0

    def _serve_one_epoch(self) -> None:
        self._heartbeat.describe(state="starting", job_id=None, detail=self._detail())
        self._pause()
        link = self._await_node()
        if self._stopping.requested:
            return
        self._epoch += 1
        group = RankGroup(self._plan, epoch=self._epoch, directory=self._scratch.path, link=link)
        try:
            self._heartbeat.describe(state="starting", epoch=self._epoch, job_id=None, detail=self._detail())
            self._await_ready(group)
            self._serve(group)
        except GroupNotLoaded as error:
            if error.is_unreadable and not self._may_have_served:
                # whoever starts the worker waits to be told, and nothing is lost by that
                raise GroupUnfit(str(error)) from error
        except GroupLost:
            pass
        finally:
            group.end("node_leaving" if group.is_leaving else "stopping")
        self._trouble = group.lost_because
        if not group.is_leaving:
            self._failures += 1
        elif link is not None:
            # it is gone in a moment, and takes no more ranks
            link.close()

    def _await_node(self) -> NodeLink | None:
        """A link to the node that has the other ranks, once it has joined; None where there is none to be."""
        if self._port is None:
            return None
        link = self._port.take()
        if link is None:
            log.info("node_awaited")
        while link is None and not self._stopping.requested:
            multiprocessing.connection.wait([self._wake.fileno()], self._settings.poll_seconds)
            self._wake.clear()
            link = self._port.take()
        return link

    def _await_ready(self, group: RankGroup) -> None:
        shown: Loading | None = None
        shown_at = float("-inf")
        while not (group.is_ready or group.is_leaving or self._stopping.requested):
            group.wait(self._settings.poll_seconds, self._wake)
            self._wake.clear()
            loading, now = group.loading, time.monotonic()
            if loading is None or loading == shown:
                continue
            is_new_stage = shown is None or loading.stage != shown.stage
            if is_new_stage or now - shown_at >= _SHOW_SECONDS:
                shown, shown_at = loading, now
                progress = _progress_of(loading)
                log.info("replica_loading", epoch=group.epoch, **progress)
                self._heartbeat.describe(detail=self._detail() | {"ranks": group.pids, "loading": progress})
        if group.is_ready:
            self._may_have_served, self._trouble = True, None
            group.relax()
            seconds = dict(group.devices[0].seconds)
            devices = [rank.device for rank in group.devices]
            log.info("replica_ready", epoch=group.epoch, devices=devices, seconds=seconds)

    def _serve(self, group: RankGroup) -> None:
        self._claimer.open()
        shown: str | None = None
        try:
            while not (self._stopping.requested or group.ended or group.is_leaving):
                self._wake.clear()
                # a rank that died since it was last looked at must not cost a job an attempt
                group.wait(0.0)
                draining = self._heartbeat.drain_requested
                claim = self._claimer.take() if self._runner.can_render and not draining else None
                if claim is not None:
                    shown = "busy"
                    if self._runner.run(claim, group):
                        self._failures = 0
                    continue
                state = self._idle_state(draining)
                if state != shown:
                    if "drained" in (state, shown):
                        log.info("replica_drained" if state == "drained" else "replica_resumed")
                    shown = state
                    self._heartbeat.describe(state=state, job_id=None, detail=self._detail(group))
                group.wait(self._settings.poll_seconds, self._wake)
        finally:
            self._claimer.shut()

    def _idle_state(self, draining: bool) -> str:
        if draining:
            # it waits for no work, and is drained when everything is given back or ended
            return "busy" if self._heartbeat.fences else "drained"
        return "ready" if self._scratch.has_room else "full"

    def _take_ahead(self) -> Claim | None:
        if self._stopping.requested or self._heartbeat.drain_requested:
            return None
        return self._claimer.take_ahead()

    def _show_turn(self, job_id: str) -> None:
        self._heartbeat.describe(state="busy", job_id=job_id)

    def _drain_itself(self) -> None:
        """Take no more jobs until somebody has looked at this replica, and resumes it or starts it again."""
        log.error("replica_drained", crashed_jobs=self._crashes.jobs)
        self._heartbeat.drain()
        self._heartbeat.describe(state="drained", job_id=None, detail=self._detail())
        while self._heartbeat.drain_requested and not self._stopping.requested:
            multiprocessing.connection.wait([self._wake.fileno()])
            self._wake.clear()
        self._crashes.forget()
        self._failures = 0
        if not self._stopping.requested:
            log.info("replica_resumed")

    def _detail(self, group: RankGroup | None = None) -> dict[str, Any]:
        return {
            "version": version("rushes"),
            **self._row["detail"],
            "checkpoint": self._checkpoint,
            "ranks": [] if group is None else group.pids,
            "devices": [] if group is None else [_device_of(rank) for rank in group.devices],
            "failures": self._failures,
            "trouble": None if self._trouble is None else storable(self._trouble)[:_MAX_TROUBLE],
            "crashed_jobs": self._crashes.jobs,
        }

    def _pause(self) -> None:
        """Wait longer the more groups ended without a completed job between them."""
        if self._failures < 2:
            return
        seconds = min(_MAX_BACKOFF_SECONDS, 2.0 ** (self._failures - 2))
        log.warning("group_postponed", failures=self._failures, seconds=seconds, reason=self._trouble)
        self._sleep(seconds)

    def _sleep(self, seconds: float) -> bool:
        """Wait; False when the replica was asked to stop."""
        deadline = time.monotonic() + seconds
        while not self._stopping.requested and time.monotonic() < deadline:
            time.sleep(min(0.2, seconds))
        return not self._stopping.requested

    def _on_hint(self) -> None:
        self._claimer.hint()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stopping.request()
        self._poke()

    def _poke(self) -> None:
        self._wake.poke()
        self._claimer_wake.poke()

    def _close(self) -> None:
        if self._port is not None:
            self._port.close()
        self._claimer.close()
        self._spool.close()
        self._media.close()
        self._scratch.remove()
        self._ledger.close()
        self._heartbeat.describe(state="stopped", job_id=None)
        self._heartbeat.close()
        log.info("replica_stopped")


def _progress_of(loading: Loading) -> dict[str, Any]:
    """What is shown of a load: `stage`, `percent` of the weights, `gb_per_second` and `seconds_left`."""
    rate, left = loading.bytes_per_second, loading.seconds_left
    return {
        "stage": loading.stage,
        "percent": int(100 * loading.done_bytes / loading.total_bytes) if loading.total_bytes else None,
        "gb_per_second": None if rate is None else round(rate / 1e9, 2),
        "seconds_left": None if left is None else round(left, 1),
    }


def _device_of(rank: Ready) -> dict[str, Any]:
    return {name: value for name, value in asdict(rank).items() if name != "seconds"}


def _node_port(
    settings: Settings, assignment: Assignment, contract: InferenceContract, *, on_change: Callable[[], None]
) -> NodePort | None:
    """Where the node with the other ranks joins.

    Raises:
        ValueError: its address cannot be listened on, or there is no secret.
    """
    if assignment.nodes == 1:
        return None
    welcome = Welcome(
        version=version("rushes"),
        contract=contract,
        kind=assignment.kind,
        layout=str(assignment.layout),
        options=check_options(settings),
    )
    secret = secret_of(settings.node_secret.get_secret_value())
    return NodePort(settings.node_host, settings.node_port, secret=secret, welcome=welcome, on_change=on_change)


def _plan(settings: Settings, assignment: Assignment, contract: InferenceContract) -> GroupPlan:
    cores = len(os.sched_getaffinity(0))
    return GroupPlan(
        sp=assignment.layout.sp,
        kind=assignment.kind,
        visible=assignment.visible,
        threads=max(1, cores // assignment.layout.ranks_per_node(assignment.nodes)),
        host=settings.node_host if assignment.nodes > 1 else "",
        pipeline=settings.pipeline,
        options=options_of(settings),
        checkpoint=settings.checkpoint,
        contract=contract,
        start_timeout_seconds=settings.start_timeout_seconds,
        stage_timeout_seconds=Deadlines.of(settings).longest,
        log_level=settings.log_level,
        log_json=settings.log_json,
    )


def main(arguments: list[str]) -> int:
    end_with_parent(int(arguments[0]))
    refusal = int(arguments[1])
    # what this process starts must not keep it open
    os.set_inheritable(refusal, False)
    settings = get_settings()
    configure_logging(settings.log_level, json=settings.log_json)
    try:
        supervisor = Supervisor(settings, Assignment.parse(arguments[2:]))
    except NameTaken as error:
        return _refuse(refusal, str(error), status=EXIT_NAME_TAKEN)
    except ValueError as error:
        return _refuse(refusal, str(error))
    try:
        return supervisor.run()
    except GroupUnfit as error:
        return _refuse(refusal, str(error))


def _refuse(refusal: int, why: str, *, status: int = EXIT_UNFIT) -> int:
    """Have the launcher say why, once for all replicas."""
    # names of files may be anything
    os.write(refusal, why.encode(errors="backslashreplace")[:MAX_REFUSAL_BYTES])
    return status
