"""Appends finished rollouts to a history in Redis, reads them back, and keeps statistics about them."""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import redis
import zstandard

from rollout_api.length_stats import MIN_ROLLOUTS_OF_ALL, LengthStats
from rollout_api.protocol.history_encoding import (
    LengthEntry,
    pack_entry,
    pack_recent,
    rollout_key,
    unpack_entries,
    unpack_recent,
)
from rollout_api.protocol.keys import NUM_SHARDS, HistoryKeys
from rollout_api.redis_client.server_functions import Call, Function, Redis, run_all
from rollout_store.history.catalog import ProblemCatalog, ProblemChange, query_problems, raise_unless_key_error
from rollout_store.history.engine_reports import EngineReports
from rollout_store.history.metadata import HistoryInfo, HistoryMetadata, list_histories
from rollout_store.history.records import (
    START,
    HistoryRecord,
    RecordError,
    block_position,
    decode_record,
    decode_records,
    encode_record,
    entry_position,
    last_entry_of,
)

MAX_READ_ATTEMPTS = 3
"""Number of attempts to read a problem while it is being compacted."""
MAX_REWARD = 3.4e38
"""Limit of a reward's absolute value: suffix indexes store rewards as float32."""
ENTRIES_PER_READ = 512
"""Maximum number of log entries of one problem in one read."""
_COMPRESSION_LEVEL = 3
_MAX_BYTES = 2**24
"""Maximum decompressed size, so that damaged data does not request all memory."""


def encode_drafter_state(state: bytes) -> bytes:
    """Compress a state (``SuffixIndex.state_dict``) and add a checksum."""
    return zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL, write_checksum=True).compress(state)


def decode_drafter_state(data: bytes) -> bytes:
    """Reverse :func:`encode_drafter_state`.

    Raises:
        RecordError: *data* is not an encoded state.
    """
    try:
        if not 0 <= zstandard.frame_content_size(data) <= _MAX_BYTES:
            raise RecordError("its decompressed size is out of range")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise RecordError(f"it cannot be decompressed: {error}") from None


class HistoryStatistics:
    """Lengths and rewards of one history."""

    def __init__(self, client: Redis, keys: HistoryKeys) -> None:
        self._client = client
        self._keys = keys

    def length_entries(self, problem_id: str) -> list[LengthEntry]:
        """Return lengths and rewards of a problem's rollouts."""
        stored: Any = self._client.hgetall(self._keys.lengths(problem_id))
        return unpack_entries(stored)

    def length_entries_by_problem(self, problem_ids: Iterable[str]) -> dict[str, list[LengthEntry]]:
        """Return lengths and rewards of several problems; none for a problem with a key of the wrong type."""
        stored = query_problems(
            self._client, problem_ids, lambda pipeline, problem_id: pipeline.hgetall(self._keys.lengths(problem_id))
        )
        return {problem_id: unpack_entries(entries or {}) for problem_id, entries in stored.items()}

    def rewards(self, problem_id: str) -> dict[bytes, float]:
        """Return rewards of a problem's rollouts, by ``rollout_key``."""
        return rewards_of(self.length_entries(problem_id))

    def length_stats(self, problem_id: str | None = None) -> LengthStats:
        """Return length statistics of a problem's rollouts; of the latest rollouts of all problems if it is None."""
        if problem_id is not None:
            return self.length_stats_by_problem([problem_id])[problem_id]
        pipeline = self._client.pipeline(transaction=False)
        for shard in range(NUM_SHARDS):
            pipeline.lrange(self._keys.recent_lengths(shard), 0, -1)
        lengths = unpack_recent(entry for reply in pipeline.execute() for entry in reply)
        return LengthStats.from_lengths(lengths, min_rollouts=MIN_ROLLOUTS_OF_ALL)

    def length_stats_by_problem(self, problem_ids: Iterable[str]) -> dict[str, LengthStats]:
        """Return length statistics of several problems; empty ones for a problem with a key of the wrong type."""
        entries_by_problem = self.length_entries_by_problem(problem_ids)
        return {problem_id: length_stats_of(entries) for problem_id, entries in entries_by_problem.items()}


def rewards_of(entries: Iterable[LengthEntry]) -> dict[bytes, float]:
    """Return the rewards in a problem's length entries, by ``rollout_key``."""
    return {entry.key: entry.reward for entry in entries if entry.reward is not None and math.isfinite(entry.reward)}


def length_stats_of(entries: Iterable[LengthEntry]) -> LengthStats:
    """Return length statistics of a problem's length entries."""
    return LengthStats.from_lengths((entry.generation, entry.length, entry.cut_off) for entry in entries)


