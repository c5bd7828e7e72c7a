"""`rushes deliver`: a CPU worker of Celery that delivers webhooks when it is woken, and looks by itself otherwise."""

import asyncio
import os
import resource
import signal
import socket

from rushes_core.log import get_logger
from rushes_core.queue import WEBHOOK_QUEUE
from rushes_core.settings import Settings

from rushes_worker.hints import HintListener
from rushes_worker.webhooks.sender import MAX_UNDER_WAY, Sender

log = get_logger(__name__)


def run(settings: Settings) -> int:
    """Deliver until SIGTERM or SIGINT. An unreachable server is waited for, not an error.

    Raises:
        WebhooksNotConfigured: there is no key to decrypt secrets with.
    """
    _allow_connections(4 * MAX_UNDER_WAY)
    asyncio.run(_run(settings))
    return 0


async def _run(settings: Settings) -> None:
    sender = Sender(settings)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, sender.stop)

    def on_hint() -> None:
        # the loop is closed when the process ends, and this thread with it
        if not loop.is_closed():
            loop.call_soon_threadsafe(sender.wake)

    name = f"deliver-{socket.gethostname()}-{os.getpid()}"
    HintListener(settings, replica_id=name, on_hint=on_hint, queue=WEBHOOK_QUEUE).start()
    log.info("sender_started")
    await sender.run()
    log.info("sender_stopped")


def _allow_connections(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
