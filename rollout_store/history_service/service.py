"""Maintains all histories on a Redis server for as long as the process runs, and serves its health and metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import redis
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from rollout_api.http_server import HttpServer
from rollout_api.protocol.keys import HistoryKeys
from rollout_api.redis_client.connection import RedisUnusableError
from rollout_api.redis_client.retry import is_transient
from rollout_api.redis_client.server_functions import Redis
from rollout_api.status_token import StatusToken
from rollout_store.history.maintenance.maintainer import (
    LEASE_RENEWAL_S,
    LOG_INTERVAL_S,
    MAINTENANCE_INTERVAL_S,
    RETENTION_S,
    HistoryMaintainer,
    pause_after,
)
from rollout_store.history.maintenance.run import MaintenanceCounts, MaintenanceResult
from rollout_store.history.metadata import list_histories

logger = logging.getLogger(__name__)

MAX_RETRY_PAUSE_S = 300.0
"""Maximum seconds until maintenance of a history that fails again and again is retried."""
_EXPECTED_ERRORS = redis.RedisError | redis.exceptions.RedisClusterException | RedisUnusableError
_LOOP_INTERVAL_S = min(MAINTENANCE_INTERVAL_S, LEASE_RENEWAL_S)
"""Default seconds between two checks which histories are due."""


@dataclass
class HistoryState:
    """The service's state of one history."""

    history: str
    """Full name of the history."""
    lease_held: bool = False
    """Whether this service maintains the history, and not another process."""
    last_result: MaintenanceResult | None = None
    """The last maintenance run of this service; None while another process maintains the history."""
    runs: int = 0
    """Number of completed maintenance runs."""
    failed_runs: int = 0
    """Number of failed maintenance runs."""
    run_seconds: float = 0.0
    """Total duration of completed runs."""
    counts: MaintenanceCounts = field(default_factory=MaintenanceCounts)
    """Sum of all runs."""


@dataclass
class ServiceState:
    """The state that the service shows. Attributes are replaced as a whole, so that other threads may read them."""

    histories: tuple[HistoryState, ...] = ()
    """All histories on the server."""
    expired: int = 0
    """Number of histories that were deleted because they were unused."""
    redis_up: bool = False
    """Whether Redis answered last."""
    failure: str = "Redis was not contacted yet"
    """Why Redis is not available; empty if it is."""
    last_activity: float = field(default_factory=time.monotonic)
    """When the service last did anything, by ``time.monotonic()``."""


@dataclass
class _MaintainedHistory:
    maintainer: HistoryMaintainer
    state: HistoryState
    next_run: float = 0.0
    """When the next run is due, by ``time.monotonic()``."""
    consecutive_failures: int = 0


