"""Brings a history into an index in the background; the decode loop never waits for Redis."""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import redis

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.length_entries import rollout_key
from rollout_api.redis_client.connection import passes
from rollout_worker.history.records import TokenArray
from rollout_worker.history.store import START, HistoryStore, LogSlice

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_REPORT_S = 10.0
"""Between two reports of how drafts from each age of history are accepted."""
_LEARNED_MORE, _LEARNED_MUCH = 256, 65_536
"""Verified tokens after which it is worth saying what was learned: at first, and at most."""
_BATCH = 512
_AT_ONCE = 16
"""Problems that are read, unpacked and built together: a history may have more than there is memory for."""
_NOTHING_KNOWN = LengthStats.of(())
_LONGEST_BACKOFF_S = 5.0
HistoryRollout: TypeAlias = tuple[str, int, TokenArray, TokenArray, float | None]
"""Name (:func:`name_of`), generation, tokens, the context that stood before them, and the reward if there is one."""


def name_of(key: bytes) -> str:
    """What the rollout of this key (``rollout_key``) is called in an index: short, as there are many."""
    return base64.urlsafe_b64encode(key).rstrip(b"=").decode()


class HistorySink(Protocol):
    """Where rollouts go: a draft index. All that is kept of each rollout is kept there, within its bounds."""

    def add(self, problem: str, rollouts: Sequence[HistoryRollout]) -> int:
        """Take rollouts; known names are ignored. A call is a use of the problem, though it brings nothing new."""
        ...

    def reward(self, problem: str, rewards: Mapping[str, float]) -> int:
        """Set rewards of rollouts by name; unknown names are ignored."""
        ...

    def drop_before(self, problem: str, generation: int) -> int:
        """Forget rollouts of generations older than *generation*."""
        ...

    def take_evicted(self) -> list[str]:
        """Problems whose rollouts were thrown out for want of room since the last call."""
        ...

    def accepted_by_age(self) -> Mapping[int, tuple[float, float]]:
        """Draft tokens (drafted, accepted) so far, by the age in generations of the history behind them."""
        ...

    def verified(self) -> int:
        """Draft tokens so far of which it is known whether they were right."""
        ...

    def learned(self) -> bytes:
        """What was learned from them."""
        ...

    def take(self, learned: bytes) -> None:
        """Go on from what another has learned; ValueError if this one cannot."""
        ...


@dataclass
class SyncCounters:
    """What a :class:`HistorySync` has done so far."""

    rollouts: int = 0
    tokens: int = 0
    corrupt: int = 0
    evictions: int = 0
    """Problems that the index threw out for want of room; each is read again, from the start, when it is wanted."""
    failures: int = 0
    """Reads that Redis did not answer; they are tried again, and drafting goes on with what is there."""
    last_failure: str = ""


