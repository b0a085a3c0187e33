"""The scheduler decides which rollout starts next, and on which engine. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from rollout_api.protocol.messages import RolloutRequest

_RUNNING_PER_EXTRA_ASSIGNMENT = 8
"""Rollouts that an engine can run at once, per additional rollout that it is assigned beyond them.

Additional rollouts start as soon as others end, without waiting for the coordinator."""
_MAX_PREFERRED_LOAD = 2
"""Highest load of an engine that the next turn of a trajectory waits for because its prefix is cached there."""
_MIN_RELATIVE_LENGTH = 0.9
"""Smallest expected length, relative to the longest waiting samples, of a sample that starts before them on an engine
that runs its siblings. With smaller values, long rollouts would start too late."""


@dataclass(frozen=True)
class VersionBounds:
    """The weight versions that a request allows an engine to have when it starts a rollout."""

    pinned: int | None = None
    """The only version that may sample the rollouts; None for any."""
    minimum: int = 0
    """Oldest version."""
    max_staleness: int | None = None
    """Largest number of versions behind the newest published one; None for any."""

    @classmethod
    def of(cls, request: RolloutRequest) -> Self:
        """Return the bounds of a request."""
        return cls(request.weight_version, request.min_weight_version or 0, request.max_staleness)

    def oldest(self, newest: int) -> int:
        """Return the oldest version that is allowed while *newest* is the newest published one."""
        if self.pinned is not None:
            return self.pinned
        return max(self.minimum, 0 if self.max_staleness is None else newest - self.max_staleness)

    def allow(self, version: int, newest: int) -> bool:
        """Return whether an engine with *version* may sample, while *newest* is the newest published version."""
        return version == self.pinned if self.pinned is not None else version >= self.oldest(newest)


ANY_VERSION = VersionBounds()
"""The bounds of requests that any version may sample."""


@dataclass(frozen=True)
class EngineLoad:
    """What the scheduler knows about an engine that takes work."""

    engine: str
    """Id of the engine."""
    max_running: int
    """Maximum number of rollouts that it decodes at once."""
    assigned: int
    """Number of rollouts that are assigned to it."""
    version: int
    """Weight version of the rollouts that it starts next."""
    non_speculative: bool = False
    """Whether it runs without speculation, for requests that want no drafts."""
    siblings: Mapping[str, int] = field(default_factory=dict)
    """Name of a group with waiting samples → number of its samples that are assigned to the engine."""

    @property
    def load(self) -> float:
        """Assigned rollouts, in relation to those that can run at once."""
        return self.assigned / self.max_running


@dataclass
class WaitingRequest:
    """The waiting samples of one request."""

    request_id: str
    client: str
    samples: list[int]
    """The waiting samples; the first one starts next."""
    arrival: int
    """Position of the request in the order of arrival."""
    priority: int = 0
    """Requests with a higher priority start first."""
    predicted_length: float = 0.0
    """Expected length of a sample in tokens."""
    probed: bool = False
    """Whether a sample of its siblings was started before: once it ends, the others' lengths are better known."""
    versions: VersionBounds = ANY_VERSION
    """Weight versions that may sample the request."""
    non_speculative: bool = False
    """Whether the request wants no drafts, and therefore an engine without speculation if there is one."""
    preferred_engine: str | None = None
    """Id of the engine that has the request's prefix cached."""
    isolated: bool = False
    """Whether several engines were lost with a sample; an engine gets at most one such sample at a time."""
    group: str = ""
    """Name of its group of siblings; an empty string if the request is a group of its own."""

    def __post_init__(self) -> None:
        """Name the group of a request that is a group of its own after the request."""
        self.group = self.group or self.request_id


@dataclass(frozen=True)
class Placement:
    """The decision to start a sample on an engine."""

    request_id: str
    sample: int
    engine: str


_Lane = tuple[str, bool, VersionBounds, bool]
"""What decides where a request may run: client, whether it wants no drafts, weight versions, and isolation."""


@dataclass(frozen=True)
class _Rules:
    """Which engines may run a request at the moment."""

    kinds: frozenset[bool]
    """Whether there are engines without (True) and with (False) speculation."""
    newest_version: int
    """Newest published weight version."""

    def may_run(self, engine: EngineLoad, *, non_speculative: bool, versions: VersionBounds) -> bool:
        """Return whether an engine may run a request.

        A request runs on an engine of the other kind only if there is none of its own.

        Args:
            engine: the engine.
            non_speculative: whether the request wants no drafts.
            versions: weight versions that may sample the request.
        """
        right_kind = engine.non_speculative == non_speculative or non_speculative not in self.kinds
        return right_kind and versions.allow(engine.version, self.newest_version)


