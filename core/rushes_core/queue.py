"""Celery over Redis: hints that wake workers. A lost hint costs latency, never a job."""

# celery and redis are not typed
# pyright: standard

from celery import Celery
from redis import Redis

from rushes_core.settings import Settings

WAKE_TASK = "rushes.wake"
WEBHOOK_QUEUE = "cpu.webhooks"
"""Celery queue that carries the hints of those who deliver webhooks."""
CAMPAIGN_QUEUE = "cpu.campaigns"
"""Celery queue that carries the hints of those who load, close and finish campaigns."""
MAX_HINTS = 64
"""Most hints that lie in a pool's list at once."""


def create_celery(settings: Settings, *, client_name: str, queue: str) -> Celery:
    """The Celery application, for the dispatcher that sends hints and for those who receive them."""
    app = Celery("rushes", broker=settings.redis_url)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        result_backend=None,
        # a hint holds nothing worth delivering twice
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_enable_prefetch_count_reduction=False,
        # a lost connection must not end the job that happens to run
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        # by default a worker gives up, and exits, after a hundred attempts
        broker_connection_max_retries=None,
        # a replica demoted by a failover answers READONLY: reconnect instead of crashing
        broker_channel_error_retry=True,
        # whoever can write to Redis could shut workers down otherwise
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        task_create_missing_queues=False,
        task_publish_retry=False,
        task_queues={queue: {"exchange": queue, "routing_key": queue}},
        task_default_queue=queue,
        broker_transport_options={
            "socket_timeout": 5,
            "socket_connect_timeout": 2,
            "socket_keepalive": True,
            "retry_on_timeout": False,
            "health_check_interval": 10,
            "visibility_timeout": 600,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "client_name": client_name,
        },
    )
    return app


class HintQueue:
    """The sending side of hints.

    Args:
        queue: None: that of the pool.
    """

    def __init__(self, settings: Settings, *, queue: str | None = None) -> None:
        self._queue = queue or settings.gpu_queue
        self._app = create_celery(settings, client_name="rushes-dispatcher", queue=self._queue)
        self._redis = Redis.from_url(settings.redis_url, socket_timeout=5, socket_connect_timeout=2)

    def top_up(self, wanted: int) -> int:
        """Send hints until `wanted` of them, at most `MAX_HINTS`, wait in the list; returns how many were sent.

        Raises:
            redis.RedisError, kombu.exceptions.OperationalError: Redis cannot be reached or refuses the write.
        """
        # kombu keeps a queue of default priority in the list of that name
        missing = min(wanted, MAX_HINTS) - int(self._redis.llen(self._queue))
        if missing <= 0:
            return 0
        with self._app.producer_or_acquire() as producer:
            for _ in range(missing):
                self._app.send_task(WAKE_TASK, queue=self._queue, producer=producer)
        # others may have counted before these were there; one hint is as good as another
        self._redis.ltrim(self._queue, 0, MAX_HINTS - 1)
        return missing

    def close(self) -> None:
        self._redis.close()
        self._app.close()
