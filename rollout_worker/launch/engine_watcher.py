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
    when the lease expires. A process is watched before its engine registers, so that no time is left in which its death
    would not be noticed; the ids of the engine are looked up once it has died.
    """

    def __init__(self, store: LauncherStore, worker: str) -> None:
        """Watch no process yet.

        Args:
            store: the job's state in Redis.
            worker: id of the worker process that the engines belong to.
        """
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
                self._ended.add(pid)
            os.close(descriptor)
