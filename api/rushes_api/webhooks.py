"""What the API knows of webhooks: where they may go, and the keys that secrets are encrypted with."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from rushes_core.errors import InvalidRequest
from rushes_core.request import Webhook
from rushes_core.settings import Settings
from rushes_core.webhooks import endpoints, guard
from rushes_core.webhooks.guard import Guard, Lookup, Target, look_up
from rushes_core.webhooks.signing import PublicKeys, Vault, WebhooksNotConfigured
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.errors import ApiError

LOOKUP_THREADS = 256
MAX_PROJECT_LOOKUPS = 16
"""Of these, of one project: a name whose servers are silent holds its thread long after the request was answered."""


class Webhooks:
    """One of them serves a process.

    Args:
        lookup: addresses of a name; blocks.
    """

    def __init__(self, settings: Settings, *, lookup: Lookup = look_up) -> None:
        self.guard = Guard(settings)
        self.vault = Vault(settings)
        self.public_keys = PublicKeys(settings)
        self._strict = settings.webhook_strict
        self._executor = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="webhook-lookup")
        self._lookup = lookup
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def check_configured(self, param: str | None = None) -> None:
        """
        Raises:
            ApiError: this deployment has no key for secrets.
        """
        try:
            self.vault.check()
        except WebhooksNotConfigured as error:
            raise ApiError(str(error), param=param, code=error.code) from error

    async def target(self, url: str, *, project: str, param: str = "url") -> Target:
        """`url`, if webhooks may go there as far as can be told now.

        Raises:
            InvalidRequest
        """
        target = self.guard.check_url(url, param=param)
        await guard.check_resolves(self.guard, target, resolve=partial(self._resolve, project), param=param)
        return target

    async def _resolve(self, project: str, host: str, port: int) -> None:
        places = self._places.get(project)
        if places is None:
            places = self._places[project] = asyncio.Semaphore(MAX_PROJECT_LOOKUPS)
        await places.acquire()
        loop = asyncio.get_running_loop()

        def release(_: Future[Any]) -> None:
            # the loop may have ended before the look-up
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(places.release)

        # the place is taken until the thread is free, however long anybody waits
        lookup = self._executor.submit(self.guard.resolve, host, port, self._lookup)
        lookup.add_done_callback(release)
        await asyncio.wrap_future(lookup)

    async def check_resolves(self, webhook: Webhook, *, project: str) -> None:
        """
        Raises:
            InvalidRequest, ApiError
        """
        self.check_configured(webhook.param)
        await self.target(webhook.url, project=project, param=webhook.param)

    async def of_job(self, webhook: Webhook, *, project: str, session: AsyncSession) -> dict[str, Any]:
        """What a new job keeps of its `webhook_url`.

        Raises:
            InvalidRequest: it is not allowed, or the project has no secret to sign with.
        """
        self.check_configured(webhook.param)
        target = self.guard.check_url(webhook.url, param=webhook.param)
        if (await session.execute(endpoints.secret_of(project))).first() is None:
            raise InvalidRequest(
                f"{webhook.param} needs a secret to sign with: make the project's with POST /v1/webhook_secret/rotate",
                param=webhook.param,
                code="webhook_secret_missing",
            )
        if self._strict:
            registered = (await session.execute(endpoints.urls(project=project))).scalars().all()
            if target.origin not in {Guard.origin_of(url) for url in registered if url is not None}:
                raise InvalidRequest(
                    f"{webhook.param} must be at the origin of a registered endpoint of the project",
                    param=webhook.param,
                )
        return endpoints.job_webhook(target, webhook.events, project=project)
