"""Carries out what the coordinator orders of one engine; needs Redis, but no coordinator, to go on."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import redis

from rollout_api.asyncio_tasks import end
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import FinishReason, Partial, Rollout, RolloutRequest, WeightsKind, WeightUpdate
from rollout_worker.engine.compat import EngineError
from rollout_worker.engine.host import Engine, Generated
from rollout_worker.engine.sampling import AdmissionError, can_continue
from rollout_worker.history.connection import retry_async
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.job_store import Assignment, EngineReport, Entry, JobStore, Order, arrival
from rollout_worker.job.weights import WeightsError, WeightTransport
from rollout_worker.policy.speculation_cutoff import SpeculationCutoff

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0
_STATS = (
    "steps",
    "drafting_seconds",
    "index_bytes",
    "cost_base_seconds",
    "cost_token_seconds",
    "cost_context_token_seconds",
    "cost_drafting_seconds",
    "cost_error_ratio",
    "timed_seconds",
    "timed_seconds_without_drafts",
    "drafting_stopped",
    "drafting_stops",
    "explored_tokens",
    "proposed_tokens",
)
_HISTORY_STATS = ("rollouts", "tokens", "corrupt", "evictions", "failures")
_HUNG_S = 300.0
"""Longer than loading the weights of any model takes, during which an engine answers nothing."""
_INBOX_WAIT_S = 1.0
_HISTORY_WAIT_S = 2.0
"""How long a rollout waits for its problem's history: drafts from the first token on are worth a little."""
_GATHER_S = 1.0
"""How long what is wanted of known problems waits to be announced together."""
_HANDOVER_S = 4.0
"""Longer than keeping the partials of all rollouts takes."""
_REQUESTS_KEPT = 512
_GIVES_UP_AFTER_S = 600.0
"""How long an engine whose drafts do not pay waits for a moment without rollouts, to be replaced then."""
_ANNOUNCED_FOR_S = 30.0
"""How long a problem's history is kept up to date after its last rollout here: its next may soon come."""


