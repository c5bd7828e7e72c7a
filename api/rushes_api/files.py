"""Finding files, and room for more of them."""

from http import HTTPStatus

from rushes_core import files
from rushes_core.fields import counted, printable
from rushes_core.ids import is_file_id
from rushes_core.models import File
from rushes_core.settings import Settings
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.errors import ApiError
from rushes_api.limits import WINDOW_SECONDS, too_many


def no_such_file(file_id: str) -> ApiError:
    return ApiError(f"no file with id {printable(file_id)}", code="file_not_found", status=HTTPStatus.NOT_FOUND)


async def find_file(file_id: str, *, project: str, session: AsyncSession) -> File:
    """The file of this project, which may be a tombstone.

    Raises:
        ApiError
    """
    found = None
    if is_file_id(file_id):
        found = (await session.execute(files.get(file_id, project=project))).scalar_one_or_none()
    if found is None:
        raise no_such_file(file_id)
    return found


async def find_visible(file_id: str, *, project: str, session: AsyncSession) -> File:
    """
    Raises:
        ApiError: there is no such file, or no longer.
    """
    found = await find_file(file_id, project=project, session=session)
    is_visible = files.visible(project=project).where(File.id == file_id).exists().select()
    if (await session.execute(is_visible)).scalar_one():
        return found
    if found.expires_at is not None and found.deleted_at in (None, found.expires_at):
        raise ApiError(f"{file_id} has expired", code="file_expired", status=HTTPStatus.GONE)
    raise ApiError(f"{file_id} was deleted", code="file_deleted", status=HTTPStatus.GONE)


async def check_room(session: AsyncSession, settings: Settings, *, project: str, num_bytes: int) -> None:
    """
    Raises:
        ApiError: 429 `quota_exceeded`: the project may not have another file of so many bytes.
    """
    count, total = (await session.execute(files.usage(project=project))).one()
    if count >= settings.files_max_count:
        message = f"a project may have {counted(settings.files_max_count, 'file')}, and this one has"
    elif total + num_bytes > settings.files_max_total_bytes:
        message = (
            f"the files of a project may have {settings.files_max_total_bytes} bytes together, those of this one have "
            f"{total}, and this file would add {num_bytes}"
        )
    else:
        return
    raise too_many(
        f"{message}; delete some",
        code="quota_exceeded",
        retry_after=WINDOW_SECONDS,
        # nobody but its owner makes room
        headers={"x-should-retry": "false"},
    )
