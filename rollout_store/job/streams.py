"""The streams that the coordinator reads, and those whose entries the relay moves to the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

import redis
import redis.asyncio

from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import CodecError, RolloutId
from rollout_api.redis_client.retry import RetryPolicy
from rollout_api.redis_client.server_functions import Call, Function, run
from rollout_store.job.part import StorePart, as_text
from rollout_store.job.requests import LedgerEntry

_REPLACE = Function("replace_ledger_entry")
ENTRIES_PER_PAGE = 500
"""Number of stream entries in one reply when a whole stream is read."""


@dataclass(frozen=True)
class RolloutEvent:
    """A rollout has ended, or an engine has returned it."""

    request_id: str
    sample: int
    returned_by: str | None = None
    """Id of the engine that returned the rollout unfinished; None if the rollout has ended."""
    failure: str = ""
    """Why the rollout is to end as failed; '' if it has ended, or is to be assigned again."""
    length: int | None = None
    """Number of response tokens; None if it is not known, as for a rollout whose event was missed."""
    measurement: bytes = b""
    """What the canary test measures of the rollout; empty if it is not part of the test."""

    @classmethod
    def read(cls, fields: Mapping[bytes, bytes]) -> Self:
        """Decode an entry of the event stream."""
        return cls(
            fields[b"r"].decode(),
            int(fields[b"s"]),
            returned_by=fields[b"e"].decode() if b"x" in fields else None,
            failure=fields[b"x"].decode() if b"f" in fields else "",
            length=int(fields[b"l"]) if b"l" in fields else None,
            measurement=fields.get(b"c", b""),
        )


CONFLICTS = "conflicts"
"""Field of the job's totals with the number of rollouts and rewards that did not belong to the history's tokens."""
_MAX_DEAD_LETTERS = 1000
"""Approximate number of dead letters that are kept; the oldest are deleted."""
MAX_DEAD_LETTER_BYTES = 16 * 1024
"""Number of first bytes of a message that its dead letter keeps, so that all dead letters together take at most some
16 MiB. They show what the message is and where it came from.
"""
_MAX_REASON_CHARS = 1000
"""Largest length of a dead letter's reason, which may quote the message."""


class Stream(StrEnum):
    """A stream that the coordinator reads."""

    REQUESTS = "requests"
    """Requests of clients. An entry stays until its request is answered."""
    CONTROL = "control"
    """Control messages of clients. An entry stays until it is processed."""
    EVENTS = "events"
    """Events of engines. Old entries are trimmed, so the coordinator may miss some."""


class Entry(NamedTuple):
    """An entry of a stream."""

    entry_id: str
    fields: dict[bytes, bytes]

    @property
    def data(self) -> bytes:
        """The encoded message; empty if the entry contains none."""
        return self.fields.get(MESSAGE_FIELD.encode(), b"")


class IncomingStreams(StorePart):
    """Reads the coordinator's streams and removes what was processed."""

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, retries: RetryPolicy | None = None) -> None:
        super().__init__(client, keys, retries)
        self._names = {Stream.REQUESTS: keys.requests, Stream.CONTROL: keys.control, Stream.EVENTS: keys.events}

    async def read(
        self, cursors: Mapping[Stream, str], *, timeout_s: float, max_entries: int
    ) -> dict[Stream, list[Entry]]:
        """Return the entries after the given ids, per stream; wait up to *timeout_s* for the first one."""
        names: Any = {self._names[stream]: cursor for stream, cursor in cursors.items()}
        replies: Any = await self._client.xread(names, count=max_entries, block=max(1, int(timeout_s * 1000)))
        streams = {name: stream for stream, name in self._names.items()}
        return {streams[as_text(name)]: [_entry(*found) for found in entries] for name, entries in replies}

    async def page(self, stream: Stream, after: str, *, max_entries: int) -> list[Entry]:
        """Return the oldest current entries of a stream that follow the entry with id *after*."""
        page: Any = await self._client.xrange(self._names[stream], min=f"({after}", count=max_entries)
        return [_entry(*entry) for entry in page]

    async def last_id(self, stream: Stream) -> str:
        """Return the id of a stream's newest entry, after which all later entries follow."""
        newest: Any = await self._client.xrevrange(self._names[stream], count=1)
        return as_text(newest[0][0]) if newest else "0"

    async def delete(self, stream: Stream, *entry_ids: str) -> None:
        """Delete entries that were processed."""
        if entry_ids:
            await self._client.xdel(self._names[stream], *entry_ids)

    async def dead_letter(self, stream: Stream, entry: Entry, reason: str) -> None:
        """Move an entry that cannot be decoded or processed to the dead letters."""
        name = self._names[stream]
        async with self._client.pipeline(transaction=True) as pipeline:
            add_dead_letter(pipeline, self._keys.dead_letters, stream=name, data=entry.data, reason=reason)
            pipeline.xdel(name, entry.entry_id)
            await pipeline.execute()

    async def num_unprocessed(self) -> int:
        """Return the number of open requests, and of rollouts and rewards that the relay has yet to move."""
        # In this order: a rollout enters the outbox before its request ends.
        return sum(
            [await self._client.xlen(name) for name in (self._keys.requests, self._keys.outbox, self._keys.rewards)]
        )


