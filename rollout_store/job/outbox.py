"""The streams that the relay moves to the history. Synchronous, because the relay is a thread."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import redis

from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import RolloutId
from rollout_store.job.incoming import Entry, add_dead_letter
from rollout_store.job.ledger import LedgerEntry
from rollout_store.job.part import as_text


class HistoryStream(StrEnum):
    """A stream whose entries belong in the history."""

    OUTBOX = "outbox"
    """Finished rollouts."""
    REWARDS = "rewards"
    """Rewards that a trainer reports."""


class Outbox:
    """Reads finished rollouts and their rewards, and removes what the history contains."""

    def __init__(self, client: redis.Redis, keys: MessageKeys) -> None:
        self._client, self._keys = client, keys
        self._names = {HistoryStream.OUTBOX: keys.outbox, HistoryStream.REWARDS: keys.rewards}

    def wait(self, timeout_s: float) -> None:
        """Wait until a stream has an entry, but not for longer than *timeout_s*."""
        streams: Any = dict.fromkeys(self._names.values(), "0")
        self._client.xread(streams, count=1, block=max(1, int(timeout_s * 1000)))

    def read(self, streams: Sequence[HistoryStream], *, max_entries: int) -> list[list[Entry]]:
        """Return the oldest entries of each of *streams*, which are read in this order."""
        pipeline = self._client.pipeline(transaction=False)
        for stream in streams:
            pipeline.xrange(self._names[stream], count=max_entries)
        return [[Entry(as_text(entry_id), fields) for entry_id, fields in entries] for entries in pipeline.execute()]

    def delete(self, stream: HistoryStream, entries: Sequence[Entry]) -> None:
        """Delete entries."""
        if entries:
            self._client.xdel(self._names[stream], *(entry.entry_id for entry in entries))

    def add_dead_letter(self, stream: HistoryStream, entry: Entry, reason: str) -> None:
        """Add a copy of an entry to the dead letters."""
        name = self._names[stream]
        add_dead_letter(self._client, self._keys.dead_letters, stream=name, data=entry.data, reason=reason)

    def clock(self) -> float:
        """Return the Unix time by the clock of Redis, which also sets the times of entries."""
        seconds, microseconds = self._client.time()
        return float(seconds) + float(microseconds) / 1e6

    def problem_of(self, rollout_id: RolloutId) -> str | None:
        """Return the problem of a finished rollout; None if the job does not know the rollout.

        Raises:
            CodecError: if the ledger entry cannot be decoded.
        """
        entry: Any = self._client.hget(self._keys.ledger(rollout_id.request_id), str(rollout_id.sample))
        return None if entry is None else LedgerEntry.unpack(entry).problem_id
