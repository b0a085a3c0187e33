"""A client's result stream: read, handed to the steps that asked, acknowledged when a step has ended."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgpack
import redis.asyncio

from rollout_api.asyncio_tasks import end
from rollout_api.errors import JobEndedError, NameInUseError, RolloutClientError, UnreadableResultError
from rollout_api.protocol.dead_letters import add_dead_letter
from rollout_api.protocol.keys import DATA, TRAINER_GROUP, MessageKeys
from rollout_api.protocol.messages import CodecError, Refusal, Rollout, RolloutId, decode
from rollout_api.redis_client.connection import BLOCK_MS, RetryPolicy, even_when_full, server_function

logger = logging.getLogger(__name__)

MOST_UNREAD = 1000
"""Rollouts that wait for a consumer before no more are read: the back-pressure that a slow consumer gives."""
_COUNT = 64
_ACKNOWLEDGED_AT_ONCE = 1000
_PAUSE_S = 0.2
_STREAM_IS_GONE = ("NOGROUP", "UNBLOCKED")

Entries = list[tuple[str, bytes | None]]


class Reader(Protocol):
    """A step, as the result stream sees it."""

    number: int

    @property
    def hungry(self) -> bool:
        """Whether somebody waits for its next rollout."""

    @property
    def unread(self) -> int:
        """Rollouts in memory that nobody has taken yet."""

    def receive(self, entry: str, request_id: str, sample: int, rollout: Rollout | None) -> None:
        """Take a rollout; None: it is to be fetched from its entry when somebody wants it."""

    def refuse(self, entry: str, refusal: Refusal) -> None:
        """Learn that a request was refused."""

    def spoil(self, request_id: str, sample: int, reason: str) -> None:
        """Learn that a result cannot be read."""

    def fail(self, error: RolloutClientError) -> None:
        """Learn that nothing will come any more."""


class ResultStream:
    """Reads one client's results in one task, for all its steps.

    A result is acknowledged when its step has ended, so what was delivered and not acknowledged is delivered again
    to the next client of this name. Results for which no step asks yet are held back: by the ids of their entries
    alone, the rollouts stay in Redis.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: MessageKeys,
        name: str,
        patience: RetryPolicy,
        on_return: Callable[[], Awaitable[None]],
    ) -> None:
        """Take what it reads with.

        Args:
            client: connection to Redis.
            keys: of the job.
            name: of the client.
            patience: with a Redis that is away.
            on_return: awaited when Redis is back after it was away; what it took last may be lost.
        """
        self.ending: RolloutClientError | None = None
        """Why nothing will come but what is in the stream already."""
        self.awaited = 0
        """Rollouts that were sent for and have not come, of all steps; their inboxes count it."""
        self._client, self._keys, self._name, self._patience = client, keys, name, patience
        self._on_return = on_return
        self._stream = keys.results(name)
        self._acknowledge = client.register_script(server_function(__package__, "acknowledge"))
        self._steps: dict[str, Reader] = {}
        """Request id → the step that asks for it."""
        self._readers: dict[Reader, int] = {}
        """Open steps → how many were opened before."""
        self._opened = 0
        self._left: dict[int, int] = {}
        """Number of a step that was left by an error → how many were opened before it was left."""
        self._held: dict[str, dict[str, int]] = {}
        """Request id → entry → sample: results that no step of this client has asked for yet."""
        self._own = re.compile(rf"{re.escape(name)}:(\d+):")
        self._newest_ended = -1
        self._abandoned: set[str] = set()
        self._acknowledgeable: list[str] = []
        self._last = "0-0"
        self._interrupted = False
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Make the group and learn which results were delivered to an earlier client of this name."""
        await self._patience.of(self._create_group, what="read results")
        while entries := await self._patience.of(lambda: self._read(self._last), what="read results"):
            await self._take(entries)
        if self._held:
            logger.info(
                "%d results of %d requests were delivered before and not acknowledged; they go to the steps that ask "
                "for them again.",
                sum(map(len, self._held.values())),
                len(self._held),
            )

    def start(self) -> None:
        """Begin to read, or begin again after a failure."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"results of {self._name}")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            await end(self._task)

    # steps

    @property
    def full(self) -> bool:
        """Whether so many rollouts wait to be taken that no more should be read."""
        return sum(step.unread for step in self._readers) >= MOST_UNREAD

    def asks(self, request_id: str) -> bool:
        """Whether an open step asks for this request's results."""
        return request_id in self._steps

    def add(self, step: Reader, request_ids: Iterable[str]) -> None:
        """From now on, these requests' results are for *step*; those held back it gets at once."""
        if step not in self._readers:
            self._readers[step] = self._opened
            self._opened += 1
            self._left.pop(step.number, None)
        for request_id in request_ids:
            self._steps[request_id] = step
            for entry, sample in self._held.pop(request_id, {}).items():
                step.receive(entry, request_id, sample, None)

    def give_back(self, step: Reader, request_ids: Iterable[str], entries: Mapping[str, Mapping[str, int]]) -> None:
        """A step was left by an error: hold its results back, unacknowledged, for when it is opened again.

        That is until a later step ends that is opened from now on: then this one has been passed over.
        """
        self._readers.pop(step, None)
        self._left[step.number] = self._opened
        for request_id in request_ids:
            self._steps.pop(request_id, None)
            self._abandoned.discard(request_id)
        for request_id, of_request in entries.items():
            self._held.setdefault(request_id, {}).update(of_request)
        self.moved()

    async def end(
        self,
        step: Reader,
        request_ids: Iterable[str],
        open_ids: Iterable[str],
        entries: dict[str, dict[str, int]],
    ) -> None:
        """A step ended: what still comes of *open_ids*, or of earlier steps, is dropped.

        Its *entries* are acknowledged and taken away, those of one request at once: if that fails, all results of each
        request are still there, or none are.
        """
        opened = self._readers.pop(step)
        for request_id in request_ids:
            self._steps.pop(request_id, None)
        self._newest_ended = max(self._newest_ended, step.number)
        self._left = {
            number: openings for number, openings in self._left.items() if number >= step.number or opened < openings
        }
        # the others are told by their number
        self._abandoned = {one for one in self._abandoned if not self._is_of_past_step(one)}
        self._abandoned.update(open_ids)
        for request_id in [request_id for request_id in self._held if self._is_past(request_id)]:
            self._drop(request_id, self._held.pop(request_id))
        self.moved()
        await self._flush()
        for batch in list(_batches(entries)):
            await self.acknowledge([entry for request_id in batch for entry in entries[request_id]])
            for request_id in batch:
                del entries[request_id]

    def moved(self) -> None:
        """Somebody took a rollout, or waits for one."""
        self._moved.set()

    # Redis

    async def fetch(self, entries: Sequence[str]) -> Entries:
        """The data of entries that were delivered before; None where an entry is gone."""

        async def ask() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for entry in entries:
                pipeline.xrange(self._stream, min=entry, max=entry)
            return list(await pipeline.execute())

        found = await self._patience.of(ask, what="read results")
        return [(entry, _data(page[0][1]) if page else None) for entry, page in zip(entries, found, strict=True)]

    async def acknowledge(self, entries: Sequence[str]) -> None:
        """Acknowledge entries; what all groups have acknowledged is deleted."""
        for at in range(0, len(entries), _ACKNOWLEDGED_AT_ONCE):
            args = [TRAINER_GROUP, *entries[at : at + _ACKNOWLEDGED_AT_ONCE]]
            await self._patience.of(
                partial(self._acknowledge, keys=[self._stream], args=args),
                what="acknowledge results",
            )

    async def bury(self, entry: str, data: bytes, reason: str) -> None:
        """Move a result that cannot be read to the dead letters."""

        async def move() -> None:
            async with self._client.pipeline(transaction=True) as pipeline:
                add_dead_letter(pipeline, self._keys.dead, stream=self._stream, data=data, reason=reason)
                pipeline.xack(self._stream, TRAINER_GROUP, entry)
                try:
                    await pipeline.execute()
                except redis.exceptions.OutOfMemoryError:
                    # to wait would keep from reading what could be acknowledged, and so make room
                    logger.warning("Redis is full: result %s stays in %s.", entry, self._stream)

        logger.error("Result %s of %s cannot be read and goes to the dead letters: %s", entry, self._stream, reason)
        await self._patience.of(move, what="move a result that cannot be read to the dead letters")

    async def _create_group(self) -> None:
        try:
            await even_when_full(
                self._client, self._stream, "XGROUP", "CREATE", self._stream, TRAINER_GROUP, "0", "MKSTREAM"
            )
        except redis.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _read(self, position: str) -> Entries:
        """New entries (``>``, waited for), or those that were delivered behind *position* and not acknowledged."""
        reply: Any = await self._client.xreadgroup(
            TRAINER_GROUP, self._name, {self._stream: position}, count=_COUNT, block=BLOCK_MS
        )
        return [(entry.decode(), _data(fields)) for _, entries in reply or [] for entry, fields in entries]

    # the task

    async def _run(self) -> None:
        try:
            await self._read_on()
        except RolloutClientError as error:
            failure = error
        except Exception as error:
            logger.exception("Reading results failed.")
            failure = RolloutClientError(f"reading results failed: {type(error).__name__}: {error}")
        self._interrupted = True
        self._fail(failure)

    async def _read_on(self) -> None:
        position = self._last if self._interrupted else ">"
        away_since: float | None = None
        while True:
            await self._room()
            ending = self.ending
            if isinstance(ending, NameInUseError):
                raise ending  # what this read would take, the other process waits for
            try:
                entries = await self._read(position)
            except redis.RedisError as error:
                if str(error).startswith(_STREAM_IS_GONE):
                    await self._renew_group()
                else:
                    away_since = away_since or time.monotonic()
                    self._patience.judge(error, away_since, "read results")
                    # what a lost reply delivered is behind the last entry that arrived
                    position, self._interrupted = self._last, True
                await asyncio.sleep(_PAUSE_S)
                continue
            away_since = None
            await self._take(entries)
            await self._flush()
            if position != ">":
                position = self._last if entries else ">"
            elif self._interrupted:
                self._interrupted = False
                await self._on_return()
            elif not entries and ending is not None:
                self._fail(ending)

    async def _room(self) -> None:
        while self.full and not any(step.hungry for step in self._readers):
            self._moved.clear()
            await self._moved.wait()

    async def _renew_group(self) -> None:
        """The stream is gone: either all of the job is, or Redis has lost its youngest writes."""
        if await self._patience.of(lambda: self._client.exists(self._keys.job), what="read results"):
            logger.warning("The result stream %s was gone from Redis; it is made anew.", self._stream)
            await self._patience.of(self._create_group, what="read results")
        else:
            self._fail(JobEndedError(f"job {self._keys.uid} is gone from Redis"))

    def _fail(self, error: RolloutClientError) -> None:
        for step in self._readers:
            step.fail(error)

    async def _take(self, entries: Entries) -> None:
        for entry, data in entries:
            self._last = entry
            if data is None:
                # delivered once, and deleted by something other than an acknowledgement
                self._acknowledgeable.append(entry)
                continue
            try:
                self._route(entry, decode(data))
            except CodecError as error:
                await self._spoil(entry, data, str(error))

    def _route(self, entry: str, message: object) -> None:
        if isinstance(message, Refusal):
            # asked again, it is refused again: there is nothing to keep
            self._acknowledgeable.append(entry)
            if (step := self._steps.get(message.request_id)) is not None:
                step.refuse(entry, message)
            return
        if not isinstance(message, Rollout):
            raise CodecError(f"a {type(message).__name__} where a result belongs")
        try:
            rollout_id = RolloutId.parse(message.rollout_id)
        except ValueError as error:
            raise CodecError(str(error)) from None
        request_id, sample = rollout_id.request_id, rollout_id.sample
        step = self._steps.get(request_id)
        if step is not None:
            step.receive(entry, request_id, sample, message)
        elif self._is_past(request_id):
            self._drop(request_id, [entry])
        else:
            self._held.setdefault(request_id, {})[entry] = sample

    async def _spoil(self, entry: str, data: bytes, reason: str) -> None:
        await self.bury(entry, data, reason)
        rollout_id = _claimed_id(data)
        step = self._steps.get(rollout_id.request_id) if rollout_id is not None else None
        if rollout_id is None:
            self._fail(UnreadableResultError({f"entry {entry}": reason}))
        elif step is not None:
            step.spoil(rollout_id.request_id, rollout_id.sample, reason)

    def _is_past(self, request_id: str) -> bool:
        """Whether nobody will ask for this request's results: its step has ended, or later ones have."""
        return request_id in self._abandoned or self._is_of_past_step(request_id)

    def _is_of_past_step(self, request_id: str) -> bool:
        number = self._number(request_id)
        if number is None:
            return True
        still_wanted = number in self._left or any(step.number == number for step in self._readers)
        return number < self._newest_ended and not still_wanted

    def _drop(self, request_id: str, entries: Iterable[str]) -> None:
        entries = list(entries)
        logger.info("Dropped %d results of request %s, for which no step asks any more.", len(entries), request_id)
        self._acknowledgeable += entries

    def _number(self, request_id: str) -> int | None:
        """The step of a request of this client's."""
        match = self._own.match(request_id)
        return int(match[1]) if match else None

    async def _flush(self) -> None:
        entries, self._acknowledgeable = self._acknowledgeable, []
        try:
            await self.acknowledge(entries)
        except RolloutClientError:
            self._acknowledgeable += entries
            raise


def _batches(entries: Mapping[str, Mapping[str, int]]) -> Iterator[list[str]]:
    """Requests whose entries are acknowledged together."""
    batch: list[str] = []
    size = 0
    for request_id, of_request in entries.items():
        if batch and size + len(of_request) > _ACKNOWLEDGED_AT_ONCE:
            yield batch
            batch, size = [], 0
        batch.append(request_id)
        size += len(of_request)
    if batch:
        yield batch


def _claimed_id(data: bytes) -> RolloutId | None:
    """The rollout id in a result that cannot be read as a whole, if that much can be made out."""
    try:
        return RolloutId.parse(msgpack.unpackb(data, raw=False)["rollout_id"])
    except Exception:  # msgpack raises a dozen unrelated types, and anything may stand where the id belongs
        return None


def _data(fields: Any) -> bytes | None:
    """The message of an entry; None of one that is deleted."""
    if not fields:
        return None
    pairs = fields.items() if isinstance(fields, dict) else fields
    return next((value for name, value in pairs if name == DATA.encode()), b"")
