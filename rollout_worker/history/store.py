"""The rollouts of one history in Redis: append, publish a generation, read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import redis

from rollout_api.keys import HistoryKeys
from rollout_worker.history.connection import server_function
from rollout_worker.history.records import HistoryRecord, RecordError, decode_record, encode_record

logger = logging.getLogger(__name__)

START = "-"
"""Cursor in front of the first entry of a log."""


class HistoryMismatchError(ValueError):
    """The history was written with another tokenizer: its token ids mean something else."""


class Appended(IntEnum):
    """What became of an append."""

    NEW = 1
    KNOWN = 0
    """It was there already: an append is repeated without effect."""
    TOO_OLD = -1
    """Its generation has left the window."""


@dataclass(frozen=True)
class Corrupt:
    """An entry of a log that could not be read."""

    problem: str
    entry_id: str
    reason: str


@dataclass(frozen=True)
class LogSlice:
    """What one read of a problem's log found."""

    cursor: str
    """Where the next read goes on."""
    records: list[HistoryRecord] = field(default_factory=list)
    corrupt: list[Corrupt] = field(default_factory=list)


class HistoryStore:
    """One history; every method may raise :class:`redis.RedisError` and none leaves a half-done write behind."""

    def __init__(self, client: redis.Redis, keys: HistoryKeys, *, window: int) -> None:
        self._client = client
        self._keys = keys
        self._window = window
        self._append = server_function(client, __package__, "append")
        self._publish = server_function(client, __package__, "publish")

    def open(self, tokenizer: str) -> None:
        """Claim the history for a tokenizer, by the fingerprint of its vocabulary.

        Raises:
            HistoryMismatchError: if it holds rollouts of another tokenizer.
        """
        self._client.hsetnx(self._keys.meta, "tokenizer", tokenizer)
        stored = self._client.hget(self._keys.meta, "tokenizer")
        known = stored.decode() if isinstance(stored, bytes) else str(stored)
        if known != tokenizer:
            raise HistoryMismatchError(
                f"history {self._keys.namespace}/{self._keys.name} holds rollouts of another tokenizer "
                f"({known[:12]}…, this model's is {tokenizer[:12]}…); name another in spec.history.name"
            )

    def publish(self, run: str, weight_version: int) -> int:
        """The generation of *weight_version* of *run*; the newest so far if it was not published before."""
        return int(self._publish(keys=[self._keys.meta], args=[f"{run}:{weight_version}"]))

    def generation(self) -> int:
        """The newest generation; 0 if none was ever published."""
        return int(self._client.hget(self._keys.meta, "generation") or 0)

    def oldest_kept(self, generation: int) -> int:
        """The oldest generation in the window that ends at *generation*."""
        return max(0, generation - self._window + 1)

    def append(self, problem: str, record: HistoryRecord, *, newest: int) -> Appended:
        """Append a rollout to its problem's log, atomically and once, and trim the log to the window.

        Args:
            problem: the problem's id.
            record: the rollout.
            newest: the newest generation of the history, where the window ends.
        """
        length = f"{record.generation} {len(record.tokens)} {record.finish_reason}"
        return Appended(
            self._append(
                keys=[self._keys.log(problem), self._keys.lengths(problem), self._keys.rewards(problem)],
                args=[
                    record.rollout_id,
                    record.generation,
                    encode_record(record),
                    length,
                    self.oldest_kept(newest),
                ],
            )
        )

    def reward(self, problem: str, rewards: Mapping[str, float]) -> None:
        """Keep rewards of a problem's rollouts, by rollout id; of rollouts that have left the window, none."""
        known = self._client.hmget(self._keys.lengths(problem), list(rewards))
        kept: Any = {name: rewards[name] for name, entry in zip(rewards, known, strict=True) if entry is not None}
        if kept:
            self._client.hset(self._keys.rewards(problem), mapping=kept)

    def rewards(self, problem: str) -> dict[str, float]:
        """Rewards of a problem's rollouts, by rollout id."""
        stored: Any = self._client.hgetall(self._keys.rewards(problem))
        return {name.decode(): float(reward) for name, reward in stored.items()}

    def read(self, cursors: Mapping[str, str], *, count: int = 512) -> dict[str, LogSlice]:
        """At most *count* further entries of each problem's log, in one round trip.

        Args:
            cursors: problem id → :data:`START` or the cursor of the last read.
            count: entries of one problem; a slice with as many is followed by more.
        """
        pipeline = self._client.pipeline(transaction=False)
        for problem, cursor in cursors.items():
            pipeline.xrange(self._keys.log(problem), min=cursor if cursor == START else f"({cursor}", count=count)
        replies = pipeline.execute()
        return {
            problem: self._slice(problem, cursor, entries)
            for (problem, cursor), entries in zip(cursors.items(), replies, strict=True)
        }

    @staticmethod
    def _slice(problem: str, cursor: str, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> LogSlice:
        found = LogSlice(entries[-1][0].decode() if entries else cursor)
        for entry_id, fields in entries:
            try:
                found.records.append(decode_record(fields.get(b"d", b"")))
            except RecordError as error:
                found.corrupt.append(Corrupt(problem, entry_id.decode(), str(error)))
        return found
