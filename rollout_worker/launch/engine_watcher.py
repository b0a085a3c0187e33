"""Notices at once that the process of an engine on this machine has ended."""

from __future__ import annotations

import logging
import os
import select
import threading

import redis

from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.launch.limits import ENGINE_POLL_INTERVAL_S, REDIS_RETRY_DELAY_S

logger = logging.getLogger(__name__)


class EngineWatcher:
    """A thread that ends the lease of an engine as soon as the engine's process has ended.

    Its rollouts then continue on other engines within a fraction of a second. Without the watcher, they would continue
    when the lease expires.
    """

    def __init__(self, store: LauncherStore) -> None:
        """Watch no process yet; *store* is the job's state in Redis."""
        self._store = store
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        """Process id → file descriptor, which becomes readable when the process ends."""
        self._engines: dict[int, str] = {}
        """Process id → id of its engine."""
        self._ended: set[str] = set()
        """Engines whose processes have ended, until their leases are ended."""
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

    def watch(self, pid: int, engine: str) -> None:
        """Watch the process of an engine. A later call replaces the engine's id, which changes with its registration.

        Where processes cannot be watched, the lease expires.
        """
        with self._lock:
            self._engines[pid] = engine
            if pid in self._descriptors:
                return
            try:
                self._descriptors[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(self._engines.pop(pid))
            except OSError as error:
                logger.debug("Process %d cannot be watched: %s", pid, error)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wait()
            with self._lock:
                ended = set(self._ended)
            try:
                for engine in ended:
                    self._store.end_lease(engine)
                    logger.warning("The process of engine %s has ended; its rollouts continue elsewhere.", engine)
                    with self._lock:
                        self._ended.discard(engine)
            except redis.RedisError as error:
                logger.debug("The leases of engines that have ended cannot be ended; trying again: %s", error)
                self._stopping.wait(REDIS_RETRY_DELAY_S)

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
                self._ended.add(self._engines.pop(pid))
            os.close(descriptor)
