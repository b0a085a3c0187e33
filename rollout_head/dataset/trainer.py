"""The trainer of a dataset source: it samples the problems epoch by epoch and reports the rewards."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.client.prompts import Prompt
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.length_entries import rollout_key
from rollout_api.protocol.messages import DraftMode, Purpose, Rollout, RolloutId, UpdateMode
from rollout_api.protocol.status import NO_STATUS, CoordinatorStatus
from rollout_api.redis_client.retry import retry
from rollout_head.dataset.problems import DatasetProblem, EnvironmentProblem, EnvironmentResults, RolloutError
from rollout_head.dataset.report import EpochMode, EpochRun, JobReport, RolloutRow
from rollout_head.environment.supervisor import EnvironmentCallError, EnvironmentSupervisor
from rollout_store.history.store import HistoryStore
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.ledger import LedgerEntry
from rollout_store.job.limits import (
    FINAL_COUNTERS_TIMEOUT_S,
    OUTBOX_POLL_INTERVAL_S,
    PROGRESS_INTERVAL_S,
    REWARDS_PER_REPORT,
)

_DRAFT_MODES = {
    EpochMode.DAS: DraftMode.HISTORY,
    EpochMode.NON_SPECULATIVE: DraftMode.OFF,
}


@dataclass
class DatasetProgress:
    """Progress of a running dataset job. The trainer updates it for whoever displays it."""

    epoch: int = 0
    epochs: int = 0
    mode: EpochMode = EpochMode.DAS
    done: int = 0
    """Number of finished rollouts of the current epoch run."""
    total: int = 0
    """Number of rollouts of the current epoch run."""
    all_done: int = 0
    """Number of rollouts that this run of the job has produced in all epoch runs."""
    all_total: int = 0
    """Number of rollouts that this run of the job has to produce in all epoch runs."""
    started: float = field(default_factory=time.monotonic)
    accepted_per_step: float = 0.0
    """Accepted draft tokens per decoding step in the current epoch run, so far."""
    status: CoordinatorStatus = field(default_factory=lambda: NO_STATUS)
    """The job's last status."""

    @property
    def remaining_seconds(self) -> float | None:
        """Estimated time until the job ends, at the average speed so far."""
        if not self.all_done:
            return None
        return (time.monotonic() - self.started) / self.all_done * (self.all_total - self.all_done)


