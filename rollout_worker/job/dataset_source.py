"""A dataset source: its problems, the weights of its epochs, and the trainer that works them off."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from pydantic.alias_generators import to_camel

from rollout_api.asyncio_tasks import end
from rollout_api.client.async_client import AsyncRolloutClient
from rollout_api.manifest.rollout_job import FieldError, ManifestError, RolloutJob
from rollout_api.protocol.keys import MessageKeys
from rollout_worker.engine.model_source import default_cache, resolve_checkpoint
from rollout_worker.history.connection import retry
from rollout_worker.job.dataset import DatasetTrainer
from rollout_worker.job.ledger import count_ended
from rollout_worker.job.problems import Problem, load_problems
from rollout_worker.job.report import JobReport, Mode
from rollout_worker.job.setup import JobSetup

_CLIENT = "dataset"
"""Under which a dataset source asks for its rollouts, in each run of it."""


@dataclass(frozen=True)
class Dataset:
    """What a dataset source makes of its manifest."""

    problems: Sequence[Problem]
    checkpoints: Sequence[str]
    """Address of each epoch's weights."""
    tokenizer: Any

    def rollouts(self, job: RolloutJob) -> int:
        """How many there are in all epochs."""
        return len(self.problems) * job.spec.sampling.n * len(self.checkpoints)


def load_dataset(job: RolloutJob, model: Path, tokenizer: Any) -> Dataset | None:
    """The dataset of a job, checked; None for a job that serves trainers.

    Raises:
        ManifestError: naming each field that cannot be carried out.
        ModelError: if a checkpoint is not to be had.
    """
    source = job.spec.source.dataset
    if source is None:
        return None
    for uri in source.checkpoints:
        resolve_checkpoint(uri, default_cache(), model, job.spec.weights.allowed_roots)
    problems = load_problems(source, tokenizer)
    _check_requests(job, problems, len(tokenizer))
    return Dataset(problems, list(source.checkpoints) or [job.spec.model.uri] * source.epochs, tokenizer)


def done_before(server: redis.Redis, keys: MessageKeys) -> int:
    """Rollouts of the dataset that earlier runs of the job have ended."""
    return retry(count_ended, server, keys, _CLIENT)


async def run_dataset(
    setup: JobSetup,
    dataset: Dataset,
    server: redis.Redis,
    *,
    done: int,
    compare: Sequence[Mode] = (),
    watch: Callable[[DatasetTrainer], Awaitable[None]] | None = None,
) -> JobReport:
    """Make what is not made yet, and close the job.

    Args:
        setup: the job, which runs.
        dataset: what to sample.
        server: the job's Redis.
        done: rollouts that had ended before.
        compare: further modes in which each epoch is made.
        watch: runs beside it to show its progress; cancelled when it ends.

    Raises:
        RolloutClientError: if the job refuses.
        redis.RedisError: if Redis is away for long; what is done is kept, and this may be called again.
    """
    run = f"compare-{secrets.token_hex(4)}"
    async with (
        AsyncRolloutClient.connect(setup.redis_url, uid=setup.uid, name=_CLIENT) as client,
        AsyncRolloutClient.connect(setup.redis_url, uid=setup.uid, name=run) as comparing,
    ):
        trainer = DatasetTrainer(
            setup.job,
            problems=dataset.problems,
            checkpoints=dataset.checkpoints,
            tokenizer=dataset.tokenizer,
            client=client,
            comparing=comparing,
            server=server,
            keys=setup.keys,
            store=setup.store(),
            compare=compare,
            done_before=done,
        )
        shown = [asyncio.ensure_future(watch(trainer))] if watch is not None else []
        try:
            return await trainer.run()
        finally:
            await end(*shown)


def _check_requests(job: RolloutJob, problems: Sequence[Problem], vocabulary: int) -> None:
    """Refuse what the engine would refuse, before it is started."""
    sampling, limit = job.spec.sampling, job.spec.engine.max_model_len
    errors = []
    longest = max(len(problem.prompt_token_ids) for problem in problems)
    if longest + sampling.max_tokens > limit:
        message = (
            f"{sampling.max_tokens}, after the longest prompt of {longest} tokens, exceeds engine.maxModelLen, {limit}"
        )
        errors.append(FieldError("spec.sampling.maxTokens", message))
    for setting, token in sampling.outside(vocabulary).items():
        message = f"{token} is no token of the model, which has {vocabulary}"
        errors.append(FieldError(f"spec.sampling.{to_camel(setting)}", message))
    if errors:
        raise ManifestError(errors)
