"""Nothing of one project shows to another: by no route, filter, cursor, idempotency key, count or pause."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rushes_api import lookup
from rushes_core.ids import new_video_id
from rushes_core.models import Job
from rushes_core.settings import Settings
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.testclient import TestClient
from support.api import JobDriver
from support.keys import bearer, create_key, create_project

STATES = ("queued", "in_progress", "completed", "failed", "cancelled")
Route = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A project with two keys and a job of every kind."""

    project: str
    first: dict[str, str]
    second: dict[str, str]
    jobs: dict[str, str]

    @property
    def ids(self) -> set[str]:
        """Of the jobs that its keys see."""
        return {job_id for name, job_id in self.jobs.items() if name != "deleted"}


def tenant(client: TestClient, driver: JobDriver, project: str, tmp: Path) -> Tenant:
    create_project(client, project)
    first, second = (bearer(create_key(client, project=project)) for _ in range(2))

    def post(headers: dict[str, str], **body: Any) -> str:
        body = {"prompt": f"the secret of {project}", "metadata": {"of": project}, **body}
        response = client.post("/v1/videos", json=body, headers=headers)
        assert response.status_code == 200, response.text
        video_id: str = response.json()["id"]
        return video_id

    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    jobs = {name: post(first) for name in ("in_progress", "completed", "failed", "cancelled", "deleted")}
    jobs |= {"queued": post(second), "early": post(second, not_before=later)}
    driver.start(jobs["in_progress"])
    driver.complete(jobs["completed"], b"the clip", tmp)
    driver.fail(jobs["failed"], code="generation_failed", message="no")
    client.post(f"/v1/videos/{jobs['cancelled']}/cancel", headers=first)
    client.delete(f"/v1/videos/{jobs['deleted']}", headers=first)
    return Tenant(project, first, second, jobs)


@pytest.fixture(scope="module")
def mine(client: TestClient, driver: JobDriver, tmp_path_factory: pytest.TempPathFactory) -> Tenant:
    return tenant(client, driver, "mine", tmp_path_factory.mktemp("mine"))


@pytest.fixture(scope="module")
def theirs(client: TestClient, driver: JobDriver, tmp_path_factory: pytest.TempPathFactory) -> Tenant:
    return tenant(client, driver, "theirs", tmp_path_factory.mktemp("theirs"))


def rows(driver: JobDriver, project: str) -> list[dict[str, Any]]:
    """The project's jobs, column by column."""
    with Session(driver.engine) as session:
        found = session.execute(select(Job.__table__).where(Job.project == project).order_by(Job.id))
        return [dict(row) for row in found.mappings()]


def routes_of_one_video(client: TestClient) -> Iterator[Route]:
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        if "{video_id}" in path:
            yield from ((method.upper(), path) for method in methods)
    for query in ("?variant=thumbnail", "?variant=audio", "?redirect=false"):
        yield "GET", f"/v1/videos/{{video_id}}/content{query}"
    yield "HEAD", "/v1/videos/{video_id}/content"
    yield "GET", "/v1/videos/{video_id}?compat=openai"
    yield "GET", "/v1/videos/{video_id}/attempts?limit=1"


