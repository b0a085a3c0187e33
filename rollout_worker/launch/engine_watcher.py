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
    """A thread that ends the lease of each engine of a worker as soon as its process has ended.

    Its rollouts then continue on other engines within a fraction of a second. Without the watcher, they would continue
    when the lease expires. Redis is read only when a process has ended.
    """

    def __init__(self, store: LauncherStore, worker: str) -> None:
        """Watch no process yet.

        Args:
            store: the job's state in Redis.
            worker: id of the worker; empty for the engines of ``rollout run``.
        """
        self._store, self._worker = store, worker
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        """Process id → file descriptor, which becomes readable when the process ends."""
        self._ended: set[int] = set()
        """Processes that have ended, until the leases of their engines are."""
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
        """Watch the process of an engine, unless it is watched already."""
        with self._lock:
            if pid in self._descriptors:
                return
            try:
                self._descriptors[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.add(pid)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wait()
            with self._lock:
                ended = set(self._ended)
            if not ended:
                continue
            try:
                self._end_leases(ended)
            except redis.RedisError as error:
                logger.debug("The leases of engines that have ended cannot be ended; trying again: %s", error)
                self._stopping.wait(REDIS_RETRY_DELAY_S)

    def _wait(self) -> None:
        """Wait for a moment, and note which processes have ended meanwhile."""
        poll = select.poll()
        with self._lock:
            processes = {descriptor: pid for pid, descriptor in self._descriptors.items()}
        for descriptor in processes:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(ENGINE_POLL_INTERVAL_S * 1000):
            with self._lock:
                del self._descriptors[processes[descriptor]]
                self._ended.add(processes[descriptor])
            os.close(descriptor)

    def _end_leases(self, pids: set[int]) -> None:
        for engine, report in self._store.engines_of(self._worker).items():
            if report.pid in pids:
                self._store.end_lease(engine)
                logger.warning("The process of engine %s has ended; its rollouts continue on other engines.", engine)
        with self._lock:
            self._ended -= pids
