"""Publishes the coordinator's status, and records it in the timeline."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator

from rollout_api.protocol.status import CoordinatorStatus, EnvironmentErrors
from rollout_head.coordinator.canaries import CanaryTest
from rollout_head.coordinator.control import ControlProcessor
from rollout_head.coordinator.dead_letters import DeadLetters
from rollout_head.coordinator.engine_tracker import EngineTracker
from rollout_head.coordinator.fenced_orders import FencedOrders
from rollout_head.coordinator.pause import PauseAnnouncer
from rollout_head.coordinator.remaining_length import RemainingWork, SimilarRollouts, estimate_remaining_work
from rollout_head.coordinator.request_spans import RequestSpans
from rollout_head.coordinator.rollout_queue import RolloutQueue
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_head.coordinator.slow_clients import SlowClients
from rollout_head.coordinator.status import StatusBoard, StatusInput
from rollout_head.coordinator.timeline_recorder import TimelineRecorder
from rollout_head.coordinator.weights import WeightAnnouncer
from rollout_head.tracing import TraceExporter
from rollout_store.job import JobStore

logger = logging.getLogger(__name__)

_MAX_ESTIMATING_SHARE = 0.05
"""Share of the time that may be spent on estimates of the remaining work."""


class StatusPublisher:
    """Publishes the status for clients, the canary test for later coordinators, and the timeline for reports."""

    def __init__(
        self,
        board: StatusBoard,
        job_store: JobStore,
        *,
        orders: FencedOrders,
        tracker: RolloutTracker,
        queue: RolloutQueue,
        engines: EngineTracker,
        weights: WeightAnnouncer,
        pause: PauseAnnouncer,
        slow_clients: SlowClients,
        control: ControlProcessor,
        dead_letters: DeadLetters,
        canaries: CanaryTest,
        traces: TraceExporter | None,
    ) -> None:
        self._board, self._job_store, self._orders = board, job_store, orders
        self._tracker, self._queue, self._engines, self._weights = tracker, queue, engines, weights
        self._pause = pause
        self._slow_clients, self._control = slow_clients, control
        self._dead_letters, self._canaries = dead_letters, canaries
        request_spans = None if traces is None else RequestSpans(traces, job_store.keys.uid, orders, tracker)
        self._recorder = TimelineRecorder(job_store, board.distributions, request_spans)
        self._stored_canaries = 0
        """Number of canaries in the state that was last stored."""
        self._remaining = RemainingWork(0.0, 0.0)
        self._next_estimate = 0.0
        """``time.monotonic()`` of the next estimate of the remaining work."""

    async def restore(self) -> None:
        """Continue the canary test of an earlier coordinator, if its state can be read."""
        try:
            if (state := await self._job_store.job.canaries()) is not None:
                self._canaries.load_json(state)
                self._stored_canaries = self._canaries.drift.canaries
        except ValueError as error:
            logger.warning(
                "Cannot read the state of the canary test in %s; the test goes on without the canaries of earlier "
                "coordinators: %s",
                self._job_store.keys.canaries,
                error,
            )

    @property
    def rollout_speed(self) -> float:
        """Tokens per second of one running rollout."""
        running = self._tracker.num_assigned
        return self._board.tokens_per_second / running if running else 0.0

    async def publish(self) -> None:
        """Publish the current state."""
        totals = await self._job_store.rollouts.totals()
        engine_errors = await self._job_store.engines.failed()
        environment_errors = await self._job_store.job.environment_errors()
        status = self._board.update(self._input(totals, engine_errors, environment_errors))
        await self._write(status)
        await self._recorder.record(status)

    def _input(
        self, totals: dict[str, int], engine_errors: dict[str, str], environment_errors: dict[str, EnvironmentErrors]
    ) -> StatusInput:
        return StatusInput(
            uid=self._job_store.keys.uid,
            coordinator=self._orders.coordinator,
            requests=len(self._tracker.requests),
            waiting=self._queue.num_waiting,
            assigned={engine: len(keys) for engine, keys in self._tracker.assigned.items()},
            totals=totals,
            engines=self._engines.engines,
            engine_errors=engine_errors,
            environment_errors=environment_errors,
            engines_lost=self._engines.num_lost,
            dead_letters=self._dead_letters.count,
            weight_version=self._weights.desired_version or 0,
            unread_bytes=self._slow_clients.unread_bytes,
            slow_clients=sorted(self._slow_clients.names),
            remaining=self._remaining_work(),
            drift=self._canaries.drift,
            closing=self._control.closing,
            paused=self._pause.mode is not None,
        )

    def _remaining_work(self) -> RemainingWork:
        now = time.monotonic()
        if now >= self._next_estimate or not self._tracker.requests:
            self._remaining = estimate_remaining_work(self._unfinished_rollouts(now))
            ended = time.monotonic()
            self._next_estimate = ended + (ended - now) / _MAX_ESTIMATING_SHARE
        return self._remaining

    def _unfinished_rollouts(self, now: float) -> Iterator[SimilarRollouts]:
        speed = self.rollout_speed
        for request in self._tracker.requests.values():
            yield from request.remaining_work(speed, now)

    async def _write(self, status: CoordinatorStatus) -> None:
        await self._job_store.job.set_status(json.dumps(status).encode())
        if self._canaries.drift.canaries != self._stored_canaries:
            self._stored_canaries = self._canaries.drift.canaries
            await self._job_store.job.set_canaries(self._canaries.to_json())
