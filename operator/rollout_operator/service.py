"""``/healthz``, ``/readyz`` and ``/metrics`` of the operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from rollout_operator.api import KubernetesApi
from rollout_operator.leader import Leadership
from rollout_operator.reconciler import Reconciler
from rollout_operator.store import Store


class OperatorCollector:
    """The operator's own figures for Prometheus."""

    def __init__(self, api: KubernetesApi, store: Store, reconciler: Reconciler, leadership: Leadership | None) -> None:
        self._api, self._store, self._reconciler, self._leadership = api, store, reconciler, leadership

    def collect(self) -> Iterator[Metric]:
        """For ``prometheus_client``."""
        figures = self._reconciler.figures
        leading = self._leadership is None or self._leadership.leading
        yield GaugeMetricFamily("rollout_operator_leading", "1 if this operator works.", value=float(leading))
        jobs = GaugeMetricFamily("rollout_operator_jobs", "RolloutJobs by state.", labels=["state"])
        for state, count in Counter(self._store.states()).items():
            jobs.add_metric([state], count)
        yield jobs
        waiting = len(self._reconciler.queue)
        yield GaugeMetricFamily("rollout_operator_queue", "Jobs that are to be looked at, now or later.", value=waiting)
        for name, text, value in (
            ("looks", "Looks at jobs.", figures.looks),
            ("failed_looks", "Looks that failed and are repeated.", figures.failed_looks),
            ("outdated_looks", "Looks at a job that had changed meanwhile.", figures.outdated),
            ("look_seconds", "Time spent in looks.", figures.seconds),
        ):
            yield CounterMetricFamily(f"rollout_operator_{name}", text, value=value)
        calls = CounterMetricFamily("rollout_operator_api_calls", "Calls to the API server.", labels=["call"])
        for call, count in self._api.calls.items():
            calls.add_metric([call], count)
        yield calls


class OperatorService:
    """Serves them over HTTP from the running asyncio loop."""

    def __init__(self, collector: OperatorCollector) -> None:
        self.ready = False
        """Whether the API server was reached; an operator that waits for another one's Lease is ready, too."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        self._runner: web.AppRunner | None = None

    async def start(self, port: int) -> None:
        """Listen on *port*.

        Raises:
            OSError: if the port is taken.
        """
        application = web.Application()
        application.add_routes(
            [
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, None, port).start()

    async def stop(self) -> None:
        """Listen no more."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n" if self.ready else "starting\n", status=200 if self.ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