async def read_entries(client: redis.asyncio.Redis, name: str) -> list[Entry]:
    """Return all current entries of the stream with key *name*, read in pages."""
    found: list[Entry] = []
    start = "-"
    while True:
        page: Any = await client.xrange(name, min=start, count=ENTRIES_PER_PAGE)
        found += [_entry(*entry) for entry in page]
        if len(page) < ENTRIES_PER_PAGE:
            return found
        start = f"({found[-1].entry_id}"


def arrival_time(entry_id: str) -> float:
    """Return the Unix time, by Redis' clock, at which a stream entry arrived."""
    return int(entry_id.partition("-")[0]) / 1000


def _entry(entry_id: bytes | str, fields: dict[bytes, bytes]) -> Entry:
    return Entry(as_text(entry_id), fields)


def add_dead_letter(client: Any, dead_letters: str, *, stream: str, data: bytes, reason: str) -> None:
    """Keep the beginning of a message, its size, and the reason why it could not be processed.

    Args:
        client: a synchronous Redis client, or a pipeline.
        dead_letters: key of the job's dead letters.
        stream: key of the stream that contained the message.
        data: the message.
        reason: why it could not be processed.
    """
    fields = {
        MESSAGE_FIELD: data[:MAX_DEAD_LETTER_BYTES],
        "bytes": len(data),
        "reason": reason[:_MAX_REASON_CHARS],
        "stream": stream,
    }
    client.xadd(dead_letters, fields, maxlen=_MAX_DEAD_LETTERS, approximate=True)


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

    def read(self, max_entries: Mapping[HistoryStream, int]) -> list[list[Entry]]:
        """Return the oldest entries of each stream in *max_entries*, at most so many; they are read in this order."""
        pipeline = self._client.pipeline(transaction=False)
        for stream, count in max_entries.items():
            pipeline.xrange(self._names[stream], count=count)
        return [[Entry(as_text(entry_id), fields) for entry_id, fields in entries] for entries in pipeline.execute()]

    def delete(self, stream: HistoryStream, entries: Sequence[Entry]) -> None:
        """Delete entries."""
        if entries:
            self._client.xdel(self._names[stream], *(entry.entry_id for entry in entries))

    def add_dead_letters(self, stream: HistoryStream, letters: Sequence[tuple[bytes, str]]) -> None:
        """Add messages of a stream, with the reasons, to the dead letters, in one round trip."""
        if not letters:
            return
        pipeline = self._client.pipeline(transaction=False)
        for data, reason in letters:
            add_dead_letter(pipeline, self._keys.dead_letters, stream=self._names[stream], data=data, reason=reason)
        pipeline.execute()

    def clock(self) -> float:
        """Return the Unix time by the clock of Redis, which also sets the times of entries."""
        seconds, microseconds = self._client.time()
        return float(seconds) + float(microseconds) / 1e6

    def ledger_entries(self, rollout_ids: Sequence[RolloutId]) -> list[LedgerEntry | CodecError | None]:
        """Return the ledger entry of each rollout, in one round trip.

        An entry that cannot be decoded is represented by the error, and that of a rollout that the job does not know by
        None.
        """
        if not rollout_ids:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for rollout_id in rollout_ids:
            pipeline.hget(self._keys.ledger(rollout_id.request_id), str(rollout_id.sample))
        entries: list[LedgerEntry | CodecError | None] = []
        for stored in pipeline.execute():
            try:
                entries.append(None if stored is None else LedgerEntry.unpack(stored))
            except CodecError as error:
                entries.append(error)
        return entries

    def replace_ledger_entry(self, rollout_id: RolloutId, entry: LedgerEntry) -> None:
        """Replace the ledger entry of a rollout, unless it has expired in the meantime."""
        ledger = self._keys.ledger(rollout_id.request_id)
        run(self._client, Call(_REPLACE, [ledger], [str(rollout_id.sample), entry.pack()]))

    def count_conflicts(self, number: int) -> None:
        """Add to the number of rollouts and rewards that belong to other tokens than those in the history."""
        self._client.hincrby(self._keys.totals, CONFLICTS, number)
