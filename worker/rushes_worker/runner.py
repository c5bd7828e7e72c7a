"""One attempt of one job, from claim to the commit that ends it.

How an attempt can end, and what becomes of the job:

| what happened | job | rank group |
|---|---|---|
| stored and committed | completed | lives |
| cancel or delete was seen | cancelled | lives |
| its campaign wants it back | queued again, nothing counted | lives |
| the request itself is wrong | failed, `invalid_request` | lives |
| an error raised on purpose by every rank, or a clip that breaks its contract | queued again, or failed | lives |
| any other error of a rank | queued again, or failed | ends |
| a rank died or fell silent | queued again, or failed; counts as a crash | ends |
| every rank reported that a device had no memory left | queued for the plan that needs less, or failed | lives |
| one rank reported it, and the others hang in step with it | queued for the plan that needs less, or failed | ends |
| the store took nothing for `upload_timeout_seconds` | queued again, or failed | lives |
| the lease was lost, or could not be renewed | nothing is written | lives |
| asked to stop, grace period over | queued again, nothing counted | ends |
"""

import json
import shutil
import time
from enum import StrEnum
from typing import Any

from rushes_core.clip import Clip
from rushes_core.contract import InferenceContract
from rushes_core.errors import GenerationError, InvalidRequest, OutOfMemory, RushesError, StorageError
from rushes_core.jobs import ClaimedJob
from rushes_core.log import get_logger
from rushes_core.states import JobState, Phase
from rushes_core.storage import Destination, ObjectStore, result_key
from rushes_core.variants import AUDIO, BY_PRODUCTS, VIDEO
from structlog.contextvars import bound_contextvars

from rushes_worker.claimer import log_stopped
from rushes_worker.commands import (
    Advanced,
    AudioReady,
    Done,
    Failed,
    Outcome,
    Refused,
    Report,
    Stopped,
    UnitReady,
)
from rushes_worker.crashes import Crashes
from rushes_worker.deadlines import Deadlines
from rushes_worker.group import GroupLost, RankGroup
from rushes_worker.heartbeat import Heartbeat
from rushes_worker.lease import Lease
from rushes_worker.ledger import Claim, Ledger, LedgerUnreachable
from rushes_worker.media.errors import MediaError
from rushes_worker.media.pool import MediaPool
from rushes_worker.media.process import ClipSpec, MadeClip, MediaProcess
from rushes_worker.pipeline.base import RenderRequest
from rushes_worker.progress import Progress
from rushes_worker.publication import Publication, Published, remove_attempt
from rushes_worker.scratch import Scratch
from rushes_worker.spool import Spool
from rushes_worker.stage_times import StageTimes
from rushes_worker.stopping import Stopping
from rushes_worker.wake import Wake

log = get_logger(__name__)

_SETTLE_SECONDS = {True: 10.0, False: 3.0}
"""How long the other ranks may take to report an error that one rank reported, by whether they are likely to."""
_TICK_SECONDS = 0.5


class Halt(StrEnum):
    """Why an attempt that could go on is given up."""

    CANCELLED = "cancelled"
    LEASE_LOST = "lease_lost"
    STOPPING = "stopping"


class Halted(Exception):
    """The attempt was given up."""

    def __init__(self, why: Halt) -> None:
        super().__init__(why)
        self.why = why


class Runner:
    """Runs claimed jobs for one replica, one after another, on the group that it is given.

    The ranks are needed until the last frame and the sound are handed over. What is left to do then, and every other
    end of an attempt, happens in the spool while the next job is rendered.
    """

    def __init__(
        self,
        *,
        contract: InferenceContract,
        provenance: str,
        deadlines: Deadlines,
        ledger: Ledger,
        heartbeat: Heartbeat,
        media: MediaPool,
        store: ObjectStore,
        scratch: Scratch,
        spool: Spool,
        crashes: Crashes,
        stopping: Stopping,
        wake: Wake,
    ) -> None:
        self.contract = contract
        self.provenance = provenance
        self.deadlines = deadlines
        self.ledger = ledger
        self.heartbeat = heartbeat
        self.media = media
        self.store = store
        self.scratch = scratch
        self.spool = spool
        self.crashes = crashes
        self.stopping = stopping
        self.wake = wake
        self.stage_times = StageTimes(ledger.measured_phases)

    def has_room(self, rendering: bool) -> bool:
        """Whether one more job may be claimed, beside the one on the ranks if there is one. Any thread may ask."""
        return self.spool.has_room(on_ranks=int(rendering)) and self.scratch.has_room

    @property
    def can_render(self) -> bool:
        """Whether a job may begin now."""
        return self.media.available

    def run(self, claim: Claim, group: RankGroup) -> bool:
        """Render one attempt; whether that succeeded. The group may have ended when this returns.

        The job is not settled yet then: the spool does that.
        """
        job, lease = claim.job, claim.lease
        with bound_contextvars(job_id=job.id, attempt=job.attempt):
            log.info("job_claimed", fence=lease.fence)
            if not self._start(lease):
                self.heartbeat.drop(lease)
                return False
            attempt = _Attempt(self, job, lease)
            rendered = attempt.render(group)
            self.spool.end(lease.fence, attempt.end)
            return rendered

    def _start(self, lease: Lease) -> bool:
        try:
            if self.stopping.requested:
                self.ledger.release(lease)
                log.info("job_released", reason="the worker is stopping")
            elif self.ledger.start(lease):
                log.info("job_started")
                return True
            elif state := self.ledger.confirm_cancel(lease):
                log_stopped(state)
            else:
                log.warning("lease_lost", reason="the job was not to be started any more")
        except LedgerUnreachable as error:
            log.warning("lease_lost", reason=str(error))
        return False


