"""Items of a campaign, page by page, in the order of their lines. A page reads its own rows and no others."""

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass

from anyio import to_thread
from rushes_core.campaigns import statements
from rushes_core.campaigns.output import Item, Show, csv_head, csv_rows, in_order, line_of, lines
from rushes_core.campaigns.statements import PARTS
from rushes_core.campaigns.tables import CampaignLineError
from rushes_core.models import Job
from rushes_core.states import JobState
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

PAGE = 200
"""Items that are in memory at once: jobs, and as many bad lines."""

Sessions = async_sessionmaker[AsyncSession]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which items are wanted."""

    states: Collection[JobState] | None
    """Of jobs; None: all."""
    has_bad_lines: bool

    @classmethod
    def part(cls, name: str) -> "Chosen":
        """A part of a manifest."""
        return cls(PARTS[name], name != "output")


async def items(
    session: AsyncSession, campaign_id: str, chosen: Chosen, *, after: int, limit: int
) -> tuple[list[Item], int | None]:
    """Some of the items behind a line, in order, and the line that the next ones are behind; None: these are the last.

    Args:
        limit: of jobs, and of bad lines: so many items, if there are, and up to twice as many.
    """
    from_jobs = statements.jobs_from(campaign_id, after=after, limit=limit, states=chosen.states)
    jobs: Sequence[Job] = (await session.execute(from_jobs)).scalars().all()
    bad: Sequence[CampaignLineError] = ()
    if chosen.has_bad_lines:
        from_bad = statements.bad_lines_from(campaign_id, after=after, limit=limit)
        bad = (await session.execute(from_bad)).scalars().all()
    # behind the end of a list that is full there may be more
    full: list[Sequence[Item]] = [some for some in (jobs, bad) if len(some) == limit]
    ends = [line_of(some[-1]) for some in full]
    if not ends:
        return list(in_order(jobs, bad)), None
    horizon = min(ends)
    return [one for one in in_order(jobs, bad) if line_of(one) <= horizon], horizon


async def pages(sessions: Sessions, campaign_id: str, chosen: Chosen) -> AsyncIterator[list[Item]]:
    """All of the items, each page read by itself: nothing is held between them."""
    after: int | None = 0
    while after is not None:
        async with sessions.begin() as session:
            found, after = await items(session, campaign_id, chosen, after=after, limit=PAGE)
        yield found


async def manifest(
    sessions: Sessions, campaign_id: str, chosen: Chosen, *, is_csv: bool, show: Show
) -> AsyncIterator[bytes]:
    """The items as lines of JSON, or as a table."""
    if is_csv:
        yield csv_head()
    write: Callable[[list[Item], Show], bytes] = _table if is_csv else _lines
    async for page in pages(sessions, campaign_id, chosen):
        if page:
            yield await to_thread.run_sync(write, page, show)


def _lines(page: list[Item], show: Show) -> bytes:
    return b"".join(lines(page, show))


def _table(page: list[Item], show: Show) -> bytes:
    return b"".join(csv_rows(page, show))
