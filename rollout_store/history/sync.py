"""Keeps a suffix index up to date with a history, in a background thread; decoding never waits for Redis.

The thread also reports the engine's drafting results to the history.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import redis

from rollout_api.protocol.history_encoding import rollout_key
from rollout_api.redis_client.retry import is_transient
from rollout_store.history.known_lengths import KnownLengths, Length
from rollout_store.history.metadata import HistoryMismatchError
from rollout_store.history.records import START, HistoryRecord, TokenArray
from rollout_store.history.store import ENTRIES_PER_READ, HistoryStore, LogSlice
from rollout_store.history.window import oldest_kept

STOP_TIMEOUT_S = 15.0
"""Seconds to wait for a background thread to end."""
POLL_INTERVAL_S = 0.25
"""Seconds between two checks for changes."""
MAX_POLL_INTERVAL_S = 5.0
"""Maximum seconds between two checks while Redis cannot be read."""
PROBLEMS_PER_READ = 16
"""Number of problems that are read and indexed together; a whole history may not fit into memory."""
FEEDBACK_INTERVAL_S = 10.0
"""Seconds between two reports of an engine's drafting results to the history."""
FIRST_STATE_TOKENS = 256
"""Number of verified draft tokens after which an engine first saves its drafter state."""
MAX_STATE_TOKENS = 65_536
"""Maximum number of further verified draft tokens between two saves; in between, the number grows by a quarter."""

logger = logging.getLogger(__name__)


class DrafterStatistics(Protocol):
    """What a suffix index has learned, and from how much."""

    def verified(self) -> int:
        """Return the number of draft tokens so far that were verified."""
        ...

    def state_dict(self) -> bytes:
        """Return the learned state."""
        ...

    def load_state_dict(self, state: bytes) -> None:
        """Continue from the state that another index has learned; raise ValueError if that is impossible."""
        ...


