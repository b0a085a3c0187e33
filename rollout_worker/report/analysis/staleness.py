"""How many weight versions rollouts were behind when they ended."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from rollout_api.protocol.timeline import Measurement
from rollout_worker.report.analysis.steps import Step


class PublishedVersions:
    """The newest published weight version at each moment."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._times: list[float] = []
        self._versions: list[int] = []
        for measurement in measurements:
            if not self._versions or measurement.weight_version > self._versions[-1]:
                self._times.append(measurement.time)
                self._versions.append(measurement.weight_version)

    def at(self, time: float) -> int:
        """Return the newest version that was published at *time*."""
        index = bisect_right(self._times, time)
        return self._versions[index - 1] if index else 0


def staleness_of(step: Step, published: PublishedVersions) -> Counter[int]:
    """Return the number of rollouts by the staleness of their oldest token."""
    counts: Counter[int] = Counter()
    for one in step.sampled:
        oldest = one.rollout.oldest_version
        if oldest is not None:
            counts[max(0, published.at(one.rollout.finished_at) - oldest)] += 1
    return counts
