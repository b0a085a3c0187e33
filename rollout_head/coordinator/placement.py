"""Placement of rollouts on engines."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Mapping

from rollout_head.coordinator.orders import EngineOrders
from rollout_head.coordinator.scheduler import EngineLoad, VersionBounds
from rollout_head.coordinator.state import CoordinatorState
from rollout_store.job import Assignment, EngineReport, JobStore, Order
from rollout_store.job.requests import ResultProgress

logger = logging.getLogger(__name__)


class RolloutPlacer:
    """Assigns waiting rollouts to engines, except those of clients that do not read their results.

    Args:
        state: the coordinator's state.
        job_store: the job's state in Redis.
        orders: sends the assignments.
        max_unread_bytes: none of a client's rollouts start while it has more bytes of unread results than this.
    """

    def __init__(
        self, state: CoordinatorState, job_store: JobStore, orders: EngineOrders, max_unread_bytes: int
    ) -> None:
        self._state, self._job_store, self._orders = state, job_store, orders
        self._max_unread_bytes = max_unread_bytes
        self._last_signs: dict[str, tuple[tuple[int, int | None], float]] = {}
        """Client → bytes of its results that it had read and noticed at its last sign of life, and ``time.monotonic()``
        then."""
        self._last_check = 0.0
        """``time.monotonic()`` of the last search for signs of life."""
        self._last_requests: dict[str, float] = {}
        """Client → ``time.monotonic()`` at which it last had open requests and was not silent."""

    async def find_slow_clients(self) -> None:
        """Find those among the clients with open requests that do not receive their results."""
        state = self._state
        progress = await self._job_store.results.progress(list(state.clients))
        unread = state.unread_bytes = {client: one.unread for client, one in progress.items()}
        slow = frozenset(client for client, size in unread.items() if size > self._max_unread_bytes)
        for client in slow - state.slow_clients:
            logger.warning(
                "Client %s has not read %d bytes of its results, but spec.queue.maxUnreadResults is %d. None of its "
                "rollouts start until it has read some.",
                client,
                unread[client],
                self._max_unread_bytes,
            )
        silent = self._find_silent_clients(progress)
        for client in silent - state.silent_clients:
            logger.warning(
                "Client %s has not noticed new results for %.0f s. Has it died? Until it returns, its rollouts only "
                "start while there is no other client.",
                client,
                state.limits.silent_client_s,
            )
        state.silent_clients = silent
        state.slow_clients = slow | silent if self._are_held_back(silent) else slow

    def _find_silent_clients(self, progress: Mapping[str, ResultProgress]) -> frozenset[str]:
        """Return the clients that have not noticed new results for too long."""
        now = time.monotonic()
        has_paused = now - self._last_check > self._state.limits.silent_client_s
        if has_paused:  # while Redis was unreachable, nobody could notice anything
            self._last_signs.clear()
        self._last_check = now
        signs = {}
        for client, one in progress.items():
            sign, seen_at = self._last_signs.get(client, (None, now))
            # A client of an earlier release only tells what it reads.
            is_waiting = one.noticed is not None and one.noticed < one.written and (one.read, one.noticed) == sign
            signs[client] = ((one.read, one.noticed), seen_at if is_waiting else now)
        self._last_signs = signs
        return frozenset(
            client for client, (_, since) in signs.items() if now - since > self._state.limits.silent_client_s
        )

    def _are_held_back(self, silent: frozenset[str]) -> bool:
        """Return whether the rollouts of silent clients do not start, because there are other clients.

        Otherwise, a trainer that is restarted finds them done, and a job that is closed ends.
        """
        now, limit = time.monotonic(), self._state.limits.other_clients_s
        known = self._last_requests | dict.fromkeys(self._state.clients.keys() - silent, now)
        self._last_requests = {client: last for client, last in known.items() if now - last < limit}
        return bool(self._last_requests.keys() - silent) and not self._state.closing

    async def place_waiting(self) -> None:
        """Assign the waiting rollouts that can start now."""
        state = self._state
        if not state.queue.num_waiting or not (loads := self._loads()):
            return
        by_engine: defaultdict[str, list[Order]] = defaultdict(list)
        newest = state.newest_version
        for placed in state.queue.place(loads, state.slow_clients, state.requests, newest):
            request = state.requests[placed.request_id]
            assignment = Assignment(
                placed.request_id,
                placed.sample,
                request.entry_id,
                resumed=state.queue.may_have_partial(request.rollout_id(placed.sample)),
                oldest_version=VersionBounds.of(request.request).oldest(newest),
                is_first=request.is_first(placed.sample),
            )
            order = Order.sample(assignment, with_request=placed.engine not in request.informed)
            request.informed.add(placed.engine)
            request.started.add(placed.sample)
            by_engine[placed.engine].append(order)
        lost = await self._orders.send(by_engine)
        for engine, orders in by_engine.items():
            for assignment in (order.assignment for order in orders if order.assignment is not None):
                if engine in lost:
                    request = state.requests[assignment.request_id]
                    state.queue.add(request, [assignment.sample], state.groups.of(request))
                else:
                    state.assign(assignment.key, engine)
        for engine in lost:  # until the next update of the engines
            state.engines.pop(engine, None)

    def _loads(self) -> list[EngineLoad]:
        """Return the engines that take work."""
        waiting_for_weights = find_engines_without_weights(self._state.engines)
        siblings = self._siblings_of_waiting()
        return [
            EngineLoad(
                engine,
                report.max_running,
                len(self._state.assigned[engine]),
                report.upcoming_version,
                report.non_speculative,
                siblings[engine],
            )
            for engine, report in self._state.engines.items()
            if not report.draining and engine not in waiting_for_weights
        ]

    def _siblings_of_waiting(self) -> defaultdict[str, Counter[str]]:
        """Return for each engine how many siblings of waiting samples are assigned to it, by the name of the group."""
        siblings: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for group in self._state.queue.probed_groups():
            for engine, count in self._state.groups.named(group).assigned.items():
                siblings[engine][group] = count
        return siblings


def find_engines_without_weights(engines: Mapping[str, EngineReport]) -> set[str]:
    """Return the engines that get no rollouts because they have missed weights that another engine serves.

    If no engine serves them, they serve the weights that they have.
    """
    return {
        engine
        for engine, report in engines.items()
        if report.missed is not None and any(other.has_full_weights(report.missed) for other in engines.values())
    }
