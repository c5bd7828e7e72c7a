"""How this deployment shows jobs to the caller at hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request
from rushes_core.campaigns.statements import hold_reasons
from rushes_core.holds import CAMPAIGN
from rushes_core.models import Job
from rushes_core.served_model import ServedModel
from rushes_core.states import JobState, states_with_status
from rushes_core.video import QueueReason, Video, video_of
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.deps import caller_of, query, state_of
from rushes_api.eta import Forecast
from rushes_api.page import one_of
from rushes_api.pauses import Pauses

VIEW_PARAMETERS = ("compat",)
"""Query parameters that change how a job is shown."""
OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class View:
    """Makes Videos of jobs."""

    model: ServedModel
    retention_days: int
    pauses: Pauses
    forecast: Forecast
    only_openais_words: bool

    def video(self, job: Job, *, num_ahead: int | None = None, campaign_reason: QueueReason | None = None) -> Video:
        """`job` as it is shown.

        Args:
            num_ahead: jobs before it in the queue, where somebody counted them.
            campaign_reason: why its campaign opens none, where somebody asked for `campaign_reasons`.
        """
        return video_of(
            job,
            self.model,
            retention_days=self.retention_days,
            num_ahead=num_ahead,
            eta=self.forecast.eta(job, num_ahead),
            is_paused=self.pauses.has(job.project),
            campaign_reason=campaign_reason,
            is_drained=self.forecast.is_drained,
            only_openais_words=self.only_openais_words,
        )

    def accepted(self, job: Job, num_ahead: int | None) -> Video:
        """`job` as it is shown to who made it."""
        return self.video(job, num_ahead=num_ahead)

    def states_of(self, status: str) -> tuple[JobState, ...]:
        """The states that are shown as `status`."""
        states = states_with_status(status)
        if self.only_openais_words and status == "failed":
            return (*states, JobState.CANCELLED, JobState.EXPIRED)
        return states


async def campaign_reasons(jobs: Sequence[Job], session: AsyncSession) -> dict[str, QueueReason | None]:
    """By the id of each campaign of which one of `jobs` waits to be opened: why it opens none now."""
    ids = {job.campaign_id for job in jobs if job.hold == CAMPAIGN and job.campaign_id is not None}
    if not ids:
        return {}
    rows = (await session.execute(hold_reasons(ids))).all()
    return {row.id: cast("QueueReason | None", row.hold_reason) for row in rows}


async def _view(request: Request) -> View:
    caller, state = await caller_of(request), state_of(request)
    sent = request.query_params.get("compat")
    compat = caller.compat if sent is None else one_of("compat", sent, (OPENAI,))
    await state["pauses"].refresh()
    return View(state["model"], state["settings"].retention_days, state["pauses"], state["forecast"], compat == OPENAI)


ViewQuery = Annotated[Mapping[str, str], Depends(query(*VIEW_PARAMETERS))]
CurrentView = Annotated[View, Depends(_view)]
