"""`rushes_worker.supervisor` with the faults of the environment."""

from rushes_worker import supervisor
from support.faults.mutants import install


def main(arguments: list[str]) -> int:
    install()
    return supervisor.main(arguments)
