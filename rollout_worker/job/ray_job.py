"""A job's actors on a Ray cluster, as whoever starts the job sees them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import Any

from rollout_worker.engine.compat import EngineError
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.setup import JobSetup

logger = logging.getLogger(__name__)

_POLL_S = 0.2
OBJECT_STORE_BYTES = 128 << 20
"""Little goes through Ray's object store: prompts and rollouts go through Redis."""


def start_local_ray(engines: int) -> None:
    """A Ray cluster of this process' own with room for so many engines; it ends with the process.

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
    """Take part in the Ray cluster whose head is at *address*.

    Raises:
        EngineError: if it does not take this process.
    """
    _init(address=address)


def own_address() -> str:
    """The address under which Ray on other machines would reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())


def _init(**settings: Any) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")  # an engine whose worker has gone waits for room, in silence
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    on_term = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(logging_level=logging.ERROR, log_to_driver=True, **settings)
    except (OSError, RuntimeError, ValueError) as error:
        raise EngineError(f"Ray does not start: {error}") from error
    # Ray's core takes SIGTERM for a crash
    signal.signal(signal.SIGTERM, on_term)


def stop_local_ray() -> None:
    """End that cluster, with everything that runs on it."""
    import ray

    ray.shutdown()


class RayJob:
    """The named, detached actors of one job."""

    def __init__(self, setup: JobSetup) -> None:
        self._setup = setup

    def start(self) -> None:
        """Make the coordinator and the relay, unless they are there; the coordinator makes the engines."""
        import ray

        from rollout_worker.job.actors import CoordinatorActor, RelayActor
        from rollout_worker.job.fleet import lasting

        for name, actor in (("coordinator", CoordinatorActor), ("relay", RelayActor)):
            ray.remote(actor).options(**lasting(name, self._setup.uid)).remote(self._setup)

    async def engines_ready(self, job_store: JobStore, wanted: int) -> None:
        """Wait until *wanted* engines have taken up their work.

        Raises:
            EngineError: as soon as one cannot start.
        """
        while True:
            engines = await job_store.engines()
            if sum(alive for _, alive in engines.values()) >= wanted:
                return
            errors = await self._ask("engine_errors")
            if errors:
                name, error = next(iter(errors.items()))
                raise EngineError(f"{name}: {error}")
            await asyncio.sleep(_POLL_S)

    async def ended(self) -> bool:
        """Whether the job was closed and all that was asked for is answered."""
        return bool(await self._ask("ended"))

    async def status_port(self) -> int:
        """Port of ``/status`` and ``/metrics`` on the coordinator's machine; 0 while it starts."""
        return int(await self._ask("address") or 0)

    async def _ask(self, method: str) -> Any:
        """What the coordinator answers; None while it is being started anew."""
        import ray

        from rollout_worker.job.fleet import namespace

        def ask() -> Any:
            try:
                coordinator = ray.get_actor("coordinator", namespace=namespace(self._setup.uid))
                return ray.get(getattr(coordinator, method).remote(), timeout=10)
            except (ray.exceptions.RayError, ValueError) as error:
                logger.info("The coordinator does not answer right now: %s", error)
                return None

        return await asyncio.to_thread(ask)