class TestForeignIds:
    @pytest.mark.parametrize("accept", ["*/*", "application/problem+json"])
    def test_they_are_answered_as_ids_that_never_existed(
        self, client: TestClient, driver: JobDriver, mine: Tenant, theirs: Tenant, accept: str
    ) -> None:
        before = rows(driver, theirs.project)
        routes = list(routes_of_one_video(client))
        assert len(routes) >= 13
        for method, path in routes:
            for headers in ({}, {"Range": "bytes=0-1"}, {"Prefer": "wait=1"}, {"Idempotency-Key": f"{method} {path}"}):

                def answer(video_id: str, method: str = method, path: str = path, more: Any = headers) -> Any:
                    body = {"prompt": "mine now"} if path.endswith("/remix") else None
                    response = client.request(
                        method,
                        path.replace("{video_id}", video_id),
                        json=body,
                        headers={**mine.first, "x-request-id": "same", "Accept": accept, **more},
                    )
                    assert response.status_code == 404, (method, path, response.text)
                    return response.text.replace(video_id, "ID"), sorted(response.headers.items())

                never = answer(new_video_id())
                for video_id in [theirs.jobs["completed"]] if headers else theirs.jobs.values():
                    assert answer(video_id) == never, (method, path)
        assert rows(driver, theirs.project) == before

    def test_the_database_sends_nothing_of_a_foreign_job(
        self, api_settings: Settings, mine: Tenant, theirs: Tenant
    ) -> None:
        """What is not sent takes no time, which would tell that it is there."""

        async def found() -> set[tuple[str, str]]:
            line = lookup.Line(api_settings)
            try:
                asked = [(video_id, mine.project) for video_id in (*mine.jobs.values(), *theirs.jobs.values())]
                return set(await lookup._find_jobs(line, asked))  # pyright: ignore[reportPrivateUsage]
            finally:
                await line.close()

        assert asyncio.run(found()) == {(video_id, mine.project) for video_id in mine.jobs.values()}

    def test_both_keys_of_a_project_see_its_jobs(self, client: TestClient, theirs: Tenant) -> None:
        for key in (theirs.first, theirs.second):
            for name, video_id in theirs.jobs.items():
                status = client.get(f"/v1/videos/{video_id}", headers=key).status_code
                assert status == (410 if name == "deleted" else 200)
            assert client.get(f"/v1/videos/{theirs.jobs['completed']}/content", headers=key).content == b"the clip"


class TestLists:
    @pytest.mark.parametrize(
        "query",
        [
            *(
                "limit=100",
                "order=asc",
                "limit=1",
                "compat=openai&status=failed",
                "created_after=1",
                "metadata[of]=mine",
            ),
            *(f"status={one}" for one in STATES),
        ],
    )
    def test_they_hold_what_is_mine(self, client: TestClient, mine: Tenant, theirs: Tenant, query: str) -> None:
        page = client.get(f"/v1/videos?{query}", headers=mine.first)
        assert page.status_code == 200, page.text
        found = {video["id"] for video in page.json()["data"]}
        assert found
        assert found <= mine.ids
        assert theirs.project not in page.text

    @pytest.mark.parametrize("query", ["", "&status=queued", "&order=asc&limit=1", "&created_after=1"])
    def test_no_filter_finds_what_is_theirs(self, client: TestClient, mine: Tenant, theirs: Tenant, query: str) -> None:
        pages = [
            client.get(f"/v1/videos?metadata[of]={value}{query}", headers=mine.first)
            for value in (theirs.project, "nobody")
        ]
        assert pages[0].json()["data"] == []
        assert pages[0].content == pages[1].content
        own = client.get(f"/v1/videos?metadata[of]={theirs.project}{query}", headers=theirs.first)
        assert own.json()["data"]

    def test_together_the_pages_hold_all_of_it(self, client: TestClient, mine: Tenant, theirs: Tenant) -> None:
        found: list[str] = []
        after = ""
        has_more = True
        while has_more:
            page = client.get(f"/v1/videos?limit=2{after}", headers=mine.second).json()
            found += [video["id"] for video in page["data"]]
            after, has_more = f"&after={page['last_id']}", page["has_more"]
        assert mine.ids <= set(found)
        assert not theirs.ids & set(found)
        assert found == sorted(found, reverse=True)

    def test_a_foreign_cursor_is_a_place_like_any_other(self, client: TestClient, mine: Tenant, theirs: Tenant) -> None:
        for video_id in theirs.jobs.values():
            # one that nobody has, at the same place of the order
            neighbour = video_id[:-1] + ("Z" if video_id[-1] != "Z" else "Y")
            for order in ("asc", "desc"):
                pages = [
                    client.get(
                        f"/v1/videos?after={after}&order={order}", headers={**mine.first, "x-request-id": "same"}
                    )
                    for after in (video_id, neighbour)
                ]
                assert pages[0].status_code == 200
                assert pages[0].content == pages[1].content

    def test_attempts_are_counted_for_each_video(self, client: TestClient, mine: Tenant, theirs: Tenant) -> None:
        for one in (mine, theirs):
            for name in ("in_progress", "completed", "failed"):
                page = client.get(f"/v1/videos/{one.jobs[name]}/attempts", headers=one.first).json()
                assert [attempt["id"] for attempt in page["data"]] == ["attempt_1"]


