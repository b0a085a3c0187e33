"""The trainer of an environment that itself asks for the responses of its rollouts, turn by turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.protocol.messages import RolloutId
from rollout_api.redis_client.retry import retry
from rollout_worker.environment.errors import EnvironmentCallError
from rollout_worker.environment.supervisor import EnvironmentSupervisor
from rollout_worker.job.dataset.environment_results import RolloutError
from rollout_worker.job.dataset.local_server import LocalServer
from rollout_worker.job.dataset.report import EpochRun, RolloutRow
from rollout_worker.job.dataset.trainer import DatasetTrainer
from rollout_worker.job.ledger import LedgerEntry


@dataclass(frozen=True)
class TrajectorySource:
    """Where trajectories take place."""

    environment: EnvironmentSupervisor
    server: LocalServer
    """The server from which the environment samples."""
    scores_groups: bool
    """Whether all rollouts of a problem have to be in one call."""


def _trajectory_name(epoch: int, problem_id: str, sample: int) -> str:
    return f"{epoch}/{sample}/{problem_id}"


class TrajectoryTrainer(DatasetTrainer):
    """One run of a dataset job whose environment runs its rollouts itself.

    The environment samples each turn from the job's HTTP server, under an ``Idempotency-Key`` that follows from epoch,
    problem, sample and conversation. The result of a trajectory is stored; a trajectory without a result is repeated.

    Args:
        source: where trajectories take place.
        arguments: the arguments of :class:`DatasetTrainer`.
    """

    def __init__(self, source: TrajectorySource, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, environment=source.environment, **keywords)
        self._source = source
        self._began = 0.0
        """When the current epoch run began, in seconds since 1970."""
        self._steps = self._accepted = 0

    async def _read_finished(self, epoch: int) -> dict[str, Any]:
        prefix = f"{epoch}/"
        return {name: result for name, result in self._results.trajectories.items() if name.startswith(prefix)}

    def _num_finished_before(self, finished: Mapping[int, Mapping[str, Any]]) -> int:
        return sum(map(len, finished.values()))

    async def _rows_of(self, finished: dict[str, Any]) -> list[RolloutRow]:
        ledger = await self._read_ledger(result["rollouts"] for result in finished.values())
        return [self._row(name, result, ledger, None, None) for name, result in finished.items()]

    async def _sample(self, run: EpochRun, finished: dict[str, Any]) -> None:
        """Run all trajectories of an epoch that have no result, at the same time as far as the environment can."""
        progress, samples = self.progress, range(self._job.spec.sampling.n)
        progress.epoch, progress.mode, progress.done = run.epoch, run.mode, len(finished)
        progress.total, progress.accepted_per_step = len(self._problems) * len(samples), 0.0
        run.rollouts += await self._rows_of(finished)
        self._began, self._steps, self._accepted = time.time(), 0, 0
        calls = []
        for problem in self._problems:
            missing = [s for s in samples if _trajectory_name(run.epoch, problem.problem_id, s) not in finished]
            groups = [missing] if self._source.scores_groups else [[sample] for sample in missing]
            calls += [self._run_trajectories(run, problem.problem_id, group) for group in groups if group]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait(*tasks)
        run.makespan = max((row.finished for row in run.from_this_run if row.finished is not None), default=0.0)

    async def _run_trajectories(self, run: EpochRun, problem_id: str, samples: list[int]) -> None:
        arguments = {
            "problem": problem_id,
            "samples": samples,
            "epoch": run.epoch,
            "model": self._job.metadata.name,
            "url": self._source.server.url,
            "token": self._source.server.token,
        }
        started = time.time()
        try:
            results = await asyncio.wrap_future(self._source.environment.call("trajectories", arguments))
        except EnvironmentCallError as error:
            failure = {"type": str(error.error_type), "message": str(error)}
            results = [{"sample": sample, "rollouts": [], "error": failure} for sample in samples]
        finished = time.time()
        ledger = await self._read_ledger(result["rollouts"] for result in results)
        kept: dict[str, dict[str, Any]] = {}
        errors: dict[str, RolloutError] = {}
        rewards: dict[str, float] = {}
        for result in results:
            name = _trajectory_name(run.epoch, problem_id, result["sample"])
            kept[name] = {"problem": problem_id, "rollouts": result["rollouts"], "reward": result.get("reward")}
            if (failure := result.get("error")) is not None:
                errors[name] = RolloutError(failure["type"], problem_id, failure["message"])
            else:
                rewards |= dict.fromkeys(result["rollouts"], result["reward"])
        if rewards:
            await self._client.report_rewards(rewards)
        await self._results.record_trajectories(kept, errors)
        for name, result in kept.items():
            row = self._row(name, result, ledger, started - self._began, finished - self._began)
            run.rollouts.append(row)
            self.progress.done += 1
            self.progress.all_done += 1
            self._steps += row.num_decoding_steps
            self._accepted += row.num_accepted_tokens
            self.progress.accepted_per_step = self._accepted / max(1, self._steps)

    async def _read_ledger(self, rollouts: Iterable[list[str]]) -> dict[str, LedgerEntry]:
        """Return the ledger entries of rollouts by their ids."""
        ids = {rollout_id: RolloutId.parse(rollout_id) for one in rollouts for rollout_id in one}
        requests = sorted({rollout.request_id for rollout in ids.values()})
        found = await asyncio.to_thread(retry, self._job_store.read_ledger, requests)
        return {
            rollout_id: entry
            for rollout_id, rollout in ids.items()
            if (entry := found[rollout.request_id].get(rollout.sample)) is not None
        }

    def _row(
        self,
        name: str,
        result: Mapping[str, Any],
        ledger: Mapping[str, LedgerEntry],
        started: float | None,
        finished: float | None,
    ) -> RolloutRow:
        """Build the row of a trajectory, which has the sums over its turns."""
        turns = [ledger[rollout_id] for rollout_id in result["rollouts"] if rollout_id in ledger]
        return RolloutRow(
            result["rollouts"][-1] if result["rollouts"] else name,
            result["problem"],
            sum(turn.length for turn in turns),
            turns[-1].finish_reason if turns else "failed",
            sum(turn.num_decoding_steps for turn in turns),
            sum(turn.num_draft_tokens for turn in turns),
            sum(turn.num_accepted_tokens for turn in turns),
            result["reward"],
            started,
            finished,
            error=self._results.error_text(name),
        )
