"""Runs a dataset job: epochs × problems × samples through an engine, each rollout finished once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_api.job import RolloutJob
from rollout_api.messages import Purpose, Rollout, RolloutRequest, WeightSpan
from rollout_worker.engine.host import Engine, Generated
from rollout_worker.engine.metrics import EngineCounters
from rollout_worker.history.connection import persist
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.ledger import Ledger
from rollout_worker.job.problems import Problem
from rollout_worker.job.relay import Relay
from rollout_worker.job.report import JobReport, Mode, Pass, RolloutRow

logger = logging.getLogger(__name__)

_HISTORY_WAIT_S = 30.0
_WATCH_S = 0.2

Sample = tuple[RolloutRequest, int]


class DeadlineError(RuntimeError):
    """The job has run for as long as ``lifecycle.activeDeadlineSeconds`` allows."""


@dataclass
class Progress:
    """Where a running job stands; written by the runner, read by whoever shows it."""

    epoch: int = 0
    epochs: int = 0
    mode: Mode = Mode.DAS
    done: int = 0
    """Rollouts of this pass that are finished."""
    total: int = 0
    """Rollouts of this pass."""
    all_done: int = 0
    """Rollouts of all passes that this run has made."""
    all_total: int = 0
    """Rollouts of all passes that this run has to make."""
    started: float = field(default_factory=time.monotonic)
    pass_started: float = field(default_factory=time.monotonic)
    counters: EngineCounters = field(default_factory=EngineCounters)
    """Of the engine at work."""

    @property
    def seconds_left(self) -> float | None:
        """Time until the job ends, if the rest goes as the part done so far."""
        if not self.all_done:
            return None
        return (time.monotonic() - self.started) / self.all_done * (self.all_total - self.all_done)


class JobRunner:
    """One run of a job. What its ledger holds is not done again; everything else is."""

    def __init__(
        self,
        job: RolloutJob,
        uid: str,
        *,
        problems: Sequence[Problem],
        checkpoints: Sequence[Path],
        tokenizer: Any,
        ledger: Ledger,
        relay: Relay,
        store: HistoryStore,
        engine: Engine,
        plain: Engine | None,
        compare: Sequence[Mode],
    ) -> None:
        """Take what a job needs.

        Args:
            job: the manifest.
            uid: identity of the job, the same for every run of it.
            problems: what to sample.
            checkpoints: weights of each epoch, in order.
            tokenizer: turns responses into text to be scored.
            ledger: what is done.
            relay: brings finished rollouts into the history; the caller starts and stops it.
            store: the history.
            engine: makes the job's rollouts.
            plain: makes those of :attr:`Mode.PLAIN`.
            compare: further modes in which each epoch is made, for comparison; they leave no trace in Redis.
        """
        self.progress = Progress()
        self._job, self._uid = job, uid
        self._problems, self._checkpoints, self._tokenizer = problems, checkpoints, tokenizer
        self._ledger, self._relay, self._store = ledger, relay, store
        self._engine, self._plain, self._compare = engine, plain, compare
        self._by_id = {problem.problem_id: problem for problem in problems}

    async def run(self) -> JobReport:
        """Make all rollouts that are not done yet.

        Raises:
            DeadlineError: see there.
            redis.RedisError: if Redis fails; what was reported done is kept.
            EngineError: if an engine dies.
        """
        deadline = self._job.spec.lifecycle.active_deadline_seconds
        watch = asyncio.ensure_future(self._watch_relay())
        work = asyncio.ensure_future(self._epochs())
        try:
            ended, _ = await asyncio.wait({watch, work}, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
            if not ended:
                raise DeadlineError(
                    f"the job has run for {deadline} s (spec.lifecycle.activeDeadlineSeconds) and is stopped; what is "
                    "done is kept"
                )
            if watch in ended:
                await watch
            return await work
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _watch_relay(self) -> None:
        """Raise what keeps the relay from Redis, so that a job with no server ends instead of running on."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._relay.failure is not None:
                raise self._relay.failure

    async def _epochs(self) -> JobReport:
        report = JobReport(self._job.metadata.name, self._uid)
        done = await asyncio.to_thread(persist, self._ledger.done)
        epochs = [(epoch, *self._split(epoch, done)) for epoch in range(1, len(self._checkpoints) + 1)]
        report.rollouts_done_before = sum(len(before) for _, before, _ in epochs)
        to_make = [len(open_) for _, _, open_ in epochs]
        size = len(self._problems) * self._job.spec.sampling.n
        self.progress.epochs = len(epochs)
        self.progress.all_total = sum(to_make) + size * len(self._compare) * sum(1 for count in to_make if count)
        self.progress.started = time.monotonic()
        await self._history_has_all()  # what a run before this one finished and did not carry
        for epoch, before, open_ in epochs:
            passes = await self._epoch(epoch, before, open_)
            report.passes += sorted(passes, key=lambda made: list(Mode).index(made.mode))
        stats = await self._engine.stats()
        if stats:
            report.corrupt_records = stats["history"]["corrupt"]
            report.index_bytes = stats["index_bytes"]
        report.dead_letters = self._relay.dead
        return report

    def _requests(self, epoch: int) -> list[RolloutRequest]:
        return [
            RolloutRequest(
                job_uid=self._uid,
                request_id=f"epoch-{epoch}-{problem.problem_id}",
                problem_id=problem.problem_id,
                prompt_token_ids=problem.prompt_token_ids,
                sampling=self._job.spec.sampling,
            )
            for problem in self._problems
        ]

    def _split(self, epoch: int, done: dict[str, Any]) -> tuple[list[RolloutRow], list[Sample]]:
        """The rollouts of an epoch that are done, and those to make."""
        before: list[RolloutRow] = []
        open_: list[Sample] = []
        for request in self._requests(epoch):
            for sample in range(request.sampling.n):
                rollout_id = str(request.rollout_id(sample))
                if (entry := done.get(rollout_id)) is None:
                    open_.append((request, sample))
                    continue
                before.append(
                    RolloutRow(
                        rollout_id,
                        request.problem_id,
                        entry.length,
                        entry.finish_reason,
                        entry.drafted,
                        entry.accepted,
                        entry.reward,
                        started=None,
                        finished=None,
                    )
                )
        return before, open_

    async def _epoch(self, epoch: int, before: list[RolloutRow], open_: list[Sample]) -> list[Pass]:
        checkpoint = self._checkpoints[epoch - 1]
        if not open_:
            return [Pass(epoch, Mode.DAS, checkpoint.name, rollouts=before)]
        await self._engine.load_weights(checkpoint, epoch)
        if self._plain is not None:
            await self._plain.load_weights(checkpoint, epoch)
        generation = await asyncio.to_thread(persist, self._store.publish, self._uid, epoch)
        # interleaved: which mode goes first changes from epoch to epoch, so that none has the warmer machine
        modes = [Mode.DAS, *self._compare]
        first = (epoch - 1) % len(modes)
        passes = []
        for mode in modes[first:] + modes[:first]:
            made = Pass(epoch, mode, checkpoint.name, rollouts=list(before) if mode is Mode.DAS else [])
            if mode is Mode.DAS:
                if not await self._engine.announce(sorted(self._by_id), generation, wait=_HISTORY_WAIT_S):
                    logger.warning(
                        "The history is not read after %.0f s; drafting begins with a part.", _HISTORY_WAIT_S
                    )
                await self._make(made, self._engine, open_)
                await self._history_has_all()
            else:
                engine = self._plain if mode is Mode.PLAIN and self._plain is not None else self._engine
                await self._make(made, engine, self._compared(epoch))
            passes.append(made)
        return passes

    def _compared(self, epoch: int) -> list[Sample]:
        requests = [request.model_copy(update={"purpose": Purpose.EVAL}) for request in self._requests(epoch)]
        return [(request, sample) for request in requests for sample in range(request.sampling.n)]

    async def _make(self, made: Pass, engine: Engine, samples: Sequence[Sample]) -> None:
        """Make the rollouts of one pass, all asked for at once; the engine queues what exceeds its batch."""
        progress = self.progress
        progress.epoch, progress.mode, progress.counters = made.epoch, made.mode, engine.counters
        progress.done, progress.total = len(made.rollouts), len(made.rollouts) + len(samples)
        await engine.clear_prefix_cache()
        drafting = (await engine.stats()).get("drafting_seconds", 0.0)
        progress.pass_started = started = time.monotonic()
        async with _all_or_first_error() as group:
            for request, sample in samples:
                group.create_task(self._one(made, engine, request, sample, started))
        made.makespan = max((row.finished for row in made.here if row.finished is not None), default=0.0)
        made.drafting_seconds = (await engine.stats()).get("drafting_seconds", 0.0) - drafting

    async def _one(self, made: Pass, engine: Engine, request: RolloutRequest, sample: int, started: float) -> None:
        sources = ("self",) if made.mode is Mode.SELF else ("history", "self")
        generated = await engine.generate(request, sample, sources=sources)
        rollout = await asyncio.to_thread(self._finish, request, sample, generated, made.mode is Mode.DAS)
        made.rollouts.append(
            RolloutRow(
                rollout.rollout_id,
                rollout.problem_id,
                len(rollout.token_ids),
                str(rollout.finish_reason),
                rollout.drafted,
                rollout.accepted,
                rollout.reward,
                started=generated.started - started,
                finished=generated.finished - started,
            )
        )
        self.progress.done += 1
        self.progress.all_done += 1

    def _finish(self, request: RolloutRequest, sample: int, generated: Generated, recorded: bool) -> Rollout:
        """Score a response and, if it is the job's own, record it as done."""
        text = self._tokenizer.decode(generated.token_ids, skip_special_tokens=True)
        rollout = Rollout(
            rollout_id=str(request.rollout_id(sample)),
            problem_id=request.problem_id,
            purpose=request.purpose,
            token_ids=generated.token_ids,
            logprobs=generated.logprobs,
            spans=[WeightSpan(start=0, weight_version=generated.weight_version)],
            finish_reason=generated.finish_reason,
            drafted=generated.drafted,
            accepted=generated.accepted,
            reward=self._by_id[request.problem_id].reward(text),
        )
        if recorded:
            persist(self._ledger.finish, rollout)
        return rollout

    async def _history_has_all(self) -> None:
        """Wait until the relay has carried all that is done into the history, so that the next drafts see it."""
        while await asyncio.to_thread(persist, self._ledger.waiting):
            if self._relay.failure is not None:
                raise self._relay.failure
            await asyncio.sleep(_WATCH_S / 4)


@asynccontextmanager
async def _all_or_first_error() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first error itself, not a group of one."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
