"""Tells the engine's drafter which histories it needs, and the history which weights are served."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rollout_api.redis_client.retry import retry_async
from rollout_store.history.store import HistoryStore
from rollout_worker.engine.engine import Engine

logger = logging.getLogger(__name__)

FAILURE_LOG_INTERVAL_S = 30.0
"""Seconds between two log messages about a continuing failure."""
HISTORY_WAIT_S = 2.0
"""Seconds for which a rollout waits for its problem's history. Early drafts justify no longer wait."""
ANNOUNCEMENT_INTERVAL_S = 1.0
"""Seconds for which new rollouts of announced problems are collected before these are announced again."""
ANNOUNCEMENT_DELAY_S = 0.01
"""Seconds for which an announcement waits for other problems that arrive at the same moment."""
ANNOUNCEMENT_RETENTION_S = 30.0
"""Seconds for which a problem's history is kept up to date after its last rollout, as the next one may come soon."""


class HistoryPrefetcher:
    """Announces problems to the engine's drafter in batches, and publishes weight versions to the history."""

    def __init__(self, engine: Engine, store: HistoryStore, run: str) -> None:
        """Announce nothing yet; :meth:`run` does. The history counts this job's weight versions under the id *run*."""
        self._engine, self._store, self._run_id = engine, store, run
        self._announced: dict[str, asyncio.Event] = {}
        """Problem → event that is set once its history has been waited for."""
        self._wanted: set[str] = set()
        """Problems whose history the drafter must read."""
        self._users: Counter[str] = Counter()
        """Problem → number of its rollouts that are running here."""
        self._unused: OrderedDict[str, float] = OrderedDict()
        """Announced problem without a rollout → time since when, oldest first."""
        self._wake = asyncio.Event()
        self._generation: int | None = None
        self._unpublished: deque[int] = deque()
        """Weight versions that were served and are not published yet."""
        self._next_log = 0.0
        """Earliest ``time.monotonic()`` at which a failure is logged again."""

    @contextmanager
    def in_use(self, problem: str) -> Iterator[None]:
        """Keep the history of *problem* up to date while one of its rollouts is produced."""
        if self._engine.config.drafting is None:
            yield
            return
        self._users[problem] += 1
        while self._unused and next(iter(self._unused.values())) < time.monotonic() - ANNOUNCEMENT_RETENTION_S:
            self._announced.pop(self._unused.popitem(last=False)[0], None)
        self._unused.pop(problem, None)
        try:
            yield
        finally:
            self._users[problem] -= 1
            if not self._users[problem]:
                del self._users[problem]
                self._unused[problem] = time.monotonic()

    async def wait_ready(self, problem: str) -> None:
        """Wait until drafts can use the history of *problem*, but not for longer than a short timeout.

        Call it within :meth:`in_use`. Only the first of several concurrent rollouts requests the history.
        """
        if self._engine.config.drafting is None:
            return
        ready = self._announced.get(problem)
        if ready is None:
            ready = self._announced[problem] = asyncio.Event()
            self._wake.set()
        if self._users[problem] == 1:
            self._wanted.add(problem)
        if not ready.is_set():
            try:
                await asyncio.wait_for(ready.wait(), HISTORY_WAIT_S)
            except TimeoutError:
                ready.set()

    def publish(self, weight_version: int) -> None:
        """Schedule the publication of a weight version that the engine serves from now on.

        The history learns of it in the background, because a job must continue without its history.
        """
        self._unpublished.append(weight_version)
        self._wake.set()

    async def advance(self, generation: int) -> None:
        """Announce a new generation of the history, so that the engine judges anew whether drafting pays."""
        self._generation = generation
        if self._engine.config.drafting is not None and self._announced:
            await self._engine.announce(list(self._announced), generation, wanted=())

    async def run(self) -> None:
        """Announce problems and publish weight versions until cancelled.

        Whatever goes wrong costs drafts. It is tried again for later rollouts.

        Raises:
            EngineError: if the engine has stopped.
        """
        while True:
            try:
                await self._run_once()
            except Exception as error:
                if self._engine.stopped:
                    raise
                self._log_failure("Cannot announce problems to the drafter", error)

    async def _run_once(self) -> None:
        # A known problem most likely has all that it needs, so it can wait for others.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), ANNOUNCEMENT_INTERVAL_S)
        self._wake.clear()
        await self._publish()
        if not self._wanted:
            return
        await asyncio.sleep(ANNOUNCEMENT_DELAY_S)
        if self._generation is None:
            generation: int = await retry_async(asyncio.to_thread, self._store.metadata.generation)
            self._generation = generation
        announced, wanted, self._wanted = dict(self._announced), self._wanted, set()
        await self._engine.announce(list(announced), self._generation, wanted=list(wanted), timeout_s=HISTORY_WAIT_S)
        for ready in announced.values():
            ready.set()

    async def _publish(self) -> None:
        """Publish weight versions in the order of their use; retry a failed one later."""
        while self._unpublished:
            version = self._unpublished[0]
            try:
                generation = await asyncio.to_thread(self._store.metadata.publish, self._run_id, version)
            except Exception as error:
                self._log_failure(
                    f"Cannot publish weight version {version} to the history {self._store.keys.full_name}", error
                )
                return
            self._unpublished.popleft()
            self._next_log = 0.0
            await self.advance(generation)

    def _log_failure(self, what: str, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + FAILURE_LOG_INTERVAL_S
            logger.warning("%s; retrying: %s: %s", what, type(error).__name__, error)
