"""Runs a dataset source as a trainer of its own: epochs of problems through the job, and the rewards back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from rollout_api.asyncio_tasks import end
from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.client.prompts import Prompt
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.length_entries import rollout_key
from rollout_api.protocol.messages import Drafts, Purpose, Rollout, RolloutId, UpdateMode
from rollout_worker.history.connection import retry
from rollout_worker.history.store import HistoryStore
from rollout_worker.job.ledger import LedgerEntry, read_ledger
from rollout_worker.job.problems import Problem
from rollout_worker.job.report import JobReport, Mode, Pass, RolloutRow

_WATCH_S = 0.05
_STATUS_S = 0.5
_LAST_COUNTERS_S = 10.0
"""An engine counts, tells Redis, the coordinator publishes it and the client reads it: once a second each."""
_REWARDS_AT_ONCE = 256
_DRAFTS = {Mode.DAS: Drafts.HISTORY, Mode.SELF: Drafts.OWN_TEXT, Mode.PLAIN: Drafts.OFF}


@dataclass
class Progress:
    """Where a running job stands; written by the trainer, read by whoever shows it."""

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
    accepted_per_step: float = 0.0
    """Of this pass, so far."""
    status: dict[str, Any] = field(default_factory=dict)
    """The job's last status."""

    @property
    def seconds_left(self) -> float | None:
        """Time until the job ends, if the rest goes as the part done so far."""
        if not self.all_done:
            return None
        return (time.monotonic() - self.started) / self.all_done * (self.all_total - self.all_done)


