"""The head of a job on several machines: Ray's head, the coordinator and the relay.

The head may be restarted at any time. Its successor is a new Ray cluster: the workers notice, hand over their running
rollouts, and join it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import subprocess
import time
from pathlib import Path

import redis

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.errors import JobNotFoundError, RedisUnreachableError
from rollout_api.redis_client.checks import explain_error
from rollout_api.redis_client.connection import connect
from rollout_api.redis_client.retry import retry
from rollout_worker.engine.errors import EngineError
from rollout_worker.job.dataset.source import Dataset, count_finished, run_dataset
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.job.ray_job import RayJob, join_ray, own_address
from rollout_worker.job.setup import JobSetup
from rollout_worker.launch.limits import POLL_INTERVAL_S, REDIS_RETRY_DELAY_S
from rollout_worker.launch.ray_processes import is_reachable, run_ray
from rollout_worker.launch.ray_token import ray_auth_environment

logger = logging.getLogger(__name__)

TERMINATION_LOG = Path("/dev/termination-log")
"""File that Kubernetes reads as a container's termination message (default ``terminationMessagePath``), up to 4 KiB."""
_FINAL_FIGURES = ("done", "total", "epoch", "weight_version", "tokens", "decoding_steps", "accepted_per_step")


async def run_head(setup: JobSetup, dataset: Dataset | None, *, host: str | None, port: int, ray_token: str) -> None:
    """Run the head of a job until the job is closed and all its requests are answered.

    Ray must not be imported before the environment has the job's token (see ``ray_auth_environment``).

    Args:
        setup: the job.
        dataset: the job's dataset source; None if it serves trainers.
        host: address at which other machines reach this one; None to use the one that Ray finds.
        port: port on which workers find the head.
        ray_token: token that admits workers to the Ray cluster.

    Raises:
        EngineError: if Ray does not start, or ends. The process has to be restarted then.
        RolloutClientError: if the job rejects its own dataset.
    """
    host = host or own_address()
    address = f"{host}:{port}"
    options = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--node-ip-address={host}"]
    server = connect(setup.redis_url)
    job_store = LauncherStore(server, setup.keys)
    head = f"{address} {secrets.token_hex(8)}"
    # Published before Ray starts, so that no worker mistakes the new cluster for the old one.
    await asyncio.to_thread(retry, job_store.publish_head, head)
    with run_ray(options, ray_auth_environment(ray_token)) as process:
        await asyncio.to_thread(_wait_until_reachable, address, process)
        join_ray(address)
        job = RayJob(setup)
        await asyncio.to_thread(job.start)
        sampling = [asyncio.ensure_future(_sample_dataset(setup, dataset, server))] if dataset is not None else []
        try:
            while not await job.ended():
                if process.poll() is not None:
                    raise EngineError("Ray's head process has ended; see its log")
                for task in sampling:
                    if task.done():
                        task.result()
                with contextlib.suppress(redis.RedisError):
                    await asyncio.to_thread(job_store.restore_head, head, ray_token)
                await asyncio.sleep(POLL_INTERVAL_S)
            await asyncio.to_thread(_write_termination_message, job_store)
        finally:
            await cancel_and_wait(*sampling)


def _write_termination_message(job_store: LauncherStore) -> None:
    """Leave the job's final figures as the container's termination message, where Kubernetes provides the file."""
    if not TERMINATION_LOG.exists():
        return
    try:
        status = retry(job_store.status)
        if status is None:
            return  # the status expires within seconds
        TERMINATION_LOG.write_text(json.dumps({name: status[name] for name in _FINAL_FIGURES if name in status}))
    except (OSError, ValueError, redis.RedisError) as error:
        logger.warning("Cannot leave the final figures for the operator: %s", error)


async def _sample_dataset(setup: JobSetup, dataset: Dataset, server: redis.Redis) -> None:
    """Sample the dataset's rollouts; retry for as long as Redis or the coordinator is unavailable."""
    while True:
        try:
            finished = await asyncio.to_thread(count_finished, server, setup.keys)
            await run_dataset(setup, dataset, server, finished_before=finished)
        except redis.RedisError as error:
            logger.warning("Waiting for Redis: %s", explain_error(error, setup.redis_url))
        except (RedisUnreachableError, JobNotFoundError) as error:  # the coordinator may be waiting for Redis as well
            logger.warning("Waiting for the coordinator: %s", error)
        else:
            return
        await asyncio.sleep(REDIS_RETRY_DELAY_S)


def _wait_until_reachable(address: str, process: subprocess.Popen[bytes]) -> None:
    while not is_reachable(address):
        if process.poll() is not None:
            raise EngineError(f"Ray cannot start on {address}; check that the port is free")
        time.sleep(POLL_INTERVAL_S)
