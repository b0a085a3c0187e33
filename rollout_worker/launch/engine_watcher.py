"""Notices at once that the process of an engine on this machine has ended."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Iterable

import redis

from rollout_worker.job.job_store import EngineReport
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.launch.limits import ENGINE_SCAN_INTERVAL_S

logger = logging.getLogger(__name__)


class EngineWatcher:
    """A thread that ends the lease of each engine of a worker as soon as its process has ended.

    Its rollouts then continue on other engines within a fraction of a second. Without the watcher, they would continue
    when the lease expires.
    """

    def __init__(self, store: LauncherStore, worker: str) -> None:
        """Watch the engines of a worker.

        Args:
            store: the job's state in Redis. Only this thread may use it.
            worker: id of the worker; empty for the engines of ``rollout run``.
        """
        self._store, self._worker = store, worker
        self._descriptors: dict[str, int] = {}
        """Engine id → file descriptor of its process, which becomes readable when the process ends."""
        self._ended: set[str] = set()
        """Engines whose processes have ended, until the coordinator has removed them."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-watcher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stopping.set()
        self._thread.join()
        self._forget(list(self._descriptors))

    def watched(self) -> set[str]:
        """Return the ids of the engines whose processes are watched."""
        return set(self._descriptors)

    def _run(self) -> None:
        scanned_at = float("-inf")
        while not self._stopping.is_set():
            try:
                if time.monotonic() - scanned_at >= ENGINE_SCAN_INTERVAL_S:
                    scanned_at = time.monotonic()
                    self._scan(self._store.engines_of(self._worker))
                self._end_leases(self._wait())
            except redis.RedisError as error:
                logger.debug("The engines' processes cannot be compared with Redis: %s", error)
                self._stopping.wait(ENGINE_SCAN_INTERVAL_S)

    def _scan(self, engines: dict[str, EngineReport]) -> None:
        """Watch new engines, and forget those that the coordinator has removed."""
        self._forget(self._descriptors.keys() - engines.keys())
        self._ended &= engines.keys()
        ended = []
        for engine, report in engines.items():
            if engine in self._descriptors or engine in self._ended:
                continue
            try:
                self._descriptors[engine] = os.pidfd_open(report.pid)
            except ProcessLookupError:
                ended.append(engine)
        self._end_leases(ended)

    def _wait(self) -> list[str]:
        """Wait for a moment, and return the engines whose processes have ended meanwhile."""
        poll = select.poll()
        engines = {descriptor: engine for engine, descriptor in self._descriptors.items()}
        for descriptor in engines:
            poll.register(descriptor, select.POLLIN)
        return [engines[descriptor] for descriptor, _ in poll.poll(ENGINE_SCAN_INTERVAL_S * 1000 / 4)]

    def _end_leases(self, engines: Iterable[str]) -> None:
        for engine in engines:
            self._store.end_lease(engine)
            self._ended.add(engine)
            logger.warning("The process of engine %s has ended; its rollouts continue on other engines.", engine)
            self._forget([engine])

    def _forget(self, engines: Iterable[str]) -> None:
        for engine in list(engines):
            if (descriptor := self._descriptors.pop(engine, None)) is not None:
                os.close(descriptor)
