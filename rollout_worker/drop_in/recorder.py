"""Records the finished rollouts of an engine in its history, in a thread, so that no step waits for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import redis

from rollout_api.redis_client.retry import is_transient
from rollout_store.history.metadata import HistoryMismatchError
from rollout_store.history.records import HistoryRecord, TokenArray, is_cut_off
from rollout_store.history.store import AppendResult
from rollout_store.history.window import oldest_kept

if TYPE_CHECKING:
    from rollout_store.history.known_lengths import KnownLengths, Length
    from rollout_store.history.store import HistoryStore
    from rollout_store.history.sync import HistorySync
    from rollout_worker.drafting.index import SuffixIndex

logger = logging.getLogger(__name__)
_MAX_QUEUED = 4096
"""Rollouts that wait to be recorded; further ones are lost, so that a server that is gone takes no memory."""
_MAX_BATCH = 256
_MAX_PROBLEMS = 4096
"""Problems whose history is kept up to date, the ones that were sampled last."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
"""Seconds between attempts to write to a server that does not answer."""
_WARNING_INTERVAL_S = 60.0
_REPETITION = "#"
"""Between the name of a run and the number of its repetition."""


class Version(NamedTuple):
    """A version of an engine's weights."""

    number: int
    """The training step that the trainer has named, or how many versions this engine has had so far."""
    is_step: bool = False
    """Whether the trainer has named it, or one before it."""


class FinishedRollout(NamedTuple):
    """A rollout that has ended."""

    rollout_id: str
    problem: str
    version: Version
    """The version of the weights when it began."""
    tokens: TokenArray
    finish_reason: str
    draft_sources: bytes


class History(Protocol):
    """Where rollouts are kept. Its methods are called by one thread, and may take long."""

    def generation_of(self, version: Version) -> int:
        """Return the generation of a version, which is a new one if the version is."""
        ...

    def use(self, problems: Sequence[str]) -> None:
        """Draft from the rollouts of these problems, which begin now."""
        ...

    def add(self, rollouts: Sequence[tuple[int, FinishedRollout]]) -> int:
        """Add rollouts with their generations, and return how many were refused."""
        ...


class IndexHistory:
    """Keeps rollouts in the index alone."""

    def __init__(self, index: SuffixIndex, window: int, lengths: KnownLengths | None = None) -> None:
        self._index, self._window, self._lengths = index, window, lengths
        self._generations: dict[str, set[int]] = {}

    def generation_of(self, version: Version) -> int:
        """Return the number of the version."""
        return version.number

    def use(self, problems: Sequence[str]) -> None:
        """Count the use of problems, so that others are evicted first."""
        for problem in problems:
            self._index.add(problem, [])

    def add(self, rollouts: Sequence[tuple[int, FinishedRollout]]) -> int:
        """Add rollouts to the index, and drop those that have left their problem's window."""
        lengths: dict[str, list[Length]] = {}
        for generation, rollout in rollouts:
            generations = self._generations.setdefault(rollout.problem, set())
            generations.add(generation)
            oldest = oldest_kept(generations, self._window)
            if min(generations) < oldest:
                self._index.drop_before(rollout.problem, oldest)
                self._generations[rollout.problem] = {kept for kept in generations if kept >= oldest}
            self._index.add(rollout.problem, [(rollout.rollout_id, generation, rollout.tokens)])
            length = (generation, len(rollout.tokens), is_cut_off(rollout.finish_reason))
            lengths.setdefault(rollout.problem, []).append(length)
        evicted = self._index.take_evicted()
        for problem in evicted:
            self._generations.pop(problem, None)
        if self._lengths is not None:
            for problem, added in lengths.items():
                self._lengths.add(problem, added)
                self._lengths.drop_before(problem, min(self._generations.get(problem, {0})))
            for problem in evicted:
                self._lengths.drop_problem(problem)
        return 0


class RedisHistory:
    """Keeps rollouts in Redis, and lets a :class:`HistorySync` read those of all engines.

    An engine whose trainer names no steps counts from the newest version of its run. Otherwise, the rollouts of a run
    that was restarted would be older than those before. A trainer that names steps may begin with one that the run has
    left behind, because it goes back to an old checkpoint, or because another training had the same name. The steps
    then get generations of their own, under another name of the run.
    """

    def __init__(self, store: HistoryStore, sync: HistorySync, run: str, tokenizer: str) -> None:
        self._store, self._sync, self._name, self._tokenizer = store, sync, run, tokenizer
        self._repetition = 1
        """How many times the run has begun with steps that it had left behind, from 1."""
        self._first_version: int | None = None
        """The newest version of the run when the history was opened; None before."""
        self._has_named_step = False
        self._problems: OrderedDict[str, None] = OrderedDict()

    def generation_of(self, version: Version) -> int:
        """Publish the version. A server that has lost its data needs that again."""
        metadata = self._store.metadata
        if self._first_version is None:
            metadata.open(self._tokenizer)
            self._first_version = self._find_run()
        generation = metadata.publish(self._run, self._number_of(version))
        if version.is_step and not self._has_named_step:
            if metadata.generation() - generation >= metadata.window:
                self._repetition += 1
                generation = metadata.publish(self._run, version.number)
            self._has_named_step = True
        return generation

    @property
    def _run(self) -> str:
        return self._name if self._repetition == 1 else f"{self._name}{_REPETITION}{self._repetition}"

    def _find_run(self) -> int:
        """Continue the newest repetition of the run, and return its newest version."""
        versions = []
        for published, generation in self._store.metadata.published_versions().items():
            run, _, number = published.rpartition(":")
            name, _, repetition = (run if run != self._name else f"{run}{_REPETITION}1").rpartition(_REPETITION)
            if name == self._name and repetition.isdigit():
                versions.append((generation, int(repetition), int(number)))
        _, self._repetition, newest = max(versions, default=(0, 1, 1))
        return newest

    def close(self) -> None:
        """Neither read nor write any more."""
        self._sync.stop()

    def _number_of(self, version: Version) -> int:
        return version.number if version.is_step else version.number - 1 + (self._first_version or 1)

    def use(self, problems: Sequence[str]) -> None:
        """Let the index follow the problems."""
        if self._first_version is None:
            return
        for problem in problems:
            self._problems[problem] = None
            self._problems.move_to_end(problem)
        while len(self._problems) > _MAX_PROBLEMS:
            self._problems.popitem(last=False)
        self._sync.announce(self._problems, problems)

    def add(self, rollouts: Sequence[tuple[int, FinishedRollout]]) -> int:
        """Append rollouts to the history."""
        records = [
            (
                rollout.problem,
                HistoryRecord(
                    rollout_id=rollout.rollout_id,
                    run=self._run,
                    weight_version=self._number_of(rollout.version),
                    generation=generation,
                    tokens=rollout.tokens,
                    finish_reason=rollout.finish_reason,
                    draft_sources=rollout.draft_sources,
                ),
            )
            for generation, rollout in rollouts
        ]
        refused = 0
        for (problem, _), result in zip(records, self._store.append_all(records), strict=True):
            if isinstance(result, redis.ResponseError) or result is AppendResult.TOO_OLD:
                logger.warning("A rollout of problem %s cannot be recorded: %s", problem, result)
                refused += 1
        return refused


