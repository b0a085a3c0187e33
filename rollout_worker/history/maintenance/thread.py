"""Maintains a job's history within the job, where no history service does."""

from __future__ import annotations

import logging
import threading
import time

import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.server_functions import Redis
from rollout_worker.history.limits import LOG_INTERVAL_S, MAINTENANCE_INTERVAL_S, STOP_TIMEOUT_S
from rollout_worker.history.maintenance.lease import new_lease_token
from rollout_worker.history.maintenance.maintainer import HistoryMaintainer, pause_after

logger = logging.getLogger(__name__)


class MaintenanceThread:
    """A thread that maintains one history while no other process holds the lease."""

    def __init__(self, client: Redis, keys: HistoryKeys) -> None:
        self._stopping = threading.Event()
        # A job uses its own history, however long its rollouts take; it therefore never expires here.
        self._maintainer = HistoryMaintainer(
            client, keys, token=new_lease_token(), retention=None, stopping=self._stopping
        )
        self._thread = threading.Thread(target=self._run, name="history-maintenance", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current operation, and release the lease."""
        self._stopping.set()
        self._thread.join(timeout=STOP_TIMEOUT_S)

    def _run(self) -> None:
        last_log = float("-inf")
        history = self._maintainer.keys.full_name
        while not self._stopping.is_set():
            pause = MAINTENANCE_INTERVAL_S
            try:
                pause = pause_after(self._maintainer.run_once())
            except Exception as error:  # the job must continue; the history only speeds it up
                if time.monotonic() - last_log > LOG_INTERVAL_S:
                    last_log = time.monotonic()
                    expected = isinstance(error, redis.RedisError)
                    logger.warning(
                        "History %s is not being maintained: %s: %s",
                        history,
                        type(error).__name__,
                        error,
                        exc_info=not expected,
                    )
            self._stopping.wait(pause)
        try:
            self._maintainer.lease.release()
        except redis.RedisError as error:
            logger.info("The lease of history %s was not released and will expire: %s", history, error)