logger = logging.getLogger(__name__)
_ALL_GENERATIONS = 2**31
"""A window that contains every generation."""

_APPEND, _SET_REWARDS = Function("append"), Function("set_rewards")


class UnknownHistoryError(LookupError):
    """There is no history of this name; the message lists those that exist."""


class AppendResult(IntEnum):
    """Result of an append."""

    APPENDED = 1
    DUPLICATE = 0
    """The rollout was there already, so nothing was changed."""
    TOO_OLD = -1
    """The rollout's generation has left the window of its problem, so it was not added."""


@dataclass(frozen=True)
class CorruptEntry:
    """A log entry, block or key that cannot be read."""

    problem_id: str
    entry_id: str
    reason: str


@dataclass(frozen=True)
class LogSlice:
    """The result of one read of a problem."""

    cursor: str
    """Cursor of the next read."""
    records: list[HistoryRecord] = field(default_factory=list)
    """Rollouts; some of them may have been returned by an earlier read."""
    corrupt: list[CorruptEntry] = field(default_factory=list)
    """Entries that cannot be read."""
    rewards: dict[bytes, float] | None = None
    """Rewards of all rollouts of the problem, by ``rollout_key``; None if they were not requested."""
    has_more: bool = False
    """Whether more entries are left to read."""


class HistoryStore:
    """One history in Redis.

    This class appends and reads rollouts. Its parts give access to the history's metadata, problems and statistics.
    Every method may raise :class:`redis.RedisError`; none leaves a write half done.
    """

    def __init__(self, client: Redis, keys: HistoryKeys, *, window: int) -> None:
        """Prepare access to a history; nothing is sent yet. This process reads *window* generations of each problem."""
        self.client = client
        self.keys = keys
        self.metadata = HistoryMetadata(client, keys, window=window)
        self.catalog = ProblemCatalog(client, keys)
        self.statistics = HistoryStatistics(client, keys)
        self.engines = EngineReports(client, keys)

    @classmethod
    def open_existing(cls, client: Redis, keys: HistoryKeys) -> tuple[HistoryStore, HistoryInfo]:
        """Return a store that reads all generations of an existing history, and the history's metadata.

        Raises:
            UnknownHistoryError: there is no history of this name.
            redis.RedisError: Redis fails.
        """
        store = cls.for_all_generations(client, keys)
        info = store.metadata.info()
        if info is not None:
            return store, info
        names = ", ".join(known.full_name for known in list_histories(client))
        raise UnknownHistoryError(
            f"there is no history {keys.full_name}; "
            + (f"this server has: {names}" if names else "this server has none")
        )

    @classmethod
    def for_all_generations(cls, client: Redis, keys: HistoryKeys) -> HistoryStore:
        """Return a store that reads all generations of a history."""
        return cls(client, keys, window=_ALL_GENERATIONS)

    # Appending

    def append(self, problem_id: str, record: HistoryRecord, *, newest: int | None = None) -> AppendResult:
        """Append a rollout to its problem, atomically and once, and delete rollouts that have left the window.

        *newest* is the newest generation of the history, if the caller knows it.
        """
        (result,) = self.append_all([(problem_id, record)], newest=newest)
        if isinstance(result, redis.ResponseError):
            raise result
        return result

    def append_all(
        self, rollouts: Sequence[tuple[str, HistoryRecord]], *, newest: int | None = None
    ) -> list[AppendResult | redis.ResponseError]:
        """Append several rollouts, given with their problem ids, as :meth:`append` does, in three round trips.

        Returns:
            For each rollout the result, or the error of a problem with a key of the wrong type.

        Raises:
            HistoryMismatchError: a history of another tokenizer has taken the name of this one.
            redis.RedisError: the server fails; the call may be repeated.
        """
        window = self.metadata.stored_window(newest)
        calls, recent_entries = [], []
        for problem_id, record in rollouts:
            entry = pack_entry(record.rollout_id, len(record.tokens), record.cut_off)
            recent_entries.append(pack_recent(record.generation, len(record.tokens), record.cut_off))
            arguments: list[str | bytes | int | float] = [entry, record.generation, encode_record(record), window]
            calls.append(Call(_APPEND, list(self.keys.problem_keys(problem_id)), arguments))
        results: list[AppendResult | redis.ResponseError] = []
        changes: dict[str, ProblemChange] = {}
        for (problem_id, _), entry, reply in zip(rollouts, recent_entries, run_all(self.client, calls), strict=True):
            if isinstance(reply, redis.ResponseError):
                results.append(reply)
                continue
            result = AppendResult(reply[0])
            results.append(result)
            # Duplicates are recorded, too: the process that appended the rollout may have failed before recording it.
            earlier = changes[problem_id].length_entries if problem_id in changes else b""
            new = entry if result is AppendResult.APPENDED else b""
            changes[problem_id] = ProblemChange(int(reply[1]), earlier + new)
        self.catalog.record_changes(changes)
        return results

    def set_rewards(self, problem_id: str, rewards: Mapping[str, float]) -> None:
        """Store rewards of a problem's rollouts, by rollout id; those of unknown rollouts are ignored."""
        for error in self.set_all_rewards({problem_id: rewards}).values():
            raise error

    def set_all_rewards(self, rewards: Mapping[str, Mapping[str, float]]) -> dict[str, redis.ResponseError]:
        """Store rewards of several problems' rollouts, by problem and rollout id, in one round trip.

        Returns:
            The errors of problems with a key of the wrong type.

        Raises:
            redis.RedisError: the server fails; the call may be repeated.
        """
        calls: dict[str, Call] = {}
        for problem_id, by_rollout in rewards.items():
            arguments: list[bytes] = []
            for rollout_id, reward in by_rollout.items():
                if not abs(reward) < MAX_REWARD:
                    logger.warning(
                        "The reward %r of rollout %s is not a finite float32; it is ignored.", reward, rollout_id
                    )
                    continue
                arguments += [rollout_key(rollout_id), struct.pack("<f", reward)]
            if arguments:
                calls[problem_id] = Call(_SET_REWARDS, [self.keys.lengths(problem_id)], arguments)
        replies = run_all(self.client, list(calls.values())) if calls else []
        return {
            problem_id: reply
            for problem_id, reply in zip(calls, replies, strict=True)
            if isinstance(reply, redis.ResponseError)
        }

    # Reading

    def read(
        self, cursors: Mapping[str, str], *, with_rewards: Collection[str] = (), count: int = ENTRIES_PER_READ
    ) -> dict[str, LogSlice]:
        """Read further log entries and all unread blocks of several problems, usually in one round trip.

        Args:
            cursors: problem id → :data:`START` or the cursor of the last read.
            with_rewards: those of the problems whose rewards are read as well.
            count: maximum number of log entries per problem.
        """
        pipeline = self.client.pipeline(transaction=False)
        for problem_id, cursor in cursors.items():
            # The log is read before the blocks, so that an entry that is compacted in between is read at least once.
            pipeline.xrange(self.keys.log(problem_id), min=cursor if cursor == START else f"({cursor}", count=count)
            if cursor == START:
                pipeline.hgetall(self.keys.blocks(problem_id))
            else:
                pipeline.hkeys(self.keys.blocks(problem_id))
            if problem_id in with_rewards:
                pipeline.hgetall(self.keys.lengths(problem_id))
        replies = iter(pipeline.execute(raise_on_error=False))
        slices = {}
        for problem_id, cursor in cursors.items():
            entries, blocks = next(replies), next(replies)
            lengths = next(replies) if problem_id in with_rewards else None
            slices[problem_id] = self._decode_slice(problem_id, cursor, entries, blocks, lengths, count)
        return slices

    def read_all(self, problem_id: str) -> Iterator[LogSlice]:
        """Read a problem from its start to its end, in slices; the first has the rewards.

        A rollout may be in several slices, because the problem may be compacted in the meantime.
        """
        cursor, has_more = START, True
        while has_more:
            with_rewards = {problem_id} if cursor == START else ()
            log_slice = self.read({problem_id: cursor}, with_rewards=with_rewards)[problem_id]
            yield log_slice
            cursor, has_more = log_slice.cursor, log_slice.has_more

    def _decode_slice(
        self, problem_id: str, cursor: str, entries: Any, blocks: Any, lengths: Any, count: int
    ) -> LogSlice:
        corrupt: list[CorruptEntry] = []
        for key, reply in zip(
            (self.keys.log(problem_id), self.keys.blocks(problem_id), self.keys.lengths(problem_id)),
            (entries, blocks, lengths),
            strict=True,
        ):
            if isinstance(reply, Exception):
                raise_unless_key_error(reply)
                corrupt.append(CorruptEntry(problem_id, key, str(reply)))
        entries, blocks, lengths = (
            None if isinstance(reply, Exception) else reply for reply in (entries, blocks, lengths)
        )
        records: list[HistoryRecord] = []
        if cursor != START:
            blocks = self._read_unread_blocks(problem_id, cursor, blocks or ())
        newest_block = START
        for name, block in sorted((blocks or {}).items(), key=lambda item: block_position(item[0])):
            try:
                records += decode_records(block)
            except RecordError as error:
                corrupt.append(CorruptEntry(problem_id, name.decode(errors="replace"), str(error)))
            newest_block = last_entry_of(name)
        for entry_id, fields in entries or ():
            try:
                records.append(decode_record(fields.get(b"d", b"")))
            except RecordError as error:
                corrupt.append(CorruptEntry(problem_id, entry_id.decode(), str(error)))
        if entries:
            cursor = entries[-1][0].decode()
        elif cursor == START:
            cursor = newest_block
        log_slice = LogSlice(cursor, records, corrupt, has_more=len(entries or ()) >= count)
        if lengths is None:
            return log_slice
        return replace(log_slice, rewards=rewards_of(unpack_entries(lengths)))

    def _read_unread_blocks(self, problem_id: str, cursor: str, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """Read blocks with entries after *cursor*, which were compacted before they were read from the log."""
        for _ in range(MAX_READ_ATTEMPTS):
            unread = [name for name in names if block_position(name) > entry_position(cursor)]
            if not unread:
                return {}
            stored: Any = self.client.hmget(self.keys.blocks(problem_id), unread)
            if all(block is not None for block in stored):
                return dict(zip(unread, stored, strict=True))
            current_names: Any = self.client.hkeys(self.keys.blocks(problem_id))
            names = current_names
        raise redis.TimeoutError(
            f"problem {problem_id} of {self.keys.full_name} is compacted faster than it can be read"
        )

    # Learned state of drafters

    def drafter_state(self) -> bytes | None:
        """Return what an engine's drafter has learned (``SuffixIndex.state_dict``); None if none was saved.

        Raises:
            RecordError: the saved state cannot be read.
        """
        stored: Any = self.client.get(self.keys.drafter_state)
        return None if stored is None else decode_drafter_state(stored)

    def save_drafter_state(self, state: bytes) -> None:
        """Save a drafter's learned state for engines that start later, in place of an earlier one."""
        self.client.set(self.keys.drafter_state, encode_drafter_state(state))


LENGTH_LOOKUP_TIMEOUT_S = 1.0
"""Seconds to wait for length statistics; all requests of a job wait for them."""
LENGTH_LOOKUP_RETENTION_S = 5.0
"""Seconds that looked-up statistics are used again."""
LENGTH_LOOKUP_PAUSE_S = 30.0
"""Seconds without a lookup after one has failed."""

NO_LENGTH_STATS = LengthStats.from_lengths(())
"""Statistics of an unknown problem."""


class LengthLookup:
    """Looks up length statistics in one history, without ever delaying its caller for long.

    Statistics are kept for a few seconds, because the turns of many trajectories ask for those of the same problems.
    """

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self._not_before = 0.0
        self._known: OrderedDict[str, tuple[float, LengthStats]] = OrderedDict()
        """Problem id → ``time.monotonic()`` of the lookup, and the statistics; oldest first."""

    async def fetch(self, problem_ids: Iterable[str]) -> dict[str, LengthStats]:
        """Return length statistics by problem id; empty ones if nothing is known or the history does not answer."""
        distinct = list(dict.fromkeys(problem_ids))
        now = time.monotonic()
        while self._known and next(iter(self._known.values()))[0] < now - LENGTH_LOOKUP_RETENTION_S:
            self._known.popitem(last=False)
        known = {problem: self._known[problem][1] for problem in distinct if problem in self._known}
        missing = [problem for problem in distinct if problem not in known]
        return known | (await self._look_up(missing) if missing else {})

    async def _look_up(self, problem_ids: list[str]) -> dict[str, LengthStats]:
        unknown = dict.fromkeys(problem_ids, NO_LENGTH_STATS)
        if time.monotonic() < self._not_before:
            return unknown
        try:
            lookup = asyncio.to_thread(self._store.statistics.length_stats_by_problem, problem_ids)
            found = await asyncio.wait_for(lookup, LENGTH_LOOKUP_TIMEOUT_S)
        except (redis.RedisError, TimeoutError) as error:
            self._not_before = time.monotonic() + LENGTH_LOOKUP_PAUSE_S
            logger.warning(
                "History %s does not return length statistics (%s: %s); requests are scheduled in order of arrival.",
                self._store.keys.full_name,
                type(error).__name__,
                error,
            )
            return unknown
        now = time.monotonic()
        for problem, stats in found.items():
            self._known[problem] = now, stats
            self._known.move_to_end(problem)
        return found
