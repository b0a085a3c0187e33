"""The scheduler: which rollout starts next, and on which engine. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rollout_worker.job.coordinator.version_bounds import ANY_VERSION, VersionBounds

_RUNNING_PER_EXTRA_ASSIGNMENT = 8
"""Rollouts that an engine can run at once, per additional rollout that it is assigned beyond them.

Additional rollouts start as soon as others end, without waiting for the coordinator."""
_MAX_PREFERRED_LOAD = 2
"""Load up to which the next turn of a trajectory waits for the engine that has its prefix cached."""
_MIN_RELATIVE_LENGTH = 0.9
"""Expected length, relative to the longest waiting samples, from which a sample starts before them on an engine that
runs its siblings. With smaller values, long rollouts would start too late."""


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
    """Weight version with which it samples new rollouts."""
    non_speculative: bool = False
    """Whether it runs without speculation, for requests that want no drafts."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Request id → number of its samples that are assigned to the engine, of requests with waiting samples."""

    @property
    def load(self) -> float:
        """Assigned rollouts, in relation to those that can run at once."""
        return self.assigned / self.max_running


@dataclass
class WaitingGroup:
    """The waiting samples of one request."""

    request_id: str
    client: str
    samples: list[int]
    """The waiting samples; the first one starts next."""
    arrival: int
    """Position of the request in the order of arrival."""
    priority: int = 0
    """Groups with a higher priority start first."""
    predicted_length: float = 0.0
    """Expected length of a sample in tokens."""
    probed: bool = False
    """Whether a sample of the request was started before: once it ends, the others' lengths are better known."""
    versions: VersionBounds = ANY_VERSION
    """Weight versions with which the request may be sampled."""
    non_speculative: bool = False
    """Whether the request wants no drafts, and therefore an engine without speculation if there is one."""
    preferred_engine: str | None = None
    """Id of the engine that has the request's prefix cached."""
    isolated: bool = False
    """Whether several engines were lost with a sample; an engine gets at most one such sample at a time."""


@dataclass(frozen=True)
class Placement:
    """The decision to start a sample on an engine."""

    request_id: str
    sample: int
    engine: str


_Lane = tuple[str, bool, VersionBounds, bool]
"""What decides where a group may run: client, whether it wants no drafts, weight versions, and isolation."""


@dataclass(frozen=True)
class _Rules:
    """Which engines may run a group at the moment."""

    kinds: frozenset[bool]
    """Whether there are engines without (True) and with (False) speculation."""
    newest_version: int
    """Newest published weight version."""

    def may_run(self, engine: EngineLoad, *, non_speculative: bool, versions: VersionBounds) -> bool:
        """Return whether an engine may run a group.

        A group runs on an engine of the other kind only if there is none of its own.

        Args:
            engine: the engine.
            non_speculative: whether the group wants no drafts.
            versions: weight versions with which the group may be sampled.
        """
        right_kind = engine.non_speculative == non_speculative or non_speculative not in self.kinds
        return right_kind and versions.allow(engine.version, self.newest_version)


