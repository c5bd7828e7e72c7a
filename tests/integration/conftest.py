"""What several modules start: an engine with rows of jobs, the API in this process, the receivers of webhooks; a module
may have other settings."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rushes_api import auth, limits, lookup
from rushes_api.app import create_app
from rushes_core.database import create_sync_engine
from rushes_core.settings import Settings
from rushes_core.storage import ObjectStore
from rushes_core.sweeper import Sweeper
from sqlalchemy import Engine, text
from starlette.testclient import TestClient
from support.api import API_KEY, AUTHORIZED, JobDriver
from support.campaigns import Campaigns
from support.checkpoints import tiny_checkpoint
from support.files import Contents
from support.job_rows import JobRows
from support.receiver import Receiver
from support.stack import SharedStack
from support.waiting import wait_for_day_with
from support.webhooks import Hooks, SenderThread
from support.worker import Jobs, StartWorker, starting_workers


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    """Have the API in this process wait for servers that are only late, as they are on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "LOOKUP_SECONDS", 60.0)
        patch.setattr(limits, "REDIS_SECONDS", 60.0)
        patch.setattr(lookup, "WAIT_SECONDS", 8.0)
        yield


@pytest.fixture
def one_day() -> None:
    """The test begins and ends on one day by UTC."""
    wait_for_day_with(seconds=120)


@pytest.fixture(scope="module")
def engine(settings: Settings) -> Iterator[Engine]:
    engine = create_sync_engine(settings)
    yield engine
    engine.dispose()


@pytest.fixture
def rows(engine: Engine) -> Iterator[JobRows]:
    yield JobRows(engine)
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE jobs, job_attempts, job_events, outbox, project_shares, replicas"))


@pytest.fixture
def store(settings: Settings) -> Iterator[ObjectStore]:
    """Empty again after each test."""
    store = ObjectStore(settings)
    yield store
    store.delete_prefix("")


@pytest.fixture(scope="module")
def api_settings(stack: SharedStack, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return stack.settings(checkpoint=tiny_checkpoint(tmp_path_factory.mktemp("api")), api_key=API_KEY)


@pytest.fixture(scope="module")
def client(api_settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_app(api_settings), headers=AUTHORIZED) as client:
        yield client


@pytest.fixture(scope="module")
def driver(api_settings: Settings) -> Iterator[JobDriver]:
    driver = JobDriver(api_settings)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def module_hooks(settings: Settings) -> Iterator[Hooks]:
    hooks = Hooks(settings)
    yield hooks
    hooks.close()


@pytest.fixture
def hooks(module_hooks: Hooks) -> Hooks:
    module_hooks.clear()
    return module_hooks


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def sender(settings: Settings, hooks: Hooks) -> Iterator[SenderThread]:
    with SenderThread(settings) as sender:
        yield sender


@pytest.fixture(scope="module")
def module_campaigns(settings: Settings) -> Iterator[Campaigns]:
    campaigns = Campaigns(settings)
    yield campaigns
    campaigns.close()


@pytest.fixture
def campaigns(module_campaigns: Campaigns) -> Campaigns:
    module_campaigns.clear()
    return module_campaigns


@pytest.fixture
def sweeper(api_settings: Settings) -> Iterator[Sweeper]:
    sweeper = Sweeper(api_settings)
    yield sweeper
    sweeper.close()


@pytest.fixture(scope="module")
def contents(api_settings: Settings, stack_env: dict[str, str]) -> Iterator[Contents]:
    contents = Contents(api_settings, stack_env)
    yield contents
    contents.close()


@pytest.fixture
def jobs(settings: Settings) -> Iterator[Jobs]:
    jobs = Jobs(settings)
    yield jobs
    jobs.close()


@pytest.fixture
def start_worker(settings: Settings, tmp_path: Path) -> Iterator[StartWorker]:
    with starting_workers(settings, tmp_path / "worker.log") as start:
        yield start
