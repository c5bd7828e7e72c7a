"""Lists of jobs on real Postgres: what each filter lets through, and the plans that find it among many."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rushes_core import listing
from rushes_core.database import create_sync_engine
from rushes_core.ids import first_video_id
from rushes_core.listing import Filters, page
from rushes_core.states import JobState, states_with_status
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session
from support.plans import executed_plan, generic_plan, rows_read, scans
from support.stack import SharedStack

NUM_JOBS = 30_000
START = datetime(2026, 1, 1, tzinfo=UTC)


def video_id(number: int) -> str:
    """The id of a job that was created `number` minutes after `START`."""
    return first_video_id((START + timedelta(minutes=number)).timestamp())


# the ids are made here: Postgres writes no base 32
_FILL = """
INSERT INTO jobs (id, project, model, prompt, seed, width, height, num_frames, request, max_attempts, created_at,
    state, finished_at, fence, lease_owner, lease_until, result, deleted_at)
SELECT id, CASE WHEN i <= 6000 AND i % 10 > 4 THEN 'old' ELSE 'project-' || i % 10 END, 'model-' || i / 10 % 2,
    'x', 1, 480, 480, 107,
    jsonb_build_object('metadata', CASE
        WHEN i % 5000 = 0 THEN jsonb_build_object('campaign', 'rare', 'take', (i / 5000)::text)
        WHEN i % 20 = 0 THEN jsonb_build_object('campaign', 'common') ELSE '{}' END),
    3, timestamptz '2026-01-01 00:00:00+00' + make_interval(mins => i::int),
    CASE WHEN i % 1500 = 0 THEN 'running' WHEN i % 1510 = 0 THEN 'failed' ELSE 'completed' END,
    CASE WHEN i % 1500 <> 0 THEN now() END,
    CASE WHEN i % 1500 = 0 THEN i END, CASE WHEN i % 1500 = 0 THEN 'w' END,
    CASE WHEN i % 1500 = 0 THEN now() + interval '1 day' END,
    CASE WHEN i % 1500 <> 0 AND i % 1510 <> 0 THEN '{}'::jsonb END,
    CASE WHEN i % 70 = 0 THEN now() END
