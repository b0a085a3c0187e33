"""Which rollout starts next, and where. Pure: it knows neither Redis nor time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class EngineLoad:
    """What a scheduler knows of an engine that takes work."""

    engine: str
    slots: int
    """Rollouts decoded at the same time."""
    assigned: int
    """Rollouts that it has to make and has not ended."""
    version: int
    """Weight version that it serves."""
    plain: bool = False
    """vLLM with no speculation configured."""

    @property
    def load(self) -> float:
        """Assigned rollouts for each slot."""
        return self.assigned / self.slots


@dataclass
class Group:
    """The rollouts of one request that wait to be started."""

    request_id: str
    client: str
    samples: list[int]
    """Numbers of the waiting samples; taken from the front."""
    arrival: int
    """Counts requests in the order in which they came."""
    priority: int = 0
    predicted: float = 0.0
    """Expected length in tokens."""
    probed: bool = False
    """Whether one of its samples was started: the others tell more about themselves once that one ends."""
    pinned: int | None = None
    """The one weight version that may sample it."""
    plain: bool = False
    """It is to have no drafts, and belongs on a plain engine where there is one."""
    holder: str | None = None
    """The engine that holds its prefix."""
    solo: bool = False
    """Engines were lost with it again and again: an engine gets one such rollout at a time."""


@dataclass(frozen=True)
class Placement:
    """Start this sample on this engine."""

    request_id: str
    sample: int
    engine: str


class Scheduler(Protocol):
    """Holds the waiting groups and gives them out."""

    def add(self, group: Group) -> None:
        """Take a group, or samples that came back of a known one."""
        ...

    def predict(self, request_id: str, length: float) -> None:
        """Expect another length, in tokens, of a group's rollouts."""
        ...

    def remove(self, request_id: str) -> list[int]:
        """Forget a group; its samples that were still waiting."""
        ...

    def place(
        self, engines: Iterable[EngineLoad], clients: frozenset[str], solo_busy: frozenset[str]
    ) -> list[Placement]:
        """Give out what can be started now.

        Args:
            engines: all that take work.
            clients: whose rollouts may not be started now, since they do not read what they have.
            solo_busy: engines that have a ``solo`` rollout already.
        """
        ...

    def waiting(self) -> int:
        """Samples that wait."""
        ...

    def groups(self) -> Iterator[Group]:
        """All groups with waiting samples."""
        ...


_Lane = tuple[str, bool, int | None, bool]


