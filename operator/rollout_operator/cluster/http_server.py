"""The operator's HTTP endpoints: ``/healthz``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from rollout_api.http_server import HttpServer
from rollout_api.manifest.status import State
from rollout_api.status_token import StatusToken
from rollout_operator.cluster.kubernetes_api import KubernetesApi
from rollout_operator.cluster.leader_election import LeaderElection
from rollout_operator.cluster.object_cache import ObjectCache
from rollout_operator.cluster.reconciler import Reconciler


class MetricsCollector:
    """The operator's metrics for Prometheus."""

    def __init__(
        self, api: KubernetesApi, cache: ObjectCache, reconciler: Reconciler, election: LeaderElection | None
    ) -> None:
        self._api, self._cache, self._reconciler, self._election = api, cache, reconciler, election

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families, as ``prometheus_client`` requires."""
        leading = self._election is None or self._election.leading
        yield GaugeMetricFamily("rollout_operator_leading", "1 if this operator is the leader.", value=float(leading))
        yield from self._job_metrics()
        yield GaugeMetricFamily(
            "rollout_operator_queue_depth", "Jobs that are due now or later.", value=self._reconciler.num_queued
        )
        counts = self._reconciler.counts
        for name, text, value in (
            ("reconciles", "Reconciles of jobs.", counts.reconciles),
            ("reconcile_errors", "Reconciles that failed and are retried.", counts.errors),
            ("reconcile_conflicts", "Reconciles of jobs that had changed since they were observed.", counts.conflicts),
            ("reconcile_seconds", "Total duration of all reconciles.", counts.seconds),
        ):
            yield CounterMetricFamily(f"rollout_operator_{name}", text, value=value)
        requests = CounterMetricFamily(
            "rollout_operator_api_requests", "Requests to the API server.", labels=["verb", "kind"]
        )
        for labels, count in self._api.request_counts.items():
            requests.add_metric(labels, count)
        yield requests

    def _job_metrics(self) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("rollout_operator_jobs", "RolloutJobs by state.", labels=["state"])
        job_labels = ["namespace", "job"]
        states = GaugeMetricFamily(
            "rollout_operator_job_state", "1 for the state that the job is in.", labels=[*job_labels, "state"]
        )
        gpus = GaugeMetricFamily("rollout_operator_job_gpus", "GPUs of the job's worker pods.", labels=job_labels)
        counts: Counter[str] = Counter()
        for (namespace, name), status in self._cache.statuses(self._reconciler.namespaces).items():
            labels, state = [namespace, f"{namespace}/{name}"], status.get("state", State.PENDING)
            counts[state] += 1
            states.add_metric([*labels, state], 1)
            gpus.add_metric(labels, (status.get("workers") or {}).get("gpus", 0))
        for state, count in counts.items():
            jobs.add_metric([state], count)
        yield from (jobs, states, gpus)


class OperatorServer(HttpServer):
    """Serves the endpoints from the running event loop."""

    def __init__(self, collector: MetricsCollector, token: StatusToken | None = None) -> None:
        """Create a server; :meth:`start` makes it listen.

        ``/metrics`` needs the *token*, if there is one.
        """
        self.ready = False
        """Whether the API server was reached. An operator that waits to become the leader is ready, too."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        ProcessCollector(registry=registry)
        super().__init__(registry, {"/healthz": self._health, "/readyz": self._readiness}, token)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readiness(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n" if self.ready else "starting\n", status=200 if self.ready else 503)
