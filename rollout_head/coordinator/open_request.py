"""A request that is admitted and not fully answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.messages import RolloutRequest
from rollout_head.coordinator.remaining_length import SimilarRollouts
from rollout_head.coordinator.sibling_lengths import SiblingLengths
from rollout_head.limits import RUNNING_LENGTH_STEP


@dataclass
class OpenRequest:
    """A request that is admitted and not fully answered, and the state of its samples."""

    entry_id: str
    """Id of the request's entry in the request stream."""
    request: RolloutRequest
    arrival: int
    """Position of the request in the order of arrival."""
    deadline: float | None
    """Unix time by Redis' clock; None if there is none."""
    lengths: SiblingLengths = field(default_factory=SiblingLengths)
    """Lengths of earlier rollouts of the problem, and of siblings."""
    done: set[int] = field(default_factory=set)
    """Samples that have ended."""
    assigned: dict[int, str] = field(default_factory=dict)
    """Sample → id of the engine that produces it."""
    assigned_at: dict[int, float] = field(default_factory=dict)
    """Sample → ``time.monotonic()`` of its assignment."""
    cancelled: bool = False
    recovered: bool = False
    """Whether another coordinator may have assigned its samples before."""
    started: set[int] = field(default_factory=set)
    """Samples for which this coordinator has sent an order, or has tried to: the reply may have been lost."""
    informed: set[str] = field(default_factory=set)
    """Ids of engines that have received the request with an order."""

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @cached_property
    def _reaches_limit(self) -> bool:
        """Whether only ``max_tokens`` ends the samples, whatever the lengths of earlier rollouts."""
        sampling = self.request.sampling
        return sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids

    @cached_property
    def group(self) -> str:
        """Name of the group of siblings to which the request belongs: its problem, turn and purpose.

        Turns of a trajectory have lengths of their own, and so do evaluation rollouts, whose settings differ.
        """
        return f"{self.request.purpose}/{self.request.turn}/{self.request.problem}"

    def rollout_id(self, sample: int) -> str:
        """Return the id of a sample's rollout."""
        return str(self.request.rollout_id(sample))

    def is_first(self, sample: int) -> bool:
        """Return whether no engine has had a sample before."""
        return not self.recovered and sample not in self.started

    @property
    def predicted_length(self) -> float:
        """Expected length of a sample in tokens."""
        return float(self.request.sampling.max_tokens) if self._reaches_limit else self.lengths.expected

    def estimated_tokens(self, sample: int, rate: float, now: float) -> int:
        """Estimate how many tokens a running sample has, at *rate* tokens per second since its assignment."""
        elapsed = now - self.assigned_at.get(sample, now)
        estimate = round(rate * elapsed / RUNNING_LENGTH_STEP) * RUNNING_LENGTH_STEP
        return min(self.request.sampling.max_tokens - 1, estimate)

    def remaining_work(self, rate: float, now: float) -> Iterator[SimilarRollouts]:
        """Yield the samples that have not ended, in groups of equal estimated length; waiting samples come first."""
        if waiting := self.request.sampling.n - len(self.done) - len(self.assigned):
            yield self._samples_at(0, waiting)
        if len(self.assigned) == 1:
            [sample] = self.assigned
            yield self._samples_at(self.estimated_tokens(sample, rate, now), 1)
            return
        for length, count in Counter(self.estimated_tokens(sample, rate, now) for sample in self.assigned).items():
            yield self._samples_at(length, count)

    def _samples_at(self, length: int, count: int) -> SimilarRollouts:
        max_tokens = self.request.sampling.max_tokens
        stats = _always(max_tokens) if self._reaches_limit else self.lengths.stats
        return SimilarRollouts(stats, length, max_tokens, count)


@lru_cache
def _always(length: int) -> LengthStats:
    """Return the statistics of rollouts that all have this length."""
    return LengthStats.from_lengths([(0, length, False)])
