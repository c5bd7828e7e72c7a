"""Four rows of the fault matrix, one run each. `make faults` plays all of them."""

from pathlib import Path

import pytest
from support.faults.matrix import play
from support.faults.scenarios import ROWS
from support.faults.servers import Servers

PATIENCE = 8.0
"""Other tests run at the same time, on a machine that may be slow: what is proven here is what happens, and
`make faults` says how soon."""


@pytest.mark.parametrize("number", [6, 24, 28, 35])
def test_invariants_hold_under(servers: Servers, tmp_path: Path, number: int) -> None:
    outcome = play(ROWS[number], servers, tmp_path, seed=number, patience=PATIENCE)
    assert outcome.violations == [], outcome.history


def test_every_row_is_played_or_says_why_not() -> None:
    assert set(ROWS) == set(range(1, 51))
    assert all((row.play is None) == bool(row.why_not) for row in ROWS.values())
    assert {row.number for row in ROWS.values() if row.in_suite} == {6, 24, 28, 35}
