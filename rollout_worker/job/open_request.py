"""A request that is taken up and not answered in full, as the coordinator sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.messages import RolloutRequest
from rollout_worker.history.lengths import NOTHING_KNOWN
from rollout_worker.policy.remaining_length import Ahead

_ROUNDED = 64


@dataclass
class OpenRequest:
    """A request that is taken up and not answered in full."""

    entry: str
    request: RolloutRequest
    arrival: int
    deadline: float | None
    """By Redis' clock."""
    history: LengthStats = NOTHING_KNOWN
    """How long earlier rollouts of the problem were."""
    done: set[int] = field(default_factory=set)
    assigned: dict[int, str] = field(default_factory=dict)
    """Sample → engine."""
    since: dict[int, float] = field(default_factory=dict)
    """Sample → when the engine got it, by this process's clock."""
    lengths: list[int] = field(default_factory=list)
    """Of the samples that ended."""
    cancelled: bool = False

    @property
    def predicted(self) -> float:
        """Expected length, in tokens, of a sample: the history's mean, which two samples of this group outweigh."""
        prior = 2 if self.history.count else 0
        count = prior + len(self.lengths)
        return (prior * self.history.mean + sum(self.lengths)) / count if count else 0.0

    def so_far(self, sample: int, rate: float, now: float) -> int:
        """About how many tokens a sample has whose engine says *rate* of them a second."""
        # rounded, so that those that began together count together
        said = round(rate * (now - self.since.get(sample, now)) / _ROUNDED) * _ROUNDED
        return min(self.request.sampling.max_tokens - 1, said)

    def ahead(self, rate: float, now: float) -> Iterator[Ahead]:
        """Its samples that have not ended; those that wait come first."""
        waiting = self.request.sampling.n - len(self.done) - len(self.assigned)
        yield self._alike(0, waiting)
        for so_far, rollouts in Counter(self.so_far(sample, rate, now) for sample in self.assigned).items():
            yield self._alike(so_far, rollouts)

    def ahead_of(self, sample: int, rate: float, now: float) -> Ahead:
        """One that runs."""
        return self._alike(self.so_far(sample, rate, now), 1)

    def _alike(self, so_far: int, rollouts: int) -> Ahead:
        known = self.history
        if len(self.lengths) > 1 or not known.count:
            known = LengthStats.of((0, length, False) for length in self.lengths)
        return Ahead(known, so_far, self.request.sampling.max_tokens, rollouts)
