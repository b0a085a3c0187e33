"""Reads the results that a job keeps for the requests of a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import redis

from rollout_api.client.job_channel import JobChannel
from rollout_api.client.open_request import AwaitedRequest, OpenRequest, OpenRequests, as_client_error, batches
from rollout_api.errors import RequestRefusedError, RolloutClientError, UnreadableResultError
from rollout_api.protocol.keys import REQUEST_FIELD
from rollout_api.protocol.messages import CodecError
from rollout_api.redis_client.client_connection import READ_BLOCK_MS
from rollout_api.redis_client.retry import BatchPacer
from rollout_api.redis_client.server_functions import execute_even_when_full

_UPDATES_PER_READ = 1000
"""Updates that are read from Redis at once."""
_CHECK_INTERVAL_S = 60.0
"""Time between two checks of all open requests, which find what no update has told."""
_REPORT_INTERVAL_S = 0.5
"""Shortest time between two reports of how much was read."""
_RETRY_PAUSE_S = 0.2
"""Pause after a failed read."""


class ResultReader:
    """Reads results in one task.

    The job names the results of a client in a short stream. The task reads this stream, and with it the results for
    which somebody waits; others stay in Redis until they are taken. Since old entries of the stream are trimmed, all
    open requests are checked if entries were missed.

    Args:
        channel: channel to the job.
        requests: the open requests.
        with_tokens: whether tokens of unfinished rollouts are read, too.
    """

    def __init__(self, channel: JobChannel, requests: OpenRequests, *, with_tokens: bool) -> None:
        self.num_answered = 0
        """Number of rollouts that were received after their request was sent."""
        self._client, self._keys, self._policy = channel.redis, channel.keys, channel.policy
        self._name, self._requests = channel.client_name, requests
        streams = [self._keys.result_updates(self._name), *([self._keys.token_updates] if with_tokens else [])]
        self._positions: dict[str, str] = dict.fromkeys(streams, "0")
        """Stream of updates → id of the last entry that was read."""
        self._written = 0
        """Bytes of all results of this client that had been written at the last update."""
        self._missed_updates = False
        self._reported, self._next_report = (-1, -1), 0.0

    async def open(self) -> None:
        """Begin with the updates from now on."""
        await self._policy.run(self._seek, action="receive rollouts")

    async def _seek(self) -> None:
        """Continue after the newest updates."""
        pipeline = self._client.pipeline(transaction=False)
        for stream in self._positions:
            pipeline.xrevrange(stream, count=1)
        pipeline.hget(self._keys.results_written, self._name)
        *newest, written = await pipeline.execute()
        self._positions = {
            stream: entries[0][0].decode() if entries else "0"
            for stream, entries in zip(self._positions, newest, strict=True)
        }
        self._written, self._missed_updates = int(written or 0), False
        self._reported, self._next_report = (-1, -1), 0.0  # Redis may have lost the last report
        await self._report_read()

    async def run(self) -> None:
        """Read updates and results until this task is cancelled."""
        failing_since: float | None = None
        pacer, next_read = BatchPacer(), 0.0
        checked_at = time.monotonic()
        while True:
            try:
                await asyncio.sleep(max(0.0, next_read - time.monotonic()))
                updated, num_results = await self._read_updates()
                now = time.monotonic()
                # New tokens do not count: engines write them in batches themselves, except for first ones.
                next_read = now + pacer.pause(num_results, now)
                if failing_since is not None:
                    await self._recover()
                    failing_since, checked_at = None, now
                elif self._missed_updates or self._requests.ending is not None or now - checked_at > _CHECK_INTERVAL_S:
                    self._missed_updates, checked_at = False, now
                    await self._check()
                else:
                    await self._read_wanted(updated)
                await self._report_read()
            except redis.RedisError as error:
                failing_since = failing_since or time.monotonic()
                try:
                    self._policy.raise_unless_retryable(error, failing_since, "receive rollouts")
                except RolloutClientError as failure:
                    self._requests.fail_all(failure)
                await asyncio.sleep(_RETRY_PAUSE_S)
            except Exception as error:  # a task that ended would leave all requests waiting
                self._requests.fail_all(as_client_error(error, "receiving rollouts"))
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _read_updates(self) -> tuple[list[OpenRequest], int]:
        """Return the open requests with news, and the number of results and refusals; wait up to a second for them."""
        positions: dict[Any, Any] = dict(self._positions)
        reply: Any = await self._client.xread(positions, count=_UPDATES_PER_READ, block=READ_BLOCK_MS)
        updated: dict[OpenRequest, None] = {}
        num_results = 0
        for stream, entries in reply or ():
            self._positions[stream.decode()] = entries[-1][0].decode()
            num_results += 0 if stream.decode() == self._keys.token_updates else len(entries)
            for _, fields in entries:
                request_id = fields[REQUEST_FIELD.encode()].decode()
                opened = self._requests.get(request_id)
                if opened is not None:
                    updated[opened] = None
                if (sample := fields.get(b"s")) is not None:
                    self._note_result(request_id, opened, int(sample), int(fields[b"b"]), int(fields[b"w"]))
                elif opened is not None and stream.decode() != self._keys.token_updates:
                    opened.announce_any()  # a refusal
        return list(updated), num_results

    def _note_result(
        self, request_id: str, opened: OpenRequest | None, sample: int, num_bytes: int, written: int
    ) -> None:
        """Record that a result was written, after which all results of this client had *written* bytes."""
        self._missed_updates = self._missed_updates or written - num_bytes != self._written
        self._written = written
        if opened is not None:
            opened.announce(sample, num_bytes)
            self._requests.count(opened)
        else:
            self._requests.note_leftover(request_id)

    async def read(self, requests: Sequence[OpenRequest]) -> None:
        """Read what was announced of these requests."""
        for batch in batches(requests):
            await self._policy.run(partial(self._read_batch, batch), action="receive rollouts")

    async def _read_wanted(self, requests: Sequence[OpenRequest]) -> None:
        """Read what was announced of these requests, or tell their steps to do so.

        Raises:
            redis.RedisError: Redis failed. The reader must know, because Redis may have lost requests.
        """
        for batch in batches(opened for opened in requests if opened.is_wanted):
            await self._read_batch(batch)
        for opened in requests:
            if opened.is_announced:
                opened.notify()

    async def _read_batch(self, batch: Sequence[OpenRequest]) -> None:
        announced = [(opened, *opened.take_announced()) for opened in batch]
        streams = [
            (opened, sample)
            for opened in batch
            if isinstance(opened, AwaitedRequest) and opened.listeners
            for sample in opened.unfinished
        ]
        pipeline = self._client.pipeline(transaction=False)
        for opened, samples, may_be_refused in announced:
            if may_be_refused:
                pipeline.get(self._keys.refusal(opened.request.request_id))
            if samples:
                pipeline.hmget(self._keys.results(opened.request.request_id), samples)
        for opened, sample in streams:
            key = self._keys.tokens(opened.request.request_id, sample)
            pipeline.xrange(key, f"({opened.num_streamed[sample]}-0")
        try:
            found = iter(await pipeline.execute())
        except BaseException:
            for opened in batch:
                opened.announce_any()
                opened.notify()
            raise
        for opened, samples, may_be_refused in announced:
            refusal = next(found) if may_be_refused else None
            results = next(found) if samples else []
            num_missing = opened.num_missing
            with _failing(opened):
                for rollout in opened.add(samples, results, refusal):
                    self._requests.note_received(rollout)
            self._requests.count(opened)
            if opened.was_sent:
                self.num_answered += num_missing - opened.num_missing
        for opened, sample in streams:
            with _failing(opened):
                opened.add_tokens(sample, next(found))

    async def read_any(self, requests: Sequence[OpenRequest]) -> None:
        """Read whatever there is of these requests, or tell their steps to do so.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """
        await self._policy.run(partial(self._read_any, requests), action="receive rollouts")

    async def _read_any(self, requests: Sequence[OpenRequest]) -> None:
        for opened in requests:
            opened.announce_any()
        await self._read_wanted(requests)

    async def _check(self) -> None:
        """Read whatever there is of all open requests that were sent. If the job has ended, the others fail."""
        ending = self._requests.ending
        sent = self._requests.sent
        await self._read_any(sent)
        if ending is not None:
            for opened in sent:
                if opened.num_missing:
                    opened.fail(ending)
            return
        for batch in batches(opened for opened in sent if opened.num_missing):
            for opened, (_, mark) in zip(batch, await self._read_ledgers(batch), strict=True):
                if mark is not None and self._requests.get(opened.request.request_id) is opened:
                    opened.fail(_released_elsewhere(opened.request.request_id, self._name))

    async def _recover(self) -> None:
        """Redis was unreachable, and may have lost requests: send all open ones again. Repetitions are harmless."""
        await self._seek()
        sent = self._requests.sent
        await self._read_any(sent)
        self._requests.lost += sent
        self._requests.has_work.set()

    async def _report_read(self) -> None:
        """Tell the job how many bytes of its results this client has read and noticed, so that it can hold back others.

        A trainer that is busy reads nothing, but this task still notices new results, unlike that of a dead one.
        """
        report = (self._written - self._requests.num_unread_bytes, self._written)
        if report != self._reported and time.monotonic() >= self._next_report:
            values = zip((self._keys.results_read, self._keys.results_noticed), report, strict=True)
            await asyncio.gather(  # in one round trip
                *(execute_even_when_full(self._client, key, "HSET", key, self._name, value) for key, value in values)
            )
            self._reported, self._next_report = report, time.monotonic() + _REPORT_INTERVAL_S

    async def ledger_states(self, requests: Sequence[OpenRequest]) -> list[list[bytes | None]]:
        """Return for each request whether the job has admitted it, and whether its results were released.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """
        return await self._policy.run(partial(self._read_ledgers, requests), action="send requests")

    async def _read_ledgers(self, requests: Sequence[OpenRequest]) -> list[list[bytes | None]]:
        pipeline = self._client.pipeline(transaction=False)
        for opened in requests:
            pipeline.hmget(self._keys.ledger(opened.request.request_id), ["entry", "released"])
        return list(await pipeline.execute())


def _released_elsewhere(request_id: str, client_name: str) -> RolloutClientError:
    return RequestRefusedError(
        {
            request_id: f"another process that is connected as {client_name!r} has received and released its rollouts; "
            "give each trainer rank its own name"
        }
    )


@contextmanager
def _failing(opened: OpenRequest) -> Iterator[None]:
    """Let *opened* fail if a message of it cannot be decoded, or if a listener raises an error."""
    try:
        yield
    except CodecError as error:
        opened.fail(UnreadableResultError({opened.request.request_id: str(error)}))
    except Exception as error:
        opened.fail(as_client_error(error, "receiving tokens"))
