"""How this deployment shows a job to the caller at hand."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends
from rushes_core.models import Job
from rushes_core.served_model import ServedModel

from rushes_api.deps import AppState
from rushes_api.video import Video, video_of


@dataclass(frozen=True, slots=True)
class View:
    """Makes Videos of jobs."""

    model: ServedModel
    retention_days: int

    def video(self, job: Job, *, num_ahead: int | None = None) -> Video:
        """`job` as it is shown; `num_ahead` where somebody counted the jobs before it."""
        return video_of(job, self.model, retention_days=self.retention_days, num_ahead=num_ahead)


async def _view(state: AppState) -> View:
    return View(state["model"], state["settings"].retention_days)


CurrentView = Annotated[View, Depends(_view)]