class TestIdempotencyKeys:
    def test_each_api_key_has_its_own(self, client: TestClient, mine: Tenant, theirs: Tenant) -> None:
        sent = [mine.first, mine.second, theirs.first, theirs.second]
        answers = [
            client.post("/v1/videos", json={"prompt": "the same"}, headers={**key, "Idempotency-Key": "shared"})
            for key in sent
        ]
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["id"] for answer in answers}) == 4
        assert not any("idempotent-replayed" in answer.headers for answer in answers)
        other = client.post("/v1/videos", json={"prompt": "else"}, headers={**mine.first, "Idempotency-Key": "shared"})
        assert other.status_code == 422


class TestQueue:
    def test_it_counts_what_is_mine(self, client: TestClient, driver: JobDriver, tmp_path: Path) -> None:
        crowd, alone = (tenant(client, driver, name, tmp_path) for name in ("crowd", "alone"))
        for _ in range(5):
            client.post("/v1/videos", json={"prompt": "more"}, headers=crowd.first)
        queue = client.get("/v1/queue", headers=alone.first).json()
        assert (queue["project"], queue["queued"], queue["in_progress"]) == ("alone", 2, 1)
        for project in ("crowd", "*", "none"):
            refused = client.get(f"/v1/queue?project={project}", headers={**alone.first, "x-request-id": "same"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
            assert "crowd" not in refused.text

    def test_a_pause_is_felt_by_nobody_else(self, client: TestClient, mine: Tenant, theirs: Tenant) -> None:
        assert client.post("/v1/queue/pause", headers=mine.first).status_code == 200
        try:
            assert client.get("/v1/queue", headers=mine.second).json()["paused"]
            queue = client.get("/v1/queue", headers=theirs.first).json()
            assert (queue["paused"], queue["paused_at"]) == (False, None)
            waiting = client.get(f"/v1/videos/{theirs.jobs['queued']}", headers=theirs.first).json()
            assert waiting["queue"]["reason"] is None
            assert client.post("/v1/queue/resume", headers=theirs.first).status_code == 200
            assert client.get("/v1/queue", headers=mine.first).json()["paused"]
        finally:
            client.post("/v1/queue/resume", headers=mine.first)


class TestOperators:
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/v1/projects"),
            ("GET", "/v1/projects/theirs"),
            ("GET", "/v1/projects/none"),
            ("POST", "/v1/projects"),
            ("GET", "/v1/api_keys?project=theirs"),
            ("POST", "/v1/api_keys"),
            ("GET", "/v1/workers"),
            ("POST", "/v1/workers/test~1/drain"),
        ],
    )
    def test_what_is_for_them_says_nothing_to_others(
        self, client: TestClient, mine: Tenant, theirs: Tenant, method: str, path: str
    ) -> None:
        response = client.request(method, path, headers=mine.first)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "insufficient_scope")
        assert theirs.project not in response.text

    def test_a_foreign_key_is_no_more_than_an_unknown_one(self, client: TestClient, mine: Tenant) -> None:
        foreign = create_key(client, project="theirs")["id"]
        for method, tail in (("GET", ""), ("PATCH", ""), ("POST", "/rotate"), ("POST", "/revoke")):
            answers = [
                client.request(method, f"/v1/api_keys/{key_id}{tail}", headers={**mine.first, "x-request-id": "same"})
                for key_id in (foreign, "key_none")
            ]
            assert answers[0].status_code == 403
            assert answers[0].content == answers[1].content

    def test_an_operators_key_sees_only_the_videos_of_its_project(
        self, client: TestClient, mine: Tenant, theirs: Tenant
    ) -> None:
        admin = bearer(create_key(client, project="mine", scopes=["admin"]))
        assert client.get(f"/v1/videos/{mine.jobs['queued']}", headers=admin).status_code == 200
        assert client.get(f"/v1/videos/{theirs.jobs['queued']}", headers=admin).status_code == 404
