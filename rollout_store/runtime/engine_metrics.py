"""The statistics of engines as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

MetricKind = type[GaugeMetricFamily | CounterMetricFamily]
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily

ENGINE_METRICS: dict[str, tuple[MetricKind, str]] = {
    "running": (_GAUGE, "Rollouts that vLLM is decoding."),
    "waiting": (_GAUGE, "Rollouts that vLLM has queued."),
    "kv_cache_usage": (_GAUGE, "Share of the KV cache that is in use."),
    "prompt_tokens": (_COUNTER, "Tokens of prompts and prefixes that were read."),
    "cached_tokens": (_COUNTER, "Tokens of prompts and prefixes whose keys and values were cached."),
    "tokens": (_COUNTER, "Response tokens."),
    "preemptions": (_COUNTER, "How often a running rollout lost its keys and values."),
    "draft_tokens": (_COUNTER, "Draft tokens that were verified."),
    "accepted_tokens": (_COUNTER, "Draft tokens that were accepted."),
    "proposed_tokens": (_COUNTER, "Draft tokens that the drafter proposed."),
    "weights_gap_seconds": (_GAUGE, "Pause of decoding during the last weight update."),
    "weights_update_seconds": (_GAUGE, "Duration of the last weight update, from its order to its end."),
    "decoding_steps": (_COUNTER, "Decoding steps."),
    "drafting_seconds": (_COUNTER, "Time that the drafter has taken."),
    "drafting_failures": (_COUNTER, "How often drafting failed; each failure costs the drafts of one step."),
    "index_bytes": (_GAUGE, "Memory of the suffix index."),
    "cost_base_seconds": (_GAUGE, "Cost model: constant part of a verification step."),
    "length_explained_ratio": (
        _GAUGE,
        "Share of the variance of remaining lengths (in logarithms) that marginal-with-lengths has explained so far.",
    ),
    "cost_token_seconds": (_GAUGE, "Cost model: time per verified token."),
    "cost_context_token_seconds": (_GAUGE, "Cost model: time per token of context."),
    "cost_drafting_seconds": (_GAUGE, "Cost model: time of drafting in a step."),
    "cost_experts_seconds": (_GAUGE, "Cost model: time to read all experts of a mixture of experts."),
    "cost_error_ratio": (_GAUGE, "Median relative error of the cost model."),
    "timed_seconds": (_COUNTER, "Duration of the measured steps."),
    "timed_seconds_without_drafts": (_COUNTER, "Predicted duration of the measured steps' tokens without drafts."),
    "drafting_disabled": (_GAUGE, "Whether the governor has disabled drafting."),
    "drafting_stops": (_COUNTER, "How often the governor has disabled drafting."),
    "trial_tokens": (_COUNTER, "Tokens of trials, which were drafted while drafting was disabled."),
    "history_rollouts": (_COUNTER, "Rollouts that were read from the history."),
    "history_tokens": (_COUNTER, "Tokens of rollouts that were read from the history."),
    "history_corrupt": (_COUNTER, "Records of the history that could not be read."),
    "history_evictions": (_COUNTER, "Problems that were evicted from the suffix index."),
    "history_failures": (_COUNTER, "Reads and writes of the history that failed."),
    "recorded_rollouts": (_COUNTER, "Rollouts that an engine without a job has recorded in its history."),
    "lost_rollouts": (_COUNTER, "Rollouts that it has not, because the history did not answer or refused them."),
    "measured_timestamp_seconds": (_GAUGE, "Unix time of the last measurement."),
}
"""Counter in an engine's report → kind and description of its metric, whose name begins with ``rollout_engine_``."""

LABELED_ENGINE_METRICS: dict[str, tuple[MetricKind, str, str]] = {
    "source_proposed_tokens": (
        _COUNTER,
        "source",
        "Draft tokens that were proposed, including those not worth verifying.",
    ),
    "source_draft_tokens": (_COUNTER, "source", "Draft tokens that were verified, by source."),
    "source_accepted_tokens": (_COUNTER, "source", "Draft tokens that were accepted, by source."),
    "position_draft_tokens": (
        _COUNTER,
        "position",
        "Draft tokens that were verified, by position of the draft, from 1.",
    ),
    "position_accepted_tokens": (
        _COUNTER,
        "position",
        "Draft tokens that were accepted, by position of the draft, from 1.",
    ),
    "class_rollouts": (_GAUGE, "class", "Running rollouts, by length class."),
    "class_steps": (_COUNTER, "class", "Verification steps of rollouts, by length class."),
    "class_budget_tokens": (_COUNTER, "class", "Draft tokens that were permitted in these steps, by length class."),
    "class_draft_tokens": (_COUNTER, "class", "Draft tokens that were verified, by length class."),
    "class_accepted_tokens": (_COUNTER, "class", "Draft tokens that were accepted, by length class."),
}
"""Labeled number in an engine's report → kind, label and description of its metric, as in :data:`ENGINE_METRICS`."""


class EngineStatistics(NamedTuple):
    """The statistics of one engine."""

    labels: Sequence[str]
    """Values of the labels that identify the engine."""
    counters: Mapping[str, float]
    """Values of :data:`ENGINE_METRICS` by name."""
    labeled_counters: Mapping[str, Mapping[str, int]]
    """Values of :data:`LABELED_ENGINE_METRICS` by name, and then by label."""


def engine_metrics(engines: Iterable[EngineStatistics], labels: Sequence[str]) -> Iterator[Metric]:
    """Yield one metric family for each statistic that an engine has; *labels* identify the engine."""
    engines = list(engines)
    for name, (kind, text) in ENGINE_METRICS.items():
        rows = [(engine.labels, engine.counters[name]) for engine in engines if name in engine.counters]
        if rows:
            yield metric_family(kind, f"engine_{name}", text, labels, rows)
    for name, (kind, label, text) in LABELED_ENGINE_METRICS.items():
        labeled = [
            ([*engine.labels, value], count)
            for engine in engines
            for value, count in engine.labeled_counters.get(name, {}).items()
        ]
        if labeled:
            yield metric_family(kind, f"engine_{name}", text, [*labels, label], labeled)


def metric_family(
    kind: MetricKind, name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return the metric ``rollout_NAME`` with a value for each of *rows*, which begin with the labels' values."""
    family = kind(f"rollout_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
