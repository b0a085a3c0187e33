"""Brings a history into an index in the background; the decode loop never waits for Redis."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import redis

from rollout_worker.history.records import TokenArray
from rollout_worker.history.store import START, HistoryStore

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_BATCH = 512
_LONGEST_BACKOFF_S = 5.0


class HistorySink(Protocol):
    """Where rollouts go: a draft index."""

    def add(self, problem: str, rollouts: Sequence[tuple[str, int, TokenArray]]) -> int:
        """Take rollouts as (rollout id, generation, tokens); known ids are ignored."""
        ...

    def drop_before(self, problem: str, generation: int) -> int:
        """Forget rollouts of generations older than *generation*."""
        ...


@dataclass
class SyncCounters:
    """What a :class:`HistorySync` has done so far."""

    rollouts: int = 0
    tokens: int = 0
    corrupt: int = 0
    failures: int = 0
    """Reads that Redis did not answer; they are tried again, and drafting goes on with what is there."""
    last_failure: str = ""


class HistorySync:
    """A thread that keeps an index up to date with the logs of the announced problems.

    It owns its cursors; the index is written by this thread alone.
    """

    def __init__(self, store: HistoryStore, sink: HistorySink) -> None:
        self.counters = SyncCounters()
        self._store = store
        self._sink = sink
        self._cursors: dict[str, str] = {}
        self._announced: tuple[frozenset[str], int] = (frozenset(), 0)
        self._served: tuple[frozenset[str], int] | None = None
        self._oldest = 0
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="history-sync", daemon=True)

    def start(self) -> None:
        """Begin; :meth:`stop` ends it."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits for a read that is under way."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout=15)

    def announce(self, problems: Iterable[str], generation: int) -> None:
        """From now on keep the logs of *problems* in the index, within the window that ends at *generation*."""
        with self._wake:
            self._announced = (frozenset(problems), generation)
            self._wake.notify_all()

    def wait_ready(self, timeout: float) -> bool:
        """Whether all that was announced was read to the end of its log, within *timeout* seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: self._stopping or self._served == self._announced, timeout)

    def _run(self) -> None:
        backoff = _POLL_S
        while not self._stopping:
            with self._wake:
                announced = self._announced
            try:
                self._drop_old(*announced)
                self._read_to_end(announced[0])
                backoff = _POLL_S
                with self._wake:
                    self._served = announced
                    self._wake.notify_all()
            except Exception as error:  # whatever it is, the thread must live: rollouts go on without it
                self.counters.failures += 1
                self.counters.last_failure = f"{type(error).__name__}: {error}"
                known = isinstance(error, redis.RedisError)
                logger.warning(
                    "History cannot be read (%s: %s); drafting goes on with what is there.",
                    type(error).__name__,
                    error,
                    exc_info=not known,
                )
                backoff = min(2 * backoff, _LONGEST_BACKOFF_S)
            with self._wake:
                if not self._stopping and self._announced == announced:
                    self._wake.wait(backoff)

    def _drop_old(self, problems: frozenset[str], generation: int) -> None:
        oldest = self._store.oldest_kept(generation)
        if oldest > self._oldest:
            for problem in self._cursors:
                self._sink.drop_before(problem, oldest)
            self._oldest = oldest
        for problem in problems:
            self._cursors.setdefault(problem, START)

    def _read_to_end(self, problems: frozenset[str]) -> None:
        behind = set(problems)
        while behind and not self._stopping:
            slices = self._store.read({problem: self._cursors[problem] for problem in behind}, count=_BATCH)
            for problem, found in slices.items():
                new = [(r.rollout_id, r.generation, r.tokens) for r in found.records if r.generation >= self._oldest]
                if new:
                    self._sink.add(problem, new)
                for corrupt in found.corrupt:
                    logger.warning(
                        "Skipped a corrupt record of problem %s, entry %s: %s",
                        corrupt.problem,
                        corrupt.entry_id,
                        corrupt.reason,
                    )
                self._cursors[problem] = found.cursor
                self.counters.rollouts += len(new)
                self.counters.tokens += sum(len(tokens) for _, _, tokens in new)
                self.counters.corrupt += len(found.corrupt)
                if len(found.records) + len(found.corrupt) < _BATCH:
                    behind.discard(problem)
            time.sleep(0)  # let the decode thread have the interpreter between batches
