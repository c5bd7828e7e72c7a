"""What the API knows of webhooks: where they may go, and the keys that secrets are encrypted with."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rushes_core.errors import InvalidRequest
from rushes_core.request import Webhook
from rushes_core.settings import Settings
from rushes_core.webhooks import endpoints, guard
from rushes_core.webhooks.guard import Guard, Target
from rushes_core.webhooks.signing import PublicKeys, Vault, WebhooksNotConfigured
from sqlalchemy.ext.asyncio import AsyncSession

from rushes_api.errors import ApiError

LOOKUP_THREADS = 32
NOT_TOLD_YET: dict[str, Any] = {"state": "pending", "attempts": 0, "last_status": None}
"""The summary that a job with a `webhook_url` begins with."""


class Webhooks:
    """One of them serves a process."""

    def __init__(self, settings: Settings) -> None:
        self.guard = Guard(settings)
        self.vault = Vault(settings)
        self.public_keys = PublicKeys(settings)
        self._strict = settings.webhook_strict
        self._executor = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="webhook-lookup")

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

    async def target(self, url: str, *, param: str = "url") -> Target:
        """`url`, if webhooks may go there as far as can be told now.

        Raises:
            InvalidRequest
        """
        target = self.guard.check_url(url, param=param)
        await guard.check_resolves(self.guard, target, executor=self._executor, param=param)
        return target

    async def check_resolves(self, webhook: Webhook) -> None:
        """
        Raises:
            InvalidRequest, ApiError
        """
        self.check_configured(webhook.param)
        await self.target(webhook.url, param=webhook.param)

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
