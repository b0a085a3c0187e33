"""Rebuilds the coordinator's state from Redis."""

from __future__ import annotations

import logging

from rollout_api.manifest.field_types import parse_quantity
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_head.coordinator.admission import RequestAdmission
from rollout_head.coordinator.answers import Answers
from rollout_head.coordinator.cancellations import Cancellations
from rollout_head.coordinator.control import ControlProcessor
from rollout_head.coordinator.engine_tracker import EngineTracker
from rollout_head.coordinator.fenced_orders import FencedOrders
from rollout_head.coordinator.message_reader import MessageReader
from rollout_head.coordinator.pause import PauseAnnouncer
from rollout_head.coordinator.rollout_queue import RolloutQueue
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_head.coordinator.status_publisher import StatusPublisher
from rollout_head.coordinator.weights import WeightAnnouncer
from rollout_store.job import JobStore, Stream
from rollout_store.job.assignments import RolloutKey
from rollout_store.job.job_record import JobDescription

logger = logging.getLogger(__name__)


class Recovery:
    """Takes over a job: rebuilds the state that a coordinator which had run from the beginning would have."""

    def __init__(
        self,
        job: RolloutJob,
        job_store: JobStore,
        description: JobDescription,
        *,
        orders: FencedOrders,
        tracker: RolloutTracker,
        queue: RolloutQueue,
        answers: Answers,
        engines: EngineTracker,
        weights: WeightAnnouncer,
        pause: PauseAnnouncer,
        cancellations: Cancellations,
        admission: RequestAdmission,
        control: ControlProcessor,
        reader: MessageReader,
        publisher: StatusPublisher,
    ) -> None:
        self._job_name = f"{job.metadata.namespace}/{job.metadata.name}"
        self._job_store, self._description, self._orders = job_store, description, orders
        self._tracker, self._queue, self._answers, self._engines = tracker, queue, answers, engines
        self._weights, self._pause = weights, pause
        self._cancellations, self._admission = cancellations, admission
        self._control, self._reader, self._publisher = control, reader, publisher
        self._server_run_id = ""

    async def take_over(self) -> None:
        """Become the job's coordinator and rebuild the state from Redis."""
        self._server_run_id = await self._job_store.server_run_id()
        await self._orders.take_over()
        # Events up to here are not read, because their effects are in the data that is read from here on.
        await self._reader.reset()
        await self._job_store.job.publish(self._job_name, self._description)
        await self._control.restore()
        await self._weights.restore()
        await self._pause.restore()
        loss_counts = await self._job_store.assignments.loss_counts()
        self._queue.restore(loss_counts, await self._job_store.rollouts.partial_ids())
        await self._publisher.restore()
        registered = await self._job_store.engines.engines()
        held: dict[RolloutKey, str] = {}
        for engine in registered:
            for order in await self._job_store.assignments.inbox(engine):
                if order.assignment is not None:
                    held[order.assignment.key] = engine
        entries = await self._job_store.incoming.entries(Stream.REQUESTS)
        await self._admission.admit(entries, held)
        if entries:
            self._reader.skip_requests(entries[-1].entry_id)
        # The live engines are discovered by the next update, which also tells them which weights to load.
        await self._engines.reclaim({engine: report for engine, (report, alive) in registered.items() if not alive})

    async def take_over_again_after_restart(self) -> None:
        """Rebuild the state if Redis was restarted or failed over, because it may have lost its last writes."""
        if await self._job_store.server_run_id() == self._server_run_id:
            return
        logger.warning("Redis was restarted or replaced. The coordinator rebuilds its state, as writes may be lost.")
        self._tracker.clear()
        self._answers.clear()
        self._cancellations.clear()
        self._engines.clear()
        await self.take_over()


def describe_job(job: RolloutJob, *, vocabulary: int, history: str, separate_history: bool) -> JobDescription:
    """Return what clients must know about a job.

    Args:
        job: the manifest.
        vocabulary: number of token ids that the model knows.
        history: full name of the job's history.
        separate_history: whether the history has a Redis server of its own.
    """
    spec = job.spec
    return JobDescription(
        model=spec.model.uri,
        vocabulary=vocabulary,
        sampling=spec.sampling.model_dump_json(),
        max_model_len=spec.engine.max_model_len,
        max_request_bytes=int(parse_quantity(spec.queue.max_request_bytes)),
        max_rollouts=spec.queue.max_rollouts,
        history=history,
        history_redis="own" if separate_history else "",
    )