class DatasetTrainer:
    """One run of a dataset job. Rollouts in the ledger are not sampled again."""

    def __init__(
        self,
        job: RolloutJob,
        *,
        problems: Sequence[DatasetProblem | EnvironmentProblem],
        checkpoints: Sequence[str],
        tokenizer: Any,
        client: AsyncRolloutClient,
        comparison_client: AsyncRolloutClient,
        server: redis.Redis,
        keys: MessageKeys,
        store: HistoryStore,
        baselines: Sequence[EpochMode],
        finished_before: int,
        environment: EnvironmentSupervisor | None = None,
    ) -> None:
        """Create a trainer; :meth:`run` does its work.

        Args:
            job: the manifest.
            problems: the problems to sample.
            checkpoints: addresses of the weights of each epoch, in order.
            tokenizer: decodes responses, so that they can be scored.
            client: a client that has the same name in each run of the job, so that a run continues the last one.
            comparison_client: a client with a name of its own, because baselines are never continued.
            server: the job's Redis, which holds the ledger.
            keys: keys of the job's messages.
            store: the history, which holds the rewards of rollouts of earlier runs.
            baselines: modes that repeat each epoch for comparison; they do not change the history.
            finished_before: number of rollouts that had finished when this run began.
            environment: computes the rewards of its problems.
        """
        self.progress = DatasetProgress()
        self._job = job
        self._problems, self._checkpoints, self._tokenizer = problems, checkpoints, tokenizer
        self._client, self._comparison_client = client, comparison_client
        self._keys, self._store, self._job_store = keys, store, LauncherStore(server, keys)
        self._baselines, self._finished_before = baselines, finished_before
        self._problem_by_id = {problem.problem_id: problem for problem in problems}
        self._environment = environment
        self._results = EnvironmentResults(self._job_store)

    async def run(self) -> JobReport:
        """Sample all rollouts that are not finished yet, and close the job.

        Raises:
            RolloutClientError: if the job cannot be reached or rejects a request.
        """
        progress = self.progress
        report = JobReport(self._job.metadata.name, self._keys.uid)
        if self._environment is not None:
            await self._results.restore()
        epochs = range(1, len(self._checkpoints) + 1)
        finished = {epoch: await self._read_finished(epoch) for epoch in epochs}
        size = len(self._problems) * self._job.spec.sampling.n
        report.rollouts_from_earlier_runs = self._num_finished_before(finished)
        missing = [size - len(entries) for entries in finished.values()]
        progress.epochs = len(epochs)
        progress.all_total = sum(missing) + size * len(self._baselines) * sum(1 for count in missing if count)
        progress.started = time.monotonic()
        status_task = asyncio.ensure_future(self._update_status())
        try:
            await self._wait_for_relay()  # an earlier run may have left finished rollouts in the outbox
            for epoch in epochs:
                is_last = not any(finished[later] for later in epochs if later > epoch)
                runs = await self._run_epoch(epoch, finished[epoch], size, is_last=is_last)
                report.epoch_runs += sorted(runs, key=lambda run: list(EpochMode).index(run.mode))
            await self._wait_for_relay()
            counters = await self._read_final_counters()
            await self._client.close_job()
        finally:
            await cancel_and_wait(status_task)
        report.corrupt_records = int(max((c.get("history_corrupt", 0) for c in counters), default=0))
        report.index_bytes = int(sum(c.get("index_bytes", 0) for c in counters))
        if self._environment is not None:
            report.environment_errors = self._results.summary()
            report.environment_restarts = self._environment.restarts
        report.dead_letters = int(await asyncio.to_thread(retry, self._job_store.num_dead_letters))
        return report

    def _num_finished_before(self, finished: Mapping[int, Mapping[str, Any]]) -> int:
        """Return how many rollouts earlier runs have finished; *finished* counts those that are not abandoned."""
        return self._finished_before

    def _prompts(self, mode: EpochMode) -> list[Prompt]:
        purpose = Purpose.TRAIN if mode is EpochMode.DAS else Purpose.EVAL
        return [
            Prompt(problem.prompt_token_ids, problem.problem_id, purpose=purpose, draft_mode=_DRAFT_MODES[mode])
            for problem in self._problems
        ]

    async def _read_finished(self, epoch: int) -> dict[str, LedgerEntry]:
        """Read the finished rollouts of an epoch: rollout id → ledger entry."""
        requests = self._client.step(epoch, self._prompts(EpochMode.DAS)).prepare_requests()
        request_ids = [request.request_id for request in requests]
        ledger = await asyncio.to_thread(retry, self._job_store.read_ledger, request_ids)
        return {
            str(RolloutId(self._keys.uid, request_id, sample)): entry
            for request_id, samples in ledger.items()
            for sample, entry in samples.items()
        }

    async def _run_epoch(
        self, epoch: int, finished: dict[str, LedgerEntry], size: int, *, is_last: bool
    ) -> list[EpochRun]:
        """Run an epoch in each mode; an epoch that earlier runs have finished is only reported.

        Args:
            epoch: the epoch.
            finished: those of its rollouts that earlier runs have sampled.
            size: number of its rollouts.
            is_last: whether no rollout of a later epoch was sampled.
        """
        checkpoint = self._checkpoints[epoch - 1]
        name = checkpoint.rstrip("/").rpartition("/")[2]
        if len(finished) >= size:
            rows = await self._rows_of(finished)
            if not (is_last and await self._has_unscored(rows)):
                return [EpochRun(epoch, EpochMode.DAS, name, rollouts=rows)]
        # There is no timeout, because workers may wait for GPUs for hours.
        await self._client.publish_weights(epoch, checkpoint, mode=UpdateMode.DRAIN, sha256=None, timeout=math.inf)
        # The mode that goes first changes from epoch to epoch, so that none always profits from a warmed-up machine.
        modes = [EpochMode.DAS, *self._baselines]
        first = (epoch - 1) % len(modes)
        runs = []
        for mode in modes[first:] + modes[:first]:
            run = EpochRun(epoch, mode, name)
            await self._sample(run, finished if mode is EpochMode.DAS else {})
            if mode is EpochMode.DAS:
                await self._wait_for_relay()
            runs.append(run)
        return runs

    async def _has_unscored(self, rows: Sequence[RolloutRow]) -> bool:
        """Return whether the last run ended before an environment had scored all rollouts, whose results are kept.

        Their results are released when all have been scored.
        """
        if self._environment is None or all(row.reward is not None or row.error is not None for row in rows):
            return False
        return await asyncio.to_thread(retry, self._job_store.has_unreleased_results, self._client.name)

    async def _rows_of(self, finished: dict[str, LedgerEntry]) -> list[RolloutRow]:
        problems = sorted({entry.problem_id for entry in finished.values()})
        rewards: dict[bytes, float] = {}
        for problem in problems:
            rewards |= await asyncio.to_thread(retry, self._store.statistics.rewards, problem)
        return [
            RolloutRow(
                rollout_id,
                entry.problem_id,
                entry.length,
                entry.finish_reason,
                entry.num_decoding_steps,
                entry.num_draft_tokens,
                entry.num_accepted_tokens,
                rewards.get(rollout_key(rollout_id)),
                started=None,
                finished=None,
                error=self._results.error_text(rollout_id),
            )
            for rollout_id, entry in finished.items()
        ]

    async def _sample(self, run: EpochRun, finished: dict[str, LedgerEntry]) -> None:
        """Request all rollouts of an epoch run at once. Those that are already finished are only delivered again."""
        progress = self.progress
        client = self._client if run.mode is EpochMode.DAS else self._comparison_client
        # Each epoch run is a step with a number of its own.
        modes = list(EpochMode)
        number = run.epoch if run.mode is EpochMode.DAS else len(modes) * run.epoch + modes.index(run.mode)
        progress.epoch, progress.mode, progress.done = run.epoch, run.mode, 0
        progress.total = len(self._problems) * self._job.spec.sampling.n
        progress.accepted_per_step = 0.0
        started = time.time()
        steps = accepted = 0
        scores = _ScoreReporter(self._client, self._results, enabled=run.mode is EpochMode.DAS)

        async def score(rollout: Rollout) -> None:
            reward, error = await self._score(rollout)
            run.rollouts.append(_row(rollout, reward, error, None if rollout.rollout_id in finished else started))
            await scores.add(rollout.rollout_id, reward, error)

        scoring: list[asyncio.Future[None]] = []
        async with client.step(number, self._prompts(run.mode)) as step:
            try:
                async for rollout in step:
                    if self._environment is None:
                        await score(rollout)
                    else:
                        scoring.append(asyncio.ensure_future(score(rollout)))
                    progress.done += 1
                    progress.all_done += rollout.rollout_id not in finished
                    steps, accepted = steps + rollout.num_decoding_steps, accepted + rollout.num_accepted_tokens
                    progress.accepted_per_step = accepted / max(1, steps)
                await asyncio.gather(*scoring)
                await scores.flush()
            finally:
                await cancel_and_wait(*scoring)
        run.makespan = max((row.finished for row in run.from_this_run if row.finished is not None), default=0.0)

    async def _score(self, rollout: Rollout) -> tuple[float | None, RolloutError | None]:
        """Return the reward of a rollout, or why there is none."""
        text = await asyncio.to_thread(self._tokenizer.decode, rollout.token_ids, skip_special_tokens=True)
        if self._environment is None:
            problem: Any = self._problem_by_id[rollout.problem_id]
            return await asyncio.to_thread(problem.reward, text), None
        arguments = {"problem": rollout.problem_id, "text": text, "token_ids": list(rollout.token_ids)}
        try:
            return await asyncio.wrap_future(self._environment.call("reward", arguments)), None
        except EnvironmentCallError as error:
            return None, RolloutError(str(error.error_type), rollout.problem_id, str(error))

    async def _update_status(self) -> None:
        while True:
            self.progress.status = self._client.status
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    async def _read_final_counters(self) -> list[dict[str, float]]:
        """Wait for counters that each engine has measured after now; after a timeout, return the last known ones."""
        now, deadline = time.time(), time.monotonic() + FINAL_COUNTERS_TIMEOUT_S
        while True:
            counters = [engine["counters"] for engine in self._client.status.get("engines", [])]
            current = counters and all(each.get("measured_timestamp_seconds", 0) > now for each in counters)
            if current or time.monotonic() > deadline:
                return counters
            await asyncio.sleep(OUTBOX_POLL_INTERVAL_S)

    async def _wait_for_relay(self) -> None:
        """Wait until all finished rollouts and rewards are in the history, where the next epoch's drafts come from."""
        while await asyncio.to_thread(retry, self._job_store.num_unrelayed):
            await asyncio.sleep(OUTBOX_POLL_INTERVAL_S)


