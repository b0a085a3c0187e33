"""Generate docs/metrics.md from the collectors of the metrics: ``python scripts/metrics_docs.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from kubernetes.client import ApiClient
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from rollout_operator.cluster.http_server import MetricsCollector
from rollout_operator.cluster.kubernetes_api import KubernetesApi
from rollout_operator.cluster.object_cache import ObjectCache
from rollout_operator.cluster.reconciler import Reconciler

from rollout_api.manifest.rollout_job import API_VERSION, KIND, parse_job
from rollout_head.coordinator.metrics import StatusMetrics
from rollout_head.coordinator.state import CoordinatorLimits, CoordinatorState
from rollout_head.coordinator.status import StatusBuilder
from rollout_store.history_service.service import HistoryCollector, ServiceState
from rollout_store.job import EngineReport
from rollout_store.runtime.engine_metrics import ENGINE_METRICS, LABELED_ENGINE_METRICS

TARGET = Path(__file__).parents[1] / "docs" / "metrics.md"

HEAD = """# Metrics

This page lists the metrics that the processes of das-rollout export for Prometheus, at `/metrics`. It is generated from
the code that exports them by `python scripts/metrics_docs.py`.

| Process | Address | Metrics begin with |
|---|---|---|
| head of a job | `--http-port`, 8080 by default | `rollout_`, and for its engines `rollout_engine_` |
| `vllm serve` with the [drafter](own-engines.md) | vLLM's `/metrics` | `rollout_engine_` |
| history service | `--port`, 8080 by default | `rollout_history_` |
| operator | `--port`, 8081 by default | `rollout_operator_` |

The chart creates what Prometheus needs to scrape them, alerts and Grafana dashboards
([The Helm chart](../charts/das-rollout/README.md#values)). A
[token](../charts/das-rollout/README.md#a-token-for-status-and-metrics) can protect them. No metric has a label with a
prompt, a problem or a text. The history service and the operator also export the usual metrics of a process
(`process_…`)."""

JOB = """## Job

The head exports these metrics. `job` is `NAMESPACE/NAME`.

- Counters of rollouts and tokens are those of the whole job: a new coordinator continues them.
  `rollout_engines_lost_total` and `rollout_dead_letters_total` begin at 0 with each coordinator.
- `rollout_saved_ratio`, `rollout_remaining_seconds` and `rollout_tail_seconds` are absent while they are unknown. The
  first one uses each engine's fitted cost model ([budgets.md](budgets.md#the-cost-model)); it is `status.timeSaved` of
  the RolloutJob. More engines shorten the remaining time, but not the tail.
- The histograms count what has ended since the coordinator began: a new coordinator begins at 0.
- The reasons behind `rollout_engines_failed` are in `/status`, and those behind `rollout_dead_letters_total` in the
  stream `rollout:{<uid>}:dead-letters`.
- `rollout_drift_e_value` is explained in [lossless.md](lossless.md#monitoring-while-it-runs)."""

ENGINES = """## Engines

The head exports these metrics for each engine, from the engine's last report. `vllm serve` with the
[drafter](own-engines.md) exports those that vLLM does not count itself, without the label `job`.

- The fitted cost model of a step is described in [budgets.md](budgets.md#the-cost-model). For a mixture of experts, its
  constant part and its time per token hold for steps with about one draft token per rollout;
  `rollout_engine_cost_experts_seconds` is 0 in a dense model.
- `rollout_engine_class_*` exist with the draft policies `das-classes`, `das-optimal` and `marginal-with-lengths`. The
  quotient of `rollout_engine_class_budget_tokens_total` and `rollout_engine_class_steps_total` is the mean
  [draft budget](budgets.md#length-classes) of a class.
- The exceptions behind `rollout_engine_drafting_failures_total` are in the log of the engine's worker."""

HISTORY = """## History service

The history service exports these metrics ([history.md](history.md#the-history-service)). Those of a history's size are
present while the service maintains the history.

- If `rollout_history_evicted_problems_total` rises, `history.maxBytes` is too small for one epoch.
- `rollout_history_trimmed_problems_total` counts deletions because the window has changed, and not rollouts that newer
  ones replace when these are appended."""

OPERATOR = """## Operator

The operator exports these metrics. Only the leader's numbers of jobs and reconciles change."""


def job_metrics() -> list[Metric]:
    """Return the metrics of a job with an engine that reports all of its counters."""
    spec = {"model": {"uri": "policy"}, "source": {"trainer": {}}}
    job = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "job"}, "spec": spec}
    state = CoordinatorState(CoordinatorLimits())
    state.engines["engine"] = EngineReport(
        "engine",
        counters=dict.fromkeys(ENGINE_METRICS, 0.0),
        labeled_counters={name: {"": 0} for name in LABELED_ENGINE_METRICS},
    )
    builder = StatusBuilder(state, parse_job(job), "")
    status = builder.update({}, {}, {})
    # Estimates are exported only while they are known.
    status["saved"] = status["remaining_seconds"] = status["tail_seconds"] = 0.0
    return list(StatusMetrics(builder).collect())


def operator_metrics() -> list[Metric]:
    """Return the metrics of an operator that has not contacted an API server."""
    api, cache = KubernetesApi(cast(ApiClient, None)), ObjectCache()
    return list(cast(Collector, MetricsCollector(api, cache, Reconciler(api, cache, "image"), None)).collect())


def labels(metric: Metric) -> tuple[str, ...]:
    """Return the names of a metric's labels, without those that belong to its type."""
    declared = getattr(metric, "_labelnames", None)
    if declared is None:
        declared = dict.fromkeys(name for sample in metric.samples for name in sample.labels)
    return tuple(name for name in declared if name not in ("le", "quantile"))


def table(metrics: list[Metric]) -> Iterator[str]:
    """Yield the lines of a table of metrics."""
    yield "| Metric | Type | Labels | Meaning |"
    yield "|---|---|---|---|"
    for metric in metrics:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        named = ", ".join(f"`{label}`" for label in labels(metric))
        yield f"| `{name}` | {metric.type} | {named} | {metric.documentation.replace('|', chr(92) + '|')} |"


def document() -> str:
    """Return the page."""
    of_head = job_metrics()
    engine_metrics = [metric for metric in of_head if metric.name.startswith("rollout_engine_")]
    sections = (
        (JOB, [metric for metric in of_head if metric not in engine_metrics]),
        (ENGINES, engine_metrics),
        (HISTORY, list(HistoryCollector(ServiceState()).collect())),
        (OPERATOR, operator_metrics()),
    )
    text = [HEAD]
    for introduction, metrics in sections:
        text += ["", introduction, "", *table(metrics)]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())
