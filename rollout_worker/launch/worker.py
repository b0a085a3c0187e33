"""A worker of a job on several machines: it offers slots on which the job starts engines."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import redis

from rollout_api.manifest.rollout_job import RolloutJob
from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.checks import RedisUnusableError, check, explain_error, wait_until_usable
from rollout_api.redis_client.connection import connect, connect_history
from rollout_worker.job.actors import WORKER_ENV
from rollout_worker.job.fleet import ENGINE_RESOURCE
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.launch.limits import (
    POLL_INTERVAL_S,
    RAY_STOP_TIMEOUT_S,
    READINESS_REDIS_TIMEOUT_S,
    REDIS_RETRY_DELAY_S,
    SHUTDOWN_GRACE_S,
    SHUTDOWN_POLL_INTERVAL_S,
)
from rollout_worker.launch.ray_processes import is_reachable, run_ray
from rollout_worker.launch.ray_token import ray_auth_environment, share_token
from rollout_worker.runtime.readiness import ReadinessServer

logger = logging.getLogger(__name__)

_MODEL_CACHE_ENV = "ROLLOUT_MODEL_CACHE"
"""Environment variable that determines the default model cache, for the engines on this machine."""


def run_worker(
    job: RolloutJob,
    redis_url: str,
    uid: str,
    *,
    history_url: str,
    name: str,
    host: str | None,
    http_port: int,
    model_cache: Path | None,
) -> bool:
    """Run a worker of a job until SIGTERM. Its engines then hand over their running rollouts, unless the job has ended.

    Args:
        job: the manifest.
        redis_url: URL of the job's Redis, where each head publishes its address.
        uid: uid of the job.
        history_url: URL of the Redis that keeps the job's history; empty if it is the job's own server.
        name: name of this worker in the job's status.
        host: address at which other machines reach this one; None to use the one that Ray finds.
        http_port: port of ``/readyz``; 0 for none.
        model_cache: directory of models; None for the default.

    Returns:
        Whether the job has ended.
    """
    server, keys = connect(redis_url), MessageKeys(uid)
    job_store = LauncherStore(server, keys)
    signals: list[int] = []
    engines = job.spec.engines_per_worker
    probed_store = LauncherStore(connect(redis_url, timeout=READINESS_REDIS_TIMEOUT_S), keys)
    readiness = WorkerReadiness(probed_store, engines)
    readiness_server = ReadinessServer(http_port, readiness.why_not_ready) if http_port else None
    try:
        wait_until_usable(server, redis_url)
        if history_url:
            warn_if_unusable(history_url)
        signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
        while not signals:
            head = _read_head(job_store)
            address = head.partition(" ")[0]
            if not head or not is_reachable(address):
                time.sleep(POLL_INTERVAL_S)
                continue
            try:
                # Read for each head, because a head whose Redis has lost its data has a new token.
                token = share_token(job_store)
            except redis.RedisError as error:
                logger.warning("Waiting for Redis before joining the job: %s", explain_error(error, redis_url))
                time.sleep(REDIS_RETRY_DELAY_S)
                continue
            # Engines that joined an earlier head were told to leave under an earlier id.
            readiness.worker = f"{name}/{secrets.token_hex(4)}"
            environment = {**ray_auth_environment(token), WORKER_ENV: readiness.worker}
            if model_cache is not None:
                environment[_MODEL_CACHE_ENV] = str(model_cache.absolute())
            options = [f"--address={address}", "--num-cpus=0", f"--resources={json.dumps({ENGINE_RESOURCE: engines})}"]
            if host:
                options.append(f"--node-ip-address={host}")
            with run_ray(options, environment) as process:
                while not signals and process.poll() is None and _read_head(job_store) in (head, ""):
                    time.sleep(POLL_INTERVAL_S)
                if signals:
                    shut_down_engines(job_store, readiness.worker, SHUTDOWN_GRACE_S)
                elif process.poll() is None:
                    logger.warning("The head was restarted. This worker joins it after handing over its rollouts.")
                    shut_down_engines(job_store, readiness.worker, 0.0)
        return _has_ended(job_store)
    finally:
        if readiness_server is not None:
            readiness_server.close()


def warn_if_unusable(history_url: str) -> None:
    """Log a warning if the history cannot be reached: rollouts are produced without it, but more slowly."""
    try:
        with connect_history(history_url) as history:
            check(history, history_url)
    except (RedisUnusableError, redis.RedisError) as error:
        reason = explain_error(error, history_url) if isinstance(error, redis.RedisError) else error
        logger.warning("Drafting without the job's history until it can be reached: %s", reason)


def shut_down_engines(job_store: LauncherStore, worker: str, grace: float) -> None:
    """Tell a worker's engines to leave the job within *grace* seconds, and wait until they have."""
    deadline = time.monotonic() + grace + RAY_STOP_TIMEOUT_S
    try:
        if job_store.has_ended():
            return  # the engines have no work, and there is no coordinator that would notice their leaving
        job_store.request_shutdown(worker, grace)
        while time.monotonic() < deadline and job_store.engines_of(worker):
            time.sleep(SHUTDOWN_POLL_INTERVAL_S)
    except redis.RedisError as error:
        logger.warning("Cannot tell the engines through Redis to leave (%s); their leases will expire.", error)


@dataclass
class WorkerReadiness:
    """Reports whether all of this worker's engines serve."""

    job_store: LauncherStore
    engines: int
    """Number of engines that belong on this worker."""
    worker: str = ""
    """Id under which the worker has joined the current head; '' if it has joined none yet."""
    _last_answer: str = "there is no head yet"

    def why_not_ready(self) -> str:
        """Return why not all engines serve, or '' if they do; repeat the last answer while Redis does not answer."""
        with contextlib.suppress(redis.RedisError):
            if not self.worker:
                return self._last_answer
            serving = len(self.job_store.engines_of(self.worker))
            self._last_answer = "" if serving >= self.engines else f"{serving} of {self.engines} engines serve"
        return self._last_answer


def _has_ended(job_store: LauncherStore) -> bool:
    """Return whether the job has ended; False while Redis does not answer."""
    try:
        return job_store.has_ended()
    except redis.RedisError:
        return False


def _read_head(job_store: LauncherStore) -> str:
    """Return the id of the current head; '' while Redis does not answer or has none."""
    try:
        return job_store.head()
    except redis.RedisError:
        return ""