@dataclass(eq=False)
class _Running:
    """One rollout that this engine has to make."""

    order: Order
    assignment: Assignment
    task: asyncio.Task[None] | None = None
    until: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to end it as it is."""
    why: FinishReason | None = None
    """Set with it: what to answer; None: nothing, the rollout goes on elsewhere."""
    moving: bool = False
    """It goes on elsewhere while this engine stays."""
    pinned: int | None = None
    deadline: asyncio.TimerHandle | None = None

    def end(self, why: FinishReason | None) -> None:
        """Let it end as it is."""
        if not self.until.is_set():
            self.why = why
            self.until.set()


class EngineWorker:
    """One engine's part of a job.

    It renews its own lease, keeps its rollouts' partials, answers clients and loads new weights, all by itself: the
    coordinator is needed for new work alone.
    """

    def __init__(
        self,
        engine: Engine,
        job_store: JobStore,
        store: HistoryStore,
        *,
        name: str,
        worker: str,
        slots: int,
        checkpoint_tokens: int,
        sampling: Sampling,
        transport: WeightTransport,
        broadcast: bool = False,
        given_up: bool = False,
        futility: SpeculationCutoff | None = None,
    ) -> None:
        """Take what a worker needs; :meth:`run` begins.

        Args:
            engine: started; the caller closes it.
            job_store: the job's messages.
            store: the job's history.
            name: of the worker, the same over its restarts.
            worker: the process on its machine that may tell it to leave; '' if there is none.
            slots: rollouts decoded at the same time.
            checkpoint_tokens: most tokens of a rollout that are lost with this engine.
            sampling: the job's settings, which a request may override.
            transport: how published weights come into the engine.
            broadcast: whether they may come from a trainer's memory.
            given_up: whether the engine is one without speculation because drafting did not pay.
            futility: when to give drafting up; default: as it comes.
        """
        self._engine, self._job_store, self._store = engine, job_store, store
        self._checkpoint_tokens, self._sampling, self._transport = checkpoint_tokens, sampling, transport
        plain = engine.config.drafting is None and not given_up
        self.gives_up = False
        """Whether it ends for another to go on without speculation, since drafting does not pay."""
        self._futility = futility or SpeculationCutoff()
        self._futile_since: float | None = None
        self._report = EngineReport(name, worker, os.getpid(), slots, plain, given_up, engine.weight_version)
        if broadcast:
            self._report.broadcast, self._report.ranks = engine.config.broadcast_backend, engine.config.ranks
        self._id = ""
        self._head = self._server = ""
        self._leaving: asyncio.Task[None] | None = None
        self._running: dict[tuple[str, int], _Running] = {}
        self._requests: OrderedDict[str, asyncio.Task[RolloutRequest | None]] = OrderedDict()
        self._history = _Announcer(engine, store, job_store.keys.uid)
        self._partials: dict[tuple[str, int], tuple[RolloutRequest, Partial]] = {}
        self._partials_there = asyncio.Event()
        self._look_for_weights = asyncio.Event()
        self._updating = asyncio.Lock()
        self._telling = asyncio.Lock()
        self._failure: asyncio.Future[None] | None = None
        self._clock_ahead = 0.0

    async def run(self, on_serving: Callable[[], None] = lambda: None) -> None:
        """Serve until :meth:`drain` has let the work end.

        Args:
            on_serving: called once the engine can be given work.

        Raises:
            EngineError: if the engine died; its rollouts go on elsewhere.
        """
        self._clock_ahead = await retry_async(self._job_store.clock) - time.time()
        self._head = await retry_async(self._job_store.head)
        self._server = await retry_async(self._job_store.server)
        await self._update()  # before any work is taken
        self._failure = asyncio.get_running_loop().create_future()
        await self._register()
        on_serving()
        loops = [
            asyncio.ensure_future(loop)
            for loop in (
                self._obey(),
                self._beat(),
                self._measure(),
                self._keep_partials(),
                self._keep_weights(),
                self._history.run(),
            )
        ]
        try:
            await asyncio.wait([*loops, self._failure], return_when=asyncio.FIRST_COMPLETED)
            for ended in [*loops, self._failure]:
                if ended.done():
                    ended.result()
        finally:
            await end(*loops, *(running.task for running in self._running.values() if running.task is not None))
            try:
                await self._job_store.leave(self._id)  # others go on at once instead of after the lease
            except redis.RedisError as error:
                logger.info("Redis was not told that engine %s ends (%s); its lease will run out.", self._id, error)

    async def drain(self, grace: float) -> None:
        """Take no more work, let what runs end for *grace* seconds, hand the rest over, and end :meth:`run`."""
        self._report.draining = True
        await retry_async(lambda: self._job_store.heartbeat(self._id, self._report))
        tasks = [running.task for running in self._running.values() if running.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        for running in self._running.values():
            running.end(None)
        tasks = [running.task for running in self._running.values() if running.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=_HANDOVER_S)
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(None)

    # lease

    async def _register(self) -> None:
        self._id = f"{self._report.name}-{secrets.token_hex(4)}"
        self._read_stats()
        await retry_async(lambda: self._job_store.heartbeat(self._id, self._report, begin=True))

    async def _beat(self) -> None:
        told = (0, 0.0)
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self._tell()
            if (waiting := await retry_async(self._job_store.waiting)) != told:
                await self._engine.tell_waiting(*waiting)
                told = waiting
            if self._report.draining:
                continue
            grace = await retry_async(self._job_store.asked_to_leave, self._report.worker)
            if grace is None and (
                head := await retry_async(self._job_store.head)
            ):  # none in a Redis that lost its data
                self._head = self._head or head
                if head != self._head:
                    grace = 0.0  # this Ray cluster is a thing of the past
            if grace is not None:
                self._leaving = asyncio.ensure_future(self.drain(grace))

    async def _measure(self) -> None:
        """Ask the engine's processes now and then; one that does not answer at all has hung."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            try:
                stats = await asyncio.wait_for(self._engine.stats(), _HUNG_S)
            except TimeoutError:
                raise EngineError(f"the engine has not answered for {_HUNG_S:.0f} s: it hangs") from None
            counters = {name: stats[name] for name in _STATS if name in stats}
            history: dict[str, Any] = stats.get("history", {})
            counters |= {f"history_{name}": history[name] for name in _HISTORY_STATS if name in history}
            self._report.counters |= counters
            self._report.counters["measured_timestamp_seconds"] = time.time()
            if "timed_seconds" in stats and not self._report.draining:
                self._look_whether_drafting_pays(stats["timed_seconds"], bool(stats["drafting_stopped"]))

    def _look_whether_drafting_pays(self, seconds: float, stopped: bool) -> None:
        """Give it up where it does not, when the engine has nothing to do; at last even though it has."""
        self._futility.observe(version=self._engine.weight_version, seconds=seconds, stopped=stopped)
        if not self._futility.futile:
            self._futile_since = None
            return
        now = time.monotonic()
        self._futile_since = self._futile_since or now
        if not self._running or now - self._futile_since > _GIVES_UP_AFTER_S:
            logger.warning("Drafting does not pay on engine %s: another takes its place, which cannot draft.", self._id)
            self.gives_up = True
            self._leaving = asyncio.ensure_future(self.drain(0.0))

    def _read_stats(self) -> None:
        self._report.counters |= asdict(self._engine.counters)
        self._report.pinned = sum(running.pinned is not None for running in self._running.values())

    async def _tell(self) -> None:
        async with self._telling:  # one at a time begins anew, so that there is one lease
            self._read_stats()
            known = await retry_async(self._job_store.heartbeat, self._id, self._report)
            if (server := await retry_async(self._job_store.server)) != self._server:
                # its last moments may be lost, and with them what was ordered, or that it was done
                self._server, why = server, "Redis was started anew"
                await retry_async(self._job_store.leave, self._id)
            elif not known:
                why = "it was taken to be lost"
            else:
                return
            logger.warning("Engine %s begins anew, since %s; its rollouts go on from what was kept.", self._id, why)
            for running in list(self._running.values()):
                if running.task is not None:
                    running.task.cancel()
            self._running.clear()
            self._partials.clear()
            await self._register()

    # orders

    async def _obey(self) -> None:
        reading, cursor = "", "0"
        while True:
            if reading != self._id:
                reading, cursor = self._id, "0"
            inbox = self._job_store.keys.inbox(reading)
            at = {inbox: cursor}
            found = await retry_async(self._read_inbox, at)
            for entry, fields in found.get(inbox, []):
                cursor = entry
                order = Order.read(entry, fields)
                if order is not None and reading == self._id:
                    await self._carry_out(order)

    async def _read_inbox(self, at: dict[str, str]) -> dict[str, list[Entry]]:
        return await self._job_store.read(at, block=_INBOX_WAIT_S, count=256)

    async def _carry_out(self, order: Order) -> None:
        if order.kind == "move" and order.assignment is not None:
            moved = self._running.get((order.assignment.request_id, order.assignment.sample))
            if moved is not None and not moved.until.is_set():
                moved.moving = True
                moved.end(None)
        elif order.assignment is not None:
            key = (order.assignment.request_id, order.assignment.sample)
            if key in self._running:  # the same order, repeated since its reply was lost
                await retry_async(self._job_store.delete, self._job_store.keys.inbox(self._id), order.order_id)
                return
            running = self._running[key] = _Running(order, order.assignment)
            running.task = asyncio.ensure_future(self._guarded(key, running))
            return
        elif order.kind == "cancel":
            for (request_id, _), running in self._running.items():
                if request_id == order.request_id:
                    running.end(FinishReason.CANCELLED)
        elif order.kind == "weights":
            self._report.failed.clear()  # published anew, what could not be loaded is tried again
            self._look_for_weights.set()
        await retry_async(self._job_store.delete, self._job_store.keys.inbox(self._id), order.order_id)

    async def _guarded(self, key: tuple[str, int], running: _Running) -> None:
        engine_id = self._id
        try:
            await self._rollout(running, engine_id)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)
        finally:
            if running.deadline is not None:
                running.deadline.cancel()
            if self._running.get(key) is running:
                del self._running[key]
            self._partials.pop(key, None)

    async def _rollout(self, running: _Running, engine_id: str) -> None:
        assignment, order = running.assignment, running.order
        request = await self._request(assignment.entry)
        if request is None or self._report.draining:
            inbox = self._job_store.keys.inbox(engine_id)
            if request is None:  # answered meanwhile
                await retry_async(self._job_store.delete, inbox, order.order_id)
            else:
                await self._give_back(running, engine_id, "draining")
            return
        started_at = time.time()
        done, cancelled, prefix = await retry_async(
            self._job_store.before, request, assignment.sample, assignment.resumed
        )
        if done:
            await retry_async(self._job_store.delete, self._job_store.keys.inbox(engine_id), order.order_id)
            return
        if prefix is not None and not can_continue(request.sampling):
            prefix = None
        prefix = prefix or request.prefix
        if cancelled:
            running.end(FinishReason.CANCELLED)
        if request.deadline_seconds is not None:
            left = arrival(assignment.entry) + request.deadline_seconds - (time.time() + self._clock_ahead)
            loop = asyncio.get_running_loop()
            running.deadline = loop.call_later(max(0.0, left), running.end, FinishReason.DEADLINE)
        pinned = request.weight_version
        served = pinned is None or await self._serves(pinned)
        running.pinned = pinned if served else None  # not before: an update waits for all that are pinned
        if served and not running.until.is_set():
            with self._history.using(request.problem):
                await self._history.ready(request.problem)
            served = pinned is None or self._engine.weight_version == pinned  # an adapter waits for nobody
        if not served:
            await self._give_back(running, engine_id, f"weight version {pinned} is not served")
            return
        made: Generated | None = None
        reason: FinishReason | None
        try:
            with self._history.using(request.problem):
                made = await self._generate(running, request, prefix)
            reason, detail = made.finish_reason or running.why, ""
        except AdmissionError as error:
            reason, detail = FinishReason.FAILED, str(error)
        said = Partial(token_ids=made.token_ids, logprobs=made.logprobs, spans=made.spans) if made else None
        if reason is None:  # handed over
            if said is not None:
                await retry_async(self._job_store.checkpoint, request, assignment.sample, said)
            if running.moving:
                await self._give_back(running, engine_id, "moved")
            return
        rollout = Rollout.of(
            request,
            assignment.sample,
            said,
            reason,
            detail=detail,
            steps=made.steps if made else 0,
            drafted=made.drafted if made else 0,
            accepted=made.accepted if made else 0,
            engine=engine_id,
            cached_tokens=made.cached_tokens if made else 0,
            started_at=started_at,
            finished_at=time.time(),
        )
        await retry_async(lambda: self._job_store.finish(request, rollout, engine=engine_id, order=order.order_id))

    async def _give_back(self, running: _Running, engine_id: str, reason: str) -> None:
        assignment = running.assignment
        # first: as soon as it is given back it may be ordered here again, which must not pass for a repetition
        self._running.pop((assignment.request_id, assignment.sample), None)
        await retry_async(self._job_store.give_back, engine_id, running.order.order_id, assignment, reason)

    async def _generate(self, running: _Running, request: RolloutRequest, prefix: Partial | None) -> Generated:
        key = (running.assignment.request_id, running.assignment.sample)

        def keep(partial: Partial) -> None:
            self._partials[key] = (request, partial)
            self._partials_there.set()

        return await self._engine.generate(
            request,
            running.assignment.sample,
            prefix=prefix,
            on_partial=keep,
            every=self._checkpoint_tokens,
            until=running.until,
        )

    async def _request(self, entry: str) -> RolloutRequest | None:
        """The request of an entry, read once for all its samples."""
        task = self._requests.get(entry)
        if task is None:
            task = self._requests[entry] = asyncio.ensure_future(self._read_request(entry))
            while len(self._requests) > _REQUESTS_KEPT:
                self._requests.popitem(last=False)
        else:
            self._requests.move_to_end(entry)
        return await asyncio.shield(task)

    async def _read_request(self, entry: str) -> RolloutRequest | None:
        request = await retry_async(self._job_store.request, entry)
        return request.under(self._sampling) if request is not None else None

    # partials

    async def _keep_partials(self) -> None:
        failing = False
        while True:
            await self._partials_there.wait()
            self._partials_there.clear()
            pending, self._partials = self._partials, {}
            writes = (
                self._job_store.checkpoint(request, key[1], partial) for key, (request, partial) in pending.items()
            )
            outcomes = await asyncio.gather(*writes, return_exceptions=True)
            failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
            if failures and not failing:
                logger.warning("Partial rollouts are not kept for now (%s); later ones will be.", failures[0])
            failing = bool(failures)

    # weights

    async def _keep_weights(self) -> None:
        while True:
            await self._look_for_weights.wait()
            self._look_for_weights.clear()
            await self._update()

    async def _serves(self, version: int) -> bool:
        """Whether new rollouts are sampled with *version*, once an update that is under way is through."""
        if version != self._report.to_come:
            return False
        async with self._updating:
            return self._report.version == version

    async def _update(self) -> None:
        """Serve what is to be served; what cannot be loaded is said, and the old weights go on."""
        async with self._updating:
            updates = await retry_async(self._job_store.weights)
            for update in updates:
                version, full = update.weight_version, update.weights is WeightsKind.FULL
                served = self._engine.full_version if full else self._engine.weight_version
                if version == served or version in self._report.failed:
                    continue
                if not full and updates[0].weight_version not in (version, self._engine.full_version):
                    self._report.loads += 1
                    self._report.failed[version] = (
                        f"it belongs on the full weights of version {updates[0].weight_version}, which are not in place"
                    )
                    continue
                self._report.loading = version
                if self._id:
                    await self._tell()
                try:
                    gap = await self._load(update)
                    self._report.weights = update.identity
                    logger.info("Weight version %d is served; decoding stood still for %.3f s.", version, gap)
                    self._report.counters["weights_gap_seconds"] = gap
                except (WeightsError, EngineError) as error:
                    if self._engine.stopped:
                        raise
                    logger.warning("Weight version %d cannot be loaded; %d goes on: %s", version, served, error)
                    self._report.failed[version] = str(error)
                self._report.loads += 1
                self._report.version, self._report.loading = self._engine.weight_version, None
            if self._id:
                await self._tell()

    async def _load(self, update: WeightUpdate) -> float:
        load = await self._transport.prepare(update, self._id)
        if update.weights is WeightsKind.FULL:
            # what is pinned to another version ends under it
            running = [one for one in self._running.values() if one.pinned not in (None, update.weight_version)]
            pinned = [one.task for one in running if one.task is not None]
            if pinned:
                await asyncio.wait(pinned)
        gap = await load(self._engine)
        self._history.publish(update.weight_version)
        return gap


