"""The open requests: those that are admitted and not fully answered, and the groups that their rollouts form."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.messages import RolloutRequest
from rollout_store.history.remaining_length import SimilarRollouts
from rollout_store.history.store import NO_LENGTH_STATS

_RUNNING_LENGTH_STEP = 64
"""Tokens to which estimated lengths of running rollouts are rounded, so that similar ones are counted together."""
_HISTORY_WEIGHT = 2
"""Weight of the history's mean length in a prediction, in rollouts of the group itself."""
_MAX_LENGTHS = 128
"""Number of siblings, those that have ended last, whose lengths a prediction uses."""
_MIN_RELATIVE_CHANGE = 0.01
"""Smallest change of a group's expected length that reorders its waiting samples. It limits the work for groups
of very many requests."""


class SiblingLengths:
    """The lengths of a problem's earlier rollouts, and of the siblings that have ended.

    Args:
        history: statistics of the earlier rollouts.
    """

    def __init__(self, history: LengthStats = NO_LENGTH_STATS) -> None:
        self.history = history
        self._ended: deque[int] = deque(maxlen=_MAX_LENGTHS)
        self._stats: LengthStats | None = None
        """Statistics of the siblings that have ended; None if they have not been computed since the last end."""

    def append(self, length: int) -> None:
        """Record the length of a sibling that has ended, in tokens."""
        self._ended.append(length)
        self._stats = None

    @property
    def expected(self) -> float:
        """Expected length of a sibling in tokens: the history's mean, corrected by the siblings that have ended."""
        prior = _HISTORY_WEIGHT if self.history.count else 0
        count = prior + len(self._ended)
        return (prior * self.history.mean + sum(self._ended)) / count if count else 0.0

    @property
    def stats(self) -> LengthStats:
        """Statistics for predictions of remaining lengths. They are the same object until something changes."""
        if len(self._ended) <= (1 if self.history.count else 0):
            return self.history if self.history.count else NO_LENGTH_STATS
        if self._stats is None:
            self._stats = LengthStats.from_lengths((0, length, False) for length in self._ended)
        return self._stats


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
        estimate = round(rate * elapsed / _RUNNING_LENGTH_STEP) * _RUNNING_LENGTH_STEP
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


@dataclass
class SiblingGroup:
    """The open requests of one problem, turn and purpose, in one or several processes of the trainer."""

    name: str
    lengths: SiblingLengths
    """Lengths of earlier rollouts, and of siblings that have ended, also of requests that are answered."""
    requests: dict[str, OpenRequest] = field(default_factory=dict)
    """Open requests by id."""
    started: bool = False
    """Whether a rollout was assigned to an engine."""
    assigned: Counter[str] = field(default_factory=Counter)
    """Id of an engine → number of rollouts that are assigned to it, if there are any."""

    expected_length: float = 0.0
    """Expected length of a rollout in tokens, as it was last used for the order of the waiting samples."""

    def update_expected_length(self, length: float) -> bool:
        """Replace the expected length by *length* if it differs enough; return whether it does."""
        if abs(length - self.expected_length) <= _MIN_RELATIVE_CHANGE * self.expected_length:
            return False
        self.expected_length = length
        return True

    def assign(self, engine: str) -> None:
        """Record that a rollout is assigned to an engine."""
        self.started = True
        self.assigned[engine] += 1

    def unassign(self, engine: str) -> None:
        """Record that a rollout is not assigned to an engine any more."""
        self.assigned[engine] -= 1
        if not self.assigned[engine]:
            del self.assigned[engine]


class SiblingGroups:
    """Groups the open requests. A group exists as long as one of its requests is open.

    Some trainers request each sample of a prompt separately (verl, and clients of the HTTP server), and others divide a
    group among their processes (TRL).
    """

    def __init__(self) -> None:
        self._groups: dict[str, SiblingGroup] = {}

    def add(self, request: OpenRequest) -> SiblingGroup:
        """Add an open request to its group, and return the group."""
        group = self._groups.setdefault(request.group, SiblingGroup(request.group, request.lengths))
        group.requests[request.request_id] = request
        if request.lengths.history.count:  # it is newer, unless the history could not be read
            group.lengths.history = request.lengths.history
        request.lengths = group.lengths
        return group

    def of(self, request: OpenRequest) -> SiblingGroup:
        """Return the group of an open request."""
        return self._groups[request.group]

    def remove(self, request: OpenRequest) -> None:
        """Remove a request that is answered."""
        group = self.of(request)
        del group.requests[request.request_id]
        if not group.requests:
            del self._groups[group.name]

    def named(self, name: str) -> SiblingGroup:
        """Return the group that has a name and an open request."""
        return self._groups[name]


@lru_cache
def _always(length: int) -> LengthStats:
    """Return the statistics of rollouts that all have this length."""
    return LengthStats.from_lengths([(0, length, False)])
