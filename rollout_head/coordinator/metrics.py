"""The coordinator's status as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from rollout_api.protocol.status import CoordinatorStatus
from rollout_head.coordinator.distributions import Distribution, RolloutDistributions

_Kind = type[GaugeMetricFamily | CounterMetricFamily]
_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily

ENGINE_METRICS: dict[str, tuple[_Kind, str]] = {
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
    "measured_timestamp_seconds": (_GAUGE, "Unix time of the last measurement."),
}
"""Counter in an engine's report → kind and description of its metric, whose name begins with ``rollout_engine_``."""

LABELED_ENGINE_METRICS = {
    "source_proposed_tokens": ("source", "Draft tokens that were proposed, including those not worth verifying."),
    "source_draft_tokens": ("source", "Draft tokens that were verified, by source."),
    "source_accepted_tokens": ("source", "Draft tokens that were accepted, by source."),
    "position_draft_tokens": ("position", "Draft tokens that were verified, by position of the draft, from 1."),
    "position_accepted_tokens": ("position", "Draft tokens that were accepted, by position of the draft, from 1."),
}
"""Labeled counter in an engine's report → label and description of its metric, as in :data:`ENGINE_METRICS`."""


HISTOGRAMS: dict[str, tuple[str, str]] = {
    "rollout_queue_seconds": (
        "queue_seconds",
        "Time from the arrival of a request in Redis until an engine starts the rollout.",
    ),
    "rollout_sampling_seconds": (
        "sampling_seconds",
        "Time from the start of a rollout, on the engine that has ended it, to its end.",
    ),
    "rollout_latency_seconds": ("latency_seconds", "Time from the arrival of a request in Redis to the rollout's end."),
    "rollout_response_tokens": ("response_tokens", "Response tokens of a rollout that was not interrupted."),
    "rollout_accepted_tokens_per_step": (
        "accepted_per_step",
        "Accepted draft tokens per decoding step of a rollout.",
    ),
    "rollout_staleness_versions": (
        "staleness_versions",
        "Weight versions that the oldest token of a rollout is behind the newest version at the rollout's end.",
    ),
    "rollout_weight_update_seconds": (
        "weight_update_seconds",
        "Duration of an engine's weight update, from its order to its end.",
    ),
    "rollout_weight_gap_seconds": ("weight_gap_seconds", "Pause of an engine's decoding during a weight update."),
}
"""Name of a histogram → the distribution that it shows, and its description."""


class StatusSource(Protocol):
    """What the metrics show."""

    @property
    def last(self) -> CoordinatorStatus | None:
        """The last status; None before the first one."""

    @property
    def distributions(self) -> RolloutDistributions | None:
        """What the histograms show; None if it is unknown, because only the coordinator's process has it."""

    @property
    def age_s(self) -> float:
        """Age of the status, in seconds."""


