"""One maintenance run: executes a plan step by step, until it is done or has to end early.

The steps reduce the memory of a history in Redis: they compact and trim problems, and delete histories.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis

from rollout_api.protocol.keys import HISTORY_NAMES, NUM_SHARDS
from rollout_api.redis_client.retry import concerns_server
from rollout_api.redis_client.server_functions import Call, Function, run
from rollout_store.history.catalog import PROBLEMS_PER_ROUND_TRIP, StoredProblem, batches
from rollout_store.history.maintenance.planner import MaintenancePlan, MaintenancePlanner
from rollout_store.history.records import (
    HistoryRecord,
    RecordError,
    block_name,
    block_position,
    decode_record,
    decode_records,
    encode_records,
    last_entry_of,
)
from rollout_store.history.store import HistoryStore
from rollout_store.history.window import oldest_kept

ENTRIES_PER_COMPACTION = 1000
"""Maximum number of log entries that one compaction packs into a block."""
MAX_BLOCK_RATIO = 2
"""A block larger than the newer data by this factor is not rewritten, which bounds how often a byte is rewritten."""
MAX_BLOCK_BYTES = 2**24
"""Maximum size of a block: servers and clients hold a block in memory as a whole."""
_COMPACT = Function("compact")
_TRIM = Function("append", even_when_full=True)


class MaintenanceOperations:
    """Operations on the problems of one history. Each is atomic per problem, and repeating it has no further effect."""

    def __init__(self, store: HistoryStore) -> None:
        self._store = store
        self._client, self._keys = store.client, store.keys

    def compact(self, problem_id: str) -> bool:
        """Merge a problem's log into a block, together with older blocks that are not much larger.

        Rollouts that have left the window are deleted. Entries and blocks that cannot be read are left where they are.

        Returns:
            Whether the problem was compacted; False if its log has changed in the meantime.
        """
        window = self._store.metadata.stored_window()
        pipeline = self._client.pipeline(transaction=False)
        pipeline.xrange(self._keys.log(problem_id), count=ENTRIES_PER_COMPACTION)
        pipeline.hgetall(self._keys.blocks(problem_id))
        entries, blocks = pipeline.execute()
        records: list[HistoryRecord] = []
        compacted_entries: list[bytes] = []
        size, last_entry = 0, ""
        for entry_id, fields in entries:
            data = fields.get(b"d", b"")
            try:
                records.append(decode_record(data))
            except RecordError:
                continue  # readers report it
            compacted_entries.append(entry_id)
            size += len(data)
            last_entry = entry_id.decode()
        if not compacted_entries:
            return False
        merged_blocks: list[bytes] = []
        for name, block in sorted(blocks.items(), key=lambda item: block_position(item[0]), reverse=True):
            if len(block) > MAX_BLOCK_RATIO * size or len(block) + size > MAX_BLOCK_BYTES:
                break
            try:
                older = decode_records(block)
            except RecordError:
                break
            merged_blocks.append(name)
            records, size = older + records, size + len(block)
        # The lengths are read, too, because newer rollouts may be in the part of the log that is not compacted yet.
        sampled = self._store.catalog.generations([problem_id])[problem_id] or []
        oldest = oldest_kept([*sampled, *(record.generation for record in records)], window)
        kept = [record for record in records if record.generation >= oldest]
        return self._replace(problem_id, merged_blocks, compacted_entries, kept, last_entry) is not None

    def trim(self, problem_id: str, *, max_generations: int | None = None) -> int:
        """Delete rollouts that have left the window of a problem that gets no new rollouts.

        At most *max_generations* generations are kept, if that is less than the window.

        Returns:
            The new size of the problem in bytes.
        """
        window = self._store.metadata.stored_window()
        if max_generations is not None:
            window = min(window, max_generations)
        call = Call(_TRIM, list(self._keys.problem_keys(problem_id)), [b"", 0, b"", window])
        _, size = run(self._client, call)
        self._store.catalog.update_size(problem_id, size)
        sampled = self._store.catalog.generations([problem_id])[problem_id] or ()
        oldest = oldest_kept(sampled, window)
        blocks: Any = self._client.hgetall(self._keys.blocks(problem_id))
        for name, block in blocks.items():
            try:
                records = decode_records(block)
            except RecordError:
                continue  # readers report it
            kept = [record for record in records if record.generation >= oldest]
            if len(kept) < len(records):
                size = self._replace(problem_id, [name], [], kept, last_entry_of(name)) or size
        return int(size)

    def delete_history(self) -> None:
        """Delete the history with everything in it. The call may be repeated if it fails."""
        while problems := self._store.catalog.problems():
            for batch in batches(problems, PROBLEMS_PER_ROUND_TRIP):
                self._store.catalog.delete(batch)
        pipeline = self._client.pipeline(transaction=False)
        for shard in range(NUM_SHARDS):
            for key in self._keys.shard_keys(shard):
                pipeline.delete(key)
        for key in (self._keys.drafter_state, self._keys.meta):
            pipeline.delete(key)
        pipeline.execute()
        self._client.srem(HISTORY_NAMES, self._keys.full_name)

    def _replace(
        self,
        problem_id: str,
        blocks: list[bytes],
        entries: list[bytes],
        records: list[HistoryRecord],
        last_entry: str,
    ) -> int | None:
        """Replace blocks and log entries by one block of *records*.

        Args:
            problem_id: id of the problem.
            blocks: names of the blocks.
            entries: ids of the log entries.
            records: rollouts of the new block; empty if no block is needed.
            last_entry: id of the last log entry that the new block stands for.

        Returns:
            The new size of the problem in bytes; None if nothing was done, because the blocks or entries have changed.
        """
        ordered = sorted(records, key=lambda record: record.generation)
        name, block = (
            (block_name(ordered[-1].generation, last_entry), encode_records(ordered)) if ordered else ("", b"")
        )
        call = Call(_COMPACT, list(self._keys.problem_keys(problem_id)), [name, block, len(blocks), *blocks, *entries])
        replaced, size = run(self._client, call)
        if not replaced:
            return None
        self._store.catalog.update_size(problem_id, int(size))
        return int(size)


logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@dataclass
class MaintenanceCounts:
    """Numbers of changes that maintenance has made to a history."""

    deleted_empty: int = 0
    """Problems without rollouts that were deleted."""
    trimmed: int = 0
    """Problems whose rollouts outside the window were deleted."""
    trimmed_to_cap: int = 0
    """Problems whose oldest generations were deleted because of the byte cap."""
    evicted: int = 0
    """Problems that were deleted because of the byte cap."""
    evicted_bytes: int = 0
    """Size of these problems."""
    compacted: int = 0
    """Problems whose logs were compacted."""
    unreadable: int = 0
    """Problems with a key of the wrong type, which are left alone until they change."""

    def add(self, other: MaintenanceCounts) -> None:
        """Add the counts of another run."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


