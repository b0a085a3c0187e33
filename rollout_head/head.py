"""The head of a job on several machines: the coordinator, the relay and the dataset source.

The head may be restarted at any time. The engines continue meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import redis

from rollout_api.asyncio_tasks import cancel_and_wait, run_in_daemon_thread
from rollout_api.errors import JobNotFoundError, RedisUnreachableError
from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.redis_client.checks import explain_error
from rollout_api.redis_client.connection import connect
from rollout_api.redis_client.retry import retry
from rollout_head.child_services import JobServices
from rollout_head.dataset.source import Dataset, count_finished, load_dataset, run_dataset
from rollout_store.job.launcher import HeadFacts, LauncherStore
from rollout_store.job.setup import JobSetup
from rollout_store.models.model_source import load_tokenizer, resolve_model, tokenizer_fingerprint

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.5
"""Seconds between two checks of the job or of Ray."""
_REDIS_RETRY_DELAY_S = 2.0
"""Seconds after which something is repeated that failed because of Redis."""

TERMINATION_LOG = Path("/dev/termination-log")
"""File that Kubernetes reads as a container's termination message (default ``terminationMessagePath``), up to 4 KiB."""
_FINAL_FIGURES = ("done", "total", "epoch", "weight_version", "tokens", "decoding_steps", "accepted_per_step")

_MAX_ERROR_CHARS = 100
"""Maximum length of texts about errors there."""


class HeadInputs:
    """Loads what the head reads from a job's model and dataset, each once and only if it is needed."""

    def __init__(self, job: RolloutJob, cache: Path) -> None:
        """Load nothing yet; *cache* is the directory of models."""
        self._job, self._cache = job, cache

    @cached_property
    def _model(self) -> Path:
        return resolve_model(self._job.spec.model, self._cache, weights=False)

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model)

    @cached_property
    def _dataset(self) -> Dataset | None:
        if self._job.spec.source.dataset is None:
            return None
        return load_dataset(self._job, self._model, self._tokenizer, self._cache)

    def dataset(self) -> Dataset | None:
        """Return the job's dataset source, or None if it serves trainers.

        Raises:
            ManifestError, ModelError: if the dataset or the model cannot be used.
        """
        return self._dataset

    def facts(self) -> HeadFacts:
        """Return what the coordinator has to know.

        Raises:
            ManifestError, ModelError: if the dataset or the model cannot be used.
        """
        dataset, tokenizer = self._dataset, self._tokenizer
        total = None if dataset is None else dataset.total_rollouts(self._job)
        return HeadFacts(len(tokenizer), tokenizer_fingerprint(tokenizer), total)


async def run_head(setup: JobSetup, load_dataset: Callable[[], Dataset | None]) -> None:
    """Run the head of a job until the job is closed and all its requests are answered.

    Args:
        setup: the job.
        load_dataset: loads the job's dataset source, while the coordinator already works; returns None if the job
            serves trainers.

    Raises:
        EngineError: if another head has taken over.
        RolloutClientError: if the job rejects its own dataset.
    """
    server = connect(setup.redis_url)
    services = JobServices(setup)
    services.start()
    sampling = asyncio.ensure_future(_sample_dataset(setup, load_dataset, server))
    try:
        while not services.ended():
            if sampling.done():
                sampling.result()
            await asyncio.sleep(_POLL_INTERVAL_S)
        await asyncio.to_thread(_write_termination_message, LauncherStore(server, setup.keys))
    finally:
        await cancel_and_wait(sampling)
        services.stop()


def _write_termination_message(job_store: LauncherStore) -> None:
    """Leave the job's final figures as the container's termination message, where Kubernetes provides the file."""
    if not TERMINATION_LOG.exists():
        return
    try:
        status = retry(job_store.status)
        if status is None:
            return  # the status expires within seconds
        figures = {name: status[name] for name in _FINAL_FIGURES if name in status}
        figures["environment_errors"] = {
            kind: {name: value[:_MAX_ERROR_CHARS] if isinstance(value, str) else value for name, value in error.items()}
            for kind, error in status.get("environment_errors", {}).items()
        }
        TERMINATION_LOG.write_text(json.dumps(figures))
    except (OSError, ValueError, redis.RedisError) as error:
        logger.warning("Cannot leave the final figures for the operator: %s", error)


async def _sample_dataset(setup: JobSetup, load_dataset: Callable[[], Dataset | None], server: redis.Redis) -> None:
    """Sample the rollouts of the dataset, if there is one; retry while Redis or the coordinator is unavailable."""
    dataset = await run_in_daemon_thread(load_dataset)
    if dataset is None:
        return
    with closing(dataset):
        while True:
            try:
                finished = await asyncio.to_thread(count_finished, server, setup.keys)
                await run_dataset(setup, dataset, server, finished_before=finished)
            except redis.RedisError as error:
                logger.warning("Waiting for Redis: %s", explain_error(error, setup.redis_url))
            except (RedisUnreachableError, JobNotFoundError) as error:  # the coordinator may wait for Redis as well
                logger.warning("Waiting for the coordinator: %s", error)
            else:
                return
            await asyncio.sleep(_REDIS_RETRY_DELAY_S)