@dataclass
class ProbeThenLongest:
    """One probe of each group first, then longest predicted first; within that by priority before all else.

    A long rollout that starts late holds the whole step up, and a group's first rollout says how long the others will
    be (Seer, arXiv 2511.14617, starts one sample of each group first as well). An engine is given as many rollouts as
    it has slots; a few more, so that it never waits for the coordinator, only while far more are waiting.
    """

    _groups: dict[str, Group] = field(default_factory=dict)
    _lanes: dict[_Lane, list[tuple[tuple[float, ...], str]]] = field(default_factory=dict)
    _waiting: int = 0

    def add(self, group: Group) -> None:
        """See :class:`Scheduler`."""
        if (known := self._groups.get(group.request_id)) is not None:
            new = [sample for sample in group.samples if sample not in known.samples]
            known.samples[:0] = new
            known.solo = known.solo or group.solo
            self._waiting += len(new)
            group = known
        elif group.samples:
            self._groups[group.request_id] = group
            self._waiting += len(group.samples)
        else:
            return
        self._push(group)

    def predict(self, request_id: str, length: float) -> None:
        """See :class:`Scheduler`."""
        if (group := self._groups.get(request_id)) is not None and group.predicted != length:
            group.predicted = length
            self._push(group)

    def remove(self, request_id: str) -> list[int]:
        """See :class:`Scheduler`."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return []
        self._waiting -= len(group.samples)
        return group.samples

    def waiting(self) -> int:
        """See :class:`Scheduler`."""
        return self._waiting

    def groups(self) -> Iterator[Group]:
        """See :class:`Scheduler`."""
        yield from self._groups.values()

    def place(
        self, engines: Iterable[EngineLoad], clients: frozenset[str], solo_busy: frozenset[str]
    ) -> list[Placement]:
        """See :class:`Scheduler`."""
        loads = {engine.engine: engine for engine in engines}
        kinds = {engine.plain for engine in loads.values()}
        placed = self._to_holders(loads, clients, kinds)
        slots = sum(engine.slots for engine in loads.values())
        solo = set(solo_busy)
        # the least loaded engine takes the first of what it may take, until none can take anything
        free = [(engine.load, name) for name, engine in loads.items()]
        heapq.heapify(free)
        while free and self._waiting:
            _, name = heapq.heappop(free)
            engine = loads[name]
            ahead = max(1, engine.slots // 8) if self._waiting > slots else 0
            if engine.assigned >= engine.slots + ahead:
                continue
            group = self._first(engine, clients, kinds, solo)
            if group is None:
                continue
            placed.append(self._take(group, loads, name))
            if group.solo:
                solo.add(name)
            heapq.heappush(free, (loads[name].load, name))
        return placed

    def _to_holders(self, loads: dict[str, EngineLoad], clients: frozenset[str], kinds: set[bool]) -> list[Placement]:
        """Turns go where their prefix is cached, even if they have to wait there a little for a slot."""
        placed = []
        for group in [group for group in self._groups.values() if group.holder is not None]:
            holder = loads.get(group.holder or "")
            if holder is None or group.solo or not _may_run(holder, group.plain, group.pinned, kinds):
                group.holder = None
            elif group.client not in clients and holder.load < 2:
                placed += [self._take(group, loads, holder.engine) for _ in list(group.samples)]
        return placed

    def _first(self, engine: EngineLoad, clients: frozenset[str], kinds: set[bool], solo: set[str]) -> Group | None:
        best: tuple[tuple[float, ...], Group] | None = None
        for lane in list(self._lanes):
            client, plain, pinned, alone = lane
            if client in clients or not _may_run(engine, plain, pinned, kinds):
                continue
            if alone and engine.engine in solo:
                continue
            head = self._head(lane)
            if head is not None and (best is None or _key(head) < best[0]):
                best = (_key(head), head)
        return best[1] if best else None

    def _head(self, lane: _Lane) -> Group | None:
        """The first group of a lane; entries that were overtaken by a later prediction are dropped on the way."""
        heap = self._lanes[lane]
        while heap:
            key, request_id = heap[0]
            group = self._groups.get(request_id)
            if group is not None and key == _key(group) and _lane(group) == lane:
                return group
            heapq.heappop(heap)
        del self._lanes[lane]
        return None

    def _push(self, group: Group) -> None:
        heapq.heappush(self._lanes.setdefault(_lane(group), []), (_key(group), group.request_id))

    def _take(self, group: Group, loads: dict[str, EngineLoad], engine: str) -> Placement:
        sample = group.samples.pop(0)
        self._waiting -= 1
        if not group.samples:
            del self._groups[group.request_id]
        elif not group.probed:
            group.probed = True
            self._push(group)
        load = loads[engine]
        loads[engine] = EngineLoad(load.engine, load.slots, load.assigned + 1, load.version, load.plain)
        return Placement(group.request_id, sample, engine)


def _may_run(engine: EngineLoad, plain: bool, pinned: int | None, kinds: set[bool]) -> bool:
    """Whether an engine serves a group's weight version, and is of its kind if any of the *kinds* there are is."""
    return pinned in (None, engine.version) and (engine.plain == plain or plain not in kinds)


def _key(group: Group) -> tuple[float, ...]:
    return (-group.priority, group.probed, -group.predicted, group.arrival)


def _lane(group: Group) -> _Lane:
    return (group.client, group.plain, group.pinned, group.solo)