class _ScoreReporter:
    """Reports rewards to the job in batches, and records errors at once, so that the job's status shows them."""

    def __init__(self, client: AsyncRolloutClient, results: EnvironmentResults, *, enabled: bool) -> None:
        self._client, self._results, self._enabled = client, results, enabled
        self._rewards: dict[str, float] = {}

    async def add(self, rollout_id: str, reward: float | None, error: RolloutError | None) -> None:
        """Report the reward of a rollout, or the error in its place."""
        if not self._enabled:
            return
        if error is not None:
            await self._results.record({rollout_id: error})
        if reward is not None:
            self._rewards[rollout_id] = reward
        if len(self._rewards) >= REWARDS_PER_REPORT:
            await self.flush()

    async def flush(self) -> None:
        """Report what is left."""
        rewards, self._rewards = self._rewards, {}
        if rewards:
            await self._results.record({}, succeeded=rewards)
            await self._client.report_rewards(rewards)


def _row(rollout: Rollout, reward: float | None, error: RolloutError | None, started: float | None) -> RolloutRow:
    """Build a row of the report.

    Args:
        rollout: the delivered rollout.
        reward: its score; None if there is none.
        error: why there is none.
        started: when this run of the job began the epoch run; None for a rollout of an earlier run.
    """
    return RolloutRow(
        rollout.rollout_id,
        rollout.problem_id,
        len(rollout.token_ids),
        str(rollout.finish_reason),
        rollout.num_decoding_steps,
        rollout.num_draft_tokens,
        rollout.num_accepted_tokens,
        reward,
        started=None if started is None else rollout.started_at - started,
        finished=None if started is None else rollout.finished_at - started,
        error=None if error is None else error.text,
    )