class DatasetTrainer:
    """One run of a dataset job. What its ledger holds is not done again; everything else is."""

    def __init__(
        self,
        job: RolloutJob,
        *,
        problems: Sequence[Problem],
        checkpoints: Sequence[str],
        tokenizer: Any,
        client: AsyncRolloutClient,
        comparing: AsyncRolloutClient,
        server: redis.Redis,
        keys: MessageKeys,
        store: HistoryStore,
        compare: Sequence[Mode],
        done_before: int,
    ) -> None:
        """Take what a run needs.

        Args:
            job: the manifest.
            problems: what to sample.
            checkpoints: addresses of each epoch's weights, in order.
            tokenizer: turns responses into text to be scored.
            client: connected to the job, under the same name in each run of it.
            comparing: connected under a name of this run's own: what it asks for is not gone on with.
            server: the job's Redis, for what the ledger holds.
            keys: of the job's messages.
            store: the history, for the rewards of what an earlier run made.
            compare: further modes in which each epoch is made, for comparison; they leave no trace in the history.
            done_before: rollouts that had ended when this run began.
        """
        self.progress = Progress()
        self._job = job
        self._problems, self._checkpoints, self._tokenizer = problems, checkpoints, tokenizer
        self._client, self._comparing = client, comparing
        self._server, self._keys, self._store = server, keys, store
        self._compare, self._done_before = compare, done_before
        self._by_id = {problem.problem_id: problem for problem in problems}

    async def run(self) -> JobReport:
        """Make all rollouts that are not done yet, and close the job.

        Raises:
            RolloutClientError: if the job cannot be asked, or refuses.
        """
        progress = self.progress
        report = JobReport(self._job.metadata.name, self._keys.uid)
        epochs = range(1, len(self._checkpoints) + 1)
        done = {epoch: await self._done(epoch) for epoch in epochs}
        size = len(self._problems) * self._job.spec.sampling.n
        report.rollouts_done_before = self._done_before
        to_make = [size - len(entries) for entries in done.values()]
        progress.epochs = len(epochs)
        progress.all_total = sum(to_make) + size * len(self._compare) * sum(1 for count in to_make if count)
        progress.started = time.monotonic()
        watch = asyncio.ensure_future(self._watch())
        try:
            await self._history_has_all()  # what a run before this one finished and did not carry
            for epoch in epochs:
                passes = await self._epoch(epoch, done[epoch], size)
                report.passes += sorted(passes, key=lambda made: list(Mode).index(made.mode))
            await self._history_has_all()
            counters = await self._last_counters()
            await self._client.close_job()
        finally:
            await end(watch)
        report.corrupt_records = int(max((c.get("history_corrupt", 0) for c in counters), default=0))
        report.index_bytes = int(sum(c.get("index_bytes", 0) for c in counters))
        report.dead_letters = int(await asyncio.to_thread(retry, self._server.xlen, self._keys.dead))
        return report

    def _prompts(self, mode: Mode) -> list[Prompt]:
        purpose = Purpose.TRAIN if mode is Mode.DAS else Purpose.EVAL
        return [
            Prompt(problem.prompt_token_ids, problem.problem_id, purpose=purpose, drafts=_DRAFTS[mode])
            for problem in self._problems
        ]

    async def _done(self, epoch: int) -> dict[str, LedgerEntry]:
        """What is made of an epoch already: rollout id → entry."""
        request_ids = [one.request_id for one in self._client.step(epoch, self._prompts(Mode.DAS)).prepare()]
        ledger = await asyncio.to_thread(retry, read_ledger, self._server, self._keys, request_ids)
        return {
            str(RolloutId(self._keys.uid, request_id, sample)): entry
            for request_id, samples in ledger.items()
            for sample, entry in samples.items()
        }

    async def _epoch(self, epoch: int, done: dict[str, LedgerEntry], size: int) -> list[Pass]:
        checkpoint = self._checkpoints[epoch - 1]
        name = checkpoint.rstrip("/").rpartition("/")[2]
        if len(done) >= size:
            return [Pass(epoch, Mode.DAS, name, rollouts=await self._rows_of(done))]
        # for as long as there is no engine: workers may wait for GPUs for hours
        await self._client.publish_weights(epoch, checkpoint, mode=UpdateMode.DRAIN, sha256=None, timeout=math.inf)
        # interleaved: which mode goes first changes from epoch to epoch, so that none has the warmer machine
        modes = [Mode.DAS, *self._compare]
        first = (epoch - 1) % len(modes)
        passes = []
        for mode in modes[first:] + modes[:first]:
            made = Pass(epoch, mode, name)
            await self._make(made, done if mode is Mode.DAS else {})
            if mode is Mode.DAS:
                await self._history_has_all()
            passes.append(made)
        return passes

    async def _rows_of(self, done: dict[str, LedgerEntry]) -> list[RolloutRow]:
        problems = sorted({entry.problem_id for entry in done.values()})
        rewards: dict[bytes, float] = {}
        for problem in problems:
            rewards |= await asyncio.to_thread(retry, self._store.rewards, problem)
        return [
            RolloutRow(
                rollout_id,
                entry.problem_id,
                entry.length,
                entry.finish_reason,
                entry.steps,
                entry.drafted,
                entry.accepted,
                rewards.get(rollout_key(rollout_id)),
                started=None,
                finished=None,
            )
            for rollout_id, entry in done.items()
        ]

    async def _make(self, made: Pass, before: dict[str, LedgerEntry]) -> None:
        """Make the rollouts of one pass, all asked for at once. What an earlier run made is delivered once more."""
        progress = self.progress
        client = self._client if made.mode is Mode.DAS else self._comparing
        # passes of one epoch are steps of their own
        number = made.epoch if made.mode is Mode.DAS else len(Mode) * made.epoch + list(Mode).index(made.mode)
        progress.epoch, progress.mode, progress.done = made.epoch, made.mode, 0
        progress.total = len(self._problems) * self._job.spec.sampling.n
        progress.accepted_per_step = 0.0
        started = time.time()
        rewards: dict[str, float] = {}
        steps = accepted = 0
        async with client.step(number, self._prompts(made.mode)) as step:
            async for rollout in step:
                reward = await asyncio.to_thread(self._reward, rollout)
                made.rollouts.append(_row(rollout, reward, None if rollout.rollout_id in before else started))
                progress.done += 1
                progress.all_done += rollout.rollout_id not in before
                steps, accepted = steps + rollout.steps, accepted + rollout.accepted
                progress.accepted_per_step = accepted / max(1, steps)
                if made.mode is Mode.DAS:
                    rewards[rollout.rollout_id] = reward
                    if len(rewards) >= _REWARDS_AT_ONCE:
                        await self._client.report_rewards(rewards)
                        rewards = {}
            if rewards:
                await self._client.report_rewards(rewards)
        made.makespan = max((row.finished for row in made.here if row.finished is not None), default=0.0)

    def _reward(self, rollout: Rollout) -> float:
        text = self._tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
        return self._by_id[rollout.problem_id].reward(text)

    async def _watch(self) -> None:
        while True:
            self.progress.status = self._client.status
            await asyncio.sleep(_STATUS_S)

    async def _last_counters(self) -> list[dict[str, float]]:
        """Each engine's counters of now; after a while, those that are known."""
        now, deadline = time.time(), time.monotonic() + _LAST_COUNTERS_S
        while True:
            counters = [engine["counters"] for engine in self._client.status.get("engines", [])]
            current = counters and all(each.get("measured_timestamp_seconds", 0) > now for each in counters)
            if current or time.monotonic() > deadline:
                return counters
            await asyncio.sleep(_WATCH_S)

    async def _history_has_all(self) -> None:
        """Wait until all that is done is in the history, so that the next drafts see it."""
        while await asyncio.to_thread(retry, self._server.xlen, self._keys.outbox):
            await asyncio.sleep(_WATCH_S)


def _row(rollout: Rollout, reward: float, started: float | None) -> RolloutRow:
    """A row of the report; *started* is when this run began the pass, None for what an earlier run made."""
    return RolloutRow(
        rollout.rollout_id,
        rollout.problem_id,
        len(rollout.token_ids),
        str(rollout.finish_reason),
        rollout.steps,
        rollout.drafted,
        rollout.accepted,
        reward,
        started=None if started is None else rollout.started_at - started,
        finished=None if started is None else rollout.finished_at - started,
    )
