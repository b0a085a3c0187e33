"""The open requests and the whereabouts of their rollouts, in memory."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping

from rollout_head.coordinator.canaries import CanaryTest
from rollout_head.coordinator.open_request import OpenRequest
from rollout_head.coordinator.rollout_queue import RolloutQueue
from rollout_head.coordinator.sibling_groups import SiblingGroups
from rollout_store.job import RolloutEvent
from rollout_store.job.assignments import RolloutKey


class RolloutTracker:
    """Tracks for each open request which samples wait, which are assigned, and which have ended.

    Cancelled samples that wait for no engine any more are answered by :class:`Answers`; until then, they are neither
    waiting nor assigned nor ended.
    """

    def __init__(self, queue: RolloutQueue, canaries: CanaryTest) -> None:
        self.requests: dict[str, OpenRequest] = {}
        """Open requests by id."""
        self.assigned: defaultdict[str, set[RolloutKey]] = defaultdict(set)
        """Engine id → the rollouts that are assigned to it."""
        self.clients: Counter[str] = Counter()
        """Client → number of its open requests, if there are any."""
        self.with_deadline: dict[str, OpenRequest] = {}
        """Open requests that have a deadline, by id."""
        self.num_rollouts = 0
        """Number of samples of all open requests, including those that have ended."""
        self.groups = SiblingGroups()
        """The groups of siblings of the open requests."""
        self._queue, self._canaries = queue, canaries

    def open(self, request: OpenRequest, held: Mapping[RolloutKey, str], preferred_engine: str | None) -> None:
        """Add an admitted request, and queue its samples that have neither ended nor an engine.

        Args:
            request: the request.
            held: request id and sample → engine that already has the assignment.
            preferred_engine: id of the engine that has the request's prefix cached.
        """
        self.close(request.request_id)  # it is open already only if Redis has lost it in the meantime
        self.requests[request.request_id] = request
        self.clients[request.request.reply_to] += 1
        if request.deadline is not None:
            self.with_deadline[request.request_id] = request
        group = self.groups.add(request)
        self.num_rollouts += request.request.sampling.n
        waiting = []
        for sample in range(request.request.sampling.n):
            if sample in request.done:
                continue
            engine = held.get((request.request_id, sample))
            if engine is None:
                waiting.append(sample)
            else:
                request.assigned[sample] = engine
                self.assigned[engine].add((request.request_id, sample))
                group.assign(engine)
        group.started = group.started or bool(request.done)
        self._queue.add(request, waiting, group, preferred_engine)

    def queue(self, request: OpenRequest, samples: list[int]) -> None:
        """Queue samples of an open request that have lost their engine."""
        self._queue.add(request, samples, self.groups.of(request))

    def close(self, request_id: str) -> None:
        """Remove a request that is answered."""
        request = self.requests.get(request_id)
        if request is None:
            return
        for sample in list(request.assigned):
            self.unassign((request_id, sample))
        del self.requests[request_id]
        self.with_deadline.pop(request_id, None)
        client = request.request.reply_to
        self.clients[client] -= 1
        if not self.clients[client]:
            del self.clients[client]
        self.groups.remove(request)
        self._canaries.discard(request_id)
        self.num_rollouts -= request.request.sampling.n
        self._queue.forget_request(request_id)

    def clear(self) -> None:
        """Remove all requests."""
        for request_id in list(self.requests):
            self.close(request_id)
        self.assigned.clear()

    @property
    def num_assigned(self) -> int:
        """Number of assigned rollouts."""
        return sum(map(len, self.assigned.values()))

    def assign(self, key: RolloutKey, engine: str) -> None:
        """Record that a rollout is assigned to an engine."""
        request, sample = self.requests[key[0]], key[1]
        request.assigned[sample], request.assigned_at[sample] = engine, time.monotonic()
        self.groups.of(request).assign(engine)
        self.assigned[engine].add(key)

    def unassign(self, key: RolloutKey) -> None:
        """Record that a rollout is not assigned to an engine any more."""
        self._queue.end_isolation(key)
        request = self.requests.get(key[0])
        if request is None:
            return
        request.assigned_at.pop(key[1], None)
        engine = request.assigned.pop(key[1], None)
        if engine is not None:
            self.assigned[engine].discard(key)
            self.groups.of(request).unassign(engine)

    def record_end(self, event: RolloutEvent) -> None:
        """Record that a rollout has ended; the request is closed with its last one. Repetitions have no effect."""
        request = self.requests.get(event.request_id)
        if request is None:
            return
        self.unassign((event.request_id, event.sample))
        self._queue.forget_rollout(request.rollout_id(event.sample))
        if event.sample not in request.done:
            request.done.add(event.sample)
            self._canaries.record(request.request, event.sample, event.measurement)
            if event.length is not None:
                request.lengths.append(event.length)
            group = self.groups.of(request)
            if group.update_expected_length(request.predicted_length):
                self._queue.update_prediction(group.name, group.expected_length)
        if len(request.done) >= request.request.sampling.n:
            self.close(event.request_id)
