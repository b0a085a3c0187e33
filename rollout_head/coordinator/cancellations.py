"""Cancellations, including those that overtake the requests that they cancel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rollout_api.protocol.messages import FinishReason
from rollout_head.coordinator.answers import Answers
from rollout_head.coordinator.fenced_orders import FencedOrders
from rollout_head.coordinator.open_request import OpenRequest
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_store.job import JobStore, Order, Stream, arrival_time


class Cancellations:
    """Cancels open requests, and remembers cancellations of requests that have not been read yet.

    Requests and control messages arrive in different streams, so a cancellation may be read before its request. Its
    entry stays in Redis until all earlier requests have been read, for this coordinator or the next one.
    """

    def __init__(self, job_store: JobStore, orders: FencedOrders, tracker: RolloutTracker, answers: Answers) -> None:
        self._job_store, self._orders, self._tracker, self._answers = job_store, orders, tracker, answers
        self._early: dict[str, str] = {}
        """Unknown request → id of the last control entry that cancels it."""
        self._early_entries: set[str] = set()
        """Ids of all control entries that cancel unknown requests."""

    async def cancel(self, entry_id: str, request_ids: Iterable[str]) -> bool:
        """Cancel requests.

        Args:
            entry_id: id of the control entry.
            request_ids: the requests.

        Returns:
            False if some requests are unknown, so that the entry must be kept.
        """
        request_ids = list(request_ids)
        await self._cancel_open(request_ids)
        unknown = set(request_ids) - self._tracker.requests.keys()
        if unknown:
            self._early |= dict.fromkeys(unknown, entry_id)
            self._early_entries.add(entry_id)
        return not unknown

    async def _cancel_open(self, request_ids: Iterable[str]) -> None:
        """Cancel the requests that are open, together, because a step may have thousands of them."""
        found = (self._tracker.requests.get(request_id) for request_id in request_ids)
        requests = [request for request in found if request is not None and not request.cancelled]
        if not requests:
            return
        await self._job_store.requests.mark_cancelled([request.request_id for request in requests])
        await self.end(requests)

    async def end(self, requests: Iterable[OpenRequest]) -> None:
        """End the rollouts of requests that are recorded as cancelled."""
        orders: defaultdict[str, list[Order]] = defaultdict(list)
        for request in requests:
            request.cancelled = True
            self._answers.end_waiting(request, FinishReason.CANCELLED)
            for engine in set(request.assigned.values()):
                orders[engine].append(Order.cancel(request.request_id))
        for engine, cancellations in orders.items():
            await self._orders.send(engine, cancellations)

    def is_cancelled_early(self, request_id: str, entry_id: str) -> bool:
        """Return whether a request that arrived with *entry_id* was cancelled by a later message that was read first.

        A request that is sent again after its cancellation is not cancelled.
        """
        cancellation = self._early.get(request_id)
        return cancellation is not None and arrival_time(entry_id) <= arrival_time(cancellation)

    async def forget_early(self) -> None:
        """Forget cancellations of unknown requests. Call this when every request that was sent has been read."""
        if self._early:
            await self._job_store.incoming.delete(Stream.CONTROL, *self._early_entries)
            self.clear()

    def clear(self) -> None:
        """Forget cancellations of unknown requests, and leave their entries in Redis."""
        self._early.clear()
        self._early_entries.clear()