class DraftingFeedback:
    """Writes one engine's drafting results to the history, and reads what other engines have learned.

    Drafting does not depend on the writes: a full server refuses them, and drafts still come from what is there.
    """

    def __init__(
        self,
        store: HistoryStore,
        index: DrafterStatistics,
        *,
        interval: float = FEEDBACK_INTERVAL_S,
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Prepare reporting; nothing is sent yet. *on_failure* is called with the error when a write was refused."""
        self._store = store
        self._index = index
        self._interval = interval
        self._on_failure = on_failure
        self._state_loaded = False
        """Whether the learned state of other engines was read."""
        self._saved_at = 0
        """Number of verified tokens when the learned state was saved last."""
        self._next_report = 0.0
        self._used: set[str] = set()
        """Problems whose use was not reported yet."""

    def load_drafter_state(self) -> None:
        """Continue from what other engines have learned; an engine may replace one of them."""
        if self._state_loaded:
            return
        try:
            state = self._store.drafter_state()
            if state is not None:
                self._index.load_state_dict(state)
        except (ValueError, redis.ResponseError) as error:
            if isinstance(error, redis.RedisError) and is_transient(error):
                raise
            key = self._store.keys.drafter_state
            logger.warning(
                "The drafter state in %s cannot be used (%s); this engine learns from the start.", key, error
            )
        self._state_loaded = True

    def mark_used(self, problem_ids: set[str]) -> None:
        """Add problems that are drafted from, which the next report marks as used."""
        self._used |= problem_ids

    def report(self) -> None:
        """Report used problems at once, and the learned state if a report is due."""
        if self._used:
            self._write(lambda: self._store.catalog.mark_used(self._used))
            self._used = set()
        if time.monotonic() < self._next_report:
            return
        self._next_report = time.monotonic() + self._interval
        self._save_drafter_state()

    def _save_drafter_state(self) -> None:
        """Save the learned state for engines that start later, if enough was learned since the last save."""
        verified = self._index.verified()
        if verified - self._saved_at >= min(FIRST_STATE_TOKENS + self._saved_at // 4, MAX_STATE_TOKENS):
            self._write(lambda: self._store.save_drafter_state(self._index.state_dict()))
            self._saved_at = verified

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except redis.ResponseError as error:
            self._on_failure(error)


HistoryRollout: TypeAlias = tuple[str, int, TokenArray, TokenArray, float | None]
"""Name (:func:`rollout_name`), generation, tokens, the context in front of them, and the reward if there is one."""


def rollout_name(key: bytes) -> str:
    """Return the name of a rollout in an index, from its ``rollout_key``; it is short, because there are many."""
    return base64.urlsafe_b64encode(key).rstrip(b"=").decode()


class HistorySink(DrafterStatistics, Protocol):
    """A suffix index that receives the rollouts of a history and keeps them within its own limits."""

    def add(self, problem: str, rollouts: Sequence[HistoryRollout]) -> int:
        """Add rollouts and return how many were new. Even a call without rollouts counts as a use of the problem."""
        ...

    def set_rewards(self, problem: str, rewards: Mapping[str, float]) -> int:
        """Set rewards of rollouts by name; unknown names are ignored."""
        ...

    def drop_before(self, problem: str, generation: int) -> int:
        """Remove rollouts of generations older than *generation*."""
        ...

    def take_evicted(self) -> list[str]:
        """Return the problems that were evicted for lack of space since the last call."""
        ...


@dataclass
class SyncCounters:
    """Numbers of events in a :class:`HistorySync` so far."""

    rollouts: int = 0
    """Rollouts added to the index."""
    tokens: int = 0
    """Tokens of the rollouts that were read."""
    corrupt: int = 0
    """Entries that could not be read and were skipped."""
    evictions: int = 0
    """Problems that the index evicted; each is read again from the start when it is requested."""
    failures: int = 0
    """Reads and writes that Redis did not answer. Reads are repeated; meanwhile the rollouts read so far are used."""
    last_failure: str = ""
    """The error of the last failure."""


class HistorySync:
    """A thread that keeps an index up to date with the logs of the announced problems.

    Only this thread writes the index, and it keeps its own cursors. It sends nothing before the first announcement.
    """

    def __init__(
        self,
        store: HistoryStore,
        sink: HistorySink,
        *,
        vocabulary: int = 2**32 - 1,
        statistics: DrafterStatistics | None = None,
        lengths: KnownLengths | None = None,
        feedback_interval: float = FEEDBACK_INTERVAL_S,
    ) -> None:
        """Prepare the thread; nothing is read yet.

        Args:
            store: the history.
            sink: the index.
            vocabulary: number of token ids. Rollouts with others, which might crash the model, are skipped as
                unreadable.
            statistics: what is reported and learned (default: that of the index).
            lengths: receives the lengths of the rollouts that are in the index; only this thread writes them.
            feedback_interval: seconds between two reports.
        """
        self.counters = SyncCounters()
        self.store = store
        self._sink, self._lengths = sink, lengths
        self._vocabulary = vocabulary
        self._feedback = DraftingFeedback(
            store, statistics or sink, interval=feedback_interval, on_failure=self._count_failure
        )
        # State of the thread. The dictionaries contain problems that were read and not evicted since.
        self._cursors: dict[str, str] = {}
        self._generations: dict[str, set[int]] = {}
        """Problem id → generations of its rollouts in the index."""
        self._pending_rewards: dict[str, dict[bytes, float]] = {}
        """Problem id → rewards by ``rollout_key``, of problems that are only partly read."""
        self._unread: set[str] = set()
        """Problems that were requested and not read since."""
        self._changed: set[str] = set()
        """Problems with changes that were not read yet."""
        self._shard_cursors: dict[int, float | None] = {}
        """Shard → cursor of the last query for changes."""
        # State that is shared with other threads under the condition's lock.
        self._wake = threading.Condition()
        self._announced: frozenset[str] = frozenset()
        self._requested: set[str] = set()
        self._num_announced = 0
        self._num_served = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="history-sync", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after a read that is in progress."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout=STOP_TIMEOUT_S)

    def announce(self, problems: Iterable[str], wanted: Iterable[str] | None = None) -> None:
        """From now on, keep the logs of *problems* in the index, each within its window.

        Args:
            problems: ids of all problems, in place of those that were announced before.
            wanted: those of *problems* whose rollouts are about to start (default: all). Their rewards are read, too,
                this one time. A problem is only read after it was wanted once since the index evicted it.
        """
        announced = frozenset(problems)
        with self._wake:
            self._announced = announced
            self._requested |= announced if wanted is None else announced.intersection(wanted)
            self._num_announced += 1
            self._wake.notify_all()

    def wait_ready(self, timeout: float) -> bool:
        """Wait up to *timeout* seconds until all wanted problems are completely read; return whether they are."""
        with self._wake:
            return self._wake.wait_for(lambda: self._stopping or self._num_served == self._num_announced, timeout)

    @property
    def num_known_problems(self) -> int:
        """Number of problems that were read and not evicted or forgotten since."""
        return len(self._cursors)

    @property
    def num_partly_read_problems(self) -> int:
        """Number of problems whose rewards are kept because some of their rollouts are still to be read."""
        return len(self._pending_rewards)

    def _run(self) -> None:
        pause = POLL_INTERVAL_S
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._num_announced)
        while not self._stopping:
            with self._wake:
                num_announced, problems = self._num_announced, self._announced
                requested, self._requested = self._requested, set()
            try:
                self._synchronize(problems, requested, num_announced)
                pause = POLL_INTERVAL_S
            except Exception as error:  # rollouts continue without the history, so the thread must survive
                self._count_failure(error)
                expected = isinstance(error, (redis.RedisError, HistoryMismatchError))
                logger.warning(
                    "History %s cannot be read (%s: %s); drafting continues with what is in the index.",
                    self.store.keys.full_name,
                    type(error).__name__,
                    error,
                    exc_info=not expected,
                )
                pause = min(2 * pause, MAX_POLL_INTERVAL_S)
            with self._wake:
                if not self._stopping and self._num_announced == num_announced:
                    self._wake.wait(pause)

    def _synchronize(self, problems: frozenset[str], requested: set[str], num_announced: int) -> None:
        """Bring the index up to date with the announced problems, then report drafting results."""
        self._unread = (self._unread | requested) & problems
        self._feedback.load_drafter_state()
        self._forget_evicted()
        if num_announced != self._num_served:
            self._forget_unannounced(problems)
        self._find_changes(problems)
        self._feedback.mark_used(self._unread)
        self._read_to_end(problems)
        with self._wake:
            self._num_served = num_announced
            self._wake.notify_all()
        # Rollouts may be waiting for the steps above, but none waits for this one.
        self._feedback.report()

    def _count_failure(self, error: Exception) -> None:
        self.counters.failures += 1
        self.counters.last_failure = f"{type(error).__name__}: {error}"

    # Forgetting problems

    def _forget_evicted(self) -> None:
        """Forget problems that the index evicted: they must be read from the start, or the index would have gaps."""
        for problem in self._sink.take_evicted():
            self._forget(problem)
            self.counters.evictions += 1

    def _forget_unannounced(self, problems: frozenset[str]) -> None:
        """Forget problems without rollouts that are no longer announced, since the index never evicts them."""
        for problem in [known for known in self._cursors if known not in problems and not self._generations.get(known)]:
            self._forget(problem)

    def _forget(self, problem: str) -> None:
        self._cursors.pop(problem, None)
        self._pending_rewards.pop(problem, None)
        self._generations.pop(problem, None)
        self._changed.discard(problem)
        self._drop_lengths(problem)

    def _drop_lengths(self, problem: str) -> None:
        if self._lengths is not None:
            self._lengths.drop_problem(problem)

    # Reading

    def _apply_window(self, problem: str, added: Iterable[int]) -> int:
        """Drop what leaves a problem's window when generations are added; return the oldest generation in it."""
        generations = self._generations.get(problem, set()).union(added)
        oldest = oldest_kept(generations, self.store.metadata.window)
        if generations and min(generations) < oldest:
            self._sink.drop_before(problem, oldest)
            if self._lengths is not None:
                self._lengths.drop_before(problem, oldest)
        self._generations[problem] = {generation for generation in generations if generation >= oldest}
        return oldest

    def _find_changes(self, problems: frozenset[str]) -> None:
        """Find the problems that have changed, in one round trip however many there are."""
        catalog = self.store.catalog
        shards = {self.store.keys.shard_of(problem) for problem in problems}
        changes = catalog.changes_since({shard: self._shard_cursors.get(shard) for shard in shards})
        reset = {problem for problem in self._cursors if self.store.keys.shard_of(problem) in changes.reset_shards}
        self._cursors |= dict.fromkeys(reset, START)
        for problem in reset:  # The index recognizes rollouts that are read again, but their lengths have no names.
            self._drop_lengths(problem)
        # A problem that was never read is read completely when it is requested, so its changes do not matter.
        self._changed |= reset | (changes.problem_ids & self._cursors.keys())
        self._shard_cursors |= changes.cursors

    def _read_to_end(self, problems: frozenset[str]) -> None:
        behind = problems & (self._changed | self._unread)
        if behind:
            self.store.metadata.stored_window()  # fails if the server has got the history of another tokenizer
        while behind and not self._stopping:
            # Requested problems come last, so that merely updating others does not evict them.
            batch = sorted(behind, key=self._unread.__contains__)[:PROBLEMS_PER_READ]
            cursors = {problem: self._cursors.get(problem, START) for problem in batch}
            slices = self.store.read(cursors, with_rewards=self._unread.intersection(batch), count=ENTRIES_PER_READ)
            for problem, log_slice in slices.items():
                # Not evicted by a problem before it; and after the end, another thread may write to the index.
                if self._cursors.get(problem, START) == cursors[problem] and not self._stopping:
                    self._add_slice(problem, log_slice)
                    self._forget_evicted()
                    if not log_slice.has_more:
                        self._changed.discard(problem)
                    elif problem in self._cursors:
                        self._changed.add(problem)
            behind = problems & (self._changed | self._unread)
            time.sleep(0)  # let the decoding thread have the interpreter between batches

    def _add_slice(self, problem: str, log_slice: LogSlice) -> None:
        if log_slice.rewards is not None:
            self._update_rewards(problem, log_slice.rewards)
        oldest = self._apply_window(problem, {record.generation for record in log_slice.records})
        rewards = self._pending_rewards.get(problem, {})
        new: list[HistoryRollout] = []
        lengths: list[Length] = []
        for record in log_slice.records:
            if record.generation >= oldest and self._check_vocabulary(problem, record):
                key = rollout_key(record.rollout_id)
                new.append((rollout_name(key), record.generation, record.tokens, record.context, rewards.get(key)))
                lengths.append((record.generation, len(record.tokens), record.cut_off))
        added = self._sink.add(problem, new) if new or problem in self._unread else 0
        if self._lengths is not None:
            self._lengths.add(problem, lengths)
        for corrupt in log_slice.corrupt:
            logger.warning(
                "Skipped entry %s of problem %s, which cannot be read: %s",
                corrupt.entry_id,
                corrupt.problem_id,
                corrupt.reason,
            )
        if not log_slice.has_more:
            self._pending_rewards.pop(problem, None)
        self._cursors[problem] = log_slice.cursor
        self._unread.discard(problem)
        self.counters.rollouts += added
        self.counters.tokens += sum(len(tokens) for _, _, tokens, _, _ in new)
        self.counters.corrupt += len(log_slice.corrupt)

    def _check_vocabulary(self, problem: str, record: HistoryRecord) -> bool:
        if max(record.tokens.max(initial=0), record.context.max(initial=0)) < self._vocabulary:
            return True
        logger.warning(
            "Skipped rollout %s of problem %s, which has token ids outside this model's vocabulary.",
            record.rollout_id,
            problem,
        )
        self.counters.corrupt += 1
        return False

    def _update_rewards(self, problem: str, rewards: dict[bytes, float]) -> None:
        if rewards and self._generations.get(problem):  # at the first read, rewards are added with their rollouts
            self._sink.set_rewards(problem, {rollout_name(key): reward for key, reward in rewards.items()})
        self._pending_rewards[problem] = rewards
