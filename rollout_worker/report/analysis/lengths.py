"""Lengths of rollouts, and how well those of earlier generations predict them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollout_api.length_stats import LengthStats
from rollout_worker.report.recording import PastLength

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Probabilities for which the calibration is examined."""


class PredictedLengths(NamedTuple):
    """What the earlier generations of a problem predict about a generation; None is beyond all observed lengths."""

    generation: int
    low: float | None
    """Quantile of 10 %."""
    median: float | None
    high: float | None
    """Quantile of 90 %."""


@dataclass(frozen=True)
class CalibrationPoint:
    """How often lengths were at most a predicted quantile."""

    predicted: float
    """Probability of the quantile."""
    observed: float
    """Share of the rollouts that were at most as long."""
    count: int
    """Number of rollouts."""


def by_generation(entries: Sequence[PastLength]) -> dict[int, list[PastLength]]:
    """Return the rollouts of each generation, oldest first."""
    grouped: defaultdict[int, list[PastLength]] = defaultdict(list)
    for entry in entries:
        grouped[entry.generation].append(entry)
    return dict(sorted(grouped.items()))


def stats_before(entries: Sequence[PastLength]) -> dict[int, LengthStats]:
    """Return, for each generation but the first, the length statistics of the earlier ones."""
    earlier: list[PastLength] = []
    statistics: dict[int, LengthStats] = {}
    for generation, of_generation in by_generation(entries).items():
        if earlier:
            statistics[generation] = LengthStats.from_lengths(
                (entry.generation, entry.length, entry.cut_off) for entry in earlier
            )
        earlier += of_generation
    return statistics


def predictions(entries: Sequence[PastLength]) -> list[PredictedLengths]:
    """Return what was predicted for each generation but the first."""
    return [
        PredictedLengths(generation, stats.quantile(0.1), stats.quantile(0.5), stats.quantile(0.9))
        for generation, stats in stats_before(entries).items()
    ]


def calibration(lengths: Mapping[str, Sequence[PastLength]]) -> list[CalibrationPoint]:
    """Compare the quantiles that earlier generations predict with the lengths of all problems' rollouts.

    A rollout that was cut off below a quantile does not count there, because its full length is unknown.
    """
    below: defaultdict[float, int] = defaultdict(int)
    count: defaultdict[float, int] = defaultdict(int)
    for entries in lengths.values():
        of_generation = by_generation(entries)
        for generation, stats in stats_before(entries).items():
            for probability in QUANTILES:
                limit = stats.quantile(probability)
                if limit is None:
                    continue
                for entry in of_generation[generation]:
                    if entry.length > limit or not entry.cut_off:
                        count[probability] += 1
                        below[probability] += entry.length <= limit
    return [CalibrationPoint(one, below[one] / count[one], count[one]) for one in QUANTILES if count[one]]
