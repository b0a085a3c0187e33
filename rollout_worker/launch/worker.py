"""A worker of a job on several machines: it runs the engines of this machine.

A worker has a Ray cluster of its own. Its engines get their rollouts through Redis and depend on no other machine: they
continue while the head is replaced.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import redis

from rollout_api.redis_client.checks import RedisUnusableError, check, explain_error, wait_until_usable
from rollout_api.redis_client.connection import connect, connect_history
from rollout_worker.engine.errors import EngineError
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.job.setup import JobSetup
from rollout_worker.launch.engines import local_ray, managed_engines
from rollout_worker.launch.limits import (
    FLEET_FAILURE_TIMEOUT_S,
    HANDOVER_MARGIN_S,
    POLL_INTERVAL_S,
    READINESS_REDIS_TIMEOUT_S,
    SHUTDOWN_GRACE_S,
    SHUTDOWN_POLL_INTERVAL_S,
)
from rollout_worker.runtime.readiness import ReadinessServer

logger = logging.getLogger(__name__)


def run_worker(setup: JobSetup, *, name: str, http_port: int) -> bool:
    """Run a worker of a job until SIGTERM. Its engines then hand over their running rollouts, unless the job has ended.

    Args:
        setup: the job.
        name: name of this worker in the job's status.
        http_port: port of ``/readyz``; 0 for none.

    Returns:
        Whether the job has ended.

    Raises:
        EngineError: if Ray fails. The process has to be restarted then.
    """
    setup = replace(setup, worker=f"{name}/{secrets.token_hex(4)}")
    server, engines = connect(setup.redis_url), setup.engines_per_machine
    job_store = LauncherStore(server, setup.keys)
    terminated = threading.Event()
    probed_store = LauncherStore(connect(setup.redis_url, timeout=READINESS_REDIS_TIMEOUT_S), setup.keys)
    readiness = WorkerReadiness(probed_store, setup.worker, engines)
    with _readiness_server(http_port, readiness):
        wait_until_usable(server, setup.redis_url)
        if setup.history_url:
            warn_if_unusable(setup.history_url)
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
        with local_ray(engines, terminated):
            if not terminated.is_set():
                with managed_engines(setup) as fleet:
                    while not terminated.wait(POLL_INTERVAL_S):
                        if fleet.failing_seconds() > FLEET_FAILURE_TIMEOUT_S:
                            raise EngineError("Ray does not answer any more; see its log")
                    shut_down_engines(job_store, setup.worker, SHUTDOWN_GRACE_S)
        return _has_ended(job_store)


@contextlib.contextmanager
def _readiness_server(port: int, readiness: WorkerReadiness) -> Iterator[None]:
    server = ReadinessServer(port, readiness.why_not_ready) if port else None
    try:
        yield
    finally:
        if server is not None:
            server.close()


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
    deadline = time.monotonic() + grace + HANDOVER_MARGIN_S
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
    worker: str
    """Id of the worker."""
    engines: int
    """Number of engines that belong on this worker."""
    _last_answer: str = "the worker is starting"

    def why_not_ready(self) -> str:
        """Return why not all engines serve, or '' if they do; repeat the last answer while Redis does not answer."""
        with contextlib.suppress(redis.RedisError):
            serving = len(self.job_store.engines_of(self.worker))
            self._last_answer = "" if serving >= self.engines else f"{serving} of {self.engines} engines serve"
        return self._last_answer


def _has_ended(job_store: LauncherStore) -> bool:
    """Return whether the job has ended; False while Redis does not answer."""
    try:
        return job_store.has_ended()
    except redis.RedisError:
        return False
