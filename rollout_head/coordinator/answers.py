"""Answers for rollouts that end without an engine."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from rollout_api.protocol.messages import FinishReason, Rollout
from rollout_head.coordinator.open_request import OpenRequest
from rollout_head.coordinator.rollout_queue import RolloutQueue
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_head.limits import CoordinatorLimits
from rollout_store.job import JobStore, RolloutEvent

logger = logging.getLogger(__name__)


class _Ended(NamedTuple):
    request: OpenRequest
    sample: int
    reason: FinishReason
    detail: str


class Answers:
    """Answers samples that end without an engine: waiting samples return their partial output, or no tokens.

    A client may cancel thousands of rollouts at once. They are answered in batches, so that other work is not delayed.
    """

    def __init__(
        self, job_store: JobStore, tracker: RolloutTracker, queue: RolloutQueue, limits: CoordinatorLimits
    ) -> None:
        self._job_store, self._tracker, self._queue, self._limits = job_store, tracker, queue, limits
        self._pending: deque[_Ended] = deque()

    def end_waiting(self, request: OpenRequest, reason: FinishReason) -> None:
        """End all waiting samples of a request."""
        for sample in self._queue.remove(request.request_id):
            self._pending.append(_Ended(request, sample, reason, ""))

    def cancel(self, request: OpenRequest, sample: int) -> None:
        """End a sample that was cancelled and is neither waiting nor assigned."""
        self._pending.append(_Ended(request, sample, FinishReason.CANCELLED, ""))

    def fail(self, request: OpenRequest, sample: int, detail: str) -> None:
        """End a sample, which is neither waiting nor assigned, with an error."""
        logger.warning("Rollout %s has failed: %s", request.rollout_id(sample), detail)
        self._pending.append(_Ended(request, sample, FinishReason.FAILED, detail))

    def fail_waiting(self, request: OpenRequest, detail: str) -> None:
        """End all waiting samples of a request with an error."""
        for sample in self._queue.remove(request.request_id):
            self.fail(request, sample, detail)

    def clear(self) -> None:
        """Forget all samples that are not answered yet."""
        self._pending.clear()

    async def send_batch(self) -> None:
        """Answer the next samples."""
        count = min(self._limits.answer_batch, len(self._pending))
        batch = [self._pending.popleft() for _ in range(count)]
        batch = [ended for ended in batch if self._tracker.requests.get(ended.request.request_id) is ended.request]
        if not batch:
            return
        samples = [(ended.request.request, ended.sample) for ended in batch]
        partials = await self._job_store.rollouts.partials(samples)
        rollouts = [
            Rollout.from_request(
                ended.request.request,
                ended.sample,
                partial or ended.request.request.prefix,
                ended.reason,
                detail=ended.detail,
            )
            for ended, partial in zip(batch, partials, strict=True)
        ]
        answers = [(ended.request.request, rollout) for ended, rollout in zip(batch, rollouts, strict=True)]
        await self._job_store.rollouts.finish_all(answers)
        for ended, rollout in zip(batch, rollouts, strict=True):
            # Not left to the event stream, from which events may be trimmed when so many rollouts end together.
            length = len(rollout.token_ids)
            self._tracker.record_end(RolloutEvent(ended.request.request_id, ended.sample, length=length))
