"""The engines of this machine: Ray, the fleet that keeps them running, and the watcher of their processes."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rollout_api.redis_client.connection import connect
from rollout_worker.engine.errors import EngineError
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.job.setup import JobSetup
from rollout_worker.launch.engine_watcher import EngineWatcher
from rollout_worker.launch.limits import RAY_RETRY_DELAY_S, RAY_START_ATTEMPTS
from rollout_worker.launch.local_ray import start_local_ray, stop_local_ray
from rollout_worker.runtime.child_process import Reaper

if TYPE_CHECKING:
    from rollout_worker.job.fleet import Fleet

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def local_ray(engines: int, terminated: threading.Event | None = None) -> Iterator[Reaper]:
    """Run Ray with room for *engines* engines on this machine.

    Ray gives its processes 30 s to start, which is too short on an overloaded machine, so a failed start is repeated.

    Args:
        engines: number of engines.
        terminated: set by SIGTERM, after which Ray is not started any more.

    Yields:
        What kills the processes of Ray that are left at the end.

    Raises:
        EngineError: if Ray does not start.
        KeyboardInterrupt: if SIGTERM was received meanwhile, unless it has set *terminated*.
    """
    terminated = terminated or threading.Event()
    reaper = Reaper()
    try:
        for attempt in range(RAY_START_ATTEMPTS):
            try:
                start_local_ray(engines)
                break
            except KeyboardInterrupt:
                if not terminated.is_set():
                    raise
                break
            except EngineError as error:
                if attempt == RAY_START_ATTEMPTS - 1:
                    raise
                logger.warning("Starting Ray again: %s", error)
                terminated.wait(RAY_RETRY_DELAY_S)
        reaper.track_descendants()
        yield reaper
    finally:
        # These calls block on purpose: with threads, a second cancellation could end Redis before the engines.
        stop_local_ray()
        reaper.close()


@contextlib.contextmanager
def managed_engines(setup: JobSetup) -> Iterator[Fleet]:
    """Keep the engines of this machine running, and watch their processes."""
    # Ray reads settings when it is imported, which these imports do.
    from rollout_worker.job.engine_actor import EngineActor
    from rollout_worker.job.fleet import Fleet

    watcher = EngineWatcher(LauncherStore(connect(setup.redis_url), setup.keys), setup.worker)
    fleet, stopping = Fleet(setup, EngineActor, on_process=watcher.watch), threading.Event()
    thread = threading.Thread(target=fleet.run, args=(stopping,), name="fleet", daemon=True)
    thread.start()
    watcher.start()
    try:
        yield fleet
    finally:
        stopping.set()
        thread.join()
        watcher.stop()
