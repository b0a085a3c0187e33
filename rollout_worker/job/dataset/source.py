"""A dataset source: its problems, the weights of its epochs, and the trainer that samples them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from pydantic.alias_generators import to_camel

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.manifest.rollout_job import FieldError, ManifestError, RolloutJob
from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.retry import retry
from rollout_worker.engine.model_source import resolve_checkpoint
from rollout_worker.environment.supervisor import EnvironmentSupervisor
from rollout_worker.job.dataset.environment_source import EnvironmentProblem, load_environment
from rollout_worker.job.dataset.local_server import LocalServer
from rollout_worker.job.dataset.problems import DatasetProblem, load_problems
from rollout_worker.job.dataset.report import EpochMode, JobReport
from rollout_worker.job.dataset.trainer import DatasetTrainer
from rollout_worker.job.dataset.trajectories import TrajectorySource, TrajectoryTrainer
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.job.setup import JobSetup

CLIENT_NAME = "dataset"
"""Name of the client that samples the job's own rollouts, the same in every run of the job."""


@dataclass(frozen=True)
class Dataset:
    """The loaded dataset source of a manifest."""

    problems: Sequence[DatasetProblem | EnvironmentProblem]
    checkpoints: Sequence[str]
    """Address of each epoch's weights."""
    tokenizer: Any
    environment: EnvironmentSupervisor | None = None
    """The environment that the problems belong to."""
    samples_itself: bool = False
    """Whether the environment itself asks for the responses, turn by turn."""
    scores_groups: bool = False
    """Whether its rewards compare the rollouts of a problem."""

    def close(self) -> None:
        """End the environment's process."""
        if self.environment is not None:
            self.environment.close()

    def prompts(self) -> dict[str, list[int]]:
        """Return the token ids of each problem's prompt; empty ones if only the environment knows them."""
        return {problem.problem_id: list(problem.prompt_token_ids) for problem in self.problems}

    def total_rollouts(self, job: RolloutJob) -> int | None:
        """Return the number of rollouts in all epochs; None if the number of turns is unknown."""
        if self.samples_itself:
            return None
        return len(self.problems) * job.spec.sampling.n * len(self.checkpoints)


def load_dataset(job: RolloutJob, model: Path, tokenizer: Any, cache: Path) -> Dataset | None:
    """Load and check the dataset source of a job; return None for a job that serves trainers.

    Args:
        job: the manifest.
        model: directory of the job's model.
        tokenizer: the model's tokenizer.
        cache: the model cache, for checkpoints.

    Raises:
        ManifestError: naming each field with a value that cannot be used.
        ModelError: if a checkpoint cannot be found.
    """
    source = job.spec.source.dataset
    if source is None:
        return None
    for uri in source.checkpoints:
        resolve_checkpoint(uri, cache, model, job.spec.weights.allowed_roots)
    checkpoints = list(source.checkpoints) or [job.spec.model.uri] * source.epochs
    if source.environment is None:
        problems = load_problems(source, tokenizer)
        _check_requests(job, problems, len(tokenizer))
        return Dataset(problems, checkpoints, tokenizer)
    loaded = load_environment(source.environment, tokenizer)
    dataset = Dataset(
        loaded.problems,
        checkpoints,
        tokenizer,
        loaded.environment,
        samples_itself=loaded.samples_itself,
        scores_groups=loaded.scores_groups,
    )
    try:
        _check_requests(job, loaded.problems, len(tokenizer))
    except ManifestError:
        dataset.close()
        raise
    return dataset


def count_finished(server: redis.Redis, keys: MessageKeys) -> int:
    """Count the dataset's rollouts that earlier runs of the job have finished."""
    return retry(LauncherStore(server, keys).count_finished_rollouts, CLIENT_NAME)


async def run_dataset(
    setup: JobSetup,
    dataset: Dataset,
    server: redis.Redis,
    *,
    finished_before: int,
    baselines: Sequence[EpochMode] = (),
    watch: Callable[[DatasetTrainer], Awaitable[None]] | None = None,
) -> JobReport:
    """Sample the rollouts that are not finished yet, and close the job.

    Args:
        setup: the job, which is running.
        dataset: the problems to sample.
        server: the job's Redis.
        finished_before: number of rollouts that earlier runs have finished.
        baselines: modes in which each epoch is repeated for comparison; none for an environment that asks for its
            responses itself.
        watch: runs concurrently to show the progress; cancelled at the end.

    Raises:
        RolloutClientError: if the job rejects a request.
        redis.RedisError: if Redis is unavailable for long. Finished rollouts are kept, and the call can be repeated.
    """
    comparison = f"compare-{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            AsyncRolloutClient.connect(setup.redis_url, uid=setup.uid, name=CLIENT_NAME)
        )
        comparison_client = await stack.enter_async_context(
            AsyncRolloutClient.connect(setup.redis_url, uid=setup.uid, name=comparison)
        )
        arguments: dict[str, Any] = {
            "problems": dataset.problems,
            "checkpoints": dataset.checkpoints,
            "tokenizer": dataset.tokenizer,
            "client": client,
            "comparison_client": comparison_client,
            "server": server,
            "keys": setup.keys,
            "store": setup.history_store(),
            "finished_before": finished_before,
        }
        if dataset.environment is not None and dataset.samples_itself:
            local_server = await stack.enter_async_context(LocalServer(setup))
            source = TrajectorySource(dataset.environment, local_server, dataset.scores_groups)
            trainer: DatasetTrainer = TrajectoryTrainer(source, setup.job, baselines=(), **arguments)
        else:
            trainer = DatasetTrainer(setup.job, environment=dataset.environment, baselines=baselines, **arguments)
        watching = [asyncio.ensure_future(watch(trainer))] if watch is not None else []
        try:
            return await trainer.run()
        finally:
            await cancel_and_wait(*watching)


def _check_requests(
    job: RolloutJob, problems: Sequence[DatasetProblem | EnvironmentProblem], vocabulary_size: int
) -> None:
    """Reject requests that the engines would reject, before any engine is started."""
    sampling, limit = job.spec.sampling, job.spec.engine.max_model_len
    errors = []
    longest = max(len(problem.prompt_token_ids) for problem in problems)
    if longest + sampling.max_tokens > limit:
        message = (
            f"{sampling.max_tokens} tokens after the longest prompt, which has {longest}, exceed "
            f"engine.maxModelLen ({limit})"
        )
        errors.append(FieldError("spec.sampling.maxTokens", message))
    for setting, token in sampling.tokens_outside(vocabulary_size).items():
        message = f"token id {token} is outside of the model's vocabulary, which has {vocabulary_size} tokens"
        errors.append(FieldError(f"spec.sampling.{to_camel(setting)}", message))
    if errors:
        raise ManifestError(errors)
