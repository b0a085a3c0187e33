"""Operations that reduce the memory of a history in Redis: compacting and trimming problems, and deleting histories."""

from __future__ import annotations

from typing import Any

from rollout_api.protocol.keys import HISTORY_NAMES, NUM_SHARDS
from rollout_api.redis_client.server_functions import Call, Function, run
from rollout_worker.history.blocks import block_name, block_position, last_entry_of
from rollout_worker.history.limits import (
    ENTRIES_PER_COMPACTION,
    MAX_BLOCK_BYTES,
    MAX_BLOCK_RATIO,
    PROBLEMS_PER_ROUND_TRIP,
)
from rollout_worker.history.queries import batches
from rollout_worker.history.records import HistoryRecord, RecordError, decode_record, decode_records, encode_records
from rollout_worker.history.store import HistoryStore
from rollout_worker.history.window import oldest_kept

_COMPACT = Function(__package__, "compact")
_TRIM = Function("rollout_worker.history", "append", even_when_full=True)


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
        rule = self._store.metadata.retention_rule()
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
        oldest = oldest_kept([*sampled, *(record.generation for record in records)], rule.window, rule.cutoff)
        kept = [record for record in records if record.generation >= oldest]
        return self._replace(problem_id, merged_blocks, compacted_entries, kept, last_entry) is not None

    def trim(self, problem_id: str, *, max_generations: int | None = None) -> int:
        """Delete rollouts that have left the window of a problem to which no rollouts are appended any more.

        Args:
            problem_id: id of the problem.
            max_generations: number of generations to keep, if that is less than the window.

        Returns:
            The new size of the problem in bytes.
        """
        rule = self._store.metadata.retention_rule()
        if max_generations is not None:
            rule = rule._replace(window=min(rule.window, max_generations))
        call = Call(_TRIM, list(self._keys.problem_keys(problem_id)), [b"", 0, b"", *rule])
        _, size = run(self._client, call)
        self._store.catalog.update_size(problem_id, size)
        sampled = self._store.catalog.generations([problem_id])[problem_id] or ()
        oldest = oldest_kept(sampled, rule.window, rule.cutoff)
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
        for key in (self._keys.acceptance_by_age, self._keys.drafter_state, self._keys.meta):
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
