"""`python -m support.faults.matrix`: play the matrix, judge every history, print a table."""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from support.faults.checker import Violation, check
from support.faults.cluster import Cluster
from support.faults.history import load
from support.faults.mutant_runs import MUTANT_RUNS, play_mutant
from support.faults.scenarios import ROWS, NotHere, Row
from support.faults.servers import Servers


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one row."""

    number: int
    name: str
    seed: int
    violations: list[Violation]
    recovery_seconds: float | None
    seconds: float
    history: str
    not_run: str = ""


def play(row: Row, servers: Servers, folder: Path, *, seed: int, patience: float = 1.0) -> Outcome:
    """Run one scenario and judge its history. What the scenario itself raises is a violation of kind `stuck`.

    Args:
        patience: see `Cluster`.
    """
    assert row.play is not None
    began = time.monotonic()
    with Cluster(servers, folder, seed=seed, patience=patience) as cluster:
        cluster.meta(row=row.number, name=row.name)
        try:
            row.play(cluster)
        except NotHere as error:
            return Outcome(row.number, row.name, seed, [], None, time.monotonic() - began, "", str(error))
        except Exception as error:
            # whatever it was: the other rows are played all the same
            where = traceback.extract_tb(error.__traceback__)
            lines = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(where[-4:]))
            cluster.expect("the scenario runs to its end", False, f"{type(error).__name__} {error} ({lines})")
        cluster.finish()
        history = cluster.history.path
    violations = check(load(history))
    return Outcome(
        row.number, row.name, seed, violations, cluster.recovery_seconds, time.monotonic() - began, str(history)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="faults", description="Play the fault matrix and judge what happened.", allow_abbrev=False
    )
    parser.add_argument("--only", type=_numbers, help="rows, as 6,24 or 1-5,17")
    parser.add_argument("--seed", type=int, default=1, help="the same seed plays the same faults")
    parser.add_argument("--runs", type=int, default=1, help="runs of each row; each has a seed of its own")
    parser.add_argument("--out", type=Path, help="where histories, logs and results.jsonl are kept")
    parser.add_argument("--mutants", action="store_true", help="take guarantees away and see that it is noticed")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="judge a history again and play nothing")
    chosen = parser.parse_args(arguments)
    if chosen.replay:
        violations = check(load(chosen.replay))
        print(f"{len(violations)} violations", flush=True)
        return _report(violations)
    out = chosen.out or Path(tempfile.mkdtemp(prefix="rushes-faults-"))
    out.mkdir(parents=True, exist_ok=True)
    print(f"histories below {out}", flush=True)
    with Servers(out / "servers") as servers:
        if chosen.mutants:
            return _play_mutants(servers, out, chosen.seed)
        return _play_rows(servers, out, chosen.only, seed=chosen.seed, runs=chosen.runs)


def _play_rows(servers: Servers, out: Path, only: set[int] | None, *, seed: int, runs: int) -> int:
    outcomes: list[Outcome] = []
    skipped = []
    with (out / "results.jsonl").open("a") as results:
        for number, row in sorted(ROWS.items()):
            if only is not None and number not in only:
                continue
            if row.play is None:
                skipped.append(row)
                results.write(json.dumps({"number": number, "name": row.name, "not_run": row.why_not}) + "\n")
                continue
            for run in range(runs):
                outcome = play(row, servers, out / f"row-{number:02}-{seed + run}", seed=seed + run)
                if outcome.not_run:
                    skipped.append(Row(number, row.name, None, outcome.not_run))
                else:
                    outcomes.append(outcome)
                results.write(json.dumps(asdict(outcome)) + "\n")
                results.flush()
                _print_outcome(outcome)
    print()
    print("| # | fault | runs | violations | recovery s | run s |\n|---|---|---|---|---|---|")
    for number, row in sorted(ROWS.items()):
        mine = [outcome for outcome in outcomes if outcome.number == number]
        if mine:
            recoveries = [o.recovery_seconds for o in mine if o.recovery_seconds is not None]
            recovery = f"{max(recoveries):.1f}" if recoveries else "-"
            took = max(outcome.seconds for outcome in mine)
            count = sum(len(outcome.violations) for outcome in mine)
            print(f"| {number} | {row.name} | {len(mine)} | {count} | {recovery} | {took:.0f} |")
    for row in skipped:
        print(f"| {row.number} | {row.name} | not run: {row.why_not} | - | - | - |")
    return 1 if any(outcome.violations for outcome in outcomes) else 0


def _play_mutants(servers: Servers, out: Path, seed: int) -> int:
    print("| mutant | fault | caught by | violations |\n|---|---|---|---|")
    missed = False
    with (out / "mutants.jsonl").open("a") as results:
        for name, mutant in MUTANT_RUNS.items():
            violations = play_mutant(mutant, servers, out / f"mutant-{name.replace(' ', '-')}", seed=seed)
            caught = sorted({violation.invariant for violation in violations} - {"X"})
            missed = missed or not (caught if mutant.is_caught else not violations)
            results.write(json.dumps({"mutant": name, "violations": [asdict(one) for one in violations]}) + "\n")
            example = violations[0].message if violations else "none"
            print(f"| {name} | {mutant.fault} | {', '.join(caught) or 'nothing'} | {example} |", flush=True)
    return 1 if missed else 0


def _print_outcome(outcome: Outcome) -> None:
    if outcome.not_run:
        print(f"{outcome.number:>2} {outcome.name}: not run: {outcome.not_run}", flush=True)
        return
    recovery = "" if outcome.recovery_seconds is None else f", recovery {outcome.recovery_seconds:.1f} s"
    verdict = "ok" if not outcome.violations else f"{len(outcome.violations)} VIOLATIONS"
    print(f"{outcome.number:>2} {outcome.name}: {verdict}{recovery}, {outcome.seconds:.0f} s", flush=True)
    _report(outcome.violations)


def _report(violations: Sequence[Violation]) -> int:
    for one in violations:
        print(f"   {one.invariant} {one.kind}: {one.job or '-'}: {one.message}", flush=True)
    return 1 if violations else 0


def _numbers(text: str) -> set[int]:
    chosen: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        chosen.update(range(int(first), int(last or first) + 1))
    return chosen


if __name__ == "__main__":
    sys.exit(main())
