"""``/healthz``, ``/readyz`` and ``/metrics`` of the history service."""

from __future__ import annotations

import time
from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from rollout_worker.history.service import HistoryFigures, ServiceState
from rollout_worker.http_server import HttpServer

_STUCK_S = 300.0
"""A service that did nothing for so long is started anew; one effect on one problem takes seconds at the most."""
_GAUGES = {
    "lease_held": "1 if this service looks after the history, and not another one.",
    "bytes": "Bytes that its problems take in Redis.",
    "max_bytes": "Its byte cap.",
    "problems": "Its problems.",
    "window": "Generations of each problem that it keeps.",
    "horizon": "Generations after which rollouts are of no use, and leave; absent while all are of use.",
    "generation": "Its newest generation.",
    "unused_seconds": "Since it was appended to or drafted from.",
    "last_pass_seconds": "That the last pass over it took.",
}
_COUNTERS = {
    "passes": "Passes over it.",
    "failed_passes": "Passes over it that failed and are repeated.",
    "pass_seconds": "Time spent in passes over it.",
    "compacted": "Problems whose log was packed.",
    "trimmed": "Problems of which rollouts were dropped that had left the window.",
    "narrowed": "Problems of which the oldest rollouts were dropped to keep the byte cap.",
    "empty": "Problems that were dropped as nothing was kept of them.",
    "evicted": "Problems that were dropped to keep the byte cap.",
    "evicted_bytes": "Bytes that these took.",
    "failed_problems": "Problems that were left alone as their keys hold something else.",
}


def _gauges(figures: HistoryFigures) -> dict[str, float | None]:
    """Those of one history that are known: one that another service looks after has no more than the first."""
    known: dict[str, float | None] = {"lease_held": float(figures.leading)}
    done = figures.last
    if done is not None and done.plan is not None:
        known |= {"bytes": done.bytes, "problems": done.problems, "last_pass_seconds": done.seconds}
        known["unused_seconds"] = done.plan.unused
        if (about := done.plan.about) is not None:
            known |= {"max_bytes": about.max_bytes, "generation": about.generation}
            known |= {"window": about.window, "horizon": about.horizon}
    return known


class HistoryCollector:
    """The service's figures for Prometheus; by history, never by problem."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """For ``prometheus_client``."""
        state, histories = self._state, self._state.histories
        yield GaugeMetricFamily("rollout_history_redis_up", "1 if Redis answered last.", value=float(state.redis_up))
        yield CounterMetricFamily(
            "rollout_history_expired", "Histories that were removed as nobody used them.", value=state.expired
        )
        known = {figures.history: _gauges(figures) for figures in histories}
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"rollout_history_{name}", text, labels=["history"])
            for history, values in known.items():
                if (value := values.get(name)) is not None:
                    gauge.add_metric([history], value)
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"rollout_history_{name}", text, labels=["history"])
            for figures in histories:
                counter.add_metric([figures.history], getattr(figures, name))
            yield counter


class HistoryServer(HttpServer):
    """Serves them over HTTP."""

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        registry = CollectorRegistry(auto_describe=False)
        registry.register(HistoryCollector(state))
        ProcessCollector(registry=registry)
        super().__init__(registry, {"/healthz": self._health, "/readyz": self._readiness})

    async def _health(self, _: web.Request) -> web.Response:
        idle = time.monotonic() - self._state.beat
        if idle > _STUCK_S:
            return web.Response(text=f"the service has done nothing for {idle:.0f} s\n", status=503)
        return web.Response(text="ok\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        if self._state.redis_up:
            return web.Response(text="ok\n")
        return web.Response(text=f"{self._state.failure}\n", status=503)