class HistoryService:
    """The main loop of the service, which continues despite any failure until it is stopped."""

    def __init__(
        self,
        connect: Callable[[], Redis],
        *,
        token: str,
        retention: float | None = RETENTION_S,
        interval: float = _LOOP_INTERVAL_S,
    ) -> None:
        """Prepare the service; it connects to nothing yet.

        *connect* creates a client, and is called again after each failure. *token* identifies this process as a holder
        of leases. A history that was unused for *retention* seconds is deleted. *interval* is the time between two
        checks which histories are due, and between two attempts to reach Redis.
        """
        self.state = ServiceState()
        self._connect = connect
        self._token = token
        self._retention = retention
        self._interval = interval
        self._client: Redis | None = None
        self._histories: dict[str, _MaintainedHistory] = {}
        self._last_log = float("-inf")
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Make :meth:`run` release all leases and return, after the current operation."""
        self._stopping.set()

    def run(self) -> None:
        """Maintain all histories until the service is stopped."""
        while not self._stopping.is_set():
            try:
                self._maintain_all()
            except Exception as error:  # the service must survive any failure
                self._handle_redis_failure(error)
            self.state.last_activity = time.monotonic()
            self._stopping.wait(self._interval)
        self._release_leases()

    def _maintain_all(self) -> None:
        """Run maintenance over each history that it is due for.

        Raises:
            Exception: Redis does not answer, or does not list its histories.
        """
        if self._client is None:
            self._client = self._reconnect()
        self._update_histories(self._client)
        # Not only after the histories are maintained, which may take minutes.
        if not self.state.redis_up:
            logger.info("Redis is available; maintaining %d histories.", len(self._histories))
        self.state.redis_up, self.state.failure = True, ""
        for name, entry in list(self._histories.items()):
            if self._stopping.is_set():
                return
            self.state.last_activity = time.monotonic()
            try:
                if time.monotonic() >= entry.next_run:
                    self._maintain(name, entry)
                elif entry.maintainer.lease.held:
                    entry.state.lease_held = entry.maintainer.lease.acquire()
            except Exception as error:
                self._client.ping()  # raises if the failure is the server's and not this history's
                self._postpone(entry, error)

    def _reconnect(self) -> Redis:
        """Create a new client, because addresses may have changed in a failover."""
        client = self._connect()
        for entry in self._histories.values():
            entry.maintainer = self._new_maintainer(client, entry.maintainer.keys)
        return client

    def _update_histories(self, client: Redis) -> None:
        """Start to maintain new histories, and forget deleted ones."""
        names = {keys.full_name: keys for keys in list_histories(client)}
        for name in self._histories.keys() - names.keys():
            self._histories.pop(name).maintainer.lease.release()
        for name, keys in names.items():
            if name not in self._histories:
                self._histories[name] = _MaintainedHistory(self._new_maintainer(client, keys), HistoryState(name))
        self._publish_state()

    def _new_maintainer(self, client: Redis, keys: HistoryKeys) -> HistoryMaintainer:
        return HistoryMaintainer(client, keys, token=self._token, retention=self._retention, stopping=self._stopping)

    def _maintain(self, name: str, entry: _MaintainedHistory) -> None:
        result = entry.maintainer.run_once()
        entry.consecutive_failures = 0
        entry.next_run = time.monotonic() + pause_after(result)
        state = entry.state
        state.lease_held = entry.maintainer.lease.held
        if result.plan is None:
            state.last_result = None
            return
        state.last_result = result
        state.runs += 1
        state.run_seconds += result.seconds
        state.counts.add(result.counts)
        if result.expired:
            entry.maintainer.lease.release()
            self.state.expired += 1
            del self._histories[name]
        self._publish_state()

    def _postpone(self, entry: _MaintainedHistory, error: Exception) -> None:
        """Retry a failing history less and less often, so that it does not delay the others."""
        entry.consecutive_failures += 1
        entry.state.failed_runs += 1
        entry.state.lease_held = False
        pause = min(MAX_RETRY_PAUSE_S, MAINTENANCE_INTERVAL_S * 2.0**entry.consecutive_failures)
        entry.next_run = time.monotonic() + pause
        logger.error(
            "Maintenance of history %s failed; retrying in %.0f s: %s: %s",
            entry.state.history,
            pause,
            type(error).__name__,
            error,
            exc_info=not isinstance(error, redis.RedisError),
        )

    def _handle_redis_failure(self, error: Exception) -> None:
        self.state.redis_up = False
        self.state.failure = f"{type(error).__name__}: {error}"
        for entry in self._histories.values():
            entry.state.lease_held = entry.maintainer.lease.held = False
        if self._client is not None:
            self._client.close()
            self._client = None
        if time.monotonic() - self._last_log > LOG_INTERVAL_S:
            self._last_log = time.monotonic()
            expected = isinstance(error, _EXPECTED_ERRORS)
            logger.warning(
                "Histories are not being maintained: %s; retrying until Redis is available.",
                self.state.failure,
                exc_info=not expected,
            )

    def _publish_state(self) -> None:
        self.state.histories = tuple(entry.state for entry in self._histories.values())

    def _release_leases(self) -> None:
        for entry in self._histories.values():
            if not entry.maintainer.lease.held:
                continue
            try:
                entry.maintainer.lease.release()
            except redis.RedisError as error:
                history = entry.state.history
                logger.info("The lease of history %s was not released and will expire: %s", history, error)
                if is_transient(error):
                    return


STUCK_S = 300.0
"""Seconds without activity after which the service reports itself as unhealthy; one operation takes a few at most."""
_PREFIX = "rollout_history_"
_GAUGES = {
    "lease_held": "Whether this service maintains the history (1), and not another process (0).",
    "bytes": "Size of the history's problems in Redis.",
    "max_bytes": "Byte cap of the history.",
    "problems": "Number of problems in the history.",
    "window_generations": "Number of generations that the history keeps per problem.",
    "generation": "Newest generation of the history.",
    "unused_seconds": "Time since the last append to the history or draft from it.",
    "last_maintenance_seconds": "Duration of the last maintenance run.",
}
_COUNTERS = {
    "maintenance_runs": ("runs", "Maintenance runs over the history."),
    "maintenance_failures": ("failed_runs", "Maintenance runs that failed and are retried."),
    "maintenance_seconds": ("run_seconds", "Time spent in maintenance runs."),
    "compacted_problems": ("counts.compacted", "Problems whose logs were compacted."),
    "trimmed_problems": ("counts.trimmed", "Problems of which rollouts outside the window were deleted."),
    "cap_trimmed_problems": (
        "counts.trimmed_to_cap",
        "Problems of which the oldest rollouts were deleted because of the byte cap.",
    ),
    "empty_problems": ("counts.deleted_empty", "Problems that were deleted because they had no rollouts."),
    "evicted_problems": ("counts.evicted", "Problems that were deleted because of the byte cap."),
    "evicted_bytes": ("counts.evicted_bytes", "Size of the problems that were deleted because of the byte cap."),
    "unreadable_problems": ("counts.unreadable", "Problems that were skipped because a key has the wrong type."),
}
"""Counter → attribute of :class:`HistoryState`, and what it counts."""


def _gauge_values(state: HistoryState) -> dict[str, float | None]:
    """Return the known gauges of one history; if another process maintains it, only whether the lease is held."""
    values: dict[str, float | None] = {"lease_held": float(state.lease_held)}
    result = state.last_result
    if result is not None and result.plan is not None:
        values |= {
            "bytes": result.bytes,
            "problems": result.problems,
            "last_maintenance_seconds": result.seconds,
            "unused_seconds": result.plan.unused,
        }
        if (info := result.plan.info) is not None:
            values |= {
                "max_bytes": info.max_bytes,
                "generation": info.generation,
                "window_generations": info.window,
            }
    return values


class HistoryCollector:
    """Prometheus metrics of the service, labeled by history and never by problem."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        histories = self._state.histories
        yield GaugeMetricFamily(
            f"{_PREFIX}redis_up", "Whether Redis answered last (1 or 0).", value=float(self._state.redis_up)
        )
        yield CounterMetricFamily(
            f"{_PREFIX}expired_histories",
            "Histories that were deleted because they were unused.",
            value=self._state.expired,
        )
        values = {state.history: _gauge_values(state) for state in histories}
        for name, description in _GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, description, labels=["history"])
            for history, gauges in values.items():
                if (value := gauges.get(name)) is not None:
                    gauge.add_metric([history], value)
            yield gauge
        for name, (attribute, description) in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, description, labels=["history"])
            for state in histories:
                counter.add_metric([state.history], attrgetter(attribute)(state))
            yield counter


class HistoryServer(HttpServer):
    """Serves the service's health and metrics over HTTP."""

    def __init__(self, state: ServiceState, token: StatusToken | None = None) -> None:
        self._state = state
        registry = CollectorRegistry(auto_describe=False)
        registry.register(HistoryCollector(state))
        ProcessCollector(registry=registry)
        super().__init__(registry, {"/healthz": self._health, "/readyz": self._readiness}, token)

    async def _health(self, _: web.Request) -> web.Response:
        idle = time.monotonic() - self._state.last_activity
        if idle > STUCK_S:
            return web.Response(text=f"the service has been inactive for {idle:.0f} s\n", status=503)
        return web.Response(text="ok\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        if self._state.redis_up:
            return web.Response(text="ok\n")
        return web.Response(text=f"{self._state.failure}\n", status=503)
