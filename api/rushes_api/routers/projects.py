"""Projects: who shares jobs with whom. For keys with the scope `admin`."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from rushes_core import keys
from rushes_core.listed import Listed
from rushes_core.log import get_logger
from rushes_core.models import Project
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.admin import SentMembers, given, json_body, no_such_project
from rushes_api.admission import KEY_HEADER
from rushes_api.deps import AdminCaller, AppState, NoQuery, Session, query
from rushes_api.errors import ApiError
from rushes_api.once import Call, SentKey, fingerprint, take_effect
from rushes_api.page import PAGE_PARAMETERS, Page, wanted_page

log = get_logger(__name__)

router = APIRouter(prefix="/v1/projects", tags=["projects"])


class ProjectObject(Listed):
    """`id` is the name."""

    object: Literal["project"]
    name: str
    weight: float
    """Its share of the GPUs beside the weights of other projects that have work."""
    created_at: int


class ProjectList(Page[ProjectObject]):
    """One page by name, from the first unless `order=desc` was asked for."""


def _object(project: Project) -> ProjectObject:
    return ProjectObject(
        id=project.name,
        object="project",
        name=project.name,
        weight=project.weight,
        created_at=int(project.created_at.timestamp()),
    )


_CREATE: dict[str, Any] = {"parameters": [KEY_HEADER], **json_body(keys.NewProject.model_json_schema())}


@router.post("", response_model=ProjectObject, openapi_extra=_CREATE)
async def create_project(
    request: Request, caller: AdminCaller, parameters: NoQuery, key: SentKey, members: SentMembers, state: AppState
) -> Response:
    wanted = keys.parse(keys.NewProject, given(members))
    was_made = False

    async def create(session: AsyncSession) -> ProjectObject:
        nonlocal was_made
        project = (await session.execute(keys.create_project(**wanted.model_dump()))).scalar_one_or_none()
        if project is None and not was_made:
            raise ApiError(
                f"there is a project {wanted.name} already",
                param="name",
                code="project_exists",
                status=HTTPStatus.CONFLICT,
                headers={"x-should-retry": "false"},
            )
        was_made = True
        return _object(project or await session.get_one(Project, wanted.name))

    call = Call(caller, "POST /v1/projects", key, fingerprint(wanted))
    return await take_effect(call, create, request=request, sessions=state["sessions"])


@router.get("")
async def list_projects(
    caller: AdminCaller, parameters: Annotated[Mapping[str, str], Depends(query(*PAGE_PARAMETERS))], session: Session
) -> ProjectList:
    wanted = wanted_page(parameters, key_of=_name, what="a project", descending=False)
    rows = (await session.execute(wanted.rows(select(Project), Project.name))).scalars().all()
    return ProjectList.of(rows, _object, limit=wanted.limit)


@router.get("/{name}")
async def get_project(name: str, caller: AdminCaller, parameters: NoQuery, session: Session) -> ProjectObject:
    return _object(await _find(name, session))


@router.patch(
    "/{name}",
    response_model=ProjectObject,
    openapi_extra=json_body(keys.ProjectChanges.model_json_schema(), required=False),
)
async def change_project(
    name: str, request: Request, caller: AdminCaller, parameters: NoQuery, members: SentMembers, state: AppState
) -> Response:
    """Change the weight of a project, which holds for its jobs that are claimed from then on."""
    values = keys.parse(keys.ProjectChanges, given(members)).model_dump(exclude_unset=True)

    async def change(session: AsyncSession) -> ProjectObject:
        found = await _find(name, session)
        if values:
            found = (await session.execute(keys.change_project(name, values))).scalar_one()
        return _object(found)

    call = Call(caller, f"PATCH /v1/projects/{name}", None, "", is_harmless=True)
    answer = await take_effect(call, change, request=request, sessions=state["sessions"])
    log.info("project_changed", project=name, by=caller.api_key, **values)
    return answer


async def _find(name: str, session: AsyncSession) -> Project:
    found = (await session.execute(keys.project(name))).scalar_one_or_none() if keys.is_project(name) else None
    if found is None:
        raise no_such_project(name)
    return found


def _name(text: str) -> str | None:
    return text if keys.is_project(text) else None
