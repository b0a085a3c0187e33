"""The coordinator's main loop, and how it takes over a job."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_head.coordinator.admission import RequestAdmission
from rollout_head.coordinator.engines import Engines, Reconciliation
from rollout_head.coordinator.messages import MessageReader
from rollout_head.coordinator.orders import EngineOrders
from rollout_head.coordinator.placement import RolloutPlacer
from rollout_head.coordinator.state import CoordinatorLimits, CoordinatorState
from rollout_head.coordinator.status import StatusBuilder, StatusPublisher
from rollout_head.coordinator.timeline import RequestSpans, TimelineRecorder
from rollout_head.coordinator.unserved_rollouts import UnservedRollouts
from rollout_head.tracing import TraceExporter
from rollout_store.history.store import HistoryStore, LengthLookup
from rollout_store.job import JobStore, Stream
from rollout_store.job.assignments import RolloutKey
from rollout_store.job.job_record import JobDescription

logger = logging.getLogger(__name__)

_END_LOG_INTERVAL_S = 10.0
"""Seconds between two messages that a closed job waits for the relay."""


class Coordinator:
    """Coordinates a job until it is closed. Another coordinator can take over at any time, from the state in Redis.

    This class runs the parts of the coordinator, which share one :class:`CoordinatorState`:

    - :class:`MessageReader` reads the messages of clients and engines, and processes weight updates, cancellations,
      pauses and the close,
    - :class:`RequestAdmission` admits or refuses requests,
    - :class:`Engines` tracks the live engines and requeues the rollouts of lost ones, and :class:`Reconciliation` finds
      events that were missed,
    - :class:`EngineOrders` sends orders to engines,
    - :class:`RolloutPlacer` assigns waiting rollouts,
    - :class:`UnservedRollouts` ends rollouts without an engine, and
    - :class:`StatusPublisher` publishes the status.
    """

    def __init__(
        self,
        job: RolloutJob,
        job_store: JobStore,
        history: HistoryStore,
        *,
        vocabulary: int,
        separate_history: bool = False,
        total_rollouts: int | None = None,
        limits: CoordinatorLimits | None = None,
        traces: TraceExporter | None = None,
    ) -> None:
        """Create a coordinator; :meth:`run` starts it.

        Args:
            job: the manifest.
            job_store: the job's state in Redis.
            history: the job's history, for the lengths of earlier rollouts.
            vocabulary: number of token ids that the model knows.
            separate_history: whether the history has a Redis server of its own.
            total_rollouts: number of rollouts in all epochs of a dataset source; None for a job that serves trainers.
            limits: intervals and limits.
            traces: sends the spans of requests; None for no traces.
        """
        spec, uid = job.spec, job_store.keys.uid
        self._description = JobDescription(
            model=spec.model.uri,
            vocabulary=vocabulary,
            sampling=spec.sampling.model_dump_json(),
            max_model_len=spec.engine.max_model_len,
            max_request_bytes=int(parse_quantity(spec.queue.max_request_bytes)),
            max_image_bytes=int(parse_quantity(spec.queue.max_image_bytes)),
            max_rollouts=spec.queue.max_rollouts,
            history=history.keys.full_name,
            history_redis="own" if separate_history else "",
        )
        self._job_name, self._job_store = f"{job.metadata.namespace}/{job.metadata.name}", job_store
        self._state = state = CoordinatorState(limits or CoordinatorLimits())
        self.status = StatusBuilder(state, job, uid, total_rollouts=total_rollouts)
        self._orders = EngineOrders(state, job_store)
        self._engines = Engines(state, job_store, self._orders)
        self._reconciliation = Reconciliation(state, job_store)
        self._admission = RequestAdmission(state, job_store, self._orders, LengthLookup(history), job, vocabulary)
        self._max_rollouts = spec.queue.max_rollouts
        self._reader = MessageReader(state, job_store, self._orders, self._engines, self._admission, self._max_rollouts)
        max_unread_bytes = int(parse_quantity(spec.queue.max_unread_results))
        self._placer = RolloutPlacer(state, job_store, self._orders, max_unread_bytes)
        self._unserved = UnservedRollouts(state, job_store, self._max_rollouts)
        spans = None if traces is None else RequestSpans(traces, uid, self._orders, state)
        timeline = TimelineRecorder(job_store, self.status.distributions, spans)
        self._publisher = StatusPublisher(state, job_store, self.status, timeline)
        self._server_run_id = ""
        self._next_end_log = 0.0
        """``time.monotonic()`` of the next message that a closed job waits for the relay."""

    @property
    def num_open_requests(self) -> int:
        """Number of requests that are not fully answered."""
        return len(self._state.requests)

    @property
    def num_open_rollouts(self) -> int:
        """Number of samples of all open requests, including those that have ended."""
        return self._state.num_rollouts

    async def run(self) -> None:
        """Coordinate until the job is closed and all its requests are answered.

        Raises:
            StaleCoordinatorError: if another coordinator has taken over.
        """
        await self._take_over()
        limits = self._state.limits
        checked_at = published_at = round_began_at = 0.0
        while not await self._ended():
            now = time.monotonic()
            if now - checked_at >= limits.engine_check_interval_s:
                checked_at = now
                await self._check()
            if now - published_at >= limits.status_interval_s:
                published_at = now
                await self._publisher.publish()
            if now - round_began_at >= limits.reconcile_interval_s:
                round_began_at = now
                self._reconciliation.begin_round()
            await self._reconciliation.step()
            await self._placer.place_waiting()
            await self._unserved.finish_batch()
            await self._reader.read()
        await self._publisher.publish()

    async def _take_over(self) -> None:
        """Become the job's coordinator, and rebuild the state that one which had run from the beginning would have."""
        state = self._state
        self._server_run_id = await self._job_store.server_run_id()
        await self._orders.take_over()
        # Events up to here are not read, because their effects are in the data that is read from here on.
        await self._reader.reset()
        await self._job_store.job.publish(state.coordinator, self._job_name, self._description)
        state.closing = await self._job_store.job.is_closing()
        loss_counts = await self._job_store.assignments.loss_counts()
        state.queue.restore(loss_counts, await self._job_store.rollouts.partial_ids())
        await self._publisher.restore()
        registered = await self._job_store.engines.engines()
        held: dict[RolloutKey, str] = {}
        for engine in registered:
            for order in await self._job_store.assignments.inbox(engine):
                if order.assignment is not None:
                    held[order.assignment.key] = engine
        state.engines = {engine: report for engine, (report, alive) in registered.items() if alive}
        await self._restore_requests(held)
        # The live engines are discovered by the next update, which also tells them which weights to load.
        state.engines = {}
        await self._engines.reclaim({engine: report for engine, (report, alive) in registered.items() if not alive})

    async def _restore_requests(self, held: Mapping[RolloutKey, str]) -> None:
        """Open the requests that were admitted before, and further ones while the job has room for them.

        Requests are admitted in the order of their entries, so the last entry that was admitted ends the first ones.

        Args:
            held: request id and sample → engine that already has the assignment.
        """
        limits, published_at = self._state.limits, time.monotonic()
        cursor = "0"
        while entries := await self._job_store.incoming.page(Stream.REQUESTS, cursor, max_entries=limits.read_batch):
            if self._state.num_limited >= self._max_rollouts:
                entries = entries[: await self._admission.num_admitted(entries)]
                if not entries:
                    return
            await self._admission.admit(entries, held)
            cursor = entries[-1].entry_id
            self._reader.skip_requests(cursor)
            if time.monotonic() - published_at >= limits.status_interval_s:
                await self._publisher.publish()
                published_at = time.monotonic()

    async def _check(self) -> None:
        """Check Redis, engines, deadlines and clients."""
        if await self._job_store.server_run_id() != self._server_run_id:
            logger.warning(
                "Redis was restarted or replaced. The coordinator rebuilds its state, as writes may be lost."
            )
            self._state.clear()
            await self._take_over()
        await self._orders.check_current()
        await self._engines.update()
        await self._unserved.find()
        await self._placer.find_slow_clients()
        self._unserved.find_blocked()

    async def _ended(self) -> bool:
        """Return whether the job is closed and all is answered; then let the job's keys expire."""
        if not self._state.closing or self._state.requests:
            return False
        # The relay ends with the job, so it must have moved everything to the history.
        if unprocessed := await self._job_store.incoming.num_unprocessed():
            if (now := time.monotonic()) >= self._next_end_log:
                self._next_end_log = now + _END_LOG_INTERVAL_S
                logger.info("The job is closed. It ends once %d rollouts or rewards are in the history.", unprocessed)
            return False
        await self._job_store.job.set_closed(self._state.coordinator)
        return True
