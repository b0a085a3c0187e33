"""Traces requests and their rollouts, once they have ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout_api.protocol.messages import FinishReason
from rollout_api.protocol.timeline import EndedRollout
from rollout_head.coordinator.fenced_orders import FencedOrders
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_head.tracing import SpanData, TraceExporter, span_of_request, spans_of_rollout
from rollout_store.job.requests import RequestTrace
from rollout_store.job.timeline import EndedEntry


@dataclass
class _Request:
    """A request of which rollouts have ended."""

    trace: RequestTrace
    last: EndedRollout
    """The rollout that ended last."""
    has_failed: bool
    """Whether a rollout has failed."""


class RequestSpans:
    """Makes spans of what the timeline says, in rounds: each round reads what has ended since the one before."""

    def __init__(self, traces: TraceExporter, job_uid: str, orders: FencedOrders, tracker: RolloutTracker) -> None:
        self._traces, self._job_uid, self._orders, self._tracker = traces, job_uid, orders, tracker
        self._requests: dict[str, _Request] = {}
        """Requests whose own span is not exported yet, by id."""
        self._open: set[str] = set()
        """Requests that were open when the round began."""
        self._spans: list[SpanData] = []
        """Spans of the current round."""

    def begin_round(self) -> None:
        """Begin a round, before the timeline is read."""
        self._open = set(self._tracker.requests)

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
