"""The judge of a fault run: reads a history and says which invariant does not hold. Pure; it needs no server.

| invariant | decided from | not decided here |
|---|---|---|
| I1 accepted jobs exist and end | `create` that were answered, `dump.jobs` | |
| I2 one final event per job and generation, one effect | `dump.job_events`, workers' `job_completed` | |
| I3 only allowed transitions, rising fences | `dump.job_events`, `dump.job_attempts` | |
| I4 completed means stored, intact, under the row's fence | `dump.jobs`, `dump.object` | |
| I5 nothing starts after a cancel | `dump.job_events`, `render`, `cancel_requested_at` | starts within 1 s |
| I6 no result of an attempt that was taken over | `dump.job_events`, `dump.job_attempts`, `dump.jobs` | |
| I7 jobs that kill workers are quarantined, others are not | `create` with `poison`, `dump.jobs` | |
| I8 one outbox row per final transition | `dump.outbox`, `dump.job_events` | deliveries: they need receivers |
| I9 counters equal what they count | `dump.jobs`, `dump.job_attempts` | |
| I10 one key, one job | `create` with `key`, `dump.jobs` | |
| I11 hints are bounded, none is unacknowledged at rest | `dump.redis` | of Redis's faults, one a dead supervisor |
| I12 nothing is left: processes, files, uploads, objects | `dump.left`, `dump.object`, `dump.job_attempts` | |
| I13 ready work is claimed soon after recovery | `mark lifted`, `dump.job_events` | needs a job that was ready then |
| I14 urgent jobs wait no longer than agreed | `meta.interactive_p95_seconds`, `dump.job_events` | without that bound |
| I15 the API answers 429 or 503, with a body, in time | `create`, `cancel`, `delete`, `get` | |
| I16 a key never has more leased jobs than it may | `meta.max_running`, `dump.job_events` | queued ones that are open |
| I17 nothing of a paused project is claimed | `mark paused`, `mark resumed`, `dump.job_events` | claims within 1 s |
| I18 campaigns count what there is, one job a good line, one end told | `campaign`, their dumps | counts on the way |
| X | `expect` records: what one scenario demands beyond these | |
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from support.faults.history import Record

FINAL = frozenset({"completed", "failed", "cancelled", "expired"})
ALLOWED = frozenset(
    {
        (None, "queued"),
        ("queued", "claimed"),
        ("queued", "cancelled"),
        ("queued", "expired"),
        ("queued", "failed"),
        ("claimed", "running"),
        ("claimed", "queued"),
        ("claimed", "cancelled"),
        ("claimed", "failed"),
        ("claimed", "expired"),
        ("running", "completed"),
        ("running", "failed"),
        ("running", "cancelled"),
        ("running", "queued"),
    }
)
LEASED = frozenset({"claimed", "running"})
RETRIED = frozenset({"failed", "cancelled", "expired"})
"""States that a retry leaves, as a new generation."""
MAX_HINTS = 64
MAX_CRASHES = 3
START_SLACK_SECONDS = 1.0
"""A start and a cancel that happen at once are ordered by the row's lock, which their times do not show."""
CLAIM_SECONDS = 5.0
MAX_ANSWER_SECONDS = 10.5

CAMPAIGN_OPS = ("campaign", "campaign pause", "campaign resume", "campaign cancel", "campaign retry_failed")
CAMPAIGN_ENDS = frozenset({"completed", "failed", "cancelled", "expired"})
COUNTED = ("queued", "in_progress", "completed", "failed", "cancelled", "expired", "invalid", "remaining_cost")