@dataclass
class ProbeThenLongest:
    """Holds the waiting groups and decides which samples start on which engines.

    One sample of each group starts first, then those with the longest expected length.

    A long rollout that starts late delays the end of the training step, and the length of a group's first rollout
    predicts the lengths of the others (Seer, arXiv 2511.14617, also starts one sample of each group first). Priorities
    take precedence over both. An engine is assigned as many rollouts as it can run at once, and a few more while many
    are waiting.

    Among samples of about the same expected length, an engine takes those whose siblings it runs, because it drafts
    from siblings while they run.
    """

    _groups: dict[str, WaitingGroup] = field(default_factory=dict)
    _lanes: dict[_Lane, list[tuple[tuple[float, ...], str]]] = field(default_factory=dict)
    _waiting: int = 0

    def add(self, group: WaitingGroup) -> None:
        """Add a group, or further samples of a known one."""
        if (known := self._groups.get(group.request_id)) is not None:
            new = [sample for sample in group.samples if sample not in known.samples]
            known.samples[:0] = new
            known.isolated = known.isolated or group.isolated
            self._waiting += len(new)
            group = known
        elif group.samples:
            self._groups[group.request_id] = group
            self._waiting += len(group.samples)
        else:
            return
        self._push(group)

    def predict(self, request_id: str, length: float) -> None:
        """Change the expected length of a group's samples, in tokens."""
        if (group := self._groups.get(request_id)) is not None and group.predicted_length != length:
            group.predicted_length = length
            self._push(group)

    def remove(self, request_id: str) -> list[int]:
        """Remove a group and return its waiting samples."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return []
        self._waiting -= len(group.samples)
        return group.samples

    def waiting(self) -> int:
        """Return the number of waiting samples."""
        return self._waiting

    def groups(self) -> Iterator[WaitingGroup]:
        """Yield all groups with waiting samples."""
        yield from self._groups.values()

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
            group = self._first(engine, slow_clients, rules, with_isolated)
            if group is None:
                continue
            placed.append(self._take(group, loads, name))
            if group.isolated:
                with_isolated.add(name)
            heapq.heappush(available, (loads[name].load, name))
        return placed

    def _place_on_preferred_engines(
        self, loads: dict[str, EngineLoad], slow_clients: frozenset[str], rules: _Rules
    ) -> list[Placement]:
        """Place turns on the engines that have their prefixes cached, even if they wait there a little."""
        placed = []
        for group in [group for group in self._groups.values() if group.preferred_engine is not None]:
            engine = loads.get(group.preferred_engine or "")
            if (
                engine is None
                or group.isolated
                or not rules.may_run(engine, non_speculative=group.non_speculative, versions=group.versions)
            ):
                group.preferred_engine = None
            elif group.client not in slow_clients and engine.load < _MAX_PREFERRED_LOAD:
                placed += [self._take(group, loads, engine.engine) for _ in list(group.samples)]
        return placed

    def _first(
        self, engine: EngineLoad, slow_clients: frozenset[str], rules: _Rules, with_isolated: set[str]
    ) -> WaitingGroup | None:
        """Return the group whose sample should start next among those that an engine may run."""
        best: tuple[tuple[float, ...], WaitingGroup] | None = None
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

    def _sibling_of(self, first: WaitingGroup, engine: EngineLoad) -> WaitingGroup:
        """Return the group of which an engine runs most samples, among those that may start instead of *first*."""
        if not first.probed or first.isolated:
            return first
        min_length = _MIN_RELATIVE_LENGTH * first.predicted_length
        candidates = [
            (count, -group.arrival, group.request_id)
            for request_id, count in engine.samples.items()
            if (group := self._groups.get(request_id)) is not None
            and _lane(group) == _lane(first)
            and group.priority == first.priority
            and group.predicted_length >= min_length
        ]
        return self._groups[max(candidates)[2]] if candidates else first

    def _head(self, lane: _Lane) -> WaitingGroup | None:
        """Return the first group of a lane; entries with an outdated sort key are dropped on the way."""
        heap = self._lanes[lane]
        while heap:
            key, request_id = heap[0]
            group = self._groups.get(request_id)
            if group is not None and key == _sort_key(group) and _lane(group) == lane:
                return group
            heapq.heappop(heap)
        del self._lanes[lane]
        return None

    def _push(self, group: WaitingGroup) -> None:
        heapq.heappush(self._lanes.setdefault(_lane(group), []), (_sort_key(group), group.request_id))

    def _take(self, group: WaitingGroup, loads: dict[str, EngineLoad], engine: str) -> Placement:
        sample = group.samples.pop(0)
        self._waiting -= 1
        if not group.samples:
            del self._groups[group.request_id]
        elif not group.probed:
            group.probed = True
            self._push(group)
        load = loads[engine]
        samples = {**load.samples, group.request_id: load.samples.get(group.request_id, 0) + 1}
        loads[engine] = replace(load, assigned=load.assigned + 1, samples=samples)
        return Placement(group.request_id, sample, engine)


def _sort_key(group: WaitingGroup) -> tuple[float, ...]:
    return (-group.priority, group.probed, -group.predicted_length, group.arrival)


def _lane(group: WaitingGroup) -> _Lane:
    return (group.client, group.non_speculative, group.versions, group.isolated)
