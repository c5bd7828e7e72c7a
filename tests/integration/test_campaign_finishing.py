"""The end of a campaign: its output and error files, written while nothing of it is left to do."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rushes_core import jobs
from rushes_core.database import create_sync_engine
from rushes_core.errors import StorageError
from rushes_core.models import File
from rushes_core.object_keys import file_key
from rushes_core.settings import Settings
from rushes_core.store_upload import Upload
from rushes_worker.campaigns import manifest
from rushes_worker.campaigns.ender import Ender
from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from support.campaigns import Campaigns, jsonl, openai_line
from support.checkpoints import tiny_checkpoint
from support.faults.proxy import Mode, TcpProxy
from support.stack import SharedStack


@pytest.fixture(scope="module")
def settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return stack.settings(
        checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("finishing")), scratch=tmp_path_factory.mktemp("scratch")
    )


def file_of(campaigns: Campaigns, file_id: str | None) -> File:
    assert file_id is not None
    with Session(campaigns.engine, expire_on_commit=False) as session:
        return session.get_one(File, file_id)


def done(campaigns: Campaigns, codes: list[str | None], *rows: Any) -> str:
    """A campaign whose lines have ended, with these codes, or completed."""
    lines = rows or tuple(map(openai_line, range(1, len(codes) + 1)))
    campaign_id = campaigns.loaded(jsonl(*lines))
    for job, code in zip(campaigns.items(campaign_id), codes, strict=True):
        assert job.line is not None
        campaigns.run(campaign_id, job.line, code=code)
    return campaign_id


def ender(campaigns: Campaigns) -> Ender:
    return Ender(campaigns.settings, campaigns.model, campaigns.engine, owner="test")


class TestFiles:
    def test_completed_lines_are_in_one_file_and_the_others_in_another(self, campaigns: Campaigns) -> None:
        campaign_id = done(
            campaigns,
            [None, "worker_lost", None],
            openai_line(1),
            b"{",
            openai_line(3),
            openai_line(3),
            openai_line(5, metadata={"shot": "5"}),
        )
        campaigns.end()
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "completed"
        assert campaign.finalizing_at is not None
        assert campaign.completed_at is not None
        output = campaigns.content(campaign.output_file_id)
        assert [line["custom_id"] for line in output] == ["id-1", "id-5"]
        body = output[1]["response"]["body"]
        assert (body["status"], body["metadata"], body["batch_id"]) == ("completed", {"shot": "5"}, campaign_id)
        errors = campaigns.content(campaign.error_file_id)
        assert [(line["custom_id"], line["error"]["code"], line["error"]["line"]) for line in errors] == [
            (None, "invalid_line", 2),
            ("id-3", "worker_lost", 3),
            ("id-3", "duplicate_custom_id", 4),
        ]
        file = file_of(campaigns, campaign.output_file_id)
        assert (file.project, file.purpose, file.filename) == (
            "default",
            "batch_output",
            f"{campaign_id}_output.jsonl",
        )
        assert campaigns.events(campaign_id) == ["batch.completed"]

    def test_a_file_that_would_be_empty_is_none(self, campaigns: Campaigns) -> None:
        good, bad = done(campaigns, [None]), campaigns.loaded(b"{\n")
        campaigns.end()
        campaign = campaigns.read(good)
        assert campaign.output_file_id is not None
        assert campaign.error_file_id is None
        campaign = campaigns.read(bad)
        assert campaign.state == "completed"
        assert campaign.output_file_id is None
        assert campaign.error_file_id is not None

    @pytest.mark.parametrize("page", [1, 2, 3, 7, 1_000])
    def test_lines_are_in_their_order_however_many_are_read_at_once(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch, page: int
    ) -> None:
        monkeypatch.setattr(manifest, "ITEMS_AT_ONCE", page)
        rows: list[Any] = [openai_line(number) if number % 3 else b"{" for number in range(1, 16)]
        campaign_id = campaigns.loaded(jsonl(*rows))
        campaigns.stop(campaign_id)
        campaigns.end()
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "cancelled"
        errors = campaigns.content(campaign.error_file_id)
        assert [line["error"]["line"] for line in errors] == list(range(1, 16))

    def test_they_are_kept_as_long_as_was_asked_for(self, campaigns: Campaigns) -> None:
        campaign_id = done(campaigns, [None])
        campaigns.execute("UPDATE campaigns SET output_seconds = 7200")
        campaigns.end()
        file = file_of(campaigns, campaigns.read(campaign_id).output_file_id)
        assert file.expires_at is not None
        assert (file.expires_at - file.created_at).total_seconds() == 7_200

    def test_what_does_not_fit_into_one_part_is_stored_in_several(self, campaigns: Campaigns) -> None:
        campaign_id = campaigns.loaded(
            jsonl(*(openai_line(number, prompt="word " * 1_990, size="480x480") for number in range(1, 601)))
        )
        campaigns.execute(
            "UPDATE jobs SET state = 'cancelled', finished_at = now(), "
            """error = jsonb_build_object('code', 'cancelled_by_user', 'message', prompt)"""
        )
        campaigns.end()
        file = file_of(campaigns, campaigns.read(campaign_id).error_file_id)
        assert file.bytes > 5 * 1024 * 1024
        assert len(campaigns.content(file.id)) == 600


class TestAgain:
    def test_a_retry_reopens_it_and_its_next_end_replaces_the_files(self, campaigns: Campaigns) -> None:
        campaign_id = done(campaigns, [None, "worker_lost"])
        campaigns.end()
        before = campaigns.read(campaign_id)
        campaigns.jobs.run(jobs.retry(campaigns.items(campaign_id)[1].id, project="default"))
        assert campaigns.read(campaign_id).state == "in_progress"
        campaigns.run(campaign_id, 2)
        campaigns.end()
        after = campaigns.read(campaign_id)
        assert after.state == "completed"
        assert after.error_file_id is None
        assert [line["custom_id"] for line in campaigns.content(after.output_file_id)] == ["id-1", "id-2"]
        for old in (before.output_file_id, before.error_file_id):
            assert file_of(campaigns, old).deleted_at is not None
        assert campaigns.events(campaign_id) == ["batch.completed", "batch.completed"]

    def test_a_retry_while_the_files_are_written_wins(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        campaign_id = done(campaigns, ["worker_lost", None])
        keys: list[str] = []
        complete = Upload.complete

        def retry_first(upload: Upload) -> None:
            keys.append(upload.key)
            if len(keys) == 1:
                campaigns.jobs.run(jobs.retry(campaigns.items(campaign_id)[0].id, project="default"))
            complete(upload)

        monkeypatch.setattr(Upload, "complete", retry_first)
        assert ender(campaigns).turn()
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "in_progress"
        assert (campaign.output_file_id, campaign.error_file_id) == (None, None)
        assert campaigns.events(campaign_id) == []
        # nothing of it stays
        assert [campaigns.store.head(key) for key in keys] == [None] * len(keys)

    def test_a_retry_in_the_moment_of_the_end_is_noticed(self, campaigns: Campaigns) -> None:
        campaign_id = done(campaigns, ["worker_lost"])
        with Session(campaigns.engine) as session, session.begin():
            # its trigger sees a campaign that goes on, and leaves that alone
            session.execute(jobs.retry(campaigns.items(campaign_id)[0].id, project="default"))
            campaigns.execute("UPDATE campaigns SET state = 'finalizing'")
        campaigns.end()
        assert campaigns.read(campaign_id).state == "in_progress"
        assert campaigns.counts(campaign_id)["queued"] == 1


class TestFaults:
    def test_a_store_that_is_away_is_waited_for(self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch) -> None:
        campaign_id = done(campaigns, [None])
        with monkeypatch.context() as patch:
            patch.setattr(Upload, "complete", _away)
            assert not ender(campaigns).turn()
            assert campaigns.read(campaign_id).state == "finalizing"
        campaigns.end()
        assert campaigns.read(campaign_id).state == "finalizing"
        campaigns.execute("UPDATE campaigns SET lease_until = now()")
        campaigns.end()
        assert campaigns.read(campaign_id).state == "completed"
        assert campaigns.events(campaign_id) == ["batch.completed"]

    def test_another_process_takes_over_and_ends_it_once(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        campaign_id = done(campaigns, [None])
        complete = Upload.complete
        began, goes_on = threading.Event(), threading.Event()

        def slowly(upload: Upload) -> None:
            complete(upload)
            began.set()
            assert goes_on.wait(60)

        with monkeypatch.context() as patch:
            patch.setattr(Upload, "complete", slowly)
            slow = threading.Thread(target=ender(campaigns).turn)
            slow.start()
            assert began.wait(60)
        campaigns.execute("UPDATE campaigns SET lease_until = now()")
        campaigns.end()
        campaign = campaigns.read(campaign_id)
        goes_on.set()
        slow.join(60)
        assert not slow.is_alive()
        assert campaigns.read(campaign_id).output_file_id == campaign.output_file_id
        assert campaigns.events(campaign_id) == ["batch.completed"]
        assert campaigns.content(campaign.output_file_id)
        kept = [item.key for page in campaigns.store.list_pages("files/") for item in page]
        assert kept.count(file_key("default", str(campaign.output_file_id))) == 1

    def test_files_stay_whose_end_was_committed_though_nobody_heard_of_it(
        self, campaigns: Campaigns, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        campaign_id = done(campaigns, [None])
        url = make_url(campaigns.settings.database_url)
        publish = manifest.Manifest.publish
        with TcpProxy(url.host or "", url.port or 5_432) as proxy:
            proxied = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
            settings = campaigns.settings.model_copy(update={"database_url": proxied})

            def then_lose_the_reply(one: manifest.Manifest, session: Session) -> None:
                publish(one, session)
                proxy.set(Mode.LOSE_REPLY, budget=1)

            engine = create_sync_engine(settings)
            with monkeypatch.context() as patch:
                patch.setattr(manifest.Manifest, "publish", then_lose_the_reply)
                with pytest.raises(DBAPIError):
                    Ender(settings, campaigns.model, engine, owner="test").turn()
            engine.dispose()
            assert proxy.strikes == 1
        campaign = campaigns.read(campaign_id)
        assert campaign.state == "completed"
        assert campaigns.content(campaign.output_file_id)
        assert list(Path(campaigns.settings.scratch).iterdir()) == []

    def test_nothing_stays_in_the_scratch_directory(self, campaigns: Campaigns, settings: Settings) -> None:
        done(campaigns, [None, "worker_lost"])
        campaigns.end()
        assert list(Path(settings.scratch).iterdir()) == []


def _away(*arguments: object) -> Callable[[], None]:
    raise StorageError("the store is away")