@dataclass
class MaintenanceResult:
    """The result of one maintenance run."""

    plan: MaintenancePlan | None
    """The plan that was executed; None if another maintainer holds the lease."""
    counts: MaintenanceCounts = field(default_factory=MaintenanceCounts)
    expired: bool = False
    """Whether the history was deleted because it was unused for too long."""
    problems: int = 0
    """Number of remaining problems."""
    bytes: int = 0
    """Size of the remaining problems in Redis."""
    complete: bool = True
    """Whether the whole plan was executed."""
    seconds: float = 0.0
    """Duration of the run."""


class MaintenanceRun:
    """Executes one plan."""

    def __init__(
        self,
        store: HistoryStore,
        planner: MaintenancePlanner,
        plan: MaintenancePlan,
        *,
        may_continue: Callable[[], bool],
        clock: Callable[[], float],
        stopping: Callable[[], bool],
    ) -> None:
        """Prepare a run; nothing is changed yet.

        *may_continue*, which is called between operations, returns whether there is time left and the lease is still
        held; *clock*, the server's time; and *stopping*, whether the process is ending.
        """
        self.result = MaintenanceResult(plan, problems=plan.problems, bytes=plan.bytes)
        self._store = store
        self._operations = MaintenanceOperations(store)
        self._planner = planner
        self._plan = plan
        self._may_continue = may_continue
        self._clock = clock
        self._stopping = stopping

    def expire(self) -> None:
        """Delete the history, unless a job has started to use it again."""
        catalog = self._store.catalog
        # The catalog is read again, because problems may have been used since the plan was made.
        for batch in batches(catalog.problems(), PROBLEMS_PER_ROUND_TRIP):
            if self._stopping():
                return
            catalog.delete(batch)
        if catalog.problems():
            return
        self._operations.delete_history()
        logger.info(
            "Deleted history %s with %d problems, which was unused for %.1f days.",
            self._plan.history,
            self._plan.problems,
            self._plan.unused / 86400,
        )
        self.result.expired, self.result.problems, self.result.bytes = True, 0, 0

    def execute(self, *, records_emptiness: bool) -> None:
        """Execute the plan of a history that has not expired.

        With *records_emptiness*, record since when it has been without problems.
        """
        if records_emptiness:
            self._record_emptiness()
        # Changes that free memory come first, because a full server rejects every command that needs memory.
        for step in (self._delete_empty, self._trim, self._trim_to_cap, self._evict, self._compact):
            step()
        if self._may_continue():
            self._store.metadata.prune_versions()

    def _record_emptiness(self) -> None:
        """Record in Redis since when the history has been empty, because maintainers may not live long enough."""
        if self._plan.info is None:
            return
        if self._plan.problems:
            self._store.metadata.set_empty_since(None)
        elif not self._plan.unused:
            self._store.metadata.set_empty_since(self._clock())

    def _delete_empty(self) -> None:
        self.result.counts.deleted_empty, _ = self._delete(self._plan.empty)

    def _trim(self) -> None:
        for problem in self._plan.trim:
            if not self._may_continue():
                return
            if self._trim_problem(problem):
                self.result.counts.trimmed += 1

    def _trim_to_cap(self) -> None:
        counts = self.result.counts
        for problem, kept in self._plan.trim_to_cap:
            if not self._may_continue():
                break
            if self._trim_problem(problem, max_generations=kept):
                counts.trimmed_to_cap += 1
        if counts.trimmed_to_cap and self._plan.info is not None:
            logger.info(
                "History %s takes %d bytes, its byte cap is %s: deleted the oldest rollouts of %d of %d problems.",
                self._plan.history,
                self._plan.bytes,
                self._plan.info.max_bytes,
                counts.trimmed_to_cap,
                self._plan.problems,
            )

    def _evict(self) -> None:
        counts = self.result.counts
        counts.evicted, counts.evicted_bytes = self._delete(self._plan.evict)
        if counts.evicted and self._plan.info is not None:
            logger.warning(
                "History %s takes %d bytes, its byte cap is %s: evicted the %d least recently used of %d problems, "
                "which took %d bytes. Raise spec.history.maxBytes if they are still sampled.",
                self._plan.history,
                self._plan.bytes,
                self._plan.info.max_bytes,
                counts.evicted,
                self._plan.problems,
                counts.evicted_bytes,
            )

    def _compact(self) -> None:
        for problem in self._plan.compact:
            if not self._may_continue():
                return
            compacted = self._unless_unreadable(problem, self._compact_whole_log)
            if compacted is None:
                continue
            if self._may_continue():  # otherwise there may be more to compact
                self._planner.note_compacted(problem)
            self.result.counts.compacted += compacted

    def _delete(self, problems: Sequence[StoredProblem]) -> tuple[int, int]:
        """Delete problems that are still unused; return their number and size."""
        count = size = 0
        for batch in batches(problems, PROBLEMS_PER_ROUND_TRIP):
            if not self._may_continue():
                break
            deleted = self._store.catalog.delete(batch)
            count += len(deleted)
            size += sum(problem.bytes for problem in deleted)
        self.result.problems -= count
        self.result.bytes -= size
        return count, size

    def _trim_problem(self, problem: StoredProblem, max_generations: int | None = None) -> bool:
        """Trim a problem; return whether its keys could be read."""
        size = self._unless_unreadable(
            problem, lambda problem_id: self._operations.trim(problem_id, max_generations=max_generations)
        )
        if size is None:
            return False
        self._planner.note_trimmed(problem)
        self.result.bytes += size - problem.bytes
        return True

    def _compact_whole_log(self, problem_id: str) -> bool:
        """Compact a problem's log, in parts if it is long; return whether there was anything to compact."""
        compacted = self._operations.compact(problem_id)
        while compacted and self._may_continue() and self._operations.compact(problem_id):
            pass
        return compacted

    def _unless_unreadable(self, problem: StoredProblem, operation: Callable[[str], _Result]) -> _Result | None:
        """Return the result of an operation on a problem; None if a key of the problem has the wrong type.

        One unreadable problem must not end the run.
        """
        try:
            return operation(problem.problem_id)
        except redis.ResponseError as error:
            if concerns_server(error):
                raise
            self.result.counts.unreadable += 1
            self._planner.note_unreadable(problem)
            logger.warning(
                "Problem %r of history %s is skipped until it changes, because a key has the wrong type: %s",
                problem.problem_id,
                self._store.keys.full_name,
                error,
            )
            return None
