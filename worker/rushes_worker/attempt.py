"""One attempt of one job: its start, its render on the ranks, and its end; what can become of it is in `runner.py`."""

import json
import shutil
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from rushes_core.claims import ClaimedJob
from rushes_core.clip import Clip
from rushes_core.contract import InferenceContract
from rushes_core.errors import GenerationError, InvalidRequest, OutOfMemory, RushesError, StorageError
from rushes_core.log import get_logger
from rushes_core.object_keys import Destination, result_key
from rushes_core.states import JobState, Phase
from rushes_core.storage import ObjectStore
from rushes_core.variants import AUDIO, BY_PRODUCTS, VIDEO

from rushes_worker.claimer import log_stopped
from rushes_worker.commands import (
    Advanced,
    AudioReady,
    Done,
    Failed,
    Idled,
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
_ROUNDS_AHEAD = 2
"""Rounds of units that are left when the next job may be started."""


class Halt(StrEnum):
    """Why an attempt that could go on is given up."""

    CANCELLED = "cancelled"
    LEASE_LOST = "lease_lost"
    STOPPING = "stopping"
    NOT_BEGUN = "not_begun"
    """The ranks ended before they began it."""


class Halted(Exception):
    """The attempt was given up."""

    def __init__(self, why: Halt) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all attempts on one replica use."""

    contract: InferenceContract
    provenance: str
    deadlines: Deadlines
    ledger: Ledger
    heartbeat: Heartbeat
    media: MediaPool
    store: ObjectStore
    scratch: Scratch
    spool: Spool
    crashes: Crashes
    stopping: Stopping
    wake: Wake
    stage_times: StageTimes


class NextJob(Protocol):
    """The job behind the one on the ranks."""

    def look(self, behind: int) -> None:
        """The render `behind` is near its end: have the next one ready. Called again and again."""
        ...

    def hear(self, rank: int, report: Report) -> None:
        """A rank said something of another render than the one it is asked about."""
        ...

    def void(self) -> None:
        """The ranks do not begin what they were told of: they are to be told again."""
        ...


class Attempt:
    """Started by any thread, told to the ranks and rendered by the main thread, then ended by a thread of the spool.

    Args:
        started_ahead: it is started while another one is on the ranks; what it waits for them is none of its run.
    """

    def __init__(self, workshop: Workshop, claim: Claim, *, started_ahead: bool = False) -> None:
        self._workshop = workshop
        self._job = job = claim.job
        self._lease = lease = claim.lease
        self._started_ahead = started_ahead
        self._directory = workshop.scratch.path / f"attempt-{lease.fence}"
        self._path = self._directory / "video.mp4"
        destination = Destination.of(job.request)
        self._store = workshop.store.in_bucket(destination.bucket)
        self._key = result_key(job.project, job.id, job.attempt, lease.fence, key_prefix=destination.key_prefix)
        self._lent: MediaProcess | None = None
        self._failure: Exception | None = None
        self._serial = 0
        self._told_ahead = False
        self._early: list[tuple[int, Report]] = []
        self._idle_seconds: float | None = None

    @property
    def job(self) -> ClaimedJob:
        return self._job

    @property
    def fence(self) -> int:
        return self._lease.fence

    def start(self) -> bool:
        """CLAIMED -> RUNNING; False if the job is not to be run here, and is settled. Any thread."""
        if self._try_start():
            expected = self._workshop.stage_times.expected(self._job)
            self._progress = Progress(num_steps=self._workshop.contract.num_forwards, seconds=expected)
            return True
        self.abandon()
        return False

    def abandon(self) -> None:
        """Have the lease run out. Any thread."""
        self._workshop.heartbeat.drop(self._lease)

    def _try_start(self) -> bool:
        ledger, lease = self._workshop.ledger, self._lease
        log.info("job_claimed", fence=lease.fence)
        try:
            if self._workshop.stopping.requested:
                ledger.release(lease)
                log.info("job_released", reason="the worker is stopping")
            elif ledger.start(lease):
                log.info("job_started")
                return True
            elif state := ledger.confirm_cancel(lease):
                log_stopped(state)
            else:
                log.warning("lease_lost", reason="the job was not to be started any more")
        except LedgerUnreachable as error:
            log.warning("lease_lost", reason=str(error))
        return False

    def hand_to(self, group: RankGroup, *, behind: int = 0) -> None:
        """Have the ranks render it, when they are done with render `behind` if there is one. Main thread.

        What stands in the way is the attempt's failure, which `render` returns with.
        """
        self._told_ahead = behind > 0
        self._lent = self._workshop.media.lend()
        try:
            self._directory.mkdir()
            self._open_clip()
        except (RushesError, OSError) as error:
            self._failure = error
            return
        self._tell(group, behind)

    def hand_again(self, group: RankGroup) -> None:
        """Have the ranks render it, who do not begin what they were told."""
        if self._failure is None:
            self._early.clear()
            self._tell(group, 0)

    def _tell(self, group: RankGroup, behind: int) -> None:
        job = self._job
        request = RenderRequest(
            job.id, job.attempt, job.prompt, job.seed, job.width, job.height, job.num_frames, job.low_memory
        )
        self._serial = group.render(request, self._directory, behind=behind)

    def hear_early(self, rank: int, report: Report) -> None:
        """A rank said something of this render while another one was on the ranks."""
        if getattr(report, "serial", 0) == self._serial:
            self._early.append((rank, report))

    def render(self, group: RankGroup, following: NextJob) -> bool:
        """Follow the ranks; whether everything that a clip needs was handed over. `end` settles either case."""
        workshop = self._workshop
        self._phases = _PhaseClock(self._progress.phase)
        if self._failure is None and group.ended:
            self._failure = self._loss_before_its_turn(group)
        if self._failure is not None:
            # its turn never came: nothing is reported of it, and so nobody pays for it
            return False
        self._report()
        try:
            self._follow(group, following)
            log.info("job_rendered", idle_before_seconds=self._idle_seconds, told_ahead=self._told_ahead)
            return True
        except GroupLost as lost:
            # at the end of its grace period a node takes the group along: that is no crash of the job's
            if workshop.stopping.grace_is_over or group.is_leaving:
                self._failure = Halted(Halt.STOPPING)
            else:
                workshop.crashes.note(self._job.id)
                self._failure = lost
        except (Halted, RushesError, OSError) as error:
            self._failure = error
            if isinstance(error, Halted) and error.why is Halt.STOPPING:
                group.end("stopping")
        return False

    def _loss_before_its_turn(self, group: RankGroup) -> Exception:
        """What it means to this attempt that the ranks ended while another one was on them.

        Once they had begun this one as well, nobody knows which of them it was: it counts against both, and neither
        has another beside it again. It is one crash of the replica.
        """
        if self._workshop.stopping.grace_is_over or group.is_leaving:
            return Halted(Halt.STOPPING)
        return GroupLost("The worker ended between two clips.", rank=None) if self._early else Halted(Halt.NOT_BEGUN)

    def end(self) -> None:
        """Publish what was rendered, or settle the job otherwise, and leave nothing of the attempt on this machine."""
        try:
            self._settle()
        except LedgerUnreachable as error:
            log.warning("lease_lost", reason=str(error))
        finally:
            self._workshop.heartbeat.drop(self._lease)
            self._return_media()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _settle(self) -> None:
        workshop, lease = self._workshop, self._lease
        try:
            if self._failure is not None:
                raise self._failure
            self._complete(self._publish())
        except Halted as halted:
            self._halt(halted.why)
        except InvalidRequest as error:
            state = workshop.ledger.fail(lease, {"code": "invalid_request", "message": str(error)})
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
            self._workshop.media.take_back(process)

    @property
    def _media(self) -> MediaProcess:
        assert self._lent is not None
        return self._lent

    def _open_clip(self) -> None:
        """
        Raises:
            InvalidRequest: the request itself is wrong.
        """
        job = self._job
        try:
            self._progress.num_units = Clip(job.num_frames).num_units
            if not self._store.is_used:
                raise InvalidRequest(f"output.bucket {self._store.bucket} may not be used any more")
            self._media.start_clip(
                ClipSpec(
                    self._path,
                    job.width,
                    job.height,
                    job.num_frames,
                    comment=_comment_of(job, self._workshop.contract, self._workshop.provenance),
                    by_products=_by_products_of(job),
                )
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    def _follow(self, group: RankGroup, following: NextJob) -> None:
        """Have the media process encode what the ranks hand over, until each has told how its render ended.

        Raises:
            Halted: the attempt was given up.
            InvalidRequest: the request itself is wrong.
            GenerationError: the ranks or the media process failed.
        """
        serial = self._serial
        group.expect(self._patience(Phase.ENCODING), Phase.ENCODING.value)
        outcomes: dict[int, Outcome] = {}
        early: Exception | None = None
        while len(outcomes) < group.size:
            if early is None and (early := self._reason_to_stop()) is not None:
                group.stop(serial)
            if self._workshop.stopping.grace_is_over:
                raise Halted(Halt.STOPPING)
            for rank, report in self._hear(group, outcomes):
                if getattr(report, "serial", serial) != serial:
                    self._hear_of_another(group, following, rank, report)
                elif isinstance(report, Done | Stopped | Refused | Failed):
                    self._note_outcome(group, outcomes, rank, report)
                elif early is None:
                    if isinstance(report, Advanced) and report.phase is not None and not outcomes:
                        phase = Phase(report.phase)
                        group.expect(self._patience(phase), phase.value)
                    early = self._take(report)
                    if early is not None:
                        group.stop(serial)
            if early is None and self._nears_end(group.size):
                following.look(serial)
        group.relax()
        void = [isinstance(one, Refused) or (isinstance(one, Failed) and not one.is_late) for one in outcomes.values()]
        if any(isinstance(outcome, Failed) and not outcome.intact for outcome in outcomes.values()):
            group.end("render_failed")
        elif any(void):
            following.void()
        if early is not None:
            raise early
        error = _first_error(outcomes)
        if error is not None:
            raise error
        if any(isinstance(outcome, Stopped) for outcome in outcomes.values()):
            raise GenerationError("The pipeline stopped without having been asked to.")

    def _hear(self, group: RankGroup, outcomes: dict[int, Outcome]) -> list[tuple[int, Report]]:
        """What the ranks said, that which was said before this attempt's turn first."""
        if self._early:
            said, self._early = self._early, []
            return said
        try:
            reports = group.wait(self._tick(), self._workshop.wake)
        except GroupLost as lost:
            # silence after an error means that the other ranks hang in step with the one that raised it
            raise (lost if lost.rank is not None else _first_error(outcomes) or lost) from None
        self._workshop.wake.clear()
        return reports

    def _hear_of_another(self, group: RankGroup, following: NextJob, rank: int, report: Report) -> None:
        following.hear(rank, report)
        if isinstance(report, Failed) and not report.intact:
            # that rank ends, and the others may not come to what is left of this render
            group.expect(_SETTLE_SECONDS[False], "the last results, while the next render failed")

    def _nears_end(self, num_ranks: int) -> bool:
        """Whether the next job may be started; none is beside one that had an attempt before, lest it suffer."""
        progress = self._progress
        is_late = progress.phase is Phase.DECODING and progress.units_left <= _ROUNDS_AHEAD * num_ranks
        return is_late and self._job.attempt == 1

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
                self._media.add_unit(report.unit, report.path, report.num_frames, report.pixels)
                self._progress.finish_unit()
                self._report()
            elif isinstance(report, AudioReady):
                self._media.set_audio(report.path)
            elif isinstance(report, Idled):
                self._idle_seconds = round(max(report.seconds, self._idle_seconds or 0.0), 4)
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
        self._workshop.spool.weigh(self._lease.fence, num_bytes)
        self._return_media()
        self._workshop.wake.poke()

    def _reason_to_discard(self) -> Halt | None:
        if self._lease.cancel_requested:
            return Halt.CANCELLED
        # the GPU is free already, so what is finished is kept as long as it may still count
        if self._lease.is_over:
            return Halt.LEASE_LOST
        return Halt.STOPPING if self._workshop.stopping.grace_is_over else None

    def _complete(self, published: Published) -> None:
        workshop, lease, facts = self._workshop, self._lease, published.facts
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
        if workshop.ledger.complete(lease, result=result, timings=timings):
            workshop.stage_times.note(self._job, timings)
            log.info("job_completed", bytes=facts.bytes, **timings)
            return
        remove_attempt(self._store, self._key)
        self._halt(Halt.CANCELLED)

    def _halt(self, why: Halt) -> None:
        """Settle a job whose attempt was given up; what a lost lease held is not touched."""
        ledger, lease = self._workshop.ledger, self._lease
        if why is Halt.CANCELLED and (state := ledger.confirm_cancel(lease)):
            log_stopped(state)
        elif why is Halt.STOPPING:
            if ledger.release(lease):
                log.info("job_released", reason="the grace period is over")
        elif why is Halt.NOT_BEGUN:
            if ledger.release(lease):
                log.info("job_released", reason="the ranks ended before they began it")
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
            state = self._workshop.ledger.out_of_memory(self._lease, stage)
        else:
            stored = {"code": error.code, "message": message, "stage": stage}
            state = self._workshop.ledger.retry_or_fail(self._lease, stored, crashed=crashed)
        event = {JobState.QUEUED: "job_requeued", JobState.CANCELLED: "job_cancelled", None: "lease_lost"}
        log.warning(event.get(state, "job_failed"), code=error.code, error=str(error), stage=stage, crashed=crashed)

    def _enter(self, phase: Phase, completed_steps: int = 0) -> None:
        self._progress.enter(phase, completed_steps)
        self._phases.enter(self._progress.phase)
        self._report()

    def _report(self) -> None:
        progress = self._progress
        self._workshop.heartbeat.report(
            self._lease,
            phase=progress.phase,
            completed_steps=progress.completed_steps,
            progress=progress.percent,
            started_ahead=self._started_ahead,
        )

    def _patience(self, phase: Phase) -> float:
        job = self._job
        return self._workshop.deadlines.seconds(phase, num_frames=job.num_frames, width=job.width, height=job.height)

    def _tick(self) -> float:
        return min(_TICK_SECONDS, self._workshop.stopping.seconds_left)


def _comment_of(job: ClaimedJob, contract: InferenceContract, provenance: str) -> str:
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


class _RenderFailed(GenerationError):
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


def _first_error(outcomes: dict[int, Outcome]) -> InvalidRequest | _RenderFailed | None:
    # a rank without memory leaves the others with errors of their own
    for outcome in sorted(outcomes.values(), key=lambda one: getattr(one, "code", "") != OutOfMemory.code):
        if isinstance(outcome, Refused):
            return InvalidRequest(outcome.message)
        if isinstance(outcome, Failed):
            return _RenderFailed(outcome)
    return None
