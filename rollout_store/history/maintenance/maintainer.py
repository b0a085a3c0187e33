"""Maintains one history: compacts it, keeps it within its window and byte cap, and deletes it when it is unused.

A lease ensures that one maintainer at a time works on it: the history service, or a thread of a job.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

import redis

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.server_functions import Call, Function, Redis, run
from rollout_store.history.maintenance.planner import MaintenancePlan, MaintenancePlanner
from rollout_store.history.maintenance.run import MaintenanceResult, MaintenanceRun
from rollout_store.history.store import HistoryStore
from rollout_store.history.sync import STOP_TIMEOUT_S

MAINTENANCE_INTERVAL_S = 5.0
"""Minimum seconds between two maintenance runs over one history."""
MAX_MAINTENANCE_S = 10.0
"""Seconds after which a run ends and leaves the rest to the next one, because other histories are waiting."""
PAUSE_RATIO = 9
"""Minimum pause after a run, as a multiple of its duration, so that scanning a large history does not load Redis."""
LEASE_S = 15.0
"""Seconds after which the lease of a maintainer that stopped renewing it expires."""
LEASE_RENEWAL_S = LEASE_S / 3
"""Seconds after which a maintainer renews its lease."""
RETENTION_S = 30 * 86400.0
"""Default seconds after which an unused history is deleted."""
LOG_INTERVAL_S = 30.0
"""Minimum seconds between two log messages about the same continuing failure."""
_HOLD_LEASE = Function("hold_lease")


def new_lease_token() -> str:
    """Return a token for this process's leases, which also names the machine and the process."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class MaintainerLease:
    """The lease of one history.

    The lease avoids duplicate work; it does not protect the history. Every operation of a maintainer is atomic and
    idempotent, so that a second maintainer, or one that was killed half-way, does no harm.
    """

    def __init__(self, client: Redis, keys: HistoryKeys, token: str) -> None:
        self.held = False
        """Whether this process held the lease when it last tried to acquire it."""
        self._client = client
        self._keys = keys
        self._token = token
        self._last_attempt = 0.0

    def acquire(self) -> bool:
        """Acquire or renew the lease; return whether this process holds it now."""
        self._last_attempt = time.monotonic()
        self.held = bool(self._hold(LEASE_S))
        return self.held

    def renew_if_due(self) -> bool:
        """Renew the lease if that is due; return whether this process holds it."""
        if time.monotonic() - self._last_attempt > LEASE_RENEWAL_S:
            self.acquire()
        return self.held

    def release(self) -> None:
        """Give up the lease, so that another maintainer need not wait until it expires."""
        self.held = False
        self._hold(0)

    def _hold(self, seconds: float) -> int:
        call = Call(_HOLD_LEASE, [self._keys.maintainer_lease], [self._token, int(seconds * 1000)])
        return int(run(self._client, call))


class HistoryMaintainer:
    """Runs maintenance over one history; every method may raise :class:`redis.RedisError`."""

    def __init__(
        self,
        client: Redis,
        keys: HistoryKeys,
        *,
        token: str,
        clock: Callable[[], float] | None = None,
        retention: float | None = RETENTION_S,
        stopping: threading.Event | None = None,
    ) -> None:
        """Prepare maintenance; nothing is sent yet.

        *token* identifies this process as a holder of the lease. A history that was unused for *retention* seconds is
        deleted. *clock* returns the server's time, and *stopping* ends a run early.
        """
        self.keys = keys
        self.lease = MaintainerLease(client, keys, token)
        self._client = client
        self._clock = clock or self._server_time
        self._retention = retention
        self._stopping = stopping or threading.Event()
        self._store = HistoryStore.for_all_generations(client, keys)
        self.planner = MaintenancePlanner(self._store, retention=retention, clock=self._clock)

    def run_once(self, *, ignore_lease: bool = False) -> MaintenanceResult:
        """Plan and execute one run, if no other maintainer holds the lease. With *ignore_lease*, run in any case."""
        started = time.monotonic()
        if not ignore_lease and not self.lease.acquire():
            return MaintenanceResult(None)

        def may_continue() -> bool:
            if self._stopping.is_set() or time.monotonic() - started > MAX_MAINTENANCE_S:
                return False
            return ignore_lease or self.lease.renew_if_due()

        plan = self.plan()
        run = MaintenanceRun(
            self._store,
            self.planner,
            plan,
            may_continue=may_continue,
            clock=self._clock,
            stopping=self._stopping.is_set,
        )
        if plan.expired:
            run.expire()
        else:
            run.execute(records_emptiness=self._retention is not None)
        run.result.complete = may_continue()
        run.result.seconds = time.monotonic() - started
        return run.result

    def plan(self) -> MaintenancePlan:
        """Return what a run would do now; nothing is changed."""
        return self.planner.plan()

    def _server_time(self) -> float:
        seconds, microseconds = self._client.time()
        return float(seconds) + float(microseconds) / 1e6


def pause_after(result: MaintenanceResult) -> float:
    """Return the seconds to wait after a run, so that scanning a large history does not keep its server busy."""
    if not result.complete:
        return MAINTENANCE_INTERVAL_S
    return max(MAINTENANCE_INTERVAL_S, PAUSE_RATIO * result.seconds)


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
