"""Keeps the job's measurements over time, and counts and traces what has ended."""

from __future__ import annotations

import logging
import time

from rollout_api.protocol.messages import CodecError
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.protocol.timeline import EngineMeasurement, Measurement
from rollout_head.coordinator.distributions import RolloutDistributions
from rollout_head.coordinator.request_spans import RequestSpans
from rollout_head.limits import MEASUREMENT_INTERVAL_S
from rollout_store.job import JobStore
from rollout_store.job.streams import ENTRIES_PER_PAGE
from rollout_store.job.timeline import resolution

logger = logging.getLogger(__name__)


class TimelineRecorder:
    """Appends measurements to the timeline, at intervals that grow with the job's age, and reads what has ended.

    A job of any age then has a limited number of measurements, and each part of it is resolved in proportion to the age
    that the job had.
    """

    def __init__(
        self, job_store: JobStore, distributions: RolloutDistributions, spans: RequestSpans | None = None
    ) -> None:
        self._job_store, self._distributions, self._spans = job_store, distributions, spans
        self._began = 0.0
        """``time.monotonic()`` of the job's first measurement."""
        self._measured = 0.0
        """``time.monotonic()`` of the last measurement."""
        self._num_bytes = 0
        """Bytes of the last measurement."""
        self._last_ended: str | None = None
        """Id of the last entry of the timeline that was counted."""

    async def record(self, status: CoordinatorStatus) -> None:
        """Record a status if it is time for a measurement, and count and trace what has ended since the last call.

        Raises:
            StaleCoordinatorError: if rollouts are traced and another coordinator has taken over.
        """
        await self._add_measurement(status)
        if self._spans is None:
            await self._read_ended(status["weight_version"])
        else:
            self._spans.begin_round()
            await self._read_ended(status["weight_version"])
            await self._spans.end_round()

    async def _add_measurement(self, status: CoordinatorStatus) -> None:
        now = time.monotonic()
        if not self._began:
            store = self._job_store
            first = await store.timeline.first_measured_at()
            self._began = now if first is None else now - max(0.0, await store.clock() - first)
        interval = max(MEASUREMENT_INTERVAL_S, (now - self._began) / resolution(self._num_bytes))
        if now - self._measured < interval:
            return
        self._measured = now
        self._num_bytes = await self._job_store.timeline.add_measurement(measurement_of(status))

    async def _read_ended(self, newest_version: int) -> None:
        timeline = self._job_store.timeline
        if self._last_ended is None:
            # An earlier coordinator has counted the others. Its counters end with it, as those of any process.
            self._last_ended = await timeline.last_ended_id()
            return
        while True:
            try:
                ended = await timeline.ended(self._last_ended)
            except CodecError as error:
                logger.warning("Cannot read the timeline from the entry %s on: %s", self._last_ended, error)
                self._last_ended = await timeline.last_ended_id()
                return
            for entry in ended:
                self._distributions.observe_rollout(entry.rollout, newest_version)
                self._last_ended = entry.entry_id
            if self._spans is not None:
                self._spans.add(ended)
            if len(ended) < ENTRIES_PER_PAGE:
                return


def measurement_of(status: CoordinatorStatus) -> Measurement:
    """Return what the timeline keeps of a status."""
    return Measurement(
        time=0.0,
        state=status["state"],
        weight_version=status["weight_version"],
        requests=status["requests"],
        waiting=status["waiting"],
        assigned=status["assigned"],
        done=status["done"],
        tokens_per_second=status["tokens_per_second"],
        saved=status["saved"],
        remaining_seconds=status["remaining_seconds"],
        unread_bytes=sum(status["unread_bytes"].values()),
        engines=[
            EngineMeasurement.of(engine["name"], engine["version"], engine["assigned"], engine["counters"])
            for engine in status["engines"]
        ],
    )