@dataclass
class ProbeThenLongest:
    """Holds the waiting requests and decides which samples start on which engines.

    One sample of each group of siblings starts first, then those with the longest expected length. The samples of a
    group may belong to one request, or to several ones, in whatever way the trainer divides it.

    A long rollout that starts late delays the end of the training step, and the length of a group's first rollout
    predicts the lengths of the others (Seer, arXiv 2511.14617, also starts one sample of each group first). Priorities
    take precedence over both. An engine is assigned as many rollouts as it can run at once, and a few more while many
    are waiting.

    Among samples of about the same expected length, an engine takes those whose siblings it runs, because it drafts
    from siblings while they run.
    """

    _requests: dict[str, WaitingRequest] = field(default_factory=dict)
    _groups: dict[str, dict[str, None]] = field(default_factory=dict)
    """Name of a group → ids of its waiting requests, in the order of their arrival."""
    _unprobed: dict[str, set[str]] = field(default_factory=dict)
    """Name of a group → ids of those of its waiting requests that do not know of a probe."""
    _lanes: dict[_Lane, list[tuple[tuple[float, ...], str]]] = field(default_factory=dict)
    _waiting: int = 0

    def add(self, request: WaitingRequest) -> None:
        """Add a request, or further samples of a known one."""
        if request.probed:
            self._mark_probed(request.group)
        if (known := self._requests.get(request.request_id)) is not None:
            new = [sample for sample in request.samples if sample not in known.samples]
            known.samples[:0] = new
            known.isolated = known.isolated or request.isolated
            self._waiting += len(new)
            request = known
        elif request.samples:
            self._requests[request.request_id] = request
            self._groups.setdefault(request.group, {})[request.request_id] = None
            if not request.probed:
                self._unprobed.setdefault(request.group, set()).add(request.request_id)
            self._waiting += len(request.samples)
        else:
            return
        self._push(request)

    def predict(self, group: str, length: float) -> None:
        """Change the expected length of the samples of a group, in tokens."""
        for request_id in self._groups.get(group, ()):
            request = self._requests[request_id]
            if request.predicted_length != length:
                request.predicted_length = length
                self._push(request)

    def remove(self, request_id: str) -> list[int]:
        """Remove a request and return its waiting samples."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        self._forget(request)
        self._waiting -= len(request.samples)
        return request.samples

    def waiting(self) -> int:
        """Return the number of waiting samples."""
        return self._waiting

    def requests(self) -> Iterator[WaitingRequest]:
        """Yield all requests with waiting samples."""
        yield from self._requests.values()

    def probed_groups(self) -> Iterator[str]:
        """Yield the names of the groups that have both waiting and started samples."""
        yield from (name for name in self._groups if name not in self._unprobed)

    def place(
        self, engines: Iterable[EngineLoad], slow_clients: frozenset[str], occupied: frozenset[str], newest_version: int
    ) -> list[Placement]:
        """Remove the samples that can start now, and return where each starts.

        Args:
            engines: all engines that take work.
            slow_clients: clients that do not read their results, whose samples must not start.
            occupied: engines that already have an isolated sample.
            newest_version: newest published weight version.
        """
        loads = {engine.engine: engine for engine in engines}
        rules = _Rules(frozenset(engine.non_speculative for engine in loads.values()), newest_version)
        placed = self._place_on_preferred_engines(loads, slow_clients, rules)
        capacity = sum(engine.max_running for engine in loads.values())
        with_isolated = set(occupied)
        # The least loaded engine takes the first sample that it may run, until no engine can take any.
        available = [(engine.load, name) for name, engine in loads.items()]
        heapq.heapify(available)
        while available and self._waiting:
            _, name = heapq.heappop(available)
            engine = loads[name]
            ahead = max(1, engine.max_running // _RUNNING_PER_EXTRA_ASSIGNMENT) if self._waiting > capacity else 0
            if engine.assigned >= engine.max_running + ahead:
                continue
            request = self._first(engine, slow_clients, rules, with_isolated)
            if request is None:
                continue
            placed.append(self._take(request, loads, name))
            if request.isolated:
                with_isolated.add(name)
            heapq.heappush(available, (loads[name].load, name))
        return placed

    def _place_on_preferred_engines(
        self, loads: dict[str, EngineLoad], slow_clients: frozenset[str], rules: _Rules
    ) -> list[Placement]:
        """Place turns on the engines that have their prefixes cached, even if they wait there a little."""
        placed = []
        for request in [request for request in self._requests.values() if request.preferred_engine is not None]:
            engine = loads.get(request.preferred_engine or "")
            if (
                engine is None
                or request.isolated
                or not rules.may_run(engine, non_speculative=request.non_speculative, versions=request.versions)
            ):
                request.preferred_engine = None
            elif request.client not in slow_clients and engine.load < _MAX_PREFERRED_LOAD:
                placed += [self._take(request, loads, engine.engine) for _ in list(request.samples)]
        return placed

    def _first(
        self, engine: EngineLoad, slow_clients: frozenset[str], rules: _Rules, with_isolated: set[str]
    ) -> WaitingRequest | None:
        """Return the request whose sample should start next among those that an engine may run."""
        best: tuple[tuple[float, ...], WaitingRequest] | None = None
        for lane in list(self._lanes):
            client, non_speculative, versions, isolated = lane
            if client in slow_clients or not rules.may_run(engine, non_speculative=non_speculative, versions=versions):
                continue
            if isolated and engine.engine in with_isolated:
                continue
            head = self._head(lane)
            if head is not None and (best is None or _sort_key(head) < best[0]):
                best = (_sort_key(head), head)
        return self._sibling_of(best[1], engine) if best else None

    def _sibling_of(self, first: WaitingRequest, engine: EngineLoad) -> WaitingRequest:
        """Return a request of the group that has most samples on an engine, if it may start instead of *first*."""
        if not first.probed or first.isolated:
            return first
        min_length = _MIN_RELATIVE_LENGTH * first.predicted_length

        def may_start_instead(request: WaitingRequest) -> bool:
            return (
                _lane(request) == _lane(first)
                and request.priority == first.priority
                and request.predicted_length >= min_length
            )

        candidates = []
        for group, count in engine.siblings.items():
            waiting = (self._requests[request_id] for request_id in self._groups.get(group, ()))
            if (found := next(filter(may_start_instead, waiting), None)) is not None:
                candidates.append((count, -found.arrival, found.request_id))
        return self._requests[max(candidates)[2]] if candidates else first

    def _head(self, lane: _Lane) -> WaitingRequest | None:
        """Return the first request of a lane; entries with an outdated sort key are dropped on the way."""
        heap = self._lanes[lane]
        while heap:
            key, request_id = heap[0]
            request = self._requests.get(request_id)
            if request is not None and key == _sort_key(request) and _lane(request) == lane:
                return request
            heapq.heappop(heap)
        del self._lanes[lane]
        return None

    def _push(self, request: WaitingRequest) -> None:
        heapq.heappush(self._lanes.setdefault(_lane(request), []), (_sort_key(request), request.request_id))

    def _take(self, request: WaitingRequest, loads: dict[str, EngineLoad], engine: str) -> Placement:
        sample = request.samples.pop(0)
        self._waiting -= 1
        if not request.samples:
            self._forget(request)
        self._mark_probed(request.group)
        load = loads[engine]
        siblings = {**load.siblings, request.group: load.siblings.get(request.group, 0) + 1}
        loads[engine] = replace(load, assigned=load.assigned + 1, siblings=siblings)
        return Placement(request.request_id, sample, engine)

    def _mark_probed(self, group: str) -> None:
        """Let the waiting requests of a group start after the first samples of other groups."""
        for request_id in self._unprobed.pop(group, ()):
            request = self._requests[request_id]
            request.probed = True
            self._push(request)

    def _forget(self, request: WaitingRequest) -> None:
        """Remove a request that has no waiting samples any more."""
        del self._requests[request.request_id]
        members = self._groups[request.group]
        del members[request.request_id]
        if not members:
            del self._groups[request.group]
        if (unprobed := self._unprobed.get(request.group)) is not None:
            unprobed.discard(request.request_id)
            if not unprobed:
                del self._unprobed[request.group]


def _sort_key(request: WaitingRequest) -> tuple[float, ...]:
    return (-request.priority, request.probed, -request.predicted_length, request.arrival)


def _lane(request: WaitingRequest) -> _Lane:
    return (request.client, request.non_speculative, request.versions, request.isolated)
