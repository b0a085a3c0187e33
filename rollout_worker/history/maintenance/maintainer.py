"""Maintains one history: compacts it, keeps it within its window and byte cap, and deletes it when it is unused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.server_functions import Redis
from rollout_worker.history.limits import MAINTENANCE_INTERVAL_S, MAX_MAINTENANCE_S, PAUSE_RATIO, RETENTION_S
from rollout_worker.history.maintenance.lease import MaintainerLease
from rollout_worker.history.maintenance.planner import MaintenancePlan, MaintenancePlanner
from rollout_worker.history.maintenance.run import MaintenanceResult, MaintenanceRun
from rollout_worker.history.store import HistoryStore


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

        Args:
            client: client of the history's server or cluster.
            keys: keys of the history.
            token: identifies this process as a holder of the lease.
            clock: returns the server's time in Unix seconds [default: ask the server].
            retention: seconds after which an unused history is deleted; None for never.
            stopping: ends a run early when it is set.
        """
        self.keys = keys
        self.lease = MaintainerLease(client, keys, token)
        self._client = client
        self._clock = clock or self._server_time
        self._retention = retention
        self._stopping = stopping or threading.Event()
        self._store = HistoryStore.for_all_generations(client, keys)
        self._planner = MaintenancePlanner(self._store, retention=retention, clock=self._clock)

    def run_once(self, *, ignore_lease: bool = False) -> MaintenanceResult:
        """Plan and execute one run, if no other maintainer holds the lease.

        Args:
            ignore_lease: run even if another maintainer holds the lease.
        """
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
            self._planner,
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

    def survey(self) -> MaintenancePlan:
        """Return the size of the history and whether it has expired; nothing else is planned."""
        return self._planner.survey()

    def plan(self) -> MaintenancePlan:
        """Return what a run would do now; nothing is changed."""
        return self._planner.plan()

    def _server_time(self) -> float:
        seconds, microseconds = self._client.time()
        return float(seconds) + float(microseconds) / 1e6


def pause_after(result: MaintenanceResult) -> float:
    """Return the seconds to wait after a run, so that scanning a large history does not keep its server busy."""
    if not result.complete:
        return MAINTENANCE_INTERVAL_S
    return max(MAINTENANCE_INTERVAL_S, PAUSE_RATIO * result.seconds)