class HistorySync:
    """A thread that keeps an index up to date with the logs of the announced problems.

    It owns its cursors; the index is written by this thread alone.
    """

    def __init__(self, store: HistoryStore, sink: HistorySink, *, vocabulary: int = 2**32 - 1) -> None:
        """Nothing is read yet.

        Args:
            store: of the history.
            sink: the index.
            vocabulary: token ids from this on are none of the model's, which might not survive to be asked about them;
                rollouts that have one are left out, as records that cannot be read.
        """
        self.counters = SyncCounters()
        self._store = store
        self._vocabulary = vocabulary
        self._sink = sink
        self._cursors: dict[str, str] = {}
        """Of every problem that was read and not evicted since."""
        self._unread: set[str] = set()
        """Problems that were wanted and not read since."""
        self._generations: dict[str, set[int]] = {}
        """Of every problem read: the generations of its rollouts in the index."""
        self._rewards: dict[str, dict[bytes, float]] = {}
        """Of problems that are half read, by ``rollout_key``: they came before their rollouts."""
        self._seen: dict[int, float | None] = {}
        """Shard → up to which change its problems were looked at."""
        self._changed: set[str] = set()
        """Problems with changes that were not read yet."""
        self._lengths: dict[str, LengthStats] = {}
        """Of announced problems."""
        self._all_lengths = _NOTHING_KNOWN
        self._ages: dict[int, tuple[float, float]] = {}
        """Acceptance by age as it was reported last."""
        self._began = False
        """Whether it was asked what other engines have learned."""
        self._told = 0
        """Verified tokens when it was said last what was learned from them."""
        self._used: set[str] = set()
        """Problems that were wanted, and of which that was not said yet."""
        self._report_due = 0.0
        self._since = 0
        """The oldest generation within the history's horizon."""
        self._announced: tuple[frozenset[str], int] = (frozenset(), 0)
        self._wanted: set[str] = set()
        self._asked = 0
        self._served = 0
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

    def announce(self, problems: Iterable[str], generation: int, wanted: Iterable[str] | None = None) -> None:
        """From now on keep the logs of *problems* in the index, each within its window.

        Args:
            problems: all of them, in place of those announced before.
            generation: the newest of the history, from which its horizon counts.
            wanted: those of *problems* whose rollouts are about to start (default: all): their rewards are read, this
                once. A problem that was not wanted yet, or not since the index threw it out, is not read.
        """
        announced = frozenset(problems)
        with self._wake:
            self._announced = (announced, generation)
            self._wanted |= announced if wanted is None else announced.intersection(wanted)
            self._asked += 1
            self._wake.notify_all()

    def wait_ready(self, timeout: float) -> bool:
        """Whether all that was wanted was read to the end of its log, within *timeout* seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: self._stopping or self._served == self._asked, timeout)

    def length_stats(self, problem: str | None = None) -> LengthStats:
        """How long rollouts of a problem are, as it was read when it was wanted last; of None, those of all problems.

        What is not announced any more is not known.

        From any thread, and at once: nothing is asked of Redis. Where nothing is known, the statistics are empty.
        """
        if problem is None:
            return self._all_lengths
        return self._lengths.get(problem, _NOTHING_KNOWN)

    def expected_lengths(self, problem: str) -> LengthStats:
        """How long rollouts of a problem are; of one without rollouts, how long those of all problems are."""
        found = self.length_stats(problem)
        return found if found.count else self._all_lengths

    def _run(self) -> None:
        backoff = _POLL_S
        while not self._stopping:
            with self._wake:
                asked, (problems, generation) = self._asked, self._announced
                wanted, self._wanted = self._wanted, set()
            try:
                self._unread = (self._unread | wanted) & problems
                self._begin()
                self._forget_evicted()
                if asked != self._served:
                    self._forget_vain(problems)
                self._drop_old(generation)
                self._look_for_changes(problems)
                self._used |= self._unread
                self._read_to_end(problems)
                with self._wake:
                    self._served = asked
                    self._wake.notify_all()
                # rollouts may wait for what is above, and for nothing below
                self._report()
                backoff = _POLL_S
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
                if not self._stopping and self._asked == asked:
                    self._wake.wait(backoff)

    def _begin(self) -> None:
        """Go on from what another engine has learned of drafts, which may be one whose place this one takes."""
        if self._began:
            return
        try:
            learned = self._store.learned()
            if learned is not None:
                self._sink.take(learned)
        except (ValueError, redis.ResponseError) as error:
            if isinstance(error, redis.RedisError) and passes(error):
                raise
            key = self._store.keys.learned
            logger.warning(
                "What engines have learned of drafts, %s, cannot be used (%s); it is learned anew.", key, error
            )
        self._began = True

    def _forget_evicted(self) -> None:
        """What follows an eviction is nothing but a read from the start, or the index would have gaps."""
        for problem in self._sink.take_evicted():
            self._forget(problem)
            self.counters.evictions += 1

    def _forget_vain(self, problems: frozenset[str]) -> None:
        """What is not announced any more, and of which there is nothing: the index will never throw it out."""
        for problem in [one for one in self._cursors if one not in problems and not self._generations.get(one)]:
            self._forget(problem)
        self._lengths = {problem: known for problem, known in self._lengths.items() if problem in problems}

    def _forget(self, problem: str) -> None:
        self._cursors.pop(problem, None)
        self._rewards.pop(problem, None)
        self._generations.pop(problem, None)
        self._lengths.pop(problem, None)
        self._changed.discard(problem)

    def _drop_old(self, generation: int) -> None:
        """Drop what has come to lie behind the horizon; what leaves a window does so when newer rollouts come."""
        before, self._since = self._since, self._store.since(generation)
        if self._since > before:
            for problem in list(self._generations):
                self._keep(problem, ())

    def _keep(self, problem: str, read: Iterable[int]) -> int:
        """Drop what has left the problem's window, now that there are those generations; returns the oldest in it."""
        generations = self._generations.get(problem, set()).union(read)
        oldest = self._store.oldest_read(generations, self._since)
        if generations and min(generations) < oldest:
            self._sink.drop_before(problem, oldest)
        self._generations[problem] = {generation for generation in generations if generation >= oldest}
        return oldest

    def _look_for_changes(self, problems: frozenset[str]) -> None:
        """One round trip, however many problems there are: shards say what has changed."""
        shards = {self._store.keys.shard(problem) for problem in problems}
        changes = self._store.changes({shard: self._seen.get(shard) for shard in shards})
        lost = {problem for problem in self._cursors if self._store.keys.shard(problem) in changes.restarted}
        self._cursors |= dict.fromkeys(lost, START)
        # of a problem that was never read, all is read when it is wanted
        self._changed |= lost | (changes.problems & self._cursors.keys())
        self._seen |= changes.cursors

    def _read_to_end(self, problems: frozenset[str]) -> None:
        behind = problems & (self._changed | self._unread)
        while behind and not self._stopping:
            # what is wanted comes last, so that it is not thrown out for what is merely kept up to date
            ordered = sorted(behind, key=self._unread.__contains__)
            some = ordered[:_AT_ONCE]
            cursors = {problem: self._cursors.get(problem, START) for problem in some}
            slices = self._store.read(cursors, rewarded=self._unread.intersection(some), count=_BATCH)
            for problem, found in slices.items():
                if self._cursors.get(problem, START) == cursors[problem]:  # not thrown out for one before it
                    self._take(problem, found)
                    self._forget_evicted()
                    if not found.more:
                        self._changed.discard(problem)
                    elif problem in self._cursors:
                        self._changed.add(problem)
            behind = problems & (self._changed | self._unread)
            time.sleep(0)  # let the decode thread have the interpreter between batches

    def _take(self, problem: str, found: LogSlice) -> None:
        if found.rewards is not None:
            self._tell_rewards(problem, found.rewards)
        if found.lengths is not None:
            self._lengths[problem] = found.lengths
        oldest = self._keep(problem, {record.generation for record in found.records})
        rewards = self._rewards.get(problem, {})
        new: list[HistoryRollout] = []
        for record in found.records:
            if record.generation < oldest:
                continue
            if max(record.tokens.max(initial=0), record.context.max(initial=0)) >= self._vocabulary:
                logger.warning("Rollout %s of problem %s has token ids of another model.", record.rollout_id, problem)
                self.counters.corrupt += 1
                continue
            key = rollout_key(record.rollout_id)
            new.append((name_of(key), record.generation, record.tokens, record.context, rewards.get(key)))
        added = self._sink.add(problem, new) if new or problem in self._unread else 0
        for corrupt in found.corrupt:
            logger.warning(
                "Skipped a corrupt record of problem %s, entry %s: %s",
                corrupt.problem,
                corrupt.entry_id,
                corrupt.reason,
            )
        if not found.more:
            self._rewards.pop(problem, None)
        self._cursors[problem] = found.cursor
        self._unread.discard(problem)
        self.counters.rollouts += added
        self.counters.tokens += sum(len(tokens) for _, _, tokens, _, _ in new)
        self.counters.corrupt += len(found.corrupt)

    def _tell_rewards(self, problem: str, rewards: dict[bytes, float]) -> None:
        if rewards and self._generations.get(problem):  # with a first read all come with their rollouts
            self._sink.reward(problem, {name_of(key): reward for key, reward in rewards.items()})
        self._rewards[problem] = rewards

    def _report(self) -> None:
        """Say which problems are drafted from; and now and then how drafts did.

        By how those from each age of history were accepted the service judges the window; from what was learned of
        them engines go on that begin.
        """
        if self._used:
            self._tell(lambda: self._store.use(self._used))
            self._used = set()
        if time.monotonic() < self._report_due:
            return
        self._report_due = time.monotonic() + _REPORT_S
        self._store.about()
        self._all_lengths = self._store.length_stats()
        now = dict(self._sink.accepted_by_age())
        new: dict[int, tuple[float, float]] = {}
        for age, (drafted, accepted) in now.items():
            before = self._ages.get(age, (0.0, 0.0))
            if drafted > before[0]:
                new[age] = drafted - before[0], accepted - before[1]
        if new:
            self._tell(lambda: self._store.report_ages(new))
        self._ages = now
        verified = self._sink.verified()
        if verified - self._told >= min(_LEARNED_MORE + self._told // 4, _LEARNED_MUCH):
            self._tell(lambda: self._store.keep_learned(self._sink.learned()))
            self._told = verified

    def _tell(self, write: Callable[[], None]) -> None:
        """Write what reading can do without: on a server that is full, drafts still come from what is there."""
        try:
            write()
        except redis.ResponseError as error:
            self.counters.failures += 1
            self.counters.last_failure = f"{type(error).__name__}: {error}"
