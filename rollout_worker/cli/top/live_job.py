"""What ``rollout top`` shows of a job, and how it follows from what was read."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.status import CoordinatorStatus, EngineEntry
from rollout_api.protocol.timeline import EndedRollout, Measurement
from rollout_worker.job.job_store import RolloutProgress

RECENT_S = 300.0
"""Seconds over which what has ended recently is summed up."""
MAX_RECENT = 5000
"""Number of rollouts that have ended lately that are kept."""
MAX_MEASUREMENTS = 240
"""Number of latest measurements that are kept."""


class RunningRollout(NamedTuple):
    """A running rollout, and how long it is expected to become."""

    engine: str
    """Name of its engine."""
    progress: RolloutProgress
    median: float | None
    """Length that it does not exceed with probability 0.5, given its length so far; None if it is unknown."""
    high: float | None
    """The same with probability 0.9."""
    surprise: float | None
    """Share of the problem's earlier rollouts that were at most as long as it is now; None without any."""

    @property
    def expected_remaining(self) -> float:
        """Tokens that it probably still generates; up to its limit if nothing is known."""
        end = self.progress.max_tokens if self.median is None else min(self.median, self.progress.max_tokens)
        return max(0.0, end - self.progress.tokens)


class Acceptance(NamedTuple):
    """Draft tokens of one kind."""

    label: str
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Share of them that was accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass
class LiveJob:
    """What is known of a job at one moment."""

    status: CoordinatorStatus
    running: Sequence[RunningRollout] = ()
    """Running rollouts, those that are expected to end last first."""
    recent: deque[EndedRollout] = field(default_factory=lambda: deque(maxlen=MAX_RECENT))
    """Rollouts that have ended lately, oldest first."""
    measurements: deque[Measurement] = field(default_factory=lambda: deque(maxlen=MAX_MEASUREMENTS))

    @property
    def seconds_saved(self) -> float:
        """Seconds of decoding that drafting has saved on all live engines, by their cost models."""
        counters = [engine["counters"] for engine in self.status["engines"]]
        return sum(each.get("timed_seconds_without_drafts", 0.0) - each.get("timed_seconds", 0.0) for each in counters)

    @property
    def num_beyond_median(self) -> int:
        """Number of running rollouts that are longer than half of the earlier rollouts of their problems."""
        return sum(one.surprise is not None and one.surprise >= 0.5 for one in self.running)

    def staleness(self, now: float) -> tuple[float, int] | None:
        """Return the mean and the largest staleness of the rollouts that have ended lately; None without any.

        Args:
            now: Unix time.
        """
        newest = self.status["weight_version"]
        ages = [
            max(0, newest - one.oldest_version)
            for one in self.recent
            if one.oldest_version is not None and one.finished_at > now - RECENT_S
        ]
        return (statistics.fmean(ages), max(ages)) if ages else None

    def acceptance(self, kind: str) -> list[Acceptance]:
        """Return the acceptance of draft tokens by ``source`` or by ``position``, over all live engines."""
        drafted: dict[str, int] = {}
        accepted: dict[str, int] = {}
        for engine in self.status["engines"]:
            counters = engine["labeled_counters"]
            for total, name in ((drafted, "draft"), (accepted, "accepted")):
                for label, count in counters.get(f"{kind}_{name}_tokens", {}).items():
                    total[label] = total.get(label, 0) + count
        return [Acceptance(label, count, accepted.get(label, 0)) for label, count in drafted.items() if count]


def predicted(
    progress: Mapping[str, Iterable[RolloutProgress]],
    lengths: Mapping[str, LengthStats],
    engines: Iterable[EngineEntry],
) -> list[RunningRollout]:
    """Return the running rollouts of live engines, those that are expected to end last first.

    Args:
        progress: running rollouts by engine id.
        lengths: statistics of earlier rollouts by problem id.
        engines: the live engines.
    """
    names = {engine["id"]: engine["name"] for engine in engines}
    running = [
        _predict(names[engine], one, lengths.get(one.problem_id))
        for engine, rollouts in progress.items()
        if engine in names
        for one in rollouts
    ]
    return sorted(running, key=lambda one: (-one.expected_remaining, -one.progress.tokens, one.progress.request_id))


def _predict(engine: str, progress: RolloutProgress, stats: LengthStats | None) -> RunningRollout:
    if stats is None or not stats.count:
        return RunningRollout(engine, progress, None, None, None)
    return RunningRollout(
        engine,
        progress,
        stats.quantile(0.5, so_far=progress.tokens),
        stats.quantile(0.9, so_far=progress.tokens),
        1.0 - stats.prob_longer_than(progress.tokens),
    )
