"""The engines of this machine: a Ray cluster, the fleet that keeps them running, and the watcher of their processes.

Ray collects the output of an actor and of its child processes, such as vLLM's engine core, and sends it to this
process, which also prints it. Ray has no public way to receive it: the dispatcher is private, and a test runs it with
the version of Ray that the project requires.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from rollout_api.redis_client.connection import connect
from rollout_store.job.engines import EngineError
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.setup import JobSetup
from rollout_store.runtime.child_process import Reaper
from rollout_store.runtime.output import rotating_handler

if TYPE_CHECKING:
    from rollout_worker.engine_worker.fleet import EngineState, Fleet


logger = logging.getLogger(__name__)

ENGINE_POLL_INTERVAL_S = 0.25
"""Seconds after which the watcher of the engines' processes also watches new ones."""
_REDIS_RETRY_DELAY_S = 2.0
"""Seconds after which something is repeated that failed because of Redis."""
_RAY_START_ATTEMPTS = 5
"""Number of attempts to start Ray."""
_RAY_RETRY_DELAY_S = 2.0
"""Seconds after which Ray is started again."""
_FLEET_FAILURE_TIMEOUT_S = 60.0
"""Seconds that Ray may fail to answer before the worker ends, to be replaced."""
_FLEET_STOP_TIMEOUT_S = 5.0
"""Seconds to wait for the fleet's call of Ray at the end."""
OBJECT_STORE_BYTES = 128 << 20
"""Size of Ray's object store, which carries little: prompts and rollouts go through Redis."""
_TOKEN_BYTES = 32
_HANDLER = "rollout-engine-logs"
_AUTOSCALER = "autoscaler"
"""Ray's substitute for a pid of its autoscaler, which reports the same resources every few seconds."""
_OTHER = "ray"
"""Name of the log file with the output of Ray's own processes."""


