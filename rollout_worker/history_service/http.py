"""``/healthz``, ``/readyz`` and ``/metrics`` of the history service."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from rollout_api.http_server import HttpServer
from rollout_api.status_token import StatusToken
from rollout_worker.history_service.service import HistoryState, ServiceState

STUCK_S = 300.0
"""Seconds without activity after which the service reports itself as unhealthy; one operation takes a few at most."""
_PREFIX = "rollout_history_"
_GAUGES = {
    "lease_held": "Whether this service maintains the history (1), and not another process (0).",
    "bytes": "Size of the history's problems in Redis.",
    "max_bytes": "Byte cap of the history.",
    "problems": "Number of problems in the history.",
    "window_generations": "Number of generations that the history keeps per problem.",
    "age_limit_generations": "Age from which rollouts are deleted even within the window. Absent without such a limit.",
    "generation": "Newest generation of the history.",
    "unused_seconds": "Time since the last append to the history or draft from it.",
    "last_maintenance_seconds": "Duration of the last maintenance run.",
}
_COUNTERS: dict[str, tuple[str, Callable[[HistoryState], float]]] = {
    "maintenance_runs": ("Maintenance runs over the history.", lambda state: state.runs),
    "maintenance_failures": ("Maintenance runs that failed and are retried.", lambda state: state.failed_runs),
    "maintenance_seconds": ("Time spent in maintenance runs.", lambda state: state.run_seconds),
    "compacted_problems": ("Problems whose logs were compacted.", lambda state: state.counts.compacted),
    "trimmed_problems": (
        "Problems of which rollouts outside the window were deleted.",
        lambda state: state.counts.trimmed,
    ),
    "cap_trimmed_problems": (
        "Problems of which the oldest rollouts were deleted because of the byte cap.",
        lambda state: state.counts.trimmed_to_cap,
    ),
    "empty_problems": (
        "Problems that were deleted because they had no rollouts.",
        lambda state: state.counts.deleted_empty,
    ),
    "evicted_problems": (
        "Problems that were deleted because of the byte cap.",
        lambda state: state.counts.evicted,
    ),
    "evicted_bytes": (
        "Size of the problems that were deleted because of the byte cap.",
        lambda state: state.counts.evicted_bytes,
    ),
    "unreadable_problems": (
        "Problems that were skipped because a key has the wrong type.",
        lambda state: state.counts.unreadable,
    ),
}


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
                "age_limit_generations": info.age_limit,
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
        for name, (description, value_of) in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, description, labels=["history"])
            for state in histories:
                counter.add_metric([state.history], value_of(state))
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