LOST, DUPLICATED, AFTER_CANCEL, STALE, STUCK, OTHER = (
    "lost",
    "duplicated effect",
    "ran after cancel",
    "stale result",
    "stuck",
    "other",
)


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that must not happen."""

    invariant: str
    kind: str
    job: str | None
    message: str


def check(history: Sequence[Record]) -> list[Violation]:
    """Every violation in `history`, by invariant."""
    view = View(history)
    return [violation for invariant in INVARIANTS for violation in invariant(view)]


class View:
    """A history, sorted by what it tells of."""

    def __init__(self, history: Sequence[Record]) -> None:
        self._by_op: dict[str, list[Record]] = defaultdict(list)
        for record in sorted(history, key=lambda record: record["t_wall"]):
            self._by_op[record["op"]].append(record)
        self.meta: dict[str, Any] = {k: v for record in self.ops("meta") for k, v in record["data"].items()}
        self.jobs: dict[str, dict[str, Any]] = {row["id"]: row for row in self.rows("jobs")}
        self.events = self._grouped("job_events", "id")
        self.attempts = self._grouped("job_attempts", "fence")
        self.objects = {record["data"]["key"]: record["data"] for record in self.ops("dump.object")}
        self.outbox: list[dict[str, Any]] | None = self.rows("outbox") if self.ops("dump.has_outbox") else None

    def ops(self, *names: str) -> list[Record]:
        return [record for name in names for record in self._by_op[name]]

    def one(self, name: str) -> dict[str, Any] | None:
        """The data of the last record of `name`."""
        found = self.ops(name)
        return found[-1]["data"] if found else None

    def logged(self, event: str) -> list[Record]:
        """What workers logged under `event`."""
        return [record for record in self.ops("log") if record["data"].get("event") == event]

    def rows(self, table: str) -> list[dict[str, Any]]:
        """What a table held at the end."""
        return [record["data"] for record in self.ops(f"dump.{table}")]

    def _grouped(self, table: str, order: str) -> dict[str, list[dict[str, Any]]]:
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in sorted(self.rows(table), key=lambda row: row[order]):
            groups[row["job_id"]].append(row)
        return groups


def generation_of(row: dict[str, Any]) -> int:
    return int(row.get("generation") or 1)


def _accepted_jobs_exist_and_end(view: View) -> Iterator[Violation]:
    for record in view.ops("create"):
        if record["phase"] == "ok" and record["job"] not in view.jobs:
            yield Violation("I1", LOST, record["job"], "accepted, and no row of it exists")
    for job_id, job in view.jobs.items():
        if job["state"] not in FINAL:
            yield Violation("I1", STUCK, job_id, f"still {job['state']} at the end, attempt {job['attempt']}")


def _one_final_event_and_one_effect(view: View) -> Iterator[Violation]:
    for job_id, events in view.events.items():
        finals = Counter(generation_of(event) for event in events if event["new_state"] in FINAL)
        for generation, count in finals.items():
            if count > 1:
                yield Violation("I2", DUPLICATED, job_id, f"{count} final events in generation {generation}")
        job = view.jobs.get(job_id)
        if job is not None and job["state"] in FINAL and not finals[generation_of(job)]:
            yield Violation("I2", LOST, job_id, f"{job['state']} without an event that says so")
    completions = Counter(record["job"] for record in view.logged("job_completed"))
    for job_id, count in completions.items():
        job = view.jobs.get(job_id)
        # a completed job cannot be retried, so whatever its generation there is one completion
        if count > 1:
            yield Violation("I2", DUPLICATED, job_id, f"{count} attempts were told that they completed it")
        elif job is not None and job["state"] != "completed":
            yield Violation("I2", LOST, job_id, f"a worker was told that it completed it, and it is {job['state']}")


def _transitions_are_allowed(view: View) -> Iterator[Violation]:
    for job_id, events in view.events.items():
        state, generation, fence = None, 1, 0
        for event in events:
            old, new, now = event["old_state"], event["new_state"], generation_of(event)
            retried = old in RETRIED and new == "queued"
            if (old, new) not in ALLOWED and not retried:
                yield Violation("I3", OTHER, job_id, f"{old} -> {new} is not allowed")
            if old != state:
                yield Violation("I3", OTHER, job_id, f"{old} -> {new} follows {state}")
            if now != generation + (1 if retried else 0):
                yield Violation("I3", OTHER, job_id, f"{old} -> {new} moved generation {generation} to {now}")
            if new == "claimed":
                if event["fence"] is None or event["fence"] <= fence:
                    yield Violation("I3", STALE, job_id, f"claimed with fence {event['fence']} after {fence}")
                fence = event["fence"] or fence
            state, generation = new, now
        job = view.jobs.get(job_id)
        if job is not None and job["state"] != state:
            yield Violation("I3", OTHER, job_id, f"the row is {job['state']}, its last event says {state}")


def _completed_means_stored(view: View) -> Iterator[Violation]:
    for job_id, job in view.jobs.items():
        if job["state"] != "completed" or job.get("purged_at") or job.get("deleted_at"):
            continue
        result = job["result"] or {}
        if result.get("deleted_at"):
            continue
        found = view.objects.get(result.get("key", ""))
        if found is None:
            yield Violation("I4", LOST, job_id, f"completed, and {result.get('key')} is not in the store")
        elif (found["bytes"], found["sha256"]) != (result["bytes"], result["sha256"]):
            yield Violation("I4", OTHER, job_id, f"{result['key']} holds other bytes than the row says")
        for variant in result.get("variants", {}).values():
            found = view.objects.get(variant["key"])
            if found is None or (found["bytes"], found["sha256"]) != (variant["bytes"], variant["sha256"]):
                yield Violation("I4", OTHER, job_id, f"{variant['key']} is not what the row says")
        if f"/{job['attempt']}-{job['fence']}/" not in result.get("key", ""):
            yield Violation("I4", STALE, job_id, f"{result.get('key')} is not of fence {job['fence']}")


def _nothing_starts_after_a_cancel(view: View) -> Iterator[Violation]:
    renders: dict[str, list[float]] = defaultdict(list)
    for record in view.ops("render"):
        if record["phase"] == "invoke":
            renders[record["job"]].append(record["t_wall"])
    for job_id, events in view.events.items():
        for index, event in enumerate(events):
            if (event["old_state"], event["new_state"]) != ("queued", "cancelled"):
                continue
            end = next((e["at"] for e in events[index + 1 :] if e["new_state"] == "queued"), math.inf)
            started = [e for e in events[index + 1 :] if e["new_state"] in ("claimed", "running") and e["at"] < end]
            rendered = [t for t in renders[job_id] if event["at"] + START_SLACK_SECONDS < t < end]
            if started or rendered:
                yield Violation("I5", AFTER_CANCEL, job_id, "started after it was cancelled in the queue")
        job = view.jobs.get(job_id)
        asked = job and job.get("cancel_requested_at")
        late = [e for e in events if asked and e["new_state"] == "running" and e["at"] > asked + START_SLACK_SECONDS]
        if late:
            yield Violation("I5", AFTER_CANCEL, job_id, f"started {late[0]['at'] - asked:.1f} s after its cancel")


def _no_result_of_a_lost_attempt(view: View) -> Iterator[Violation]:
    for job_id, events in view.events.items():
        holder = None
        for event in events:
            if event["new_state"] == "claimed":
                holder = event["fence"]
            elif event["new_state"] == "completed" and event["fence"] != holder:
                yield Violation("I6", STALE, job_id, f"completed by fence {event['fence']}, held by {holder}")
            elif event["new_state"] == "queued":
                holder = None
    for job_id, attempts in view.attempts.items():
        job = view.jobs.get(job_id)
        completed = [one["fence"] for one in attempts if one["outcome"] == "completed"]
        if len(completed) > 1:
            yield Violation("I6", DUPLICATED, job_id, f"{len(completed)} attempts completed it")
        if completed and completed != [attempts[-1]["fence"]]:
            yield Violation("I6", STALE, job_id, f"fence {completed[0]} completed it after a later claim")
        if job is not None and job["state"] == "completed":
            key = (job["result"] or {}).get("key", "")
            # the fence in the key names the attempt that wrote it
            fence = key.split("/")[-2].rpartition("-")[2] if key.count("/") >= 2 else ""
            if fence != str(attempts[-1]["fence"]):
                yield Violation(
                    "I6", STALE, job_id, f"its result is of fence {fence}, its last holder had {attempts[-1]['fence']}"
                )


def _only_poison_is_quarantined(view: View) -> Iterator[Violation]:
    poison = {record["job"] for record in view.ops("create") if record["data"].get("poison")}
    for job_id, job in view.jobs.items():
        code = (job["error"] or {}).get("code") if job["state"] == "failed" else None
        if job_id not in poison:
            if code == "worker_crash" and not view.meta.get("may_quarantine"):
                yield Violation("I7", OTHER, job_id, "quarantined, and it kills no worker")
            continue
        runs = [one for one in view.attempts[job_id] if one["started_at"] is not None]
        if job["state"] in FINAL - {"cancelled"} and code != "worker_crash":
            yield Violation("I7", OTHER, job_id, f"kills workers, and ended {job['state']} with {code}")
        if len(runs) > MAX_CRASHES:
            yield Violation("I7", OTHER, job_id, f"killed {len(runs)} workers, more than {MAX_CRASHES}")


def _one_outbox_row_per_final_transition(view: View) -> Iterator[Violation]:
    if view.outbox is None:
        return
    finals = {
        (job_id, generation_of(event)): event["new_state"]
        for job_id, events in view.events.items()
        for event in events
        if event["new_state"] in FINAL
    }
    rows: dict[tuple[str, int], list[str]] = defaultdict(list)
    for row in view.outbox:
        if row["type"].removeprefix("video.") in FINAL:
            rows[row["job_id"], generation_of(row)].append(row["type"].removeprefix("video."))
    for (job_id, generation), states in rows.items():
        if len(states) > 1:
            yield Violation("I8", DUPLICATED, job_id, f"{len(states)} outbox rows of generation {generation}")
        if finals.get((job_id, generation)) != states[0]:
            yield Violation("I8", OTHER, job_id, f"outbox says {states[0]} of generation {generation}")
    for (job_id, generation), state in finals.items():
        job = view.jobs.get(job_id)
        # a campaign tells of its end, not of its jobs'
        is_told = job is not None and not job.get("deleted_at") and not job.get("campaign_id")
        if (job_id, generation) not in rows and is_told:
            yield Violation("I8", LOST, job_id, f"no outbox row for {state} of generation {generation}")


def _counters_equal_what_they_count(view: View) -> Iterator[Violation]:
    for job_id, job in view.jobs.items():
        mine = [one for one in view.attempts[job_id] if generation_of(one) == generation_of(job)]
        if mine and "crashed" in mine[0]:
            crashed = sum(bool(one["crashed"]) for one in mine)
            if crashed != job["crash_count"]:
                yield Violation("I9", OTHER, job_id, f"crash_count {job['crash_count']}, {crashed} attempts crashed")
        claims = [e for e in view.events[job_id] if e["new_state"] == "claimed"]
        if len(claims) != len(view.attempts[job_id]):
            message = f"{len(claims)} claims, {len(view.attempts[job_id])} attempts in its history"
            yield Violation("I9", OTHER, job_id, message)
    if "num_rows" in view.meta and view.meta["num_rows"] != len(view.jobs):
        yield Violation("I9", OTHER, None, f"count(*) is {view.meta['num_rows']}, {len(view.jobs)} rows were read")


def _one_key_one_job(view: View) -> Iterator[Violation]:
    answers: dict[str, set[str]] = defaultdict(set)
    for record in view.ops("create"):
        if record["phase"] == "ok" and record["data"].get("key"):
            answers[record["data"]["key"]].add(record["job"])
    stored: dict[str, set[str]] = defaultdict(set)
    for job_id, job in view.jobs.items():
        key = ((job["request"] or {}).get("metadata") or {}).get("key")
        if key:
            stored[key].add(job_id)
    for key in answers.keys() | stored.keys():
        if len(answers[key]) > 1:
            yield Violation("I10", DUPLICATED, None, f"key {key} was answered with {sorted(answers[key])}")
        if len(stored[key]) > 1:
            yield Violation("I10", DUPLICATED, None, f"key {key} made {sorted(stored[key])}")


def _hints_are_bounded(view: View) -> Iterator[Violation]:
    redis = view.one("dump.redis")
    if redis is None:
        return
    for record in view.ops("dump.redis"):
        if record["data"]["hints"] > MAX_HINTS:
            yield Violation("I11", OTHER, None, f"{record['data']['hints']} hints, bound {MAX_HINTS}")
    # what a killed supervisor had in hand is restored after the visibility timeout, long after the run
    killed = len(view.logged("supervisor_died"))
    if redis["unacked"] > (MAX_HINTS if view.meta.get("redis_broke") else killed):
        yield Violation("I11", OTHER, None, f"{redis['unacked']} messages unacknowledged at rest")


def _nothing_is_left(view: View) -> Iterator[Violation]:
    left = view.one("dump.left") or {}
    for what in ("processes", "files", "uploads", "descriptors"):
        if left.get(what):
            yield Violation("I12", OTHER, None, f"left behind: {what} {left[what]}")
    results = [job["result"] or {} for job in view.jobs.values() if not job.get("deleted_at")]
    pointed = {result.get("key") for result in results}
    pointed |= {variant["key"] for result in results for variant in result.get("variants", {}).values()}
    pointed |= {f"files/{file['project']}/{file['id']}" for file in view.rows("files")}
    for key in view.objects.keys() - pointed:
        parts = key.split("/")
        if len(parts) != 5 or parts[0] != "results":
            yield Violation("I12", OTHER, None, f"{key} is no result")
            continue
        job = view.jobs.get(parts[2])
        if job is not None and job.get("deleted_at") and job.get("purged_at"):
            yield Violation("I12", OTHER, parts[2], f"{key} outlived its deleted job")
        known = {f"{one['attempt']}-{one['fence']}" for one in view.attempts[parts[2]] if one["outcome"] != "completed"}
        if job is None or parts[3] not in known:
            yield Violation("I12", OTHER, parts[2], f"{key} belongs to no attempt that was lost")


def _ready_work_is_claimed_soon(view: View) -> Iterator[Violation]:
    claims = sorted(e["at"] for events in view.events.values() for e in events if e["new_state"] == "claimed")
    for mark in view.ops("mark"):
        if mark["data"].get("name") != "lifted":
            continue
        lifted, limit = mark["t_wall"], mark["data"].get("limit", CLAIM_SECONDS)
        waiting = [job_id for job_id, events in view.events.items() if _is_ready(events, lifted)]
        if waiting and not any(lifted - 0.1 <= at <= lifted + limit for at in claims):
            yield Violation("I13", STUCK, waiting[0], f"{len(waiting)} ready jobs, no claim within {limit:g} s")


def _is_ready(events: list[dict[str, Any]], moment: float) -> bool:
    """Whether the job had been in the queue at `moment`, and not put back there after a loss."""
    before = [event for event in events if event["at"] <= moment]
    return bool(before) and before[-1]["old_state"] is None


def _urgent_jobs_do_not_wait(view: View) -> Iterator[Violation]:
    bound = view.meta.get("interactive_p95_seconds")
    if bound is None:
        return
    waits = sorted(
        next(e["at"] for e in view.events[job_id] if e["new_state"] == "claimed") - job["created_at"]
        for job_id, job in view.jobs.items()
        if job["priority"] == 0 and any(e["new_state"] == "claimed" for e in view.events[job_id])
    )
    if waits and (p95 := waits[math.ceil(0.95 * len(waits)) - 1]) > bound:
        yield Violation("I14", OTHER, None, f"urgent jobs waited {p95:.1f} s (p95), bound {bound:g} s")


def _the_api_answers(view: View) -> Iterator[Violation]:
    for record in view.ops("create", "cancel", "delete", "get", "retry", *CAMPAIGN_OPS):
        data = record["data"]
        status, seconds = data.get("status"), data.get("seconds", 0.0)
        if record["phase"] == "invoke":
            continue
        if status is not None and status >= 500 and status != 503:
            yield Violation("I15", OTHER, record["job"], f"{record['op']} was answered with {status}")
        if status in (429, 503) and not data.get("code"):
            yield Violation("I15", OTHER, record["job"], f"{record['op']}: {status} without an error body")
        if seconds > MAX_ANSWER_SECONDS:
            yield Violation("I15", STUCK, record["job"], f"{record['op']} took {seconds:.1f} s")


def _keys_keep_to_their_limits(view: View) -> Iterator[Violation]:
    limits: dict[str, int] = view.meta.get("max_running", {})
    for key, limit in limits.items():
        changes: list[tuple[float, int, str]] = []
        for job_id, events in view.events.items():
            if job_id not in view.jobs or view.jobs[job_id]["api_key"] != key:
                continue
            for event in events:
                change = (event["new_state"] in LEASED) - (event["old_state"] in LEASED)
                if change:
                    changes.append((event["at"], change, job_id))
        running = 0
        # what ends at the same moment ends first
        for _, change, job_id in sorted(changes):
            running += change
            if running > limit:
                yield Violation("I16", OTHER, job_id, f"{running} jobs of {key} were leased at once, limit {limit}")
                break


def _nothing_paused_is_claimed(view: View) -> Iterator[Violation]:
    paused_at: dict[str, float] = {}
    pauses: list[tuple[str, float, float]] = []
    for mark in view.ops("mark"):
        project = mark["data"].get("project", "")
        if mark["data"].get("name") == "paused":
            paused_at.setdefault(project, mark["t_wall"])
        elif mark["data"].get("name") == "resumed" and project in paused_at:
            pauses.append((project, paused_at.pop(project), mark["t_wall"]))
    for job_id, events in view.events.items():
        for project, start, end in pauses:
            claims = [e["at"] for e in events if e["new_state"] == "claimed"]
            late = [at for at in claims if start + START_SLACK_SECONDS < at < end]
            if late and job_id in view.jobs and view.jobs[job_id]["project"] == project:
                yield Violation("I17", OTHER, job_id, f"claimed {late[0] - start:.1f} s after {project} was paused")


def _campaigns_count_what_there_is(view: View) -> Iterator[Violation]:
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for job in view.jobs.values():
        if batch_id := job.get("campaign_id"):
            counted[batch_id]["in_progress" if job["state"] in LEASED else job["state"]] += 1
            if job["state"] not in FINAL:
                counted[batch_id]["remaining_cost"] += job["num_frames"] * job["width"] * job["height"] // 10_000
    for error in view.rows("campaign_line_errors"):
        counted[error["campaign_id"]]["invalid"] += 1
    kept: dict[str, Counter[str]] = defaultdict(Counter)
    for shard in view.rows("campaign_counts"):
        for name in COUNTED:
            kept[shard["campaign_id"]][name] += shard[name]
    for campaign in view.rows("campaigns"):
        mine, there = kept[campaign["id"]], counted[campaign["id"]]
        for name in COUNTED:
            if mine[name] != there[name]:
                yield Violation("I18", OTHER, campaign["id"], f"counts {mine[name]} {name}, its rows say {there[name]}")


def _every_good_line_is_one_job(view: View) -> Iterator[Violation]:
    campaigns = {campaign["id"] for campaign in view.rows("campaigns")}
    jobs = Counter((job.get("campaign_id"), job.get("line")) for job in view.jobs.values())
    errors = Counter((error["campaign_id"], error["line"]) for error in view.rows("campaign_line_errors"))
    for record in view.ops("campaign"):
        batch_id, data = record["job"], record["data"]
        if record["phase"] != "ok":
            continue
        if batch_id not in campaigns:
            yield Violation("I18", LOST, batch_id, "accepted, and no row of it exists")
            continue
        for line in range(1, data["lines"] + 1):
            wanted = (0, 1) if line in data["bad"] else (1, 0)
            found = jobs[batch_id, line], errors[batch_id, line]
            if found != wanted:
                kind = DUPLICATED if sum(found) > 1 else OTHER if sum(found) else LOST
                yield Violation("I18", kind, batch_id, f"line {line} is {found[0]} jobs and {found[1]} errors")


def _campaigns_tell_of_their_end_once(view: View) -> Iterator[Violation]:
    if view.outbox is None:
        return
    retries = Counter(record["job"] for record in view.ops("campaign retry_failed") if record["phase"] != "invoke")
    for campaign in view.rows("campaigns"):
        batch_id, state = campaign["id"], campaign["state"]
        if state not in CAMPAIGN_ENDS:
            yield Violation("I18", STUCK, batch_id, f"still {state} at the end")
            continue
        mine = sorted((row for row in view.outbox if row["job_id"] == batch_id), key=generation_of)
        ends = [kind for kind in (row["type"].removeprefix("batch.") for row in mine) if kind in CAMPAIGN_ENDS]
        if not ends:
            yield Violation("I18", LOST, batch_id, f"{state}, and nobody is told")
        elif ends[-1] != state:
            yield Violation("I18", OTHER, batch_id, f"{state}, and the last event says {ends[-1]}")
        # each retry may have it end once more
        if len(ends) > 1 + retries[batch_id]:
            yield Violation("I18", DUPLICATED, batch_id, f"{len(ends)} events of its end, {retries[batch_id]} retries")


def _scenario_is_content(view: View) -> Iterator[Violation]:
    for record in view.ops("expect"):
        if not record["data"]["holds"]:
            yield Violation("X", OTHER, record["job"], f"{record['data']['what']}: {record['data']['detail']}")


INVARIANTS: tuple[Callable[[View], Iterator[Violation]], ...] = (
    _accepted_jobs_exist_and_end,
    _one_final_event_and_one_effect,
    _transitions_are_allowed,
    _completed_means_stored,
    _nothing_starts_after_a_cancel,
    _no_result_of_a_lost_attempt,
    _only_poison_is_quarantined,
    _one_outbox_row_per_final_transition,
    _counters_equal_what_they_count,
    _one_key_one_job,
    _hints_are_bounded,
    _nothing_is_left,
    _ready_work_is_claimed_soon,
    _urgent_jobs_do_not_wait,
    _the_api_answers,
    _keys_keep_to_their_limits,
    _nothing_paused_is_claimed,
    _campaigns_count_what_there_is,
    _every_good_line_is_one_job,
    _campaigns_tell_of_their_end_once,
    _scenario_is_content,
)