class EngineWatcher:
    """A thread that ends the lease of an engine as soon as the engine's process has ended.

    Its rollouts then continue on other engines within a fraction of a second. Without the watcher, they would continue
    when the lease expires. A process is watched before its engine registers, so that there is no moment when its death
    would not be noticed; the ids of the engine are looked up once it has died.
    """

    def __init__(self, store: LauncherStore, worker: str) -> None:
        """Watch no process yet."""
        self._store, self._worker = store, worker
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        """Process id → file descriptor, which becomes readable when the process ends."""
        self._ended: set[int] = set()
        """Processes that have ended, until the leases of their engines are ended."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-watcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stopping.set()
        self._thread.join()
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def watch(self, pid: int) -> None:
        """Watch the process of an engine's actor. Where processes cannot be watched, the lease expires."""
        with self._lock:
            if pid in self._descriptors:
                return
            try:
                self._descriptors[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(pid)
            except OSError as error:
                logger.debug("Process %d cannot be watched: %s", pid, error)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wait()
            with self._lock:
                ended = set(self._ended)
            try:
                for pid in ended:
                    for engine in self._store.end_leases(self._worker, pid):
                        logger.warning("The process of engine %s has ended; its rollouts continue elsewhere.", engine)
                    with self._lock:
                        self._ended.discard(pid)
            except redis.RedisError as error:
                logger.debug("The leases of engines that have ended cannot be ended; trying again: %s", error)
                self._stopping.wait(_REDIS_RETRY_DELAY_S)

    def _wait(self) -> None:
        """Wait for a moment, and note which engines' processes have ended meanwhile."""
        poll = select.poll()
        with self._lock:
            processes = {descriptor: pid for pid, descriptor in self._descriptors.items()}
        for descriptor in processes:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(ENGINE_POLL_INTERVAL_S * 1000):
            pid = processes[descriptor]
            with self._lock:
                del self._descriptors[pid]
                self._ended.add(pid)
            os.close(descriptor)


@contextlib.contextmanager
def running_engines(setup: JobSetup, terminated: threading.Event | None = None) -> Iterator[Fleet]:
    """Run Ray and the engines of this machine, and restart engines that die.

    Once SIGTERM has set *terminated*, Ray is not started any more.

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
    if fleet.failing_seconds > _FLEET_FAILURE_TIMEOUT_S:
        raise EngineError(
            f"Ray has not answered for {_FLEET_FAILURE_TIMEOUT_S:.0f} s; its logs are in /tmp/ray/session_latest/logs"
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
            if not isinstance(error, EngineError) or failures == _RAY_START_ATTEMPTS:
                raise
            logger.warning("Starting Ray again: %s", error)
            terminated.wait(_RAY_RETRY_DELAY_S)
        else:
            reaper.track_descendants()
            return reaper
    raise KeyboardInterrupt


@contextlib.contextmanager
def _fleet(setup: JobSetup, reaper: Reaper) -> Iterator[Fleet]:
    """Keep the engines running in a thread, and watch their processes."""
    # Ray reads settings when it is imported, which these imports do.
    from rollout_worker.engine_worker.engine_actor import EngineActor
    from rollout_worker.engine_worker.fleet import Fleet

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
        thread.join(_FLEET_STOP_TIMEOUT_S)  # a call of Ray may hang
        watcher.stop()


def configure_ray() -> None:
    """Set the environment that Ray reads when it is imported, unless that has been done.

    With it, the processes of a Ray cluster listen on the loopback interface only, and accept only this process and its
    descendants.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without this, Ray warns repeatedly about an engine that waits for resources.
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        # Otherwise Ray prints escape codes around the prefixes of lines, and around how often it has left out a line.
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray would kill engines, and let them start again and again, as soon as the machine or the container has little
    # free memory, also if something else uses it. The limit of the container and the kernel do this work.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # In spite of its name, this makes Ray 2.60 use the loopback address on Linux, too.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(_TOKEN_BYTES))


def start_local_ray(engines: int) -> None:
    """Start a Ray cluster with room for *engines* engines; see `configure_ray` for who can reach it.

    Raises:
        EngineError: if Ray does not start.
        KeyboardInterrupt: if SIGTERM was received meanwhile; its handler has been called.
    """
    configure_ray()
    import ray

    from rollout_worker.engine_worker.fleet import ENGINE_RESOURCE

    sigterm_handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            resources={ENGINE_RESOURCE: engines},
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=True,
        )
    except SystemExit:  # Ray's handler of SIGTERM
        ray.shutdown()
        if not callable(sigterm_handler):
            raise
        sigterm_handler(signal.SIGTERM, None)
        raise KeyboardInterrupt from None
    except Exception as error:  # a timeout of Ray is a plain Exception
        ray.shutdown()
        raise EngineError(f"Ray cannot start: {error}; its logs are in /tmp/ray/session_latest/logs") from error
    finally:
        # Ray's core installs a handler that treats SIGTERM as a crash.
        signal.signal(signal.SIGTERM, sigterm_handler)


def stop_local_ray() -> None:
    """End the cluster and everything that runs on it."""
    import ray

    ray.shutdown()


@contextmanager
def engine_logs(directory: Path) -> Iterator[None]:
    """Write the output of each engine to ``NAME.log`` in *directory* within the context."""
    configure_ray()
    from ray._private.ray_logging import global_worker_stdstream_dispatcher

    files = _EngineLogFiles(directory)
    global_worker_stdstream_dispatcher.add_handler(_HANDLER, files.write)
    try:
        yield
    finally:
        global_worker_stdstream_dispatcher.remove_handler(_HANDLER)
        files.close()


class _EngineLogFiles:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._handlers: dict[str, logging.Handler] = {}

    def write(self, data: dict[str, Any]) -> None:
        """Write lines that Ray has collected from one process."""
        if data.get("pid") == _AUTOSCALER:
            return
        name = data.get("actor_name") or _OTHER
        if name not in self._handlers:
            self._handlers[name] = rotating_handler(self._directory, name, "%(message)s")
        for line in data.get("lines", ()):
            record = logging.LogRecord(name, logging.INFO, "", 0, "%s", (line,), None)
            self._handlers[name].handle(record)

    def close(self) -> None:
        for handler in self._handlers.values():
            handler.close()
