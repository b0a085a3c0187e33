"""Distributions of what rollouts and weight updates have taken, since this coordinator began."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from rollout_api.protocol.messages import FinishReason
from rollout_api.protocol.timeline import EndedRollout
from rollout_store.job import EngineReport

_COMPLETE = frozenset(reason.value for reason in FinishReason if reason.complete)
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)
_SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = tuple(2**exponent for exponent in range(4, 18))
_ACCEPTED = (0, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
_VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


@dataclass
class Distribution:
    """Number of observed values in each bucket."""

    bounds: Sequence[float]
    """Upper bounds of the buckets, in ascending order; a value that equals a bound is in its bucket."""
    counts: list[int] = field(init=False)
    """Number of values in each bucket, and of those above all bounds."""
    total: float = 0.0
    """Sum of the values."""

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return the upper bounds as text, ending with ``+Inf``, each with the number of values up to it."""
        bounds = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


@dataclass
class RolloutDistributions:
    """The distributions over all rollouts that have ended, and over all weight updates of all engines."""

    queue_seconds: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    """From the arrival of a request until an engine starts the rollout."""
    sampling_seconds: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    """From then until the rollout ends."""
    latency_seconds: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    """From the arrival of the request until the rollout ends."""
    response_tokens: Distribution = field(default_factory=lambda: Distribution(_TOKENS))
    accepted_per_step: Distribution = field(default_factory=lambda: Distribution(_ACCEPTED))
    """Accepted draft tokens per decoding step of a rollout."""
    staleness_versions: Distribution = field(default_factory=lambda: Distribution(_VERSIONS))
    """Number of weight versions that a rollout's oldest token is behind the newest one when the rollout ends."""
    weight_update_seconds: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    """From the order to load weights until an engine serves them."""
    weight_gap_seconds: Distribution = field(default_factory=lambda: Distribution(_SHORT_SECONDS))
    """Pause of an engine's decoding during a weight update."""
    _versions: dict[str, int] = field(default_factory=dict)
    """Engine → weight version that it served at the last observation."""

    def observe_rollout(self, rollout: EndedRollout, newest_version: int) -> None:
        """Count a rollout that has ended; one that no engine has sampled has only a latency."""
        self.latency_seconds.observe(rollout.finished_at - rollout.arrived_at)
        if not rollout.started_at:
            return
        # The clocks of Redis and the engine may differ.
        self.queue_seconds.observe(max(0.0, rollout.started_at - rollout.arrived_at))
        self.sampling_seconds.observe(max(0.0, rollout.finished_at - rollout.started_at))
        if rollout.finish_reason in _COMPLETE:  # a reason of a later release is none of these
            self.response_tokens.observe(rollout.tokens)
        if rollout.decoding_steps:
            self.accepted_per_step.observe(rollout.accepted_tokens / rollout.decoding_steps)
        if rollout.oldest_version is not None:
            self.staleness_versions.observe(max(0, newest_version - rollout.oldest_version))

    def observe_engines(self, engines: Mapping[str, EngineReport]) -> None:
        """Count the weight updates that engines have reported since the last call.

        Args:
            engines: reports of the live engines by id.
        """
        for engine, report in engines.items():
            if report.version != self._versions.get(engine, report.version):
                self.weight_update_seconds.observe(report.counters.get("weights_update_seconds", 0.0))
                self.weight_gap_seconds.observe(report.counters.get("weights_gap_seconds", 0.0))
        self._versions = {engine: report.version for engine, report in engines.items()}
