"""The coordinator's status as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from rollout_api.protocol.status import CoordinatorStatus
from rollout_head.coordinator.distributions import Distribution, RolloutDistributions
from rollout_store.runtime.engine_metrics import EngineStatistics, engine_metrics, metric_family

_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily

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
            yield metric_family(_GAUGE, name, text, ["job"], [(job, value)])
        for name, (text, value) in _counters(status).items():
            yield metric_family(_COUNTER, name, text, ["job"], [(job, value)])
        unread = [([*job, client], size) for client, size in status["unread_bytes"].items()]
        text = "Bytes of the results that a client has not read."
        yield metric_family(_GAUGE, "results_unread_bytes", text, ["job", "client"], unread)
        errors = [([*job, kind], errors["count"]) for kind, errors in status["environment_errors"].items()]
        text = "Rollouts of a dataset source that got no reward from its environment."
        yield metric_family(_GAUGE, "environment_errors", text, ["job", "type"], errors)
        distributions = self._source.distributions
        for name, (distribution, text) in HISTOGRAMS.items() if distributions is not None else ():
            histogram = HistogramMetricFamily(name, text, labels=["job"])
            shown: Distribution = getattr(distributions, distribution)
            histogram.add_metric(job, shown.cumulative(), shown.total)
            yield histogram
        versions = [([*job, engine["name"]], engine["version"]) for engine in status["engines"]]
        text = "Weight version that the engine serves."
        yield metric_family(_GAUGE, "engine_weight_version", text, ["job", "engine"], versions)
        engines = (
            EngineStatistics([*job, engine["name"]], engine["counters"], engine["labeled_counters"])
            for engine in status["engines"]
        )
        yield from engine_metrics(engines, ["job", "engine"])

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
        "conflicts": (
            "Rewards and rollouts that were refused because the job does not know these tokens.",
            status["conflicts"],
        ),
    }