class StatusMetrics:
    """A ``prometheus_client`` collector of the last status. Labels name the job, engine or client, never a prompt."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family for each figure."""
        status = self._source.last
        if status is None:
            return
        job = [status["job"]]
        for name, (text, value) in self._gauges(status).items():
            yield _family(_GAUGE, name, text, ["job"], [(job, value)])
        for name, (text, value) in _counters(status).items():
            yield _family(_COUNTER, name, text, ["job"], [(job, value)])
        unread = [([*job, client], size) for client, size in status["unread_bytes"].items()]
        text = "Bytes of the results that a client has not read."
        yield _family(_GAUGE, "results_unread_bytes", text, ["job", "client"], unread)
        errors = [([*job, kind], errors["count"]) for kind, errors in status["environment_errors"].items()]
        text = "Rollouts of a dataset source that got no reward from its environment."
        yield _family(_GAUGE, "environment_errors", text, ["job", "type"], errors)
        distributions = self._source.distributions
        for name, (distribution, text) in HISTOGRAMS.items() if distributions is not None else ():
            histogram = HistogramMetricFamily(name, text, labels=["job"])
            shown: Distribution = getattr(distributions, distribution)
            histogram.add_metric(job, shown.cumulative(), shown.total)
            yield histogram
        versions = [([*job, engine["name"]], engine["version"]) for engine in status["engines"]]
        text = "Weight version that the engine serves."
        yield _family(_GAUGE, "engine_weight_version", text, ["job", "engine"], versions)
        for name, (kind, text) in ENGINE_METRICS.items():
            rows = [
                ([*job, engine["name"]], engine["counters"][name])
                for engine in status["engines"]
                if name in engine["counters"]
            ]
            if rows:
                yield _family(kind, f"engine_{name}", text, ["job", "engine"], rows)

        for name, (label, text) in LABELED_ENGINE_METRICS.items():
            rows = [
                ([*job, engine["name"], value], count)
                for engine in status["engines"]
                for value, count in engine["labeled_counters"].get(name, {}).items()
            ]
            if rows:
                yield _family(_COUNTER, f"engine_{name}", text, ["job", "engine", label], rows)

    def _gauges(self, status: CoordinatorStatus) -> dict[str, tuple[str, float]]:
        gauges: dict[str, tuple[str, float]] = {
            "requests_open": ("Requests that are not fully answered.", status["requests"]),
            "rollouts_waiting": ("Rollouts that are not assigned to an engine.", status["waiting"]),
            "rollouts_assigned": ("Rollouts that are assigned to an engine.", status["assigned"]),
            "engines": ("Engines with a valid lease.", len(status["engines"])),
            "engines_failed": ("Engines that cannot start.", len(status["engine_errors"])),
            "status_age_seconds": ("Age of these figures; it grows while Redis is unavailable.", self._source.age_s),
            "weight_version": ("Weight version that the engines should serve.", status["weight_version"]),
            "drift_e_value": (
                "Evidence that drafting changes the output distribution; 1000 raises the alarm.",
                status["drift_e_value"],
            ),
            "distribution_drift": (
                "Whether the e-value has ever reached the alarm threshold.",
                float(status["distribution_drift"]),
            ),
            "engines_speculation_disabled": (
                "Engines without speculation because drafting did not pay.",
                sum(engine["speculation_disabled"] for engine in status["engines"]),
            ),
            "engines_unverified": (
                "Engines whose vLLM does not verify the proposed drafts.",
                len(status["unverified"]),
            ),
            "tokens_per_second": ("Response tokens per second over the last seconds.", status["tokens_per_second"]),
        }
        if status["saved"] is not None:
            gauges["saved_ratio"] = ("Fraction of the decoding time that drafting has saved.", status["saved"])
        if status["remaining_seconds"] is not None:
            gauges["remaining_seconds"] = (
                "Estimated time until all open requests are answered.",
                status["remaining_seconds"],
            )
        if status["tail_seconds"] is not None:
            gauges["tail_seconds"] = ("Estimated time until the longest open rollout ends.", status["tail_seconds"])
        return gauges


def _counters(status: CoordinatorStatus) -> dict[str, tuple[str, float]]:
    return {
        "rollouts": ("Rollouts that have ended.", status["done"]),
        "tokens": ("Response tokens of rollouts that have ended.", status["tokens"]),
        "decoding_steps": ("Decoding steps of rollouts that have ended.", status["decoding_steps"]),
        "draft_tokens": ("Draft tokens of rollouts that have ended.", status["draft_tokens"]),
        "accepted_tokens": ("Accepted draft tokens of rollouts that have ended.", status["accepted_tokens"]),
        "canaries": ("Canaries that were compared with their siblings.", status["canaries"]),
        "engines_lost": ("Engines that this coordinator has lost.", status["engines_lost"]),
        "dead_letters": ("Messages that this coordinator has moved to the dead letters.", status["dead_letters"]),
    }


def _family(
    kind: _Kind,
    name: str,
    text: str,
    labels: list[str],
    rows: Sequence[tuple[list[str], float]],
) -> Metric:
    family = kind(f"rollout_{name}", text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
