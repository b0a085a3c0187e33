"""The coordinator's main loop."""

from __future__ import annotations

import time

from rollout_api.manifest.quantity import parse_quantity
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_head.coordinator.admission import RequestAdmission
from rollout_head.coordinator.answers import Answers
from rollout_head.coordinator.canaries import CanaryTest
from rollout_head.coordinator.cancellations import Cancellations
from rollout_head.coordinator.control import ControlProcessor
from rollout_head.coordinator.dead_letters import DeadLetters
from rollout_head.coordinator.engine_tracker import EngineTracker
from rollout_head.coordinator.fenced_orders import FencedOrders
from rollout_head.coordinator.message_reader import MessageReader
from rollout_head.coordinator.pause import PauseAnnouncer
from rollout_head.coordinator.reconciliation import Reconciliation
from rollout_head.coordinator.recovery import Recovery, describe_job
from rollout_head.coordinator.rollout_placer import RolloutPlacer
from rollout_head.coordinator.rollout_queue import RolloutQueue
from rollout_head.coordinator.rollout_tracker import RolloutTracker
from rollout_head.coordinator.slow_clients import SlowClients
from rollout_head.coordinator.status import StatusBoard
from rollout_head.coordinator.status_publisher import StatusPublisher
from rollout_head.coordinator.unservable import UnservableRequests
from rollout_head.coordinator.weights import WeightAnnouncer
from rollout_head.limits import CoordinatorLimits
from rollout_head.tracing import TraceExporter
from rollout_store.history.store import HistoryStore, LengthLookup
from rollout_store.job import JobStore


class Coordinator:
    """Coordinates a job until it is closed. Another coordinator can take over at any time, from the state in Redis.

    This class runs the parts of the coordinator, each of which owns its state:

    - :class:`Recovery` rebuilds the state from Redis,
    - :class:`MessageReader` reads the messages of clients and engines,
    - :class:`RequestAdmission` admits or refuses requests,
    - :class:`ControlProcessor` processes weight updates, :class:`Cancellations` and the close,
    - :class:`RolloutTracker` knows the open requests, and :class:`RolloutQueue` which of their rollouts wait,
    - :class:`EngineTracker` knows the live engines and reclaims the rollouts of lost ones,
    - :class:`RolloutPlacer` assigns waiting rollouts,
    - :class:`UnservableRequests` ends what no engine can serve any more,
    - :class:`Answers` answers rollouts that end without an engine,
    - :class:`SlowClients` finds clients that do not read their results, and
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
        limits = limits or CoordinatorLimits()
        queue = job.spec.queue
        self.board = StatusBoard(job, total_rollouts=total_rollouts)
        self._job_store, self._limits = job_store, limits
        self._canaries = CanaryTest()
        self._dead_letters = DeadLetters(job_store)
        self._orders = FencedOrders(job_store)
        self._queue = RolloutQueue(limits)
        self._tracker = RolloutTracker(self._queue, self._canaries)
        self._answers = Answers(job_store, self._tracker, self._queue, limits)
        self._weights = WeightAnnouncer(job_store, self._orders)
        self._pause = PauseAnnouncer(job_store, self._orders)
        self._engines = EngineTracker(job_store, self._orders, self._tracker, self._queue, self._answers, limits)
        self._reconciliation = Reconciliation(job_store, self._tracker, self._engines)
        self._cancellations = Cancellations(job_store, self._orders, self._tracker, self._answers)
        self._control = ControlProcessor(
            job_store, self._cancellations, self._weights, self._pause, self._engines, self._dead_letters
        )
        self._admission = RequestAdmission(
            job,
            job_store,
            LengthLookup(history),
            vocabulary=vocabulary,
            tracker=self._tracker,
            cancellations=self._cancellations,
            dead_letters=self._dead_letters,
        )
        self._reader = MessageReader(
            job_store,
            tracker=self._tracker,
            engines=self._engines,
            admission=self._admission,
            cancellations=self._cancellations,
            control=self._control,
            max_rollouts=queue.max_rollouts,
            limits=limits,
        )
        self._unservable = UnservableRequests(
            job_store,
            tracker=self._tracker,
            queue=self._queue,
            engines=self._engines,
            weights=self._weights,
            answers=self._answers,
            limits=limits,
        )
        self._slow_clients = SlowClients(job_store, self._tracker, int(parse_quantity(queue.max_unread_results)))
        self._placer = RolloutPlacer(self._orders, self._tracker, self._queue, self._engines, self._weights)
        self._publisher = StatusPublisher(
            self.board,
            job_store,
            orders=self._orders,
            tracker=self._tracker,
            queue=self._queue,
            engines=self._engines,
            weights=self._weights,
            pause=self._pause,
            slow_clients=self._slow_clients,
            control=self._control,
            dead_letters=self._dead_letters,
            canaries=self._canaries,
            traces=traces,
        )
        self._recovery = Recovery(
            job,
            job_store,
            describe_job(job, vocabulary=vocabulary, history=history.keys.full_name, separate_history=separate_history),
            orders=self._orders,
            tracker=self._tracker,
            queue=self._queue,
            answers=self._answers,
            engines=self._engines,
            weights=self._weights,
            pause=self._pause,
            cancellations=self._cancellations,
            admission=self._admission,
            control=self._control,
            reader=self._reader,
            publisher=self._publisher,
        )

    @property
    def num_open_requests(self) -> int:
        """Number of requests that are not fully answered."""
        return len(self._tracker.requests)

    @property
    def num_open_rollouts(self) -> int:
        """Number of samples of all open requests, including those that have ended."""
        return self._tracker.num_rollouts

    async def run(self) -> None:
        """Coordinate until the job is closed and all its requests are answered.

        Raises:
            StaleCoordinatorError: if another coordinator has taken over.
        """
        await self._recovery.take_over()
        limits = self._limits
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
            await self._placer.assign_waiting(self._slow_clients.names)
            await self._answers.send_batch()
            await self._reader.read()
        await self._publisher.publish()

    async def _check(self) -> None:
        """Check Redis, engines, deadlines and clients."""
        await self._recovery.take_over_again_after_restart()
        await self._orders.check_current()
        for engine in await self._engines.update():
            await self._weights.notify_new_engine(engine, self._engines.engines[engine])
            await self._pause.notify_new_engine(engine, self._engines.engines[engine])
        await self._unservable.end_overdue()
        self._unservable.fail_unserved_versions()
        await self._slow_clients.update()

    async def _ended(self) -> bool:
        """Return whether the job is closed and all is answered; then let the job's keys expire."""
        if not self._control.closing or self._tracker.requests:
            return False
        # The relay ends with the job, so it must have moved everything to the history.
        if not await self._job_store.incoming.all_processed():
            return False
        await self._job_store.job.set_closed()
        return True
