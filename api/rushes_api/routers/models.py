"""The served model and what may be asked of it."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from rushes_core.fields import shown
from rushes_core.request import ModelNotFound

from rushes_api.capabilities import Capabilities, capabilities_of
from rushes_api.deps import AppState, CurrentProject, NoQuery, State

router = APIRouter(prefix="/v1", tags=["models"])


class Model(BaseModel):
    """OpenAI's Model object."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


def _served(state: State) -> Model:
    return Model(id=state["model"].name, object="model", created=state["model_created"], owned_by="rushes")


@router.get("/models")
async def list_models(project: CurrentProject, state: AppState, parameters: NoQuery) -> ModelList:
    return ModelList(object="list", data=[_served(state)])


@router.get("/models/{model_id:path}")
async def get_model(model_id: str, project: CurrentProject, state: AppState, parameters: NoQuery) -> Model:
    served = _served(state)
    if model_id != served.id:
        raise ModelNotFound(f"model {shown(model_id)} is not served here; served: {served.id}", param="model")
    return served


@router.get("/capabilities")
async def get_capabilities(project: CurrentProject, state: AppState, parameters: NoQuery) -> Capabilities:
    """The limits that requests are checked against."""
    return capabilities_of(state["model"], delivery=state["settings"].content_delivery)