@dataclass
class RecorderCounters:
    """Numbers of events so far."""

    recorded: int = 0
    """Rollouts that were recorded."""
    lost: int = 0
    """Rollouts that were not, because the history did not answer or refused them."""
    last_failure: str = ""


class RolloutRecorder:
    """A thread that records rollouts and tells the history which problems are sampled."""

    def __init__(
        self, in_memory: IndexHistory, set_generation: Callable[[int], None], shared: RedisHistory | None = None
    ) -> None:
        """Prepare the thread.

        Args:
            in_memory: where rollouts are recorded if there is no shared history, or only one of another tokenizer.
            set_generation: called with each new generation.
            shared: where rollouts are recorded otherwise.
        """
        self.counters = RecorderCounters()
        self._in_memory, self._set_generation, self._shared = in_memory, set_generation, shared
        self._queue: queue.Queue[FinishedRollout | str | Version | None] = queue.Queue(_MAX_QUEUED)
        self._generation = 0
        self._next_warning = 0.0
        self._thread = threading.Thread(target=self._run, name="rollout-recorder", daemon=True)

    @property
    def is_shared(self) -> bool:
        """Whether rollouts are recorded in a history that engines share."""
        return self._shared is not None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Record what is queued, and end the thread; give up after *timeout* seconds."""
        deadline = time.monotonic() + timeout
        with suppress(queue.Full):
            self._queue.put(None, timeout=timeout)
        self._thread.join(deadline - time.monotonic())

    def begin_version(self, version: Version) -> None:
        """Record that the weights have another version now."""
        self._put(version)

    def use(self, problem: str) -> None:
        """Record that a rollout of a problem begins."""
        self._put(problem)

    def record(self, rollout: FinishedRollout) -> None:
        """Record a rollout; if too many wait already, it is lost."""
        if not self._put(rollout):
            self.counters.lost += 1

    def _put(self, item: FinishedRollout | str | Version) -> bool:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        while True:
            items = [self._queue.get()]
            while len(items) < _MAX_BATCH and not self._queue.empty():
                items.append(self._queue.get_nowait())
            self._handle([item for item in items if item is not None])
            if None in items:
                return

    def _handle(self, items: Sequence[FinishedRollout | str | Version]) -> None:
        pause = _FIRST_PAUSE_S
        rollouts = [item for item in items if isinstance(item, FinishedRollout)]
        versions = {item for item in items if isinstance(item, Version)} | {rollout.version for rollout in rollouts}
        problems = list(dict.fromkeys(item for item in items if isinstance(item, str)))
        while True:
            history: History = self._shared or self._in_memory
            try:
                generations = {version: history.generation_of(version) for version in sorted(versions)}
                if (newest := max(generations.values(), default=0)) > self._generation:
                    self._set_generation(newest)
                    self._generation = newest
                if problems:
                    history.use(problems)
                refused = 0
                if rollouts:
                    refused = history.add([(generations[rollout.version], rollout) for rollout in rollouts])
                self.counters.recorded += len(rollouts) - refused
                self.counters.lost += refused
                return
            except HistoryMismatchError as error:
                logger.warning(
                    "%s, or here in the history's URL. This engine keeps its rollouts in its own memory instead.", error
                )
                self.counters.last_failure = str(error)
                if self._shared is not None:
                    self._shared.close()
                    self._shared = None
                continue
            except Exception as error:  # decoding goes on without the history, so the thread must survive
                self.counters.last_failure = f"{type(error).__name__}: {error}"
                self._warn(error)
                if not (isinstance(error, redis.RedisError) and is_transient(error)):
                    self.counters.lost += len(rollouts)
                    return
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_S)

    def _warn(self, error: Exception) -> None:
        if time.monotonic() < self._next_warning:
            return
        self._next_warning = time.monotonic() + _WARNING_INTERVAL_S
        logger.warning(
            "Rollouts cannot be recorded in the history (%s: %s); the engine goes on without.",
            type(error).__name__,
            error,
            exc_info=not isinstance(error, redis.RedisError),
        )
