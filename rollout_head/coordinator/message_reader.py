"""Reads what clients and engines send to the coordinator."""

from __future__ import annotations

import asyncio
import time

from rollout_api.redis_client.batch_pacer import BatchPacer
from rollout_head.coordinator.admission import RequestAdmission
from rollout_head.coordinator.cancellations import Cancellations
from rollout_head.coordinator.control import ControlProcessor
from rollout_head.coordinator.engine_tracker import EngineTracker
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_head.limits import CoordinatorLimits
from rollout_store.job import JobStore, RolloutEvent, Stream


class MessageReader:
    """Reads the request, control and event streams from where it left off."""

    def __init__(
        self,
        job_store: JobStore,
        *,
        tracker: RolloutTracker,
        engines: EngineTracker,
        admission: RequestAdmission,
        cancellations: Cancellations,
        control: ControlProcessor,
        max_rollouts: int,
        limits: CoordinatorLimits,
    ) -> None:
        self._job_store, self._limits, self._max_rollouts = job_store, limits, max_rollouts
        self._tracker, self._engines = tracker, engines
        self._admission, self._cancellations, self._control = admission, cancellations, control
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
        cursors = dict(self._cursors)
        if self._tracker.num_rollouts >= self._max_rollouts:
            del cursors[Stream.REQUESTS]

        found = await self._job_store.incoming.read(
            cursors, timeout_s=self._limits.read_timeout_s, max_entries=self._limits.read_batch
        )
        now = time.monotonic()
        self._next_read = now + self._pacer.pause(sum(map(len, found.values())), now)
        for stream, entries in found.items():
            self._cursors[stream] = entries[-1].entry_id
        for entry in found.get(Stream.EVENTS, []):
            self._engines.apply_event(RolloutEvent.read(entry.fields))
        requests = found.get(Stream.REQUESTS, [])
        await self._admission.admit(requests)
        for entry in found.get(Stream.CONTROL, []):
            await self._control.process(entry)
        if Stream.REQUESTS in cursors and len(requests) < self._limits.read_batch:
            await self._cancellations.forget_early()