class _Attempt:
    """Rendered by the main thread, then ended by a thread of the spool."""

    def __init__(self, runner: Runner, job: ClaimedJob, lease: Lease) -> None:
        self._runner = runner
        self._job = job
        self._lease = lease
        self._directory = runner.scratch.path / f"attempt-{lease.fence}"
        self._path = self._directory / "video.mp4"
        destination = Destination.of(job.request)
        self._store = runner.store.in_bucket(destination.bucket)
        self._key = result_key(job.project, job.id, job.attempt, lease.fence, key_prefix=destination.key_prefix)
        self._progress = Progress(num_steps=runner.contract.num_forwards, seconds=runner.stage_times.expected(job))
        self._phases = _PhaseClock(self._progress.phase)
        self._lent: MediaProcess | None = runner.media.lend()
        self._failure: Exception | None = None

    def render(self, group: RankGroup) -> bool:
        """Have the ranks render; whether everything that a clip needs was handed over. `end` settles either case."""
        runner = self._runner
        self._report()
        try:
            self._directory.mkdir()
            self._render(group)
            return True
        except GroupLost as lost:
            # at the end of the grace period the group goes with the worker: that is no crash of the job's
            if runner.stopping.grace_is_over:
                self._failure = Halted(Halt.STOPPING)
            else:
                runner.crashes.note(self._job.id)
                self._failure = lost
        except (Halted, RushesError, OSError) as error:
            self._failure = error
            if isinstance(error, Halted) and error.why is Halt.STOPPING:
                group.end("stopping")
        return False

    def end(self) -> None:
        """Publish what was rendered, or settle the job otherwise, and leave nothing of the attempt on this machine."""
        try:
            self._settle()
        except LedgerUnreachable as error:
            log.warning("lease_lost", reason=str(error))
        finally:
            self._runner.heartbeat.drop(self._lease)
            self._return_media()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _settle(self) -> None:
        runner, lease = self._runner, self._lease
        try:
            if self._failure is not None:
                raise self._failure
            self._complete(self._publish())
        except Halted as halted:
            self._halt(halted.why)
        except InvalidRequest as error:
            state = runner.ledger.fail(lease, {"code": "invalid_request", "message": str(error)})
            log.info("job_failed", code="invalid_request", error=str(error), state=state)
        except LedgerUnreachable:
            raise
        except OSError as error:
            self._retry(GenerationError(f"The worker's scratch directory cannot be used: {error.strerror}."))
        except RushesError as error:
            self._retry(error)

    def _return_media(self) -> None:
        process, self._lent = self._lent, None
        if process is not None:
            self._runner.media.take_back(process)

    @property
    def _media(self) -> MediaProcess:
        assert self._lent is not None
        return self._lent

    def _render(self, group: RankGroup) -> None:
        """Have the ranks render while the media process encodes what they hand over.

        Raises:
            Halted: the attempt was given up.
            InvalidRequest: the request itself is wrong.
            GenerationError: the ranks or the media process failed.
        """
        job = self._job
        try:
            self._progress.num_units = Clip(job.num_frames).num_units
            if self._store.bucket not in [store.bucket for store in self._runner.store.buckets]:
                raise InvalidRequest(f"output.bucket {self._store.bucket} may not be used any more")
            self._media.start_clip(
                ClipSpec(
                    self._path,
                    job.width,
                    job.height,
                    job.num_frames,
                    comment=comment_of(job, self._runner.contract, self._runner.provenance),
                    by_products=_by_products_of(job),
                )
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        request = RenderRequest(
            job.id, job.attempt, job.prompt, job.seed, job.width, job.height, job.num_frames, job.low_memory
        )
        serial = group.render(request, self._directory)
        group.expect(self._patience(Phase.ENCODING), Phase.ENCODING.value)
        outcomes: dict[int, Outcome] = {}
        early: Exception | None = None
        while len(outcomes) < group.size:
            if early is None and (early := self._reason_to_stop()) is not None:
                group.stop()
            if self._runner.stopping.grace_is_over:
                raise Halted(Halt.STOPPING)
            try:
                reports = group.wait(self._tick(), self._runner.wake)
            except GroupLost as lost:
                # silence after an error means that the other ranks hang in step with the one that raised it
                raise (lost if lost.rank is not None else _first_error(outcomes) or lost) from None
            self._runner.wake.clear()
            for rank, report in reports:
                if getattr(report, "serial", serial) != serial:
                    continue
                if isinstance(report, Done | Stopped | Refused | Failed):
                    self._note_outcome(group, outcomes, rank, report)
                elif early is None:
                    if isinstance(report, Advanced) and report.phase is not None and not outcomes:
                        phase = Phase(report.phase)
                        group.expect(self._patience(phase), phase.value)
                    early = self._take(report)
                    if early is not None:
                        group.stop()
        group.relax()
        error = _first_error(outcomes)
        if any(isinstance(outcome, Failed) and not outcome.intact for outcome in outcomes.values()):
            group.end("render_failed")
        if early is not None:
            raise early
        if error is not None:
            raise error
        if any(isinstance(outcome, Stopped) for outcome in outcomes.values()):
            raise GenerationError("The pipeline stopped without having been asked to.")

    def _note_outcome(self, group: RankGroup, outcomes: dict[int, Outcome], rank: int, outcome: Outcome) -> None:
        outcomes[rank] = outcome
        if isinstance(outcome, Failed):
            log.warning("render_failed", rank=rank, kind=outcome.kind, stage=outcome.stage, trace=outcome.traceback)
        if isinstance(outcome, Refused | Failed) and len(outcomes) < group.size:
            # a rank without memory is likely alone with it, and the others wait for it
            together = isinstance(outcome, Refused) or (outcome.intact and outcome.code != OutOfMemory.code)
            group.expect(_SETTLE_SECONDS[together], "waiting for the other ranks")

    def _reason_to_stop(self) -> Exception | None:
        if self._lease.cancel_requested:
            return Halted(Halt.CANCELLED)
        if self._lease.is_doubtful:
            return Halted(Halt.LEASE_LOST)
        try:
            self._media.check()
        except MediaError as error:
            return error
        return None

    def _take(self, report: Report) -> Exception | None:
        """Use what a rank handed over; the error of a media process that could not."""
        try:
            if isinstance(report, Advanced):
                if report.phase is not None:
                    self._enter(Phase(report.phase), report.completed_steps)
            elif isinstance(report, UnitReady):
                self._media.add_unit(report.unit, report.path, report.num_frames)
                self._progress.finish_unit()
                self._report()
            elif isinstance(report, AudioReady):
                self._media.set_audio(report.path)
        except MediaError as error:
            return error
        return None

    def _publish(self) -> Published:
        """Have the clip finished, validated and stored.

        Raises:
            Halted: the attempt was given up.
            GenerationError: the clip breaks its contract.
            StorageError: the store took nothing for too long.
        """
        publication = Publication(
            self._media,
            self._store,
            path=self._path,
            key=self._key,
            enter=self._enter,
            on_encoded=self._note_encoded,
            finish_seconds=self._patience(Phase.MUXING),
            upload_seconds=self._patience(Phase.UPLOADING),
        )
        publication.start()
        while not publication.wait(self._tick()):
            why = self._reason_to_discard()
            if why is not None:
                publication.give_up()
                raise Halted(why)
        return publication.result()

    def _note_encoded(self, made: MadeClip) -> None:
        num_bytes = made.facts.bytes + sum(product.bytes for product in made.by_products)
        self._runner.spool.weigh(self._lease.fence, num_bytes)
        self._return_media()
        self._runner.wake.poke()

    def _reason_to_discard(self) -> Halt | None:
        if self._lease.cancel_requested:
            return Halt.CANCELLED
        # the GPU is free already, so what is finished is kept as long as it may still count
        if self._lease.is_over:
            return Halt.LEASE_LOST
        return Halt.STOPPING if self._runner.stopping.grace_is_over else None

    def _complete(self, published: Published) -> None:
        runner, lease, facts = self._runner, self._lease, published.facts
        timings = self._phases.seconds()
        result = {
            "bucket": self._store.bucket,
            "key": self._key,
            "bytes": facts.bytes,
            "sha256": facts.sha256,
            "content_type": VIDEO.content_type,
            "num_frames": facts.num_frames,
            "width": facts.width,
            "height": facts.height,
            "fps": facts.fps,
            "duration_seconds": facts.duration_seconds,
            "has_audio": facts.has_audio,
            "audio_sample_rate": facts.audio_sample_rate,
            "variants": published.variants,
            "warnings": published.warnings,
        }
        if runner.ledger.complete(lease, result=result, timings=timings):
            runner.stage_times.note(self._job, timings)
            log.info("job_completed", bytes=facts.bytes, **timings)
            return
        remove_attempt(self._store, self._key)
        self._halt(Halt.CANCELLED)

    def _halt(self, why: Halt) -> None:
        """Settle a job whose attempt was given up; what a lost lease held is not touched."""
        ledger, lease = self._runner.ledger, self._lease
        if why is Halt.CANCELLED and (state := ledger.confirm_cancel(lease)):
            log_stopped(state)
        elif why is Halt.STOPPING:
            if ledger.release(lease):
                log.info("job_released", reason="the grace period is over")
        elif lease.lost or not ledger.try_release(lease):
            log.warning("lease_lost", reason="taken over, or not renewed in time")
        else:
            log.warning("job_released", reason="the lease could not be renewed in time")

    def _retry(self, error: RushesError) -> None:
        crashed = isinstance(error, GroupLost)
        # what the store's client says names hosts and keys, which are nobody's business
        message = "The object store did not take the clip." if isinstance(error, StorageError) else str(error)
        stage = getattr(error, "stage", None) or self._progress.phase.value
        if error.code == OutOfMemory.code:
            state = self._runner.ledger.out_of_memory(self._lease, stage)
        else:
            stored = {"code": error.code, "message": message, "stage": stage}
            state = self._runner.ledger.retry_or_fail(self._lease, stored, crashed=crashed)
        event = {JobState.QUEUED: "job_requeued", JobState.CANCELLED: "job_cancelled", None: "lease_lost"}
        log.warning(event.get(state, "job_failed"), code=error.code, error=str(error), stage=stage, crashed=crashed)

    def _enter(self, phase: Phase, completed_steps: int = 0) -> None:
        self._progress.enter(phase, completed_steps)
        self._phases.enter(self._progress.phase)
        self._report()

    def _report(self) -> None:
        progress = self._progress
        self._runner.heartbeat.report(
            self._lease,
            phase=progress.phase,
            completed_steps=progress.completed_steps,
            progress=progress.percent,
        )

    def _patience(self, phase: Phase) -> float:
        job = self._job
        return self._runner.deadlines.seconds(phase, num_frames=job.num_frames, width=job.width, height=job.height)

    def _tick(self) -> float:
        return min(_TICK_SECONDS, self._runner.stopping.seconds_left)


def comment_of(job: ClaimedJob, contract: InferenceContract, provenance: str) -> str:
    """What the file of a clip says of how it was made, by the setting `provenance`."""
    if provenance == "off":
        return ""
    made: dict[str, Any] = {
        "id": job.id,
        "model": job.model,
        "revision": contract.checkpoint_content_sha256 or contract.base_model_revision,
        "seed": job.seed,
    }
    if provenance == "prompt":
        made["prompt"] = job.prompt
    return json.dumps({name: value for name, value in made.items() if value is not None}, ensure_ascii=False)


def _by_products_of(job: ClaimedJob) -> tuple[str, ...]:
    output = job.request.get("output") or {}
    wanted = BY_PRODUCTS if output.get("thumbnail", True) else (AUDIO,)
    return tuple(variant.name for variant in wanted)


class RenderFailed(GenerationError):
    """A rank reported an error of its pipeline."""

    def __init__(self, failure: Failed) -> None:
        super().__init__(failure.message, stage=failure.stage)
        self.code = failure.code


class _PhaseClock:
    """Seconds spent in each phase."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._began = self._entered = time.monotonic()
        self._seconds: dict[str, float] = {}

    def enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._charge()
            self._phase = phase

    def seconds(self) -> dict[str, float]:
        """Seconds per phase so far, and `total`."""
        self._charge()
        return {**self._seconds, "total": round(time.monotonic() - self._began, 3)}

    def _charge(self) -> None:
        now = time.monotonic()
        spent = self._seconds.get(self._phase, 0.0) + now - self._entered
        self._seconds[self._phase.value] = round(spent, 3)
        self._entered = now


def _first_error(outcomes: dict[int, Outcome]) -> InvalidRequest | RenderFailed | None:
    # a rank without memory leaves the others with errors of their own
    for outcome in sorted(outcomes.values(), key=lambda one: getattr(one, "code", "") != OutOfMemory.code):
        if isinstance(outcome, Refused):
            return InvalidRequest(outcome.message)
        if isinstance(outcome, Failed):
            return RenderFailed(outcome)
    return None
