"""The coordinator's knowledge of its job, in memory."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rollout_api.protocol.messages import FinishReason, InitWeightTransfer, PauseMode, WeightUpdate
from rollout_head.coordinator.canaries import CanaryTest
from rollout_head.coordinator.open_requests import OpenRequest, SiblingGroups
from rollout_head.coordinator.rollout_queue import RolloutQueue
from rollout_store.job import EngineReport, RolloutEvent, arrival_time
from rollout_store.job.assignments import RolloutKey

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoordinatorLimits:
    """Intervals and limits of a coordinator. The defaults suit production; tests shorten some of them."""

    read_timeout_s: float = 0.1
    """Time for which a read waits for new messages; it bounds how long other work is delayed."""
    read_batch: int = 500
    """Maximum number of entries of each stream in one read."""
    engine_check_interval_s: float = 0.25
    """Time between two checks of engines, deadlines and unread results."""
    status_interval_s: float = 1.0
    """Time between two publications of the status."""
    reconcile_interval_s: float = 10.0
    """Time between two comparisons with Redis, which find events that were missed."""
    finish_batch: int = 256
    """Maximum number of rollouts that end without an engine in one pass, so that other work is not delayed."""
    isolation_threshold: int = 3
    """Engines lost with a rollout after which an engine gets at most one such rollout at a time."""
    max_losses: int = 6
    """Engines lost with a rollout, without any progress in between, after which the rollout fails."""
    silent_client_s: float = 60.0
    """Time without a sign of life after which a client that has new results is considered dead. A client notices
    results within about a second, also while its trainer updates the policy, unless something blocks its event loop."""
    other_clients_s: float = 600.0
    """Time after the last request of another client for which the rollouts of dead clients do not start. It covers a
    policy update, during which a trainer may have no request; its next step should find the engines free."""
    unserved_version_log_delay_s: float = 30.0
    """Time after which rollouts that wait for a weight version are first logged."""
    unserved_version_log_interval_s: float = 300.0
    """Time between further log messages about such rollouts."""


class UnservedRollout(NamedTuple):
    """A rollout that has ended without an engine, and whose result is not written yet."""

    request: OpenRequest
    sample: int
    reason: FinishReason
    detail: str = ""


class CoordinatorState:
    """Everything that a coordinator knows of its job. This class does no I/O.

    A coordinator that takes over rebuilds it from Redis, which has all of it in a durable form. What changes
    together is changed by the methods; all other attributes are written by the part that their comment names.

    A sample of an open request waits, is assigned, has ended, or is unserved.
    """

    def __init__(self, limits: CoordinatorLimits) -> None:
        self.limits = limits
        self.requests: dict[str, OpenRequest] = {}
        """Open requests by id."""
        self.clients: Counter[str] = Counter()
        """Client → number of its open requests, if there are any."""
        self.with_deadline: dict[str, OpenRequest] = {}
        """Open requests that have a deadline, by id."""
        self.groups = SiblingGroups()
        """The groups of siblings of the open requests."""
        self.num_rollouts = 0
        """Number of samples of all open requests, including those that have ended."""
        self.queue = RolloutQueue(limits.isolation_threshold)
        """The waiting samples."""
        self.assigned: defaultdict[str, set[RolloutKey]] = defaultdict(set)
        """Engine id → the rollouts that are assigned to it."""
        self.unserved: deque[UnservedRollout] = deque()
        """Samples that are neither waiting nor assigned, because they have ended without an engine."""
        self.canaries = CanaryTest()
        """Compares canaries with their siblings as they end."""

        # Written by EngineOrders:
        self.coordinator = 0
        """Number of this coordinator, its fencing token; 0 before it has taken over."""
        self.weights: list[WeightUpdate] = []
        """Published weights: the newest ones, and those that they build on."""
        self.transfer_group: InitWeightTransfer | None = None
        """The trainer and the engines that transfer weights in memory."""
        self.pause_mode: PauseMode | None = None
        """How the job is paused; None if it is not."""

        # Written by Engines (RolloutPlacer removes an engine whose lease it finds expired):
        self.engines: dict[str, EngineReport] = {}
        """Last reports of the engines with a valid lease, by engine id."""
        self.num_lost_engines = 0
        """Number of engines that this coordinator has lost."""

        # Written by MessageReader (Coordinator reads from Redis whether the job was closed):
        self.closing = False
        """Whether a client has closed the job, which ends once all requests are answered."""
        self.early_cancellations: dict[str, str] = {}
        """Request that was cancelled before it was read → id of the last control entry that cancels it."""
        self.early_entries: set[str] = set()
        """Ids of all control entries that cancel such requests."""

        # Written by RequestAdmission and MessageReader:
        self.num_dead_letters = 0
        """Number of messages that this coordinator has moved to the dead letters."""

        # Written by RolloutPlacer:
        self.unread_bytes: dict[str, int] = {}
        """Bytes of the unread results of each client with open requests."""
        self.slow_clients: frozenset[str] = frozenset()
        """Clients whose rollouts do not start until they read: those with too many unread results, and silent clients
        while there are others."""
        self.silent_clients: frozenset[str] = frozenset()
        """Clients that have not noticed new results for so long that they are considered dead."""

        # Written by UnservedRollouts:
        self.blocked: Counter[str] = Counter()
        """Client → number of its waiting samples that cannot start at the moment, whatever engines are free: it has too
        many unread results, or no engine serves or loads weights that may sample them. Those of silent clients are
        among them."""
        self.num_not_limited = 0
        """Number of samples of such requests that do not count towards spec.queue.maxRollouts. A client that has died
        would otherwise keep all others out."""

    @property
    def num_limited(self) -> int:
        """Number of samples of all open requests that count towards spec.queue.maxRollouts."""
        return self.num_rollouts - self.num_not_limited

    @property
    def desired_version(self) -> int | None:
        """Weight version that the engines should serve; None if none was published."""
        return self.weights[-1].weight_version if self.weights else None

    @property
    def newest_version(self) -> int:
        """Newest published weight version; 0 is the model that the job started with."""
        return self.desired_version or 0

    @property
    def num_assigned(self) -> int:
        """Number of assigned rollouts."""
        return sum(map(len, self.assigned.values()))

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
        self.queue.add(request, waiting, group, preferred_engine)

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
        self.canaries.discard(request_id)
        self.num_rollouts -= request.request.sampling.n
        self.queue.forget_request(request_id)

    def clear(self) -> None:
        """Forget what Redis may have lost, before it is read again."""
        for request_id in list(self.requests):
            self.close(request_id)
        self.assigned.clear()
        self.unserved.clear()
        self.blocked.clear()
        self.num_not_limited = 0
        self.forget_early_cancellations()
        self.engines.clear()

    def forget_early_cancellations(self) -> None:
        """Forget cancellations of requests that have not been read."""
        self.early_cancellations.clear()
        self.early_entries.clear()

    def is_cancelled_early(self, request_id: str, entry_id: str) -> bool:
        """Return whether a request that arrived with *entry_id* was cancelled by a later message that was read first.

        A request that is sent again after its cancellation is not cancelled.
        """
        cancellation = self.early_cancellations.get(request_id)
        return cancellation is not None and arrival_time(entry_id) <= arrival_time(cancellation)

    def assign(self, key: RolloutKey, engine: str) -> None:
        """Record that a rollout is assigned to an engine."""
        request, sample = self.requests[key[0]], key[1]
        request.assigned[sample], request.assigned_at[sample] = engine, time.monotonic()
        self.groups.of(request).assign(engine)
        self.assigned[engine].add(key)

    def unassign(self, key: RolloutKey) -> None:
        """Record that a rollout is not assigned to an engine any more."""
        self.queue.end_isolation(key)
        request = self.requests.get(key[0])
        if request is None:
            return
        request.assigned_at.pop(key[1], None)
        engine = request.assigned.pop(key[1], None)
        if engine is not None:
            self.assigned[engine].discard(key)
            self.groups.of(request).unassign(engine)

    def requeue(self, request: OpenRequest, sample: int) -> None:
        """Queue a sample that has lost its engine, unless it is cancelled, or too many engines were lost with it."""
        losses = self.queue.loss_count(request.rollout_id(sample))
        if losses >= self.limits.max_losses:
            self.fail(request, sample, f"{losses} engines were lost with it before it made any progress")
        elif request.cancelled:
            self.unserved.append(UnservedRollout(request, sample, FinishReason.CANCELLED))
        else:
            self.queue.add(request, [sample], self.groups.of(request))

    def return_rollout(self, request: OpenRequest, sample: int, failure: str = "") -> None:
        """Queue a rollout again whose engine has returned it, or end it with an error because of a *failure*."""
        self.unassign((request.request_id, sample))
        if failure and sample not in request.done:
            self.fail(request, sample, failure)
        elif sample not in request.done:
            self.queue.add_partials({request.rollout_id(sample)})
            self.requeue(request, sample)

    def end_waiting(self, request: OpenRequest, reason: FinishReason) -> None:
        """End all waiting samples of a request."""
        waiting = self.queue.remove(request.request_id)
        self.unserved.extend(UnservedRollout(request, sample, reason) for sample in waiting)

    def fail_waiting(self, request: OpenRequest, detail: str) -> None:
        """End all waiting samples of a request with an error."""
        for sample in self.queue.remove(request.request_id):
            self.fail(request, sample, detail)

    def fail(self, request: OpenRequest, sample: int, detail: str) -> None:
        """End a sample, which is neither waiting nor assigned, with an error."""
        logger.warning("Rollout %s has failed: %s", request.rollout_id(sample), detail)
        self.unserved.append(UnservedRollout(request, sample, FinishReason.FAILED, detail))

    def record_end(self, event: RolloutEvent) -> None:
        """Record that a rollout has ended; the request is closed with its last one. Repetitions have no effect."""
        request = self.requests.get(event.request_id)
        if request is None:
            return
        self.unassign((event.request_id, event.sample))
        self.queue.forget_rollout(request.rollout_id(event.sample))
        if event.sample not in request.done:
            request.done.add(event.sample)
            self.canaries.record(request.request, event.sample, event.measurement)
            if event.length is not None:
                request.lengths.append(event.length)
            group = self.groups.of(request)
            if group.update_expected_length(request.predicted_length):
                self.queue.update_prediction(group.name, group.expected_length)
        if len(request.done) >= request.request.sampling.n:
            self.close(event.request_id)
