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
from rollout_worker.launch.limits import (
    FLEET_FAILURE_TIMEOUT_S,
    FLEET_STOP_TIMEOUT_S,
    RAY_RETRY_DELAY_S,
    RAY_START_ATTEMPTS,
)
from rollout_worker.launch.local_ray import start_local_ray, stop_local_ray
from rollout_worker.runtime.child_process import Reaper

if TYPE_CHECKING:
    from rollout_worker.job.fleet import EngineState, Fleet

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def running_engines(setup: JobSetup, terminated: threading.Event | None = None) -> Iterator[Fleet]:
    """Run Ray and the engines of this machine, and restart engines that die.

    Args:
        setup: the job.
        terminated: set by SIGTERM. Ray is not started any more then.

    Raises:
        EngineError: if Ray does not start.
        KeyboardInterrupt: if SIGTERM was received before Ray had started.
    """
    reaper = _start_ray(setup.num_engines, terminated or threading.Event())
    try:
        with _fleet(setup, reaper) as fleet:
            yield fleet
    finally:
        # These calls block on purpose: with threads, a second cancellation could end Redis before the engines.
        reaper.track_descendants()
        stop_local_ray()
        reaper.close()


def check_ray(fleet: Fleet) -> None:
    """Check that Ray answers.

    Raises:
        EngineError: if it has not answered for long.
    """
    if fleet.failing_seconds > FLEET_FAILURE_TIMEOUT_S:
        raise EngineError(
            f"Ray has not answered for {FLEET_FAILURE_TIMEOUT_S:.0f} s; its logs are in /tmp/ray/session_latest/logs"
        )


def _start_ray(engines: int, terminated: threading.Event) -> Reaper:
    """Start Ray, and return what kills those of its processes that are left at the end.

    Ray gives its processes 30 s to start, which is too short on an overloaded machine, so a failed start is repeated.
    """
    failures = 0
    while not terminated.is_set():
        reaper = Reaper()
        try:
            start_local_ray(engines)
        except BaseException as error:
            # Ray forgets the processes of a failed start.
            reaper.track_descendants()
            reaper.close()
            failures += 1
            if not isinstance(error, EngineError) or failures == RAY_START_ATTEMPTS:
                raise
            logger.warning("Starting Ray again: %s", error)
            terminated.wait(RAY_RETRY_DELAY_S)
        else:
            reaper.track_descendants()
            return reaper
    raise KeyboardInterrupt


@contextlib.contextmanager
def _fleet(setup: JobSetup, reaper: Reaper) -> Iterator[Fleet]:
    """Keep the engines running in a thread, and watch their processes."""
    # Ray reads settings when it is imported, which these imports do.
    from rollout_worker.job.engine_actor import EngineActor
    from rollout_worker.job.fleet import Fleet

    watcher = EngineWatcher(LauncherStore(connect(setup.redis_url), setup.keys), setup.worker)
    known: set[tuple[int, bool]] = set()

    def handle_state(state: EngineState) -> None:
        watcher.watch(state.pid)
        # The processes of an engine are its actor's and, later, vLLM's.
        if (seen := (state.pid, state.started)) not in known:
            known.add(seen)
            reaper.track_descendants()

    fleet, stopping = Fleet(setup, EngineActor, on_state=handle_state), threading.Event()
    thread = threading.Thread(target=fleet.run, args=(stopping,), name="fleet", daemon=True)
    thread.start()
    watcher.start()
    try:
        yield fleet
    finally:
        stopping.set()
        thread.join(FLEET_STOP_TIMEOUT_S)  # a call of Ray may hang
        watcher.stop()