FROM unnest(CAST(:ids AS text[])) WITH ORDINALITY AS numbered (id, i)
"""


@pytest.fixture(scope="module")
def filled(stack: SharedStack) -> Iterator[Connection]:
    engine = create_sync_engine(stack.settings())
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(_FILL), {"ids": [video_id(number) for number in range(1, NUM_JOBS + 1)]})
        connection.execute(text("ANALYZE jobs"))
        yield connection
    engine.dispose()


def listed(connection: Connection, *, filters: Filters | None = None, **options: Any) -> list[int]:
    """The numbers of the jobs of one page of project-0, and of the one after it."""
    values = {"project": "project-0", "after": None, "limit": 5, "descending": True, **options}
    statement = page(filters=filters or Filters(), **values)
    with Session(connection) as session:
        return [round((job.created_at - START) / timedelta(minutes=1)) for job in session.scalars(statement)]


def at(number: int) -> datetime:
    return START + timedelta(minutes=number)


class TestFilters:
    def test_without_any_all_but_the_deleted_are_listed(self, filled: Connection) -> None:
        assert listed(filled) == [30_000, 29_990, 29_980, 29_970, 29_950, 29_940]
        assert listed(filled, descending=False) == [10, 20, 30, 40, 50, 60]

    def test_a_position_need_not_be_a_job(self, filled: Connection) -> None:
        assert listed(filled, after=video_id(29_995), limit=2) == [29_990, 29_980, 29_970]
        assert listed(filled, after=video_id(70), limit=2, descending=False) == [80, 90, 100]
        assert listed(filled, after="video_" + "7" + "Z" * 25, descending=False) == []

    def test_states(self, filled: Connection) -> None:
        running = Filters(states=states_with_status("in_progress"))
        assert listed(filled, filters=running) == [30_000, 28_500, 27_000, 25_500, 24_000, 22_500]
        failed = Filters(states=(JobState.FAILED,))
        assert listed(filled, filters=failed) == [28_690, 27_180, 25_670, 24_160, 22_650, 19_630]
        both = Filters(states=(JobState.FAILED, JobState.RUNNING))
        assert listed(filled, filters=both, after=video_id(28_000), limit=3) == [27_180, 27_000, 25_670, 25_500]
        assert listed(filled, filters=both, limit=3, descending=False) == [1_500, 1_510, 3_000, 3_020]

    def test_model(self, filled: Connection) -> None:
        assert listed(filled, filters=Filters(model="model-1"), limit=2) == [29_990, 29_970, 29_950]
        assert listed(filled, filters=Filters(model="model-2")) == []

    def test_times_are_the_databases(self, filled: Connection) -> None:
        window = Filters(created_from=at(9_970), created_until=at(10_000))
        assert listed(filled, filters=window) == [9_990, 9_980, 9_970]
        assert listed(filled, filters=Filters(created_until=at(21)), descending=False) == [10, 20]

    @pytest.mark.parametrize("max_walked", [10_000, 50, 1])
    def test_metadata_has_all_the_pairs(
        self, filled: Connection, max_walked: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listing, "MAX_WALKED", max_walked)
        rare = Filters(metadata={"campaign": "rare"})
        assert listed(filled, filters=rare) == [30_000, 25_000, 20_000, 15_000, 10_000, 5_000]
        assert listed(filled, filters=Filters(metadata={"campaign": "rare", "take": "3"})) == [15_000]
        assert listed(filled, filters=Filters(metadata={"campaign": "rare", "take": "9"})) == []
        assert listed(filled, filters=Filters(metadata={"campaign": "common"}), limit=2) == [29_980, 29_940, 29_920]
        old = {"after": video_id(11_000), "limit": 1, "descending": False}
        assert listed(filled, filters=rare, **old) == [15_000, 20_000]
        failed = Filters(states=(JobState.FAILED, JobState.RUNNING), metadata={"campaign": "rare"})
        assert listed(filled, filters=failed) == [30_000, 15_000]

    def test_together(self, filled: Connection) -> None:
        filters = Filters(
            states=states_with_status("in_progress"),
            model="model-0",
            created_from=at(14_000),
            created_until=at(16_000),
            metadata={"campaign": "rare"},
        )
        assert listed(filled, filters=filters) == [15_000]


WANTED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "newest": ({}, {"ix_jobs_project_id"}),
    "oldest": ({"descending": False}, {"ix_jobs_project_id"}),
    "next": ({"after": video_id(9_000)}, {"ix_jobs_project_id"}),
    "of a project whose jobs are old": ({"project": "old"}, {"ix_jobs_project_id"}),
    "status": ({"filters": Filters(states=(JobState.FAILED,))}, {"ix_jobs_project_state"}),
    "statuses": ({"filters": Filters(states=tuple(JobState)), "after": video_id(9_000)}, {"ix_jobs_project_state"}),
    "model": ({"filters": Filters(model="model-1")}, {"ix_jobs_project_id"}),
    "metadata": ({"filters": Filters(metadata={"campaign": "rare"})}, {"ix_jobs_metadata"}),
    "metadata of many": ({"filters": Filters(metadata={"campaign": "common"})}, {"ix_jobs_project_id"}),
    # ids begin with a time, so few of all projects' are read
    "window": (
        {"filters": Filters(created_from=at(100), created_until=at(200))},
        {"ix_jobs_project_id", "pk_jobs"},
    ),
    "long ago": ({"filters": Filters(created_until=at(200))}, {"ix_jobs_project_id", "pk_jobs"}),
}


class TestPlan:
    @pytest.mark.parametrize(("options", "indexes"), WANTED.values(), ids=WANTED)
    def test_uses_an_index_and_reads_few_rows(
        self, filled: Connection, options: dict[str, Any], indexes: set[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listing, "MAX_WALKED", 100)
        values = {
            "project": "project-0",
            "filters": Filters(),
            "after": None,
            "limit": 20,
            "descending": True,
            **options,
        }
        executed, generic = executed_plan(filled, page(**values)), generic_plan(filled, page(**values))
        for plan in (executed, generic):
            assert [n for n in scans(plan) if n["Node Type"] == "Seq Scan" and n["Relation Name"] == "jobs"] == []
        assert indexes & {node.get("Index Name") for node in scans(executed)}
        assert 0 < rows_read(executed, "jobs") <= 300 < NUM_JOBS / 50
