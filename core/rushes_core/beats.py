"""When processes that work without being asked did so last: nobody waits for an answer that they owe."""

from typing import Final

from sqlalchemy import Select, func, select
from sqlalchemy.dialects.postgresql import Insert, insert

from rushes_core.models import Beat

BEAT_SECONDS = 5.0
"""How often each says that it works."""
DISPATCHER: Final = "dispatcher"
LOADER: Final = "loader"
SENDER: Final = "sender"
PROCESSES = (DISPATCHER, LOADER, SENDER)


def beat(process: str) -> Insert:
    """One process of this kind has just done what it repeats; a loader: runs."""
    statement = insert(Beat).values(process=process)
    return statement.on_conflict_do_update(index_elements=[Beat.process], set_={"at": func.now()})


def silences() -> Select[str, float]:
    """Seconds since one of each kind worked; no row for a kind of which none ever did."""
    return select(Beat.process, func.extract("epoch", func.clock_timestamp() - Beat.at))
