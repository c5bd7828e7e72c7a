"""The state machine: one table, read by Python, the database and the docs."""

import re
from pathlib import Path

from rushes_core.states import FINAL_STATES, RETRYABLE_STATES, TRANSITIONS, JobState, sources, states_with_status

ROOT = Path(__file__).parents[2]


def test_every_state_has_a_row() -> None:
    assert set(TRANSITIONS) == set(JobState)


def test_no_attempt_leaves_a_final_state() -> None:
    assert set(FINAL_STATES) == {state for state in JobState if TRANSITIONS[state] <= {JobState.QUEUED}}


def test_what_did_not_complete_can_be_retried() -> None:
    assert RETRYABLE_STATES == (JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED)


def test_every_state_but_the_first_can_be_reached() -> None:
    assert all(sources(state) for state in JobState if state is not JobState.QUEUED)


def test_a_job_completes_only_while_it_runs() -> None:
    assert sources(JobState.COMPLETED) == (JobState.RUNNING,)


def test_a_lease_is_not_shown_to_clients() -> None:
    assert states_with_status("in_progress") == (JobState.CLAIMED, JobState.RUNNING)
    assert states_with_status("running") == ()


def test_the_diagram_in_the_architecture_is_the_table() -> None:
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    drawn = set(re.findall(r"^\s+(\w+) --> (\w+)", text, re.MULTILINE))
    assert drawn == {(old.value, new.value) for old, targets in TRANSITIONS.items() for new in targets}
