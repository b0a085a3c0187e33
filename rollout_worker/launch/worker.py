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
from typing import TYPE_CHECKING

import redis

from rollout_api.redis_client.checks import RedisUnusableError, check, explain_error, wait_until_usable
from rollout_api.redis_client.connection import connect, connect_history
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.job.setup import JobSetup
from rollout_worker.launch.engines import check_ray, running_engines
from rollout_worker.runtime.readiness import ReadinessServer

if TYPE_CHECKING:
    from rollout_worker.job.fleet import Fleet

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.5
"""Seconds between two checks of the job or of Ray."""
HANDOVER_MARGIN_S = 10.0
"""Seconds after ``workers.drainSeconds`` that engines have to hand over their rollouts."""
_SHUTDOWN_POLL_INTERVAL_S = 0.25
"""Seconds between two checks whether a worker's engines have left the job."""


def run_worker(setup: JobSetup, *, name: str, http_port: int) -> bool:
    """Run a worker of a job until SIGTERM. Its engines then hand over their running rollouts, unless the job has ended.

    Args:
        setup: the job.
        name: name of this worker in the job's status.
        http_port: port of ``/readyz``; 0 for none.

    Returns:
        Whether the job has ended.

    Raises:
        EngineError: if Ray does not start, or does not answer any more. The process has to be restarted then.
    """
    setup = replace(setup, worker=f"{name}/{secrets.token_hex(4)}")
    server = connect(setup.redis_url)
    job_store = LauncherStore(server, setup.keys)
    terminated = threading.Event()
    readiness = WorkerReadiness(setup.num_engines)
    with _readiness_server(http_port, readiness):
        wait_until_usable(server, setup.redis_url)
        if setup.history_url:
            warn_if_unusable(setup.history_url)
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
        try:
            with running_engines(setup, terminated) as fleet:
                readiness.fleet = fleet
                while not terminated.wait(_POLL_INTERVAL_S):
                    check_ray(fleet)
                shut_down_engines(job_store, setup.worker, fleet, float(setup.job.spec.workers.drain_seconds))
        except KeyboardInterrupt:
            if not terminated.is_set():  # else SIGTERM has interrupted the start of Ray
                raise
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


def shut_down_engines(job_store: LauncherStore, worker: str, fleet: Fleet, grace: float) -> None:
    """Tell a worker's engines to leave the job within *grace* seconds, and wait until they have."""
    deadline = time.monotonic() + grace + HANDOVER_MARGIN_S
    try:
        if job_store.has_ended():
            return  # the engines have no work
        job_store.request_shutdown(worker, grace)
    except redis.RedisError as error:
        logger.warning("Cannot tell the engines through Redis to leave (%s); their leases will expire.", error)
        return
    while time.monotonic() < deadline and fleet.num_serving:
        time.sleep(_SHUTDOWN_POLL_INTERVAL_S)


@dataclass
class WorkerReadiness:
    """Reports whether all of this worker's engines serve."""

    engines: int
    """Number of engines that belong on this worker."""
    fleet: Fleet | None = None
    """The engines; None while Ray starts."""

    def why_not_ready(self) -> str:
        """Return why not all engines serve, or '' if they do."""
        if self.fleet is None:
            return "the worker is starting"
        serving = self.fleet.num_serving
        return "" if serving >= self.engines else f"{serving} of {self.engines} engines serve"


def _has_ended(job_store: LauncherStore) -> bool:
    """Return whether the job has ended; False while Redis does not answer."""
    try:
        return job_store.has_ended()
    except redis.RedisError:
        return False
