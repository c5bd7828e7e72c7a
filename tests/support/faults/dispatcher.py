"""`rushes dispatcher` with the faults of the environment."""

from rushes_core.dispatcher import run
from rushes_core.log import configure_logging
from rushes_core.settings import get_settings
from support.faults.mutants import install


def main(arguments: list[str]) -> int:
    install()
    settings = get_settings()
    configure_logging(settings.log_level, json=settings.log_json)
    return run(settings)
