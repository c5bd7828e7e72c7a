"""The checker: a good history passes, and for every invariant there is a bad one that it catches."""

from collections.abc import Callable
from typing import Any

import pytest
from rushes_core.states import TRANSITIONS
from support.faults.checker import ALLOWED, COUNTED, RETRIED, check
from support.faults.history import Record

JOB = "video_1"
KEY = f"results/default/{JOB}/1-7/video.mp4"


class Story:
    """A history by hand: one job that is posted, rendered and completed, with everything that is dumped of it."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.job: dict[str, Any] = {
            "id": JOB,
            "project": "default",
            "api_key": "key_1",
            "state": "completed",
            "generation": 1,
            "attempt": 1,
            "fence": 7,
            "crash_count": 0,
            "priority": 1,
            "created_at": 1.0,
            "request": {"metadata": {"key": "k1"}},
            "result": {"key": KEY, "bytes": 3, "sha256": "aa"},
            "error": None,
            "deleted_at": None,
            "purged_at": None,
            "cancel_requested_at": None,
        }
        self.moves: list[tuple[str | None, str, float, int | None, int]] = [
            (None, "queued", 1.0, None, 1),
            ("queued", "claimed", 2.0, 7, 1),
            ("claimed", "running", 3.0, 7, 1),
            ("running", "completed", 5.0, 7, 1),
        ]
        self.attempts: list[dict[str, Any]] = [
            {"fence": 7, "attempt": 1, "generation": 1, "started_at": 3.0, "outcome": "completed", "crashed": False}
        ]
        self.outbox: list[tuple[str, int]] = [("video.completed", 1)]
        self.objects: dict[str, tuple[int, str]] = {KEY: (3, "aa")}
        self.left: dict[str, list[Any]] = {"processes": [], "files": [], "uploads": [], "descriptors": []}
        self.redis = {"hints": 0, "unacked": 0}
        self.say("create", job=JOB, status=200, seconds=0.1, key="k1", poison=False)
        self.say("render", "invoke", job=JOB, t=3.1)
        self.say("log", job=JOB, t=5.0, event="job_completed", attempt=1)

    def say(self, op: str, phase: str = "ok", *, job: str | None = None, t: float = 1.0, **data: Any) -> None:
        self.records.append(
            {
                "t_mono": t,
                "t_wall": t,
                "proc": data.pop("proc", "p"),
                "op": op,
                "phase": phase,
                "job": job,
                "generation": None,
                "attempt": None,
                "fence": None,
                "data": data,
            }
        )

    def requeue(self) -> None:
        """The first attempt is lost while it runs, and a second one completes the job."""
        self.moves[3:] = [
            ("running", "queued", 4.0, 7, 1),
            ("queued", "claimed", 5.0, 8, 1),
            ("claimed", "running", 6.0, 8, 1),
            ("running", "completed", 8.0, 8, 1),
        ]
        self.attempts[0] |= {"outcome": "queued", "crashed": True}
        second = {"fence": 8, "attempt": 2, "generation": 1, "started_at": 6.0, "outcome": "completed"}
        self.attempts.append(second | {"crashed": False})
        key = KEY.replace("/1-7/", "/2-8/")
        self.objects[key] = (3, "aa")
        self.job |= {"attempt": 2, "fence": 8, "crash_count": 1, "result": {**self.job["result"], "key": key}}

    def cancel_in_queue(self) -> None:
        self.moves[1:] = [("queued", "cancelled", 2.0, None, 1)]
        self.job |= {"state": "cancelled", "attempt": 0, "fence": None, "result": None, "cancel_requested_at": 2.0}
        self.attempts.clear()
        self.objects.clear()
        self.outbox = [("video.cancelled", 1)]
        self.records = [record for record in self.records if record["op"] == "create"]

    def fail(self, code: str) -> None:
        self.moves[3:] = [("running", "failed", 5.0, 7, 1)]
        self.job |= {"state": "failed", "result": None, "error": {"code": code}}
        self.attempts[0]["outcome"] = "failed"
        self.objects.clear()
        self.outbox = [("video.failed", 1)]
        self.records = [record for record in self.records if record["op"] != "log"]

    def told(self) -> list[Record]:
        """The whole history."""
        story = Story.__new__(Story)
        story.records = list(self.records)
        story.say("dump.jobs", **self.job)
        for number, (old, new, at, fence, generation) in enumerate(self.moves):
            event = {"old_state": old, "new_state": new, "fence": fence, "generation": generation}
            story.say("dump.job_events", id=number, job_id=self.job["id"], at=at, **event)
        for attempt in self.attempts:
            story.say("dump.job_attempts", job_id=self.job["id"], **attempt)
        story.say("dump.has_outbox")
        for kind, generation in self.outbox:
            story.say("dump.outbox", job_id=self.job["id"], type=kind, generation=generation)
        for key, (size, sha256) in self.objects.items():
            story.say("dump.object", key=key, bytes=size, sha256=sha256)
        story.say("dump.left", **self.left)
        story.say("dump.redis", **self.redis)
        return story.records


def of_campaign(story: Story) -> None:
    """The job is line 1 of a campaign whose line 2 is bad, and which has ended."""
    story.say("campaign", job="batch_1", status=200, seconds=0.1, key="c1", lines=2, bad=[2])
    story.job |= {"campaign_id": "batch_1", "line": 1, "num_frames": 107, "width": 64, "height": 64}
    story.say("dump.campaigns", id="batch_1", state="completed")
    story.say("dump.files", id="file_1", project="default")
    story.objects["files/default/file_1"] = (9, "ff")
    story.say("dump.campaign_line_errors", campaign_id="batch_1", line=2)
    for shard in (0, 1):
        counts = dict.fromkeys(COUNTED, 0) | {"completed" if shard else "invalid": 1}
        story.say("dump.campaign_counts", campaign_id="batch_1", shard=shard, **counts)
    story.outbox = []
    tell_end(story)


def tell_end(story: Story, state: str = "completed", number: int = 1) -> None:
    story.say("dump.outbox", job_id="batch_1", type=f"batch.{state}", generation=number)


def caught(story: Story) -> set[tuple[str, str]]:
    return {(violation.invariant, violation.kind) for violation in check(story.told())}


def retry(story: Story) -> None:
    """Cancelled, retried in place, and completed as generation 2."""
    done = [(old, new, at + 10, fence, 2) for old, new, at, fence, _ in story.moves[1:]]
    job, attempts, objects, records = dict(story.job), story.attempts[:], dict(story.objects), story.records[:]
    story.cancel_in_queue()
    story.moves += [("cancelled", "queued", 10.0, None, 2), *done]
    story.job = job | {"generation": 2}
    story.attempts = [attempt | {"generation": 2} for attempt in attempts]
    story.objects, story.records = objects, [record | {"t_wall": record["t_wall"] + 10} for record in records]
    story.outbox.append(("video.completed", 2))


@pytest.mark.parametrize("tell", [lambda s: None, Story.requeue, Story.cancel_in_queue, retry, of_campaign])
def test_good_history_passes(tell: Callable[[Story], None]) -> None:
    story = Story()
    tell(story)
    assert caught(story) == set()


def test_poison_job_that_is_quarantined_passes() -> None:
    story = Story()
    story.fail("worker_crash")
    story.say("create", job=JOB, status=200, seconds=0.1, poison=True)
    assert caught(story) == set()


def test_limit_that_is_kept_and_pauses_of_others_or_at_other_times_pass() -> None:
    story = Story()
    story.requeue()
    story.say("meta", max_running={"key_1": 1, "key_2": 0})
    pause(story, 2.5, 4.5)
    pause(story, 0.0, 9.0, project="another")
    assert caught(story) == set()


def test_hint_that_a_killed_supervisor_had_in_hand_passes() -> None:
    story = Story()
    story.say("log", t=3.0, event="supervisor_died")
    story.redis["unacked"] = 1
    assert caught(story) == set()


def test_campaign_that_ends_again_after_a_retry_passes() -> None:
    story = Story()
    of_campaign(story)
    story.say("campaign retry_failed", job="batch_1", status=200, seconds=0.1)
    tell_end(story, number=2)
    assert caught(story) == set()


def test_history_without_an_outbox_decides_nothing_of_it() -> None:
    story = Story()
    records = [record for record in story.told() if record["op"] not in ("dump.has_outbox", "dump.outbox")]
    assert check(records) == []


Change = Callable[[Story], object]


def lost(story: Story) -> None:
    story.say("create", job="video_2", status=200, seconds=0.1, key="k2", poison=False)


def stuck(story: Story) -> None:
    story.moves.pop()
    story.job |= {"state": "running", "result": None}
    story.records.pop()
    story.outbox.clear()
    story.attempts[0]["outcome"] = None


def two_final_events(story: Story) -> None:
    story.moves.append(("completed", "completed", 6.0, 7, 1))


def two_effects(story: Story) -> None:
    story.say("log", job=JOB, t=6.0, event="job_completed", attempt=2, proc="w2")


def forgotten_effect(story: Story) -> None:
    story.fail("worker_lost")
    story.say("log", job=JOB, t=4.0, event="job_completed", attempt=1)


def illegal_move(story: Story) -> None:
    del story.moves[2]


def falling_fence(story: Story) -> None:
    story.requeue()
    story.moves[4] = ("queued", "claimed", 5.0, 6, 1)


def generation_that_stands_still(story: Story) -> None:
    retry(story)
    story.moves = [(old, new, at, fence, 1) for old, new, at, fence, _ in story.moves]


def other_bytes(story: Story) -> None:
    story.objects[KEY] = (3, "bb")


def key_of_another_fence(story: Story) -> None:
    key = KEY.replace("1-7", "1-6")
    story.objects = {key: (3, "aa")}
    story.job["result"] = {**story.job["result"], "key": key}


def started_after_cancel(story: Story) -> None:
    story.cancel_in_queue()
    story.say("render", "invoke", job=JOB, t=4.0)


def started_although_cancel_was_asked_for(story: Story) -> None:
    story.job["cancel_requested_at"] = 1.5


def stale_completion(story: Story) -> None:
    story.requeue()
    story.moves[-1] = ("running", "completed", 8.0, 7, 1)


def stale_attempt(story: Story) -> None:
    story.requeue()
    story.attempts[0]["outcome"], story.attempts[1]["outcome"] = "completed", "queued"


def poison_that_completes(story: Story) -> None:
    story.say("create", job=JOB, status=200, seconds=0.1, poison=True)


def poison_that_runs_for_ever(story: Story) -> None:
    story.fail("worker_crash")
    story.say("create", job=JOB, status=200, seconds=0.1, poison=True)
    story.attempts += [story.attempts[0] | {"fence": fence} for fence in (8, 9, 10)]


def quarantined_without_a_crash(story: Story) -> None:
    story.fail("worker_crash")


def silent_outbox(story: Story) -> None:
    story.outbox.clear()


def loud_outbox(story: Story) -> None:
    story.outbox.append(("video.completed", 1))


def outbox_that_lies(story: Story) -> None:
    story.outbox[:] = [("video.failed", 1)]


def miscounted_crashes(story: Story) -> None:
    story.job["crash_count"] = 1


def uncounted_rows(story: Story) -> None:
    story.say("meta", num_rows=2)


def key_with_two_answers(story: Story) -> None:
    story.say("create", job="video_2", status=200, seconds=0.1, key="k1", poison=False)


def key_with_two_jobs(story: Story) -> None:
    twin = story.job | {"id": "video_2"}
    story.say("dump.jobs", **twin)
    for record in [r for r in story.told() if r["op"].startswith("dump.job_")]:
        story.records.append(record | {"data": record["data"] | {"job_id": "video_2"}})


def too_many_hints(story: Story) -> None:
    story.redis["hints"] = 65


def unacknowledged_hint(story: Story) -> None:
    story.redis["unacked"] = 1


def more_unacknowledged_hints_than_supervisors_died(story: Story) -> None:
    story.say("log", t=3.0, event="supervisor_died")
    story.redis["unacked"] = 2


def process_left(story: Story) -> None:
    story.left["processes"].append(4711)


def other_bytes_of_a_variant(story: Story) -> None:
    key = KEY.replace("video.mp4", "thumbnail.jpg")
    story.objects[key] = (3, "bb")
    story.job["result"] = story.job["result"] | {"variants": {"thumbnail": {"key": key, "bytes": 3, "sha256": "aa"}}}


def object_of_nobody(story: Story) -> None:
    story.objects[f"results/default/{JOB}/3-9/video.mp4"] = (1, "cc")


def file_of_nobody(story: Story) -> None:
    of_campaign(story)
    story.objects["files/default/file_2"] = (9, "ff")


def object_of_a_deleted_job(story: Story) -> None:
    story.job |= {"deleted_at": 6.0, "purged_at": 7.0}


def idle_workers(story: Story) -> None:
    story.say("mark", t=1.5, name="lifted", limit=0.2)


def waiting_urgent_job(story: Story) -> None:
    story.job |= {"priority": 0}
    story.say("meta", interactive_p95_seconds=0.5)


def internal_error(story: Story) -> None:
    story.say("get", "info", job=JOB, status=500, seconds=0.1, code="internal_error")


def refusal_without_a_body(story: Story) -> None:
    story.say("get", "info", job=JOB, status=503, seconds=0.1, code=None)


def hanging_request(story: Story) -> None:
    story.say("get", "info", job=JOB, seconds=15.0, error="ReadTimeout()")


def discontented_scenario(story: Story) -> None:
    story.say("expect", "fail", job=JOB, what="one object", holds=False, detail="2")


def more_than_the_limit(story: Story) -> None:
    story.say("meta", max_running={"key_1": 0})


def pause(story: Story, begin: float, end: float, project: str = "default") -> None:
    for name, at in (("paused", begin), ("resumed", end)):
        story.say("mark", t=at, name=name, project=project)


def campaign_without(op: str) -> Change:
    def tell(story: Story) -> None:
        of_campaign(story)
        story.records = [record for record in story.records if record["op"] != op]

    return tell


def campaign_with_another_end(state: str) -> Change:
    def tell(story: Story) -> None:
        of_campaign(story)
        tell_end(story, state, number=2)

    return tell


def miscounted_campaign(story: Story) -> None:
    of_campaign(story)
    story.say("dump.campaign_counts", campaign_id="batch_1", shard=2, **dict.fromkeys(COUNTED, 0) | {"failed": 1})


def line_loaded_twice(story: Story) -> None:
    of_campaign(story)
    story.say("dump.jobs", **story.job | {"id": "video_2"})


def line_never_loaded(story: Story) -> None:
    of_campaign(story)
    story.job["line"] = 3


def good_line_refused(story: Story) -> None:
    of_campaign(story)
    story.job["line"] = 3
    story.say("dump.campaign_line_errors", campaign_id="batch_1", line=1)


def campaign_that_goes_on(story: Story) -> None:
    campaign_without("dump.campaigns")(story)
    story.say("dump.campaigns", id="batch_1", state="in_progress")


@pytest.mark.parametrize(
    ("tell", "invariant", "kind"),
    [
        (lost, "I1", "lost"),
        (stuck, "I1", "stuck"),
        (two_final_events, "I2", "duplicated effect"),
        (two_effects, "I2", "duplicated effect"),
        (forgotten_effect, "I2", "lost"),
        (illegal_move, "I3", "other"),
        (falling_fence, "I3", "stale result"),
        (generation_that_stands_still, "I3", "other"),
        (lambda story: story.objects.clear(), "I4", "lost"),
        (other_bytes, "I4", "other"),
        (other_bytes_of_a_variant, "I4", "other"),
        (key_of_another_fence, "I4", "stale result"),
        (started_after_cancel, "I5", "ran after cancel"),
        (started_although_cancel_was_asked_for, "I5", "ran after cancel"),
        (stale_completion, "I6", "stale result"),
        (stale_attempt, "I6", "stale result"),
        (key_of_another_fence, "I6", "stale result"),
        (poison_that_completes, "I7", "other"),
        (poison_that_runs_for_ever, "I7", "other"),
        (quarantined_without_a_crash, "I7", "other"),
        (silent_outbox, "I8", "lost"),
        (loud_outbox, "I8", "duplicated effect"),
        (outbox_that_lies, "I8", "other"),
        (miscounted_crashes, "I9", "other"),
        (uncounted_rows, "I9", "other"),
        (key_with_two_answers, "I10", "duplicated effect"),
        (key_with_two_jobs, "I10", "duplicated effect"),
        (too_many_hints, "I11", "other"),
        (unacknowledged_hint, "I11", "other"),
        (more_unacknowledged_hints_than_supervisors_died, "I11", "other"),
        (process_left, "I12", "other"),
        (object_of_nobody, "I12", "other"),
        (file_of_nobody, "I12", "other"),
        (object_of_a_deleted_job, "I12", "other"),
        (idle_workers, "I13", "stuck"),
        (waiting_urgent_job, "I14", "other"),
        (internal_error, "I15", "other"),
        (refusal_without_a_body, "I15", "other"),
        (hanging_request, "I15", "stuck"),
        (more_than_the_limit, "I16", "other"),
        (lambda story: pause(story, 0.5, 3.0), "I17", "other"),
        (campaign_without("dump.campaigns"), "I18", "lost"),
        (campaign_without("dump.campaign_counts"), "I18", "other"),
        (campaign_without("dump.campaign_line_errors"), "I18", "lost"),
        (campaign_without("dump.outbox"), "I18", "lost"),
        (campaign_with_another_end("completed"), "I18", "duplicated effect"),
        (campaign_with_another_end("cancelled"), "I18", "other"),
        (miscounted_campaign, "I18", "other"),
        (line_loaded_twice, "I18", "duplicated effect"),
        (line_never_loaded, "I18", "lost"),
        (good_line_refused, "I18", "other"),
        (campaign_that_goes_on, "I18", "stuck"),
        (discontented_scenario, "X", "other"),
    ],
)
def test_bad_history_is_caught(tell: Change, invariant: str, kind: str) -> None:
    story = Story()
    tell(story)
    assert (invariant, kind) in caught(story)


def test_checker_allows_what_the_job_domain_allows() -> None:
    moves = {(old.value, new.value) for old, targets in TRANSITIONS.items() for new in targets}
    assert moves == {(old, new) for old, new in ALLOWED if old} | {(state, "queued") for state in RETRIED}
