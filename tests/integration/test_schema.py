"""What starts, and what does not, on a database whose schema is not that of this release."""

import json
import os
from collections.abc import Iterator

import pytest
from alembic.script import ScriptDirectory
from rushes_cli.main import main
from rushes_core import jobs
from rushes_core.campaigns import loading
from rushes_core.database import alembic_config, create_sync_engine
from rushes_core.errors import SchemaMismatch
from rushes_core.log import configure_logging
from rushes_core.schema import check_schema, known_revisions
from rushes_core.settings import Settings, get_settings
from sqlalchemy import Engine, create_engine, make_url, text
from support.api import offline_settings
from support.campaign_rows import CampaignRows
from support.checkpoints import tiny_checkpoint
from support.job_rows import MODEL, RESULT
from support.stack import settings_env

OLDER, NEWER = "e8c3417f9b60", "0123456789ab"


@pytest.fixture
def _environment(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """That of a process on the module's database."""
    for name in [name for name in os.environ if name.startswith("RUSHES_")]:
        monkeypatch.delenv(name)
    for name, value in settings_env(settings).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RUSHES_CHECKPOINT", str(tiny_checkpoint(tmp_path_factory.mktemp("schema"))))
    monkeypatch.setenv("RUSHES_SCRATCH", str(tmp_path_factory.mktemp("scratch")))
    get_settings.cache_clear()


@pytest.fixture
def at_revision(request: pytest.FixtureRequest, engine: Engine) -> Iterator[str | None]:
    """The database says that it is at this revision; None: it never heard of any."""
    revision: str | None = request.param
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE kept AS SELECT * FROM alembic_version"))
        if revision is None:
            connection.execute(text("DROP TABLE alembic_version"))
        else:
            connection.execute(text("UPDATE alembic_version SET version_num = :revision"), {"revision": revision})
    yield revision
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS alembic_version"))
        connection.execute(text("ALTER TABLE kept RENAME TO alembic_version"))


def test_the_revision_that_is_needed_is_the_last_that_ships() -> None:
    scripts = ScriptDirectory.from_config(alembic_config("postgresql+psycopg://nowhere/none"))
    assert known_revisions() == (scripts.get_current_head(), {one.revision for one in scripts.walk_revisions()})


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("command", ["api", "worker", "dispatcher", "deliver", "loader"])
@pytest.mark.parametrize(
    ("at_revision", "told"),
    [(None, "was never migrated"), (OLDER, f"is at revision {OLDER} of an earlier release")],
    indirect=["at_revision"],
    ids=["blank", "older"],
)
def test_nothing_starts_on_a_schema_of_an_earlier_release_or_none(
    at_revision: str | None, command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 1
    needed = f"needed is {known_revisions()[0]}: run `rushes migrate`"
    assert capsys.readouterr().err == f"rushes {command}: the database's schema {told}, {needed}\n"


@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("at_revision", [NEWER], indirect=True)
def test_a_schema_of_a_later_release_serves_this_one_and_is_left_as_it_is(
    at_revision: str, settings: Settings, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging()
    check_schema(settings)
    told = json.loads(capsys.readouterr().err)
    assert (told["event"], told["level"], told["revision"]) == ("schema_is_newer", "warning", NEWER)
    assert main(["migrate"]) == 0
    assert f"at revision {NEWER} of a later release, which serves this one too" in capsys.readouterr().out
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == NEWER


def test_a_database_that_is_away_is_waited_for(settings: Settings) -> None:
    check_schema(offline_settings(settings.checkpoint))


@pytest.mark.parametrize("at_revision", [""], indirect=True)
def test_a_migration_that_never_began_is_none(at_revision: str, settings: Settings, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM alembic_version"))
    with pytest.raises(SchemaMismatch, match="was never migrated"):
        check_schema(settings)


NEXT_FENCE = text("SELECT nextval('webhook_fence')")


@pytest.mark.usefixtures("_environment")
def test_what_ran_before_a_restore_has_no_part_in_what_is_claimed_after_it(
    settings: Settings, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = CampaignRows(engine)
    campaign = rows.campaign(is_loaded=False)
    job = rows.add()
    engine.dispose()
    url = make_url(settings.database_url)
    server = create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {url.database}_restored TEMPLATE {url.database}"))
    server.dispose()
    old = rows.running_again()
    assert old.fence is not None
    old_load = rows.run(loading.claim(owner="old", model=MODEL))
    restored = url.set(database=f"{url.database}_restored").render_as_string(hide_password=False)
    monkeypatch.setenv("RUSHES_DATABASE_URL", restored)
    get_settings.cache_clear()
    assert main(["migrate"]) == 0
    afterwards = create_sync_engine(settings.model_copy(update={"database_url": restored}))
    try:
        rows = CampaignRows(afterwards)
        new = rows.running_again()
        assert (new.id, new.attempt) == (old.id, old.attempt)
        assert rows.run(jobs.renew(job.id, fence=old.fence, lease_seconds=30)) is None
        assert rows.run(jobs.complete(job.id, fence=old.fence, result=RESULT, timings={})) is None
        assert (new.fence or 0) > old.fence
        assert rows.run(loading.claim(owner="new", model=MODEL)).id == campaign
        assert rows.run(loading.renew(loading.Lease(campaign, old_load.fence))) is None
        with engine.connect() as before, afterwards.connect() as after:
            assert after.execute(NEXT_FENCE).scalar_one() > before.execute(NEXT_FENCE).scalar_one()
    finally:
        afterwards.dispose()


@pytest.mark.usefixtures("_environment")
def test_what_is_held_beside_a_migration_stays_held(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = CampaignRows(engine)
    rows.clear()
    campaign = rows.campaign(is_loaded=False)
    monkeypatch.setattr(loading, "LEASE_SECONDS", 600.0)
    load = rows.run(loading.claim(owner="loader", model=MODEL))
    job = rows.running()
    assert job.fence is not None
    assert main(["migrate"]) == 0
    assert rows.run(loading.renew(loading.Lease(campaign, load.fence))) == campaign
    assert rows.run(jobs.renew(job.id, fence=job.fence, lease_seconds=30)) is False
