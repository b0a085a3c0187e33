"""Reads what clients and engines send to the coordinator, and processes the control messages among it."""

from __future__ import annotations

import asyncio
import logging
import time

from rollout_api.protocol.messages import (
    Cancel,
    CodecError,
    ControlMessage,
    InitWeightTransfer,
    Pause,
    Resume,
    WeightUpdate,
    decode,
)
from rollout_api.redis_client.retry import BatchPacer
from rollout_head.coordinator.admission import RequestAdmission, move_to_dead_letters
from rollout_head.coordinator.engines import Engines
from rollout_head.coordinator.orders import EngineOrders
from rollout_head.coordinator.state import CoordinatorState
from rollout_store.job import Entry, JobStore, RolloutEvent, Stream

logger = logging.getLogger(__name__)


class MessageReader:
    """Reads the request, control and event streams from where it left off.

    Requests and control messages arrive in different streams, so a cancellation may be read before its request. Its
    entry stays in Redis until all earlier requests have been read, for this coordinator or the next one.
    """

    def __init__(
        self,
        state: CoordinatorState,
        job_store: JobStore,
        orders: EngineOrders,
        engines: Engines,
        admission: RequestAdmission,
        max_rollouts: int,
    ) -> None:
        self._state, self._job_store, self._orders = state, job_store, orders
        self._engines, self._admission, self._max_rollouts = engines, admission, max_rollouts
        self._cursors: dict[Stream, str] = {}
        self._pacer, self._next_read = BatchPacer(), 0.0
        """``time.monotonic()`` before which no read begins."""

    async def reset(self) -> None:
        """Read requests and control messages from the beginning, and events from now on."""
        last_event = await self._job_store.incoming.last_id(Stream.EVENTS)
        self._cursors = {Stream.REQUESTS: "0", Stream.CONTROL: "0", Stream.EVENTS: last_event}

    def skip_requests(self, last_id: str) -> None:
        """Continue to read requests after *last_id*."""
        self._cursors[Stream.REQUESTS] = last_id

    async def read(self) -> None:
        """Process new messages; wait a moment for them if there are none.

        While the queue is full, no requests are read. While many messages arrive, further ones are collected briefly.
        """
        if (pause := self._next_read - time.monotonic()) > 0:
            await asyncio.sleep(pause)
        cursors, limits = dict(self._cursors), self._state.limits
        if self._state.num_limited >= self._max_rollouts:
            del cursors[Stream.REQUESTS]

        found = await self._job_store.incoming.read(
            cursors, timeout_s=limits.read_timeout_s, max_entries=limits.read_batch
        )
        now = time.monotonic()
        self._next_read = now + self._pacer.pause(sum(map(len, found.values())), now)
        for stream, entries in found.items():
            self._cursors[stream] = entries[-1].entry_id
        for entry in found.get(Stream.EVENTS, []):
            try:
                event = RolloutEvent.read(entry.fields)
            except (KeyError, ValueError) as error:
                logger.warning(
                    "Event %s cannot be read and is skipped: %s: %s", entry.entry_id, type(error).__name__, error
                )
                continue
            self._engines.apply_event(event)
        requests = found.get(Stream.REQUESTS, [])
        await self._admission.admit(requests)
        for entry in found.get(Stream.CONTROL, []):
            await self._process(entry)
        if Stream.REQUESTS in cursors and len(requests) < limits.read_batch and self._state.early_entries:
            # Every request that was sent has been read, so those that were cancelled do not exist.
            await self._job_store.incoming.delete(Stream.CONTROL, *self._state.early_entries)
            self._state.forget_early_cancellations()

    async def _process(self, entry: Entry) -> None:
        """Process an entry of the control stream."""
        try:
            message = decode(entry.data)
            if not isinstance(message, ControlMessage):
                raise CodecError(f"a {message.kind} in place of a control message")
        except CodecError as error:
            await move_to_dead_letters(self._state, self._job_store, Stream.CONTROL, entry, str(error))
            return
        if isinstance(message, WeightUpdate):
            newest = self._state.newest_version
            if message.weight_version < newest:
                reason = f"weight version {message.weight_version} is older than {newest}, which was published before"
                await move_to_dead_letters(self._state, self._job_store, Stream.CONTROL, entry, reason)
                return
            await self._orders.publish_weights(message)
        elif isinstance(message, InitWeightTransfer):
            await self._orders.init_transfer(message)
        elif isinstance(message, Cancel):
            if not await self._cancel(entry.entry_id, message.request_ids):
                return
        elif isinstance(message, Pause | Resume):
            await self._orders.pause(message.mode if isinstance(message, Pause) else None)
        else:
            await self._job_store.job.set_closing(self._state.coordinator)
            self._state.closing = True
            if self._state.pause_mode is not None:  # a paused job would never answer its requests
                await self._orders.pause(None)
        await self._job_store.incoming.delete(Stream.CONTROL, entry.entry_id)

    async def _cancel(self, entry_id: str, request_ids: list[str]) -> bool:
        """Cancel requests together, because a step may have thousands of them.

        Returns:
            False if some requests are unknown, so that the control entry *entry_id* must be kept.
        """
        found = (self._state.requests.get(request_id) for request_id in request_ids)
        requests = [request for request in found if request is not None and not request.cancelled]
        if requests:
            await self._job_store.requests.mark_cancelled([request.request_id for request in requests])
            await self._orders.cancel(requests)
        unknown = set(request_ids) - self._state.requests.keys()
        if unknown:
            self._state.early_cancellations |= dict.fromkeys(unknown, entry_id)
            self._state.early_entries.add(entry_id)
        return not unknown
