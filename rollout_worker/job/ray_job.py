"""A job's actors on a Ray cluster, as seen by the process that starts the job."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any

from rollout_worker.engine.errors import EngineError
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.limits import ACTOR_CALL_TIMEOUT_S, ACTOR_POLL_INTERVAL_S, OBJECT_STORE_BYTES
from rollout_worker.job.setup import JobSetup

logger = logging.getLogger(__name__)


def start_local_ray(engines: int) -> None:
    """Start a Ray cluster with room for *engines* engines, which ends with this process.

    Raises:
        EngineError: if Ray does not start.
    """
    from rollout_worker.job.fleet import ENGINE_RESOURCE

    _init(
        address="local",
        include_dashboard=False,
        resources={ENGINE_RESOURCE: engines},
        object_store_memory=OBJECT_STORE_BYTES,
    )


def join_ray(address: str) -> None:
    """Connect this process to the Ray cluster whose head is at *address*.

    Raises:
        EngineError: if the cluster does not accept this process.
    """
    _init(address=address)


def stop_local_ray() -> None:
    """End the local Ray cluster and everything that runs on it."""
    import ray

    ray.shutdown()


def own_address() -> str:
    """Return the address at which Ray on other machines reaches this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def _init(**settings: Any) -> None:
    # Ray reads these settings from the environment alone.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this, Ray warns repeatedly about an engine that waits for a worker.
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    sigterm_handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=True, **settings)
    except (OSError, RuntimeError, ValueError) as error:
        raise EngineError(f"Ray cannot start: {error}") from error
    # Ray's core installs a handler that treats SIGTERM as a crash.
    signal.signal(signal.SIGTERM, sigterm_handler)


class RayJob:
    """The named, detached actors of one job."""

    def __init__(self, setup: JobSetup) -> None:
        self._setup = setup

    def start(self) -> None:
        """Start the coordinator and the relay unless they exist; the coordinator starts the engines."""
        import ray

        from rollout_worker.job.actors import CoordinatorActor, RelayActor
        from rollout_worker.job.fleet import detached_actor_options

        for name, actor in (("coordinator", CoordinatorActor), ("relay", RelayActor)):
            ray.remote(actor).options(**detached_actor_options(name, self._setup.uid)).remote(self._setup)

    async def wait_engines_ready(self, job_store: JobStore, count: int) -> None:
        """Wait until *count* engines serve.

        Raises:
            EngineError: as soon as one engine cannot start.
        """
        while True:
            engines = await job_store.engines.engines()
            if sum(alive for _, alive in engines.values()) >= count:
                return
            errors = await self._call_coordinator("engine_errors")
            if errors:
                name, error = next(iter(errors.items()))
                raise EngineError(f"{name} cannot start: {error}")
            await asyncio.sleep(ACTOR_POLL_INTERVAL_S)

    async def ended(self) -> bool:
        """Return whether the job was closed and all its requests are answered."""
        return bool(await self._call_coordinator("ended"))

    async def status_port(self) -> int:
        """Return the port of ``/status`` on the coordinator's machine; 0 until the coordinator has started."""
        return int(await self._call_coordinator("get_status_port") or 0)

    async def _call_coordinator(self, method: str) -> Any:
        """Return the result of a method of the coordinator; None while it restarts."""
        import ray

        from rollout_worker.job.fleet import ray_namespace

        def call() -> Any:
            try:
                coordinator = ray.get_actor("coordinator", namespace=ray_namespace(self._setup.uid))
                return ray.get(getattr(coordinator, method).remote(), timeout=ACTOR_CALL_TIMEOUT_S)
            except (ray.exceptions.RayError, ValueError) as error:
                logger.info("The coordinator does not answer: %s", error)
                return None

        return await asyncio.to_thread(call)
