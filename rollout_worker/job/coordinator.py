"""Reads requests, gives rollouts to engines and takes back what lost engines had. All its state is in Redis."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from rollout_api.manifest.quantity import parse_quantity
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.keys import DATA, named
from rollout_api.protocol.messages import (
    SCHEMA_VERSION,
    Cancel,
    Close,
    CodecError,
    Drafts,
    FinishReason,
    Refusal,
    Rollout,
    RolloutRequest,
    WeightUpdate,
    decode,
)
from rollout_worker.engine.sampling import AdmissionError, admit
from rollout_worker.history.connection import retry_async
from rollout_worker.history.lengths import ExpectedLengths
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.canaries import Canaries
from rollout_worker.job.job_store import Assignment, EngineReport, Entry, JobStore, StaleCoordinatorError, arrival
from rollout_worker.job.migration import plan_migrations
from rollout_worker.job.open_request import OpenRequest
from rollout_worker.job.scheduler import EngineLoad, Group, ProbeThenLongest, Scheduler
from rollout_worker.job.status import JobStatus, StatusBoard
from rollout_worker.policy.remaining_length import work_ahead

logger = logging.getLogger(__name__)

_WAIT_S = 0.1
_LOOK_AROUND_S = 0.25
_STATUS_S = 1.0
_RECONCILE_S = 10.0
_READ = 500
_ENDED_AT_ONCE = 256
_SAY_AWAITED_S = 30.0
_SOLO_AFTER = 3
"""Engines that may be lost with a rollout before it is run apart from others like it."""
_GIVE_UP_AFTER = 6
_NOT_ADMITTED = {
    -1: "it was answered before; to sample it again, ask under another request id",
    -2: "a request by this id is open and asks for another number of samples; ask under another request id",
}
"""What ``admit`` answers → why such a request is refused."""


class Coordinator:
    """One coordinator of a job. A later one takes over at any moment from what is in Redis."""

    def __init__(
        self,
        job: RolloutJob,
        job_store: JobStore,
        history: HistoryStore,
        *,
        vocabulary: int,
        history_apart: bool = False,
        scheduler: Scheduler | None = None,
    ) -> None:
        """Take what a coordinator needs.

        Args:
            job: the manifest.
            job_store: the job's messages.
            history: for the lengths of earlier rollouts.
            vocabulary: number of token ids that the model knows.
            history_apart: whether the history is on a server of its own.
            scheduler: who goes first; default: :class:`ProbeThenLongest`.
        """
        self.board = StatusBoard(job)
        self._job, self._job_store = job, job_store
        self._lengths, self._history_name, self._history_apart = (
            ExpectedLengths(history),
            history.keys.full_name,
            history_apart,
        )
        self._vocabulary = vocabulary
        self._scheduler = scheduler or ProbeThenLongest()
        self._number = 0
        self._server = ""
        self._open: dict[str, OpenRequest] = {}
        self._open_rollouts = 0
        """Samples of the open requests, ended or not."""
        self._arrivals = 0
        self._engines: dict[str, EngineReport] = {}
        """Engines whose lease holds."""
        self._assigned: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        """Engine → its samples."""
        self._attempts: dict[str, int] = {}
        self._resumable: set[str] = set()
        """Rollouts of which there may be a partial to go on from."""
        self._solo: set[tuple[str, int]] = set()
        self._slow: frozenset[str] = frozenset()
        self._ending: deque[tuple[OpenRequest, int, FinishReason, str]] = deque()
        """Samples that end without an engine, and how; a few at each pass."""
        self._awaited: dict[int, float] = {}
        """Weight version that rollouts wait for → when to say so."""
        self._early: dict[str, str] = {}
        """Request that is not known yet → the last control entry that cancels it."""
        self._early_entries: set[str] = set()
        """All such entries, which stay until their requests are known."""
        self._without_order: set[tuple[str, str, int]] = set()
        """Engine, request and sample of what an engine was given and did not have when that was looked at last."""
        self._canaries, self._canaries_kept = Canaries(), 0
        self._updates: list[WeightUpdate] = []
        self._cursors: dict[str, str] = {}
        self._closing = False

    async def run(self) -> None:
        """Coordinate until the job is closed and answered.

        Raises:
            StaleCoordinatorError: another coordinator has taken over.
        """
        await self._recover()
        looked = said = reconciled = 0.0
        while not await self._ended():
            now = time.monotonic()
            if now - looked >= _LOOK_AROUND_S:
                looked = now
                await self._look_around()
            if now - said >= _STATUS_S:
                said = now
                await self._say()
            if now - reconciled >= _RECONCILE_S:
                reconciled = now
                await self._reconcile()
                await self._move_some()
            await self._place()
            await self._end_some()
            await self._read()
        await self._say()

    # taking over

    async def _recover(self) -> None:
        """Make of what is in Redis the state that a coordinator which never ended would have."""
        job_store, keys = self._job_store, self._job_store.keys
        self._server = await retry_async(job_store.server)
        self._number = await retry_async(job_store.take_over)
        # events before this point are in what is read below
        self._cursors = {
            keys.requests: "0",
            keys.control: "0",
            keys.events: await retry_async(job_store.last, keys.events),
        }
        await retry_async(self._publish_job)
        self._updates = await retry_async(job_store.weights)
        self._attempts = await retry_async(job_store.attempts)
        self._resumable = await retry_async(job_store.partial_ids)
        if (kept := await retry_async(job_store.canaries)) is not None:
            self._canaries.unpack(kept)
            self._canaries_kept = self._canaries.test.canaries
        reports = await retry_async(job_store.engines)
        held: dict[tuple[str, int], str] = {}
        for engine in reports:
            for order in await retry_async(job_store.orders, engine):
                if order.assignment is not None:
                    held[order.assignment.request_id, order.assignment.sample] = engine
        entries = await retry_async(job_store.entries, keys.requests)
        await self._take_up(entries, held)
        if entries:
            self._cursors[keys.requests] = entries[-1][0]
        # the engines that are alive are all new to this coordinator, which looks around next
        await self._reclaim({engine: report for engine, (report, alive) in reports.items() if not alive})

    async def _start_over(self) -> None:
        """Redis was started anew, or is another now: what this coordinator knows may never have happened there."""
        logger.warning("Redis was started anew; what its last moments may have lost is looked for.")
        for request_id in list(self._open):
            self._forget(request_id)
        self._ending.clear()
        self._early.clear()
        self._early_entries.clear()
        self._engines.clear()
        self._assigned.clear()
        await self._recover()

    async def _publish_job(self) -> None:
        spec, client, keys = self._job.spec, self._job_store.client, self._job_store.keys
        about: dict[
            str | bytes | bytearray | memoryview | int | float, str | bytes | bytearray | memoryview | int | float
        ] = {
            "version": SCHEMA_VERSION,
            "model": spec.model.uri,
            "vocabulary": self._vocabulary,
            "sampling": spec.sampling.model_dump_json(),
            "max_model_len": spec.engine.max_model_len,
            "max_request_bytes": int(parse_quantity(spec.queue.max_request_bytes)),
            "max_rollouts": spec.queue.max_rollouts,
            "history": self._history_name,
            "history_redis": "own" if self._history_apart else "",
        }
        await client.hset(keys.job, mapping=about)
        await client.hsetnx(keys.job, "state", "running")
        self._closing = await client.hget(keys.job, "closing") == b"1"
        await client.set(named(f"{self._job.metadata.namespace}/{self._job.metadata.name}"), keys.uid)

    # what comes in

    async def _read(self) -> None:
        keys = self._job_store.keys
        cursors = dict(self._cursors)
        if self._open_rollouts >= self._job.spec.queue.max_rollouts:
            del cursors[keys.requests]
        found = await retry_async(lambda: self._job_store.read(cursors, block=_WAIT_S, count=_READ))
        for stream, entries in found.items():
            self._cursors[stream] = entries[-1][0]
        for _, fields in found.get(keys.events, []):
            self._note(fields)
        requests = found.get(keys.requests, [])
        await self._take_up(requests, {})
        for entry, fields in found.get(keys.control, []):
            await self._control(entry, fields.get(DATA.encode(), b""))
        if self._early and keys.requests in cursors and len(requests) < _READ:
            # every request that a cancellation overtook has been taken up, or was never sent
            await retry_async(self._job_store.delete, keys.control, *self._early_entries)
            self._early.clear()
            self._early_entries.clear()

    async def _take_up(self, entries: Iterable[Entry], held: dict[tuple[str, int], str]) -> None:
        """Take requests up, refuse what cannot be served, and forget what is a repetition."""
        taken: list[tuple[str, RolloutRequest]] = []
        for entry, fields in entries:
            data = fields.get(DATA.encode(), b"")
            try:
                request = self._readable(data)
            except CodecError as error:
                await self._bury(self._job_store.keys.requests, entry, data, str(error))
                continue
            try:
                request = self._admissible(request, len(data))
            except AdmissionError as error:
                await self._refuse(entry, data, request, str(error))
                continue
            state = await retry_async(self._job_store.admit, entry, request)
            if state == 1:
                taken.append((entry, request))
            elif (reason := _NOT_ADMITTED.get(state)) is not None:
                refusal = Refusal(request_id=request.request_id, reason=reason, answered=state == -1)
                await retry_async(self._job_store.reply, request.reply_to, refusal)
        if not taken:
            return
        progress = await retry_async(self._job_store.progress, [request.request_id for _, request in taken])
        lengths = await self._lengths.of(request.problem for _, request in taken)
        holders = await self._holders([request for _, request in taken])
        overtaken: list[str] = []
        for (entry, request), (done, cancelled), holder in zip(taken, progress, holders, strict=True):
            self._arrivals += 1
            early = self._early.get(request.request_id)
            if early is not None and arrival(entry) <= arrival(early):
                overtaken.append(request.request_id)
                cancelled = True
            deadline = arrival(entry) + request.deadline_seconds if request.deadline_seconds else None
            one = OpenRequest(
                entry, request, self._arrivals, deadline, lengths[request.problem], set(done), cancelled=cancelled
            )
            self._forget(request.request_id)  # it is open here only if Redis has come back without it
            self._open[request.request_id] = one
            self._open_rollouts += request.sampling.n
            waiting = []
            for sample in range(request.sampling.n):
                engine = held.get((request.request_id, sample))
                if sample in done:
                    continue
                if engine is not None:
                    one.assigned[sample] = engine
                    self._assigned[engine].add((request.request_id, sample))
                else:
                    waiting.append(sample)
            self._queue(one, waiting, holder)
            if one.cancelled:
                self._end_waiting(one, FinishReason.CANCELLED)
        if overtaken:
            await retry_async(self._job_store.mark_cancelled, overtaken)

    def _readable(self, data: bytes) -> RolloutRequest:
        request = decode(data)
        if not isinstance(request, RolloutRequest):
            raise CodecError(f"a {request.kind} where a request belongs")
        return request

    def _admissible(self, request: RolloutRequest, size: int) -> RolloutRequest:
        """The request with the job's sampling settings under its own; AdmissionError if it cannot be served."""
        spec = self._job.spec
        if request.job_uid != self._job_store.keys.uid:
            raise AdmissionError(f"it is for job {request.job_uid}, this is {self._job_store.keys.uid}; connect again")
        if size > (most := int(parse_quantity(spec.queue.max_request_bytes))):
            raise AdmissionError(f"{size} bytes; spec.queue.maxRequestBytes allows {most}")
        try:
            request = request.under(spec.sampling)
        except ValueError as error:
            raise AdmissionError(f"sampling, with the job's spec.sampling: {error}") from None
        admit(
            request.sampling,
            len(request.prompt_token_ids),
            max_model_len=spec.engine.max_model_len,
            speculating=spec.speculation.policy != "off",
            prefix=request.prefix,
        )
        prefix = request.prefix
        ids = {"prompt": request.prompt_token_ids, "prefix": prefix.token_ids if prefix is not None else []}
        outside = {what: one for what, tokens in ids.items() for one in tokens if not 0 <= one < self._vocabulary}
        outside |= {f"sampling.{name}": one for name, one in request.sampling.outside(self._vocabulary).items()}
        if outside:
            what, token = next(iter(outside.items()))
            raise AdmissionError(
                f"{what}: {token} is no token of the model, which has {self._vocabulary}; take it out, or make the "
                "prompt with the model's tokenizer"
            )
        if request.weight_version is not None and prefix is not None:
            others = sorted({span.weight_version for span in prefix.spans} - {request.weight_version})
            if others:
                raise AdmissionError(
                    f"it is pinned to weight version {request.weight_version} and goes on from tokens of {others[0]}; "
                    "leave weight_version out, or sample it from the beginning"
                )
        return request

    async def _refuse(self, entry: str, data: bytes, request: RolloutRequest, reason: str) -> None:
        logger.warning("Refused request %s of %s: %s", request.request_id, request.reply_to, reason)
        await retry_async(
            self._job_store.reply, request.reply_to, Refusal(request_id=request.request_id, reason=reason)
        )
        await self._bury(self._job_store.keys.requests, entry, data, reason)

    async def _bury(self, stream: str, entry: str, data: bytes, reason: str) -> None:
        logger.warning("To the dead letters, from %s: %s", stream.rpartition(":")[2], reason)
        self.board.dead += 1
        await retry_async(self._job_store.bury, stream, entry, data, reason)

    async def _holders(self, requests: list[RolloutRequest]) -> list[str | None]:
        keys = [self._job_store.keys.trajectory(request.trajectory_id or "") for request in requests]
        if not any(request.turn for request in requests):
            return [None] * len(requests)
        found = await retry_async(self._job_store.client.mget, keys)
        return [
            str(engine, "utf-8") if isinstance(engine, bytes) and request.turn else None
            for engine, request in zip(found, requests, strict=True)
        ]

    def _queue(self, one: OpenRequest, samples: list[int], holder: str | None = None) -> None:
        """Let samples of a request wait for an engine; those that cost too many engines wait apart."""
        request = one.request
        solo = {
            (request.request_id, sample)
            for sample in samples
            if self._attempts.get(str(request.rollout_id(sample)), 0) >= _SOLO_AFTER
        }
        self._solo |= solo
        self._scheduler.add(
            Group(
                request.request_id,
                request.reply_to,
                samples,
                one.arrival,
                request.priority,
                one.predicted,
                probed=bool(one.done or one.assigned),
                pinned=request.weight_version,
                plain=request.drafts is Drafts.OFF,
                holder=holder,
                solo=bool(solo),
            )
        )

    async def _control(self, entry: str, data: bytes) -> None:
        control = self._job_store.keys.control
        try:
            message = decode(data)
            if not isinstance(message, WeightUpdate | Cancel | Close):
                raise CodecError(f"a {message.kind} where a control message belongs")
        except CodecError as error:
            await self._bury(control, entry, data, str(error))
            return
        if isinstance(message, WeightUpdate):
            if self._updates and message.weight_version < (newest := self._updates[-1].weight_version):
                await self._bury(control, entry, data, f"weight version {message.weight_version} comes after {newest}")
                return
            await retry_async(self._job_store.set_weights, message)
            self._updates = await retry_async(self._job_store.weights)
            for engine in list(self._engines):
                await self._order(engine, ["weights"])
        elif isinstance(message, Cancel):
            await self._cancel(message.request_ids)
            if unknown := set(message.request_ids) - self._open.keys():
                # it may have overtaken them; the entry stays, for this coordinator or the next
                self._early |= dict.fromkeys(unknown, entry)
                self._early_entries.add(entry)
                return
        else:
            await retry_async(self._job_store.client.hset, self._job_store.keys.job, "closing", "1")
            self._closing = True
        await retry_async(self._job_store.delete, control, entry)

    async def _cancel(self, request_ids: Iterable[str]) -> None:
        """Cancel those of *request_ids* that are open, all together: a step may have thousands."""
        found = (self._open.get(request_id) for request_id in request_ids)
        running = [one for one in found if one is not None and not one.cancelled]
        if not running:
            return
        await retry_async(self._job_store.mark_cancelled, [one.request.request_id for one in running])
        orders: defaultdict[str, list[str]] = defaultdict(list)
        for one in running:
            one.cancelled = True
            self._end_waiting(one, FinishReason.CANCELLED)
            for engine in set(one.assigned.values()):
                orders[engine].append(f"cancel {one.request.request_id}")
        for engine, cancellations in orders.items():
            await self._order(engine, cancellations)

    def _note(self, fields: dict[bytes, bytes]) -> None:
        """An engine (or this coordinator) has ended a sample, or gives one back."""
        request_id, sample = fields[b"r"].decode(), int(fields[b"s"])
        one = self._open.get(request_id)
        if one is None:
            return
        if b"x" in fields:
            if one.assigned.get(sample) == fields[b"e"].decode():
                self._unassign(request_id, sample)
                self._wait_again(one, sample)
            return
        self._unassign(request_id, sample)
        rollout_id = str(one.request.rollout_id(sample))
        self._attempts.pop(rollout_id, None)
        self._resumable.discard(rollout_id)
        if sample not in one.done:
            one.done.add(sample)
            self._canaries.note(one.request, sample, fields.get(b"c", b""))
            if b"l" in fields:  # not in what was learned from the ledger
                one.lengths.append(int(fields[b"l"]))
            self._scheduler.predict(request_id, one.predicted)
        if len(one.done) >= one.request.sampling.n:
            self._forget(request_id)

    def _wait_again(self, one: OpenRequest, sample: int) -> None:
        """A sample that no engine has any more waits for another, unless it has ended or is to end."""
        if sample in one.done:
            return
        self._resumable.add(str(one.request.rollout_id(sample)))
        self._queue(one, [sample])
        if one.cancelled:
            self._end_waiting(one, FinishReason.CANCELLED)

    def _forget(self, request_id: str) -> None:
        one = self._open.get(request_id)
        if one is None:
            return
        for sample in list(one.assigned):
            self._unassign(request_id, sample)
        del self._open[request_id]
        self._canaries.forget(request_id)
        self._open_rollouts -= one.request.sampling.n
        self._solo = {key for key in self._solo if key[0] != request_id}
        self._scheduler.remove(request_id)

    def _unassign(self, request_id: str, sample: int) -> None:
        self._solo.discard((request_id, sample))
        one = self._open.get(request_id)
        engine = one.assigned.pop(sample, None) if one is not None else None
        if one is not None:
            one.since.pop(sample, None)
        if engine is not None:
            self._assigned[engine].discard((request_id, sample))

    # engines

    async def _look_around(self) -> None:
        """Which engines are there, which were lost, what is overdue, who does not read."""
        if await retry_async(self._job_store.server) != self._server:
            await self._start_over()
        if await retry_async(self._job_store.coordinator) > self._number:
            raise StaleCoordinatorError("another coordinator has taken over")
        reports = await retry_async(self._job_store.engines)
        came = {engine for engine, (_, alive) in reports.items() if alive} - self._engines.keys()
        for engine in came:
            logger.info("Engine %s is there.", engine)
        self._engines = {engine: report for engine, (report, alive) in reports.items() if alive}
        await self._reclaim({engine: report for engine, (report, alive) in reports.items() if not alive})
        desired = self._updates[-1].weight_version if self._updates else None
        for engine in came:
            report = self._engines[engine]
            if desired is not None and report.to_come != desired and desired not in report.failed:
                await self._order(engine, ["weights"])
        await self._end_overdue()
        self._end_unservable(desired)
        await self._find_slow_clients()

    async def _reclaim(self, lost: dict[str, EngineReport]) -> None:
        for engine, report in lost.items():
            orders = await retry_async(self._job_store.reclaim, self._number, engine)
            self._engines.pop(engine, None)
            if orders is None:
                continue
            samples = self._assigned.pop(engine, set())
            samples |= {(o.assignment.request_id, o.assignment.sample) for o in orders if o.assignment is not None}
            if report.draining:
                logger.info("Engine %s has left; %d rollouts go on elsewhere.", engine, len(samples))
            else:
                logger.warning("Engine %s was lost; %d rollouts go on elsewhere.", engine, len(samples))
                self.board.engines_lost += 1
            await self._give_to_others(samples, lost=not report.draining)

    async def _give_to_others(self, samples: set[tuple[str, int]], *, lost: bool) -> None:
        self._resumable |= await retry_async(self._job_store.partial_ids)
        held = []
        for request_id, sample in sorted(samples):
            self._unassign(request_id, sample)
            one = self._open.get(request_id)
            if one is not None and sample not in one.done:
                held.append((one, sample))
        # what ended just before is in the ledger, and its event may still be on its way
        progress = await retry_async(self._job_store.progress, [one.request.request_id for one, _ in held])
        still = []
        for (one, sample), (done, _) in zip(held, progress, strict=True):
            if sample in done:
                self._note({b"r": one.request.request_id.encode(), b"s": str(sample).encode()})
            else:
                still.append((one, sample))
        if lost:
            ids = [str(one.request.rollout_id(sample)) for one, sample in still]
            self._attempts |= zip(ids, await retry_async(self._job_store.count_loss, ids), strict=True)
        for one, sample in still:
            count = self._attempts.get(str(one.request.rollout_id(sample)), 0)
            if count >= _GIVE_UP_AFTER:
                self._fail(one, sample, f"{count} engines were lost with it before it made any progress")
            elif one.cancelled:
                self._ending.append((one, sample, FinishReason.CANCELLED, ""))
            else:
                self._queue(one, [sample])

    async def _reconcile(self) -> None:
        """Learn what this coordinator has not heard of: old events are trimmed.

        What has ended is in the ledger. What was given back is neither there nor in its engine's inbox, and is not
        either at the next look, when an order that was on its way has arrived.
        """
        without = set()
        for engine in self._engines:
            orders = await retry_async(self._job_store.orders, engine)
            there = {(o.assignment.request_id, o.assignment.sample) for o in orders if o.assignment is not None}
            without |= {(engine, *key) for key in self._assigned[engine] - there}
        behind = [one for one in self._open.values() if one.assigned]
        progress = await retry_async(self._job_store.progress, [one.request.request_id for one in behind])
        for one, (done, _) in zip(behind, progress, strict=True):
            for sample in done:
                self._note({b"r": one.request.request_id.encode(), b"s": str(sample).encode()})
        for engine, request_id, sample in without & self._without_order:
            found = self._open.get(request_id)
            if found is not None and found.assigned.get(sample) == engine:
                logger.warning("Rollout %s was given back, unheard.", found.request.rollout_id(sample))
                self._unassign(request_id, sample)
                self._wait_again(found, sample)
        self._without_order = without

    async def _order(self, engine: str, orders: Sequence[Assignment | str]) -> bool:
        return await retry_async(self._job_store.assign, self._number, engine, orders) is not None

    async def _move_some(self) -> None:
        """At the end of a step, when nothing waits, let some rollouts of busy engines go on on idle ones."""
        if self._scheduler.waiting():
            return
        held = {
            engine: [(self._open[request_id], sample) for request_id, sample in samples]
            for engine, samples in self._assigned.items()
        }
        last = self.board.last
        a_step = 1.0 + (0.0 if last is None else last["accepted_per_step"])
        for move in plan_migrations(self._engines, held, rate=self._rate(), tokens_a_step=a_step):
            request_id, sample = move.rollout
            one = self._open[request_id]
            logger.info("Rollout %s goes on elsewhere than on %s.", one.request.rollout_id(sample), move.source)
            order = Assignment(request_id, sample, one.entry)
            given = await retry_async(self._job_store.assign, self._number, move.source, [order], "move")
            self.board.moved += given is not None

    def _rate(self) -> float:
        """Tokens a second of a rollout that runs."""
        running = sum(map(len, self._assigned.values()))
        return self.board.speed / running if running else 0.0

    async def _place(self) -> None:
        loads = [
            EngineLoad(engine, report.slots, len(self._assigned[engine]), report.to_come, report.plain)
            for engine, report in self._engines.items()
            if not report.draining
        ]
        if not loads or not self._scheduler.waiting():
            return
        solo_busy = frozenset(
            one.assigned[sample]
            for request_id, sample in self._solo
            if (one := self._open.get(request_id)) is not None and sample in one.assigned
        )
        by_engine: defaultdict[str, list[Assignment]] = defaultdict(list)
        for placement in self._scheduler.place(loads, self._slow, solo_busy):
            one = self._open[placement.request_id]
            resumed = str(one.request.rollout_id(placement.sample)) in self._resumable
            by_engine[placement.engine].append(
                Assignment(placement.request_id, placement.sample, one.entry, resumed=resumed)
            )
        for engine, orders in by_engine.items():
            given = await self._order(engine, orders)
            for order in orders:
                one = self._open[order.request_id]
                if given:
                    one.assigned[order.sample], one.since[order.sample] = engine, time.monotonic()
                    self._assigned[engine].add((order.request_id, order.sample))
                else:
                    self._queue(one, [order.sample])
            if not given:
                self._engines.pop(engine, None)

    # what ends without an engine

    async def _end_overdue(self) -> None:
        if not any(one.deadline is not None for one in self._open.values()):
            return
        now = await retry_async(self._job_store.clock)
        for one in [one for one in self._open.values() if one.deadline is not None and one.deadline <= now]:
            self._end_waiting(one, FinishReason.DEADLINE)

    def _end_unservable(self, desired: int | None) -> None:
        """Answer what is pinned to a version that no engine serves or will serve."""
        pinned = {group.pinned for group in self._scheduler.groups() if group.pinned is not None}
        pinned -= {report.to_come for report in self._engines.values()}
        if not pinned or not self._engines:
            return
        for one in list(self._open.values()):
            version = one.request.weight_version
            if version not in pinned or version is None:
                continue
            reasons = [report.failed[version] for report in self._engines.values() if version in report.failed]
            if version == desired and len(reasons) == len(self._engines):
                detail = f"no engine can load weight version {version}: {reasons[0]}"
            elif desired is not None and version < desired:
                detail = f"no engine serves weight version {version} any more; the newest is {desired}"
            else:
                self._say_that_one_waits(version)
                continue
            for sample in self._scheduler.remove(one.request.request_id):
                self._fail(one, sample, detail)

    def _say_that_one_waits(self, version: int) -> None:
        now = time.monotonic()
        if now >= self._awaited.setdefault(version, now + _SAY_AWAITED_S):
            self._awaited[version] = now + 10 * _SAY_AWAITED_S
            logger.warning("Rollouts wait for weight version %d, which no engine serves or is loading.", version)

    def _end_waiting(self, one: OpenRequest, reason: FinishReason) -> None:
        self._ending.extend((one, sample, reason, "") for sample in self._scheduler.remove(one.request.request_id))

    def _fail(self, one: OpenRequest, sample: int, detail: str) -> None:
        logger.warning("Rollout %s cannot be made: %s", one.request.rollout_id(sample), detail)
        self._ending.append((one, sample, FinishReason.FAILED, detail))

    async def _end_some(self) -> None:
        """Answer some of the samples that end without an engine, each with what there is of it.

        A step of many thousands may be cancelled at once, and engines are to be looked after meanwhile.
        """
        some = [self._ending.popleft() for _ in range(min(_ENDED_AT_ONCE, len(self._ending)))]
        some = [one for one in some if self._open.get(one[0].request.request_id) is one[0]]
        if not some:
            return
        partials = await retry_async(self._job_store.partials, [(one.request, sample) for one, sample, _, _ in some])
        ended = [
            (one.request, Rollout.of(one.request, sample, partial or one.request.prefix, reason, detail=detail))
            for (one, sample, reason, detail), partial in zip(some, partials, strict=True)
        ]
        await retry_async(self._job_store.finish_all, ended)
        for (one, sample, _, _), (_, rollout) in zip(some, ended, strict=True):
            # at once: of so many that end together, events are trimmed before they are read
            length = str(len(rollout.token_ids))
            self._note({b"r": one.request.request_id.encode(), b"s": str(sample).encode(), b"l": length.encode()})

    # what goes out

    async def _find_slow_clients(self) -> None:
        most = int(parse_quantity(self._job.spec.queue.max_unread_results))
        clients = list({one.request.reply_to for one in self._open.values()})
        sizes = await asyncio.gather(*(retry_async(self._job_store.unread, client) for client in clients))
        unread = dict(zip(clients, sizes, strict=True))
        slow = frozenset(client for client, (_, size) in unread.items() if size > most)
        for client in slow - self._slow:
            logger.warning(
                "Client %s has %d unread results (%d bytes, spec.queue.maxUnreadResults allows %d): none of its "
                "rollouts is started until it has read some.",
                client,
                *unread[client],
                most,
            )
        self._slow = slow
        self.board.unread = {client: count for client, (count, _) in unread.items()}

    async def _say(self) -> None:
        totals = await retry_async(self._job_store.totals)
        now, rate = time.monotonic(), self._rate()
        ahead = work_ahead(part for one in self._open.values() for part in one.ahead(rate, now))
        status: JobStatus = self.board.status(
            uid=self._job_store.keys.uid,
            coordinator=self._number,
            requests=len(self._open),
            waiting=self._scheduler.waiting(),
            assigned={engine: len(samples) for engine, samples in self._assigned.items()},
            totals=totals,
            engines=self._engines,
            weight_version=self._updates[-1].weight_version if self._updates else 0,
            slow=sorted(self._slow),
            ahead=ahead,
            canaries=self._canaries.test,
            closing=self._closing,
        )
        await retry_async(self._job_store.set_status, json.dumps(status).encode())
        if self._canaries.test.canaries != self._canaries_kept:
            self._canaries_kept = self._canaries.test.canaries
            await retry_async(self._job_store.keep_canaries, self._canaries.pack())
        engines = max(1, len(self._engines))
        waiting = [(len(group.samples), group.predicted) for group in self._scheduler.groups()]
        rollouts, tokens = sum(count for count, _ in waiting), sum(count * length for count, length in waiting)
        await retry_async(self._job_store.set_waiting, round(rollouts / engines), tokens / engines)

    async def _ended(self) -> bool:
        if not self._closing or self._open:
            return False
        keys = self._job_store.keys
        # the relay ends with the job
        for stream in (keys.requests, keys.outbox, keys.rewards):
            if await retry_async(self._job_store.client.xlen, stream):
                return False
        await retry_async(self._job_store.client.hset, self._job_store.keys.job, "state", "closed")
        await retry_async(self._job_store.let_expire)
        return True
