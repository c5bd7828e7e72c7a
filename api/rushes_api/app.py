"""The API process: `uvicorn --factory rushes_api.app:create_app`."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import cache
from urllib.parse import urlsplit

from anyio import CapacityLimiter
from fastapi import FastAPI
from rushes_core.contract import CONTRACT_FILE
from rushes_core.database import create_api_engine
from rushes_core.log import configure_logging, get_logger
from rushes_core.served_model import ServedModel
from rushes_core.setting_rules import listed
from rushes_core.settings import ContentDelivery, Settings, get_settings
from rushes_core.storage import ObjectStore
from sqlalchemy.ext.asyncio import async_sessionmaker

from rushes_api import errors
from rushes_api.auth import ApiKeys
from rushes_api.boundary import Boundary
from rushes_api.campaign_archive import MAX_ARCHIVES
from rushes_api.deps import State
from rushes_api.eta import forecasting
from rushes_api.intake import Intake
from rushes_api.limits import RequestLimits
from rushes_api.lookup import Lookup
from rushes_api.metrics import CountRequests, Metrics
from rushes_api.openapi import describe, operation_id
from rushes_api.pauses import Pauses
from rushes_api.pulse import beating
from rushes_api.readiness import Readiness
from rushes_api.routers import (
    actions,
    api_keys,
    batches,
    campaigns,
    content,
    events,
    files,
    health,
    metrics,
    minimax,
    models,
    projects,
    queue,
    sync,
    videos,
    webhook_deliveries,
    webhook_endpoints,
    workers,
)
from rushes_api.watch import watching
from rushes_api.webhooks import Webhooks

log = get_logger(__name__)

STORE_THREADS = 32
MAX_UPLOADS = 8
ANSWER_WITHIN_SECONDS = 10.0
"""How long a request may go without an answer before it is given up with 503."""

_DEFAULT_PORTS = {"http": 80, "https": 443}


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application; without `settings` those of the environment, and the process's logs are set up.

    Raises:
        ValueError: there is no API key, or content would be redirected to the API itself.
        CheckpointError: at start, when the checkpoint cannot be served.
    """
    if settings is None:
        settings = get_settings()
        configure_logging(settings.log_level, json=settings.log_json)
    keys = ApiKeys(settings)
    _check_redirects(settings)
    configured, figures = settings, Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[State]:
        model = ServedModel.load(configured)
        store = ObjectStore(configured)
        engine = create_api_engine(configured)
        sessions = async_sessionmaker(engine, expire_on_commit=False)
        request_limits = RequestLimits(configured)
        webhooks = Webhooks(configured)
        lookup = Lookup(configured)
        intake = Intake(configured)
        log.info("api_started", model=model.name)
        async with (
            beating(configured) as pulse,
            watching(configured, sessions, on_change=figures.note_waiting) as watcher,
            forecasting(configured, sessions, model=model.name) as forecast,
        ):
            yield State(
                settings=configured,
                keys=keys,
                request_limits=request_limits,
                model=model,
                model_created=int((configured.checkpoint / CONTRACT_FILE).stat().st_mtime),
                sessions=sessions,
                lookup=lookup,
                intake=intake,
                pulse=pulse,
                pauses=Pauses(sessions),
                forecast=forecast,
                store=store,
                store_limiter=CapacityLimiter(STORE_THREADS),
                uploads=CapacityLimiter(MAX_UPLOADS),
                archives=CapacityLimiter(MAX_ARCHIVES),
                readiness=Readiness(configured, model=model.name, sessions=sessions, store=store),
                watcher=watcher,
                metrics=figures,
                webhooks=webhooks,
            )
        await intake.close()
        await lookup.close()
        webhooks.close()
        await keys.close()
        await request_limits.close()
        await engine.dispose()
        log.info("api_stopped")

    app = FastAPI(
        title="Rushes",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
    )
    app.add_middleware(
        Boundary,
        cors_origins=_cors_origins(settings),
        answer_within_seconds=ANSWER_WITHIN_SECONDS,
    )
    app.add_middleware(CountRequests, metrics=figures)
    errors.install(app)
    # requests are matched in this order: those that come all the time first
    for module in (
        videos,
        health,
        metrics,
        models,
        actions,
        sync,
        events,
        content,
        minimax,
        files,
        batches,
        campaigns,
        queue,
        workers,
        projects,
        api_keys,
        webhook_endpoints,
        webhook_deliveries,
    ):
        app.include_router(module.router)
    errors.reserve_literal_paths(app)
    app.openapi = cache(lambda: describe(app))
    return app


def _check_redirects(settings: Settings) -> None:
    """A redirect within one origin keeps the Authorization header, which a store refuses beside its own signature."""
    if settings.content_delivery is not ContentDelivery.REDIRECT or not settings.api_origin:
        return
    store = settings.s3_public_endpoint_url or settings.s3_endpoint_url
    if store and _origin(store) == _origin(settings.api_origin):
        raise ValueError(
            f"RUSHES_CONTENT_DELIVERY=redirect needs the store at another origin than the API, but both are at "
            f"{settings.api_origin}: clients would send their API key along; use proxy"
        )


def _cors_origins(settings: Settings) -> list[str]:
    """As browsers send them, without capitals."""
    return [origin.lower() for origin in listed(settings.cors_origins)]


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme)