class _Announcer:
    """Tells the engine's drafter which problems are coming, many at a time, and waits a moment for their history."""

    def __init__(self, engine: Engine, store: HistoryStore, run: str) -> None:
        self._engine, self._store, self._run_uid = engine, store, run
        self._known: dict[str, asyncio.Event] = {}
        """Problem → set once its history was waited for."""
        self._wanted: set[str] = set()
        self._users: Counter[str] = Counter()
        self._left: OrderedDict[str, float] = OrderedDict()
        """Known problem without a rollout → since when."""
        self._new = asyncio.Event()
        self._generation: int | None = None
        self._versions: deque[int] = deque()
        """Weight versions that were served and not published yet."""

    @contextmanager
    def using(self, problem: str) -> Iterator[None]:
        """Keep the history of *problem* up to date while one of its rollouts is made."""
        if self._engine.config.drafting is None:
            yield
            return
        self._users[problem] += 1
        while self._left and next(iter(self._left.values())) < time.monotonic() - _ANNOUNCED_FOR_S:
            self._known.pop(self._left.popitem(last=False)[0], None)
        self._left.pop(problem, None)
        try:
            yield
        finally:
            self._users[problem] -= 1
            if not self._users[problem]:
                del self._users[problem]
                self._left[problem] = time.monotonic()

    async def ready(self, problem: str) -> None:
        """Return once *problem* can be drafted from, or has kept the rollout waiting for long enough.

        To be called within :meth:`using`. The first rollout of a problem wants its history; others find what it has.
        """
        if self._engine.config.drafting is None:
            return
        known = self._known.get(problem)
        if known is None:
            known = self._known[problem] = asyncio.Event()
            self._new.set()
        if self._users[problem] == 1:
            self._wanted.add(problem)
        if not known.is_set():
            try:
                await asyncio.wait_for(known.wait(), _HISTORY_WAIT_S)
            except TimeoutError:
                known.set()

    def publish(self, weight_version: int) -> None:
        """The engine serves *weight_version* now. The history is told in its own time: a job goes on without it."""
        self._versions.append(weight_version)
        self._new.set()

    async def advance(self, generation: int) -> None:
        """The history has a new generation: what has come to lie behind its horizon is forgotten."""
        self._generation = generation
        if self._engine.config.drafting is not None and self._known:
            await self._engine.announce(list(self._known), generation, wanted=())

    async def _publish(self) -> None:
        """Publish versions in the order in which they were served; what fails is tried again later."""
        while self._versions:
            try:
                generation = await asyncio.to_thread(self._store.publish, self._run_uid, self._versions[0])
            except redis.RedisError as error:
                logger.info(
                    "The history does not know of weight version %d yet: %s: %s",
                    self._versions[0],
                    type(error).__name__,
                    error,
                )
                return
            self._versions.popleft()
            await self.advance(generation)

    async def run(self) -> None:
        """Announce what is wanted, again and again."""
        while True:
            with suppress(TimeoutError):  # what is known has most likely all that it needs, and waits for company
                await asyncio.wait_for(self._new.wait(), _GATHER_S)
            self._new.clear()
            await self._publish()
            if not self._wanted:
                continue
            await asyncio.sleep(0.01)  # what came in the same moment goes together
            if self._generation is None:
                generation: int = await retry_async(asyncio.to_thread, self._store.generation)
                self._generation = generation
            announced, wanted, self._wanted = dict(self._known), self._wanted, set()
            await self._engine.announce(list(announced), self._generation, wanted=list(wanted), wait=_HISTORY_WAIT_S)
            for known in announced.values():
                known.set()
