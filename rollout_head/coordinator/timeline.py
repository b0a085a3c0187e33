"""Keeps the job's measurements over time, and counts and traces what has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from rollout_api.protocol.messages import CodecError, FinishReason
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.protocol.timeline import EndedRollout, EngineMeasurement, Measurement
from rollout_head.coordinator.distributions import RolloutDistributions
from rollout_head.coordinator.orders import EngineOrders
from rollout_head.coordinator.state import CoordinatorState
from rollout_head.tracing import SpanData, TraceExporter, span_of_request, spans_of_rollout
from rollout_store.job import JobStore
from rollout_store.job.limits import ENTRIES_PER_PAGE, MEASUREMENT_INTERVAL_S
from rollout_store.job.request_trace import RequestTrace
from rollout_store.job.timeline import EndedEntry, resolution

logger = logging.getLogger(__name__)


@dataclass
class _Request:
    """A request whose first rollouts have ended."""

    trace: RequestTrace
    last: EndedRollout
    """The rollout that ended last."""
    has_failed: bool
    """Whether a rollout has failed."""


class RequestSpans:
    """Makes spans of what the timeline says, in rounds: each round reads what has ended since the one before."""

    def __init__(self, traces: TraceExporter, job_uid: str, orders: EngineOrders, state: CoordinatorState) -> None:
        self._traces, self._job_uid, self._orders, self._state = traces, job_uid, orders, state
        self._requests: dict[str, _Request] = {}
        """Requests whose own span is not exported yet, by id."""
        self._open: set[str] = set()
        """Requests that were open when the round began."""
        self._spans: list[SpanData] = []
        """Spans of the current round."""

    def begin_round(self) -> None:
        """Begin a round, before the timeline is read."""
        self._open = set(self._state.requests)

    def add(self, entries: Iterable[EndedEntry]) -> None:
        """Add rollouts that have ended."""
        for _, ended, packed_trace in entries:
            has_failed = ended.finish_reason == FinishReason.FAILED
            request = self._requests.get(ended.request_id)
            if request is None:
                trace = RequestTrace.unpack(packed_trace, self._job_uid, ended.request_id)
                request = self._requests[ended.request_id] = _Request(trace, ended, has_failed)
            request.last, request.has_failed = ended, request.has_failed or has_failed
            self._spans += spans_of_rollout(request.trace, ended)

    async def end_round(self) -> None:
        """Export the spans of the round, and those of requests whose rollouts had all ended when it began.

        Raises:
            StaleCoordinatorError: if another coordinator has taken over, which may have read the same entries.
        """
        for request_id in [request_id for request_id in self._requests if request_id not in self._open]:
            request = self._requests.pop(request_id)
            self._spans.append(span_of_request(request.trace, request.last, has_failed=request.has_failed))
        if self._spans:
            await self._orders.check_current()
            self._traces.export(self._spans)
            self._spans = []


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
