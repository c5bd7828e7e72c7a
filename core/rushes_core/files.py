"""Statements on uploaded files. Nothing here executes: the asynchronous API and the sweeper run the same statements."""

from collections.abc import Collection
from datetime import timedelta
from typing import Any

from sqlalchemy import Select, Update, and_, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate
from sqlalchemy.sql.elements import ColumnElement

from rushes_core.campaigns.statements import is_to_be_read_from
from rushes_core.leftovers import Place, in_order
from rushes_core.models import File, Project

PURPOSES = ("batch",)
"""What uploaded files may be for."""
OUTPUT = "batch_output"
"""The purpose of the files that a campaign ends with."""
ALL_PURPOSES = (*PURPOSES, OUTPUT)
MIN_EXPIRY_SECONDS = 3_600
MAX_EXPIRY_SECONDS = 2_592_000

_IS_EXPIRED = and_(File.expires_at.is_not(None), File.expires_at <= func.now())


def create(*, expires_after_seconds: int | None = None, **values: Any) -> ReturningInsert[File]:
    """A new file. No row: it was made already."""
    if expires_after_seconds is not None:
        values["expires_at"] = func.now() + timedelta(seconds=expires_after_seconds)
    return insert(File).values(**values).on_conflict_do_nothing(index_elements=[File.id]).returning(File)


def get(file_id: str, *, project: str) -> Select[File]:
    """The file of this project with this id, deleted or not."""
    return select(File).where(File.id == file_id, File.project == project)


def visible(*, project: str, purpose: str | None = None) -> Select[File]:
    """The files that a project has."""
    conditions: list[ColumnElement[bool]] = [File.project == project, *_is_visible()]
    if purpose is not None:
        conditions.append(File.purpose == purpose)
    return select(File).where(*conditions)


def usage(*, project: str) -> Select[int, int]:
    """How many files a project has uploaded, and their bytes together."""
    total = func.coalesce(func.sum(File.bytes), 0)
    return select(func.count(), total).where(File.project == project, File.purpose.in_(PURPOSES), *_is_visible())


def lock_project(project: str) -> Select[str]:
    """Until the transaction ends, no other one that locks the project adds a file to it."""
    return select(Project.name).where(Project.name == project).with_for_update(key_share=True)


def delete_file(file_id: str, *, project: str) -> Update:
    """Make a tombstone of the file unless it is one."""
    return update(File).where(File.id == file_id, File.project == project, *_is_visible()).values(deleted_at=func.now())


def expire() -> ReturningUpdate[str]:
    """Make tombstones of the files whose time has come, but for those that a campaign is still to read."""
    return (
        update(File)
        .where(File.deleted_at.is_(None), _IS_EXPIRED, ~is_to_be_read_from())
        .values(deleted_at=File.expires_at)
        .execution_options(synchronize_session=False)
        .returning(File.id)
    )


def unpurged(*, after: Place | None = None, limit: int = 20) -> Select[File]:
    """Tombstones whose objects may still lie in the store, by `deleted_at`."""
    return in_order(File, File.deleted_at, after, limit).where(File.deleted_at.is_not(None), File.purged_at.is_(None))


def mark_purged(file_id: str) -> Update:
    """Record that a tombstone left nothing in the store, and forget its name."""
    return update(File).where(File.id == file_id).values(purged_at=func.now(), filename="")


def known(ids: Collection[str]) -> Select[str]:
    """Those of these ids whose objects may lie in the store."""
    return select(File.id).where(File.id.in_(ids), File.purged_at.is_(None))


def _is_visible() -> tuple[ColumnElement[bool], ...]:
    return File.deleted_at.is_(None), or_(File.expires_at.is_(None), File.expires_at > func.now())
