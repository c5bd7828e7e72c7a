"""`rushes sweep`: one pass of the sweeper, or the objects that no job points at."""

import argparse
import sys

from rushes_core.errors import StorageError
from rushes_core.log import configure_logging
from rushes_core.sweeper import Sweeper

from rushes_cli.main import UsageError, load_settings, one_line_database_errors


def run(arguments: argparse.Namespace) -> int:
    """Sweep once, or list orphans, and remove them if that was asked for."""
    if arguments.delete and not arguments.orphans:
        raise UsageError("--delete belongs to --orphans")
    settings = load_settings()
    configure_logging(settings.log_level, json=settings.log_json)
    sweeper = Sweeper(settings, is_patient=True)
    try:
        with one_line_database_errors():
            if arguments.orphans:
                _orphans(sweeper, delete=arguments.delete)
                return 0
            return _sweep(sweeper)
    finally:
        sweeper.close()


def _sweep(sweeper: Sweeper) -> int:
    sweeper.sweep()
    sweeper.purge()
    problems: list[str] = []
    try:
        sweeper.purge_again()
    except StorageError as error:
        problems.append(str(error))
    problems += [f"{step} failed, see the log" for step in sweeper.tidy()]
    if sweeper.num_stuck:
        noun = "job or file" if sweeper.num_stuck == 1 else "jobs or files"
        problems.append(f"objects of {sweeper.num_stuck} {noun} could not be removed, and stay")
    if sweeper.num_unsure:
        noun = "job" if sweeper.num_unsure == 1 else "jobs"
        problems.append(f"{sweeper.num_unsure} {noun} removed before could not be looked at for objects that came late")
    for problem in problems:
        print(f"rushes sweep: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _orphans(sweeper: Sweeper, *, delete: bool) -> None:
    count = num_bytes = 0
    for orphan in sweeper.orphans(delete=delete):
        count += 1
        num_bytes += orphan.num_bytes
        print(f"{orphan.num_bytes:>12}  {orphan.modified:%Y-%m-%d %H:%M}  {orphan.bucket}/{orphan.key}")
    done = "removed" if delete else "found; nothing was removed"
    noun = "orphan" if count == 1 else "orphans"
    print(f"rushes sweep: {count} {noun} of {num_bytes} bytes {done}")
