"""Sends a client's requests, and reads the results that the job keeps under their ids."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import redis
import redis.asyncio

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.job_info import PreparedRequest
from rollout_api.client.open_request import AwaitedRequest, Leftovers, OpenRequest, TokensCallback
from rollout_api.client.request_sender import LOG_INTERVAL_S, RequestSender
from rollout_api.errors import JobFullError, RequestRefusedError, RolloutClientError, UnreadableResultError
from rollout_api.protocol.keys import LEDGER_RETENTION_S, MESSAGE_FIELD, REQUEST_FIELD, MessageKeys
from rollout_api.protocol.messages import CodecError, Rollout, RolloutRequest, decode, encode
from rollout_api.redis_client.batch_pacer import BatchPacer
from rollout_api.redis_client.client_connection import READ_BLOCK_MS
from rollout_api.redis_client.retry import ClientRetryPolicy
from rollout_api.redis_client.server_functions import async_function, execute_even_when_full

logger = logging.getLogger(__name__)

_UPDATES_PER_READ = 1000
"""Updates that are read from Redis at once."""
_REQUESTS_PER_BATCH = 64
"""Requests that are sent, or whose results are read or released, in one round trip."""
_BATCH_BYTES = 4_000_000
"""Encoded size, in bytes, above which no further request is added to a batch."""
_CHECK_INTERVAL_S = 60.0
"""Time between two checks of all open requests, which find what no update has told."""
_REPORT_INTERVAL_S = 0.5
"""Shortest time between two reports of how much was read."""
_RETRY_PAUSE_S = 0.2
"""Pause after a failed read, and while the job has no room for another request."""
_LAST_BATCH_TIMEOUT_S = 2.0
"""How long a cancellation waits for the batch of requests that is being sent."""
_FIRST_CANCEL_PAUSE_S, _MAX_CANCEL_PAUSE_S = 2.0, 60.0
"""Pause before a cancellation is first repeated, which doubles with each repetition, and the longest pause."""
_RESAMPLED_SUFFIX = re.compile(r"\.r\d+$")


class Results:
    """Sends requests and reads their results.

    The job samples a request once, however many processes send it, and keeps the results under the id of the request.
    It names the results of a client in a short stream. One task reads this stream, and with it the results for which
    somebody waits; others stay in Redis until they are taken. Since old entries of the stream are trimmed, all open
    requests are checked if entries were missed. Another task sends requests as the job has room for them.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        client_name: name of the client.
        sender: knows how many rollouts the job has room for.
        policy: how failing commands are retried.
        leftovers: receives the requests with results that no step awaits; None if the results expire.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: MessageKeys,
        client_name: str,
        sender: RequestSender,
        policy: ClientRetryPolicy,
        *,
        leftovers: Leftovers | None = None,
    ) -> None:
        self.ending: RolloutClientError | None = None
        """Why no further results will come; None while they may. Results that are in Redis are still read."""
        self.num_awaited = 0
        """Number of rollouts that were requested and have not been received."""
        self._client, self._keys, self._name = client, keys, client_name
        self._sender, self._policy, self._leftovers = sender, policy, leftovers
        self._release = async_function(client, __package__, "release")
        self._open: dict[str, OpenRequest] = {}
        self._unsent: deque[OpenRequest] = deque()
        self._lost: list[OpenRequest] = []
        """Requests that Redis may have lost, and that are sent again."""
        self._abandoned: list[str] = []
        self._has_work, self._is_idle = asyncio.Event(), asyncio.Event()
        self._is_idle.set()
        self._tasks: list[asyncio.Task[None]] = []
        # Stream of updates → id of the last entry that was read. Steps do not stream tokens.
        streams = [keys.result_updates(client_name), *([] if leftovers is not None else [keys.token_updates])]
        self._positions: dict[str, str] = dict.fromkeys(streams, "0")
        self._written = 0
        """Bytes of all results of this client that had been written at the last update."""
        self._reported, self._next_report = -1, 0.0
        self._num_unread_bytes = 0
        """Bytes of the results of open requests that were announced and not read."""
        self._missed_updates = False
        self._next_cancellation, self._cancel_pause = 0.0, _FIRST_CANCEL_PAUSE_S
        self._next_log = 0.0

    async def open(self) -> None:
        """Receive updates from now on, and start the tasks.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
            RedisRefusedError: Redis refused a command.
        """
        await self._policy.run(self._seek, action="receive rollouts")
        if self._leftovers is not None:
            found: Any = await self._policy.run(
                lambda: self._client.smembers(self._keys.unreleased(self._name)), action="receive rollouts"
            )
            self._leftovers.add((request_id.decode() for request_id in found), when=0)
            if found:
                logger.info(
                    "Results of %d requests of an earlier trainer with this name are kept; they go to the steps that "
                    "request them again.",
                    len(found),
                )
        self._tasks = [
            asyncio.create_task(self._send_forever(), name=f"requests of {self._name}"),
            asyncio.create_task(self._receive_forever(), name=f"results of {self._name}"),
        ]

    async def close(self, error: RolloutClientError) -> None:
        """Stop sending and receiving; whoever waits for results gets *error*."""
        await cancel_and_wait(*self._tasks)
        self._fail_all(error)

    # Requests.

    def add(self, requests: Sequence[OpenRequest]) -> None:
        """Send requests when the job has room for them, and receive their results."""
        for opened in requests:
            self._register(opened)
        self._unsent.extend(requests)
        self._has_work.set()

    def remove(self, requests: Iterable[OpenRequest], *, keep: bool = False) -> None:
        """Stop receiving the results of requests.

        Args:
            requests: the requests.
            keep: whether to remember that their results may be there for a later step.
        """
        for opened in requests:
            request_id = opened.request.request_id
            if self._open.get(request_id) is opened:
                del self._open[request_id]
                if keep and self._leftovers is not None:
                    self._leftovers.add([request_id])
            opened.has_ended = True
            self._count(opened)

    async def cancel(self, requests: Iterable[OpenRequest], *, withdrawal: RolloutClientError) -> None:
        """Cancel requests: their rollouts return what they have. This works while Redis is full.

        Args:
            requests: the requests.
            withdrawal: error for those that were not sent, of which nothing is expected any more.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long; some cancellations may have arrived.
        """
        # The batch that is being sent counts as sent, unless Redis is full or unreachable.
        with suppress(asyncio.TimeoutError):  # differs from TimeoutError in Python 3.10
            await asyncio.wait_for(self._is_idle.wait(), _LAST_BATCH_TIMEOUT_S)
        missing = [opened for opened in requests if opened.num_unanswered]
        for opened in missing:
            if opened.was_sent:
                opened.is_cancelled = True
            else:
                opened.withdraw(withdrawal)
            self._count(opened)
        self._cancel_pause = _FIRST_CANCEL_PAUSE_S
        self._next_cancellation = time.monotonic() + self._cancel_pause
        # Those that were not sent are cancelled, too: an earlier trainer may have sent them.
        await self._sender.cancel([opened.request.request_id for opened in missing])

    async def release(self, request_ids: Sequence[str]) -> None:
        """Delete results that are not needed any more. Later results of these requests are dropped.

        The results of one request are deleted in one command, which also runs while Redis is full.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long; some results may be left.
        """
        for start in range(0, len(request_ids), _REQUESTS_PER_BATCH):
            batch = request_ids[start : start + _REQUESTS_PER_BATCH]
            keys = [self._keys.job, self._keys.unreleased(self._name)]
            keys += [key for name in batch for key in (self._keys.ledger(name), self._keys.results(name))]

            async def release(keys: list[str] = keys, batch: Sequence[str] = batch) -> None:
                await self._release(keys=keys, args=[LEDGER_RETENTION_S, *batch])

            await self._policy.run(release, action="release results")

    async def rollouts(
        self,
        request: PreparedRequest,
        *,
        may_be_answered: bool,
        on_tokens: TokensCallback | None = None,
        may_wait: bool = True,
    ) -> list[Rollout]:
        """Return the rollouts of a request, ordered by sample.

        Args:
            request: the request.
            may_be_answered: whether it may have been sent before. If not, it is cancelled with this call.
            on_tokens: receives the tokens of unfinished rollouts, if the request was sent to stream them.
            may_wait: whether it may wait while the job has no room for it.

        Raises:
            JobFullError: the job has no room, and the request may not wait.
            RequestRefusedError: the job refused the request, or no longer keeps its rollouts.
            UnreadableResultError: a rollout cannot be decoded.
            JobEndedError: the job has ended.
            RedisUnreachableError: Redis was unreachable for too long.
        """
        found = self._open.get(request.request_id)
        if isinstance(found, AwaitedRequest):
            opened = found
        else:
            opened = AwaitedRequest(request, may_be_answered=may_be_answered, may_wait=may_wait)
            self.add([opened])
        opened.num_waiters += 1
        if on_tokens is not None:
            opened.listen(on_tokens)
        try:
            return await asyncio.shield(opened.answer)
        finally:
            opened.num_waiters -= 1
            if on_tokens is not None:
                opened.stop_listening(on_tokens)
            if not opened.num_waiters:
                if not opened.answer.done():
                    opened.answer.cancel()
                    if opened.was_sent and not opened.may_be_answered:
                        self._abandoned.append(opened.request.request_id)
                        self._has_work.set()
                self.remove([opened])

    def _register(self, opened: OpenRequest) -> None:
        request_id = opened.request.request_id
        self._open[request_id] = opened
        if self._leftovers is not None:
            self._leftovers.discard([request_id])

    def _count(self, opened: OpenRequest) -> None:
        """Update the number of awaited rollouts and of unread bytes after a change of *opened*."""
        is_open = self._open.get(opened.request.request_id) is opened
        counted = opened.num_missing if is_open and opened.was_sent else 0, opened.num_unread_bytes if is_open else 0
        self.num_awaited += counted[0] - opened.counted[0]
        self._num_unread_bytes += counted[1] - opened.counted[1]
        opened.counted = counted

    def _fail_all(self, error: RolloutClientError) -> None:
        for opened in self._open.values():
            opened.fail(error)

    def _fail(self, requests: Iterable[OpenRequest], error: Exception, action: str) -> None:
        failure = _as_client_error(error, action)
        for opened in requests:
            opened.fail(failure)

    # Sending.

    async def _send_forever(self) -> None:
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_work.wait(), _RETRY_PAUSE_S if self._unsent else None)
            self._has_work.clear()
            while batch := self._next_batch():
                self._is_idle.clear()
                try:
                    await self._send(batch)
                except Exception as error:
                    self._fail(batch, error, "sending requests")
                finally:
                    self._is_idle.set()
            lost, self._lost = self._lost, []
            for batch in _batches(lost):
                try:
                    await self._append(batch)
                except Exception as error:
                    self._fail(batch, error, "sending requests")
            # The job only cancels requests that it has.
            cancelled = [opened.request.request_id for opened in lost if _awaits_cancellation(opened)]
            abandoned, self._abandoned = self._abandoned, []
            try:
                await self._sender.cancel(cancelled + abandoned)
            except RolloutClientError as error:
                logger.warning("Cannot cancel %d requests: %s", len(cancelled + abandoned), error)

    def _next_batch(self) -> list[OpenRequest]:
        """Remove the next requests from the queue: those for which the job has room, and those that may not wait."""
        batch: list[OpenRequest] = []
        waiting: list[OpenRequest] = []
        num_rollouts = size = 0
        is_full = False
        while self._unsent and len(batch) < _REQUESTS_PER_BATCH and size < _BATCH_BYTES:
            opened = self._unsent.popleft()
            if opened.has_ended:
                continue
            # An ended job needs no room: its requests only fail.
            has_room = not is_full and self._sender.has_room(num_rollouts + opened.num_missing, self.num_awaited)
            if has_room or not opened.may_wait or self.ending is not None:
                batch.append(opened)
                num_rollouts += opened.num_missing * has_room
                size += len(opened.request.data)
            else:
                waiting.append(opened)
                is_full = True
        self._unsent.extendleft(reversed(waiting))
        if is_full and not batch:
            self._sender.log_no_room(len(self._unsent))
        return batch

    async def _send(self, batch: Sequence[OpenRequest]) -> None:
        await self._find_earlier([opened for opened in batch if opened.may_be_answered])
        batch = [opened for opened in batch if opened.num_missing]
        if batch and self.ending is not None:
            raise self.ending
        admitted: list[OpenRequest] = []
        excess: list[OpenRequest] = []
        num_rollouts = 0
        for opened in batch:
            fits = opened.may_wait or self._sender.has_room(num_rollouts + opened.num_missing, self.num_awaited)
            (admitted if fits else excess).append(opened)
            num_rollouts += opened.num_missing * fits
        if excess:
            states = await self._ledger_states(excess)
            for opened, (entry, _) in zip(excess, states, strict=True):
                if entry is None:
                    opened.fail(
                        JobFullError(
                            "the job has as many open rollouts as it may have (spec.queue.maxRollouts); try again later"
                        )
                    )
                else:  # another process has sent it before
                    admitted.append(opened)
        self._sender.count_sent(num_rollouts)
        await self._append(admitted)

    async def _append(self, requests: Sequence[OpenRequest]) -> None:
        """Append requests to the job's stream. Those that end while Redis is full or unreachable are left out."""
        left = list(requests)

        async def append_missing() -> None:
            sent = [opened for opened in left if opened.num_missing]
            if not sent:
                return
            pipeline = self._client.pipeline(transaction=False)
            for opened in sent:
                pipeline.xadd(self._keys.requests, {MESSAGE_FIELD: opened.request.data})
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            left.clear()
            for opened, reply in zip(sent, replies, strict=True):
                if isinstance(reply, Exception):
                    left.append(opened)
                else:
                    opened.was_sent = True
                    self._count(opened)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply

        await self._policy.run(append_missing, action="send requests")

    async def _find_earlier(self, requests: Sequence[OpenRequest]) -> None:
        """Find out which requests were sent before.

        The results of these are read. A request whose results an earlier trainer has released gets another id.
        """
        while requests:
            states = await self._ledger_states(requests)
            released = [opened for opened, (_, mark) in zip(requests, states, strict=True) if mark is not None]
            for opened in released:
                self._rename(opened)
            if released and time.monotonic() >= self._next_log:
                self._next_log = time.monotonic() + LOG_INTERVAL_S
                logger.warning(
                    "Results were received and released before, those of %s among them; they are sampled again under "
                    "other request ids.",
                    first_id(released[0].request.request_id),
                )
            known = [
                opened
                for opened, (entry, mark) in zip(requests, states, strict=True)
                if entry is not None and mark is None
            ]
            await self._read_any(known)
            requests = released

    async def _ledger_states(self, requests: Sequence[OpenRequest]) -> list[list[bytes | None]]:
        """Return for each request whether the job has admitted it, and whether its results were released."""

        async def read() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for opened in requests:
                pipeline.hmget(self._keys.ledger(opened.request.request_id), ["entry", "released"])
            return list(await pipeline.execute())

        return await self._policy.run(read, action="send requests")

    def _rename(self, opened: OpenRequest) -> None:
        """Give a request the next id under which it can be sampled again."""
        old = opened.request.request_id
        first = first_id(old)
        number = 1 + int(old[len(first) + 2 :] or 0)
        message = cast(RolloutRequest, decode(opened.request.data))
        renamed = message.model_copy(update={"request_id": f"{first}.r{number}"})
        self._open.pop(old, None)
        opened.request = replace(opened.request, request_id=renamed.request_id, data=encode(renamed))
        if renamed.request_id in self._open:
            opened.fail(RolloutClientError(f"request {renamed.request_id} is open already"))
            return
        self._register(opened)

    # Receiving.

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

    async def _receive_forever(self) -> None:
        failing_since: float | None = None
        pacer = BatchPacer()
        checked_at = time.monotonic()
        while True:
            try:
                updated, num_updates = await self._read_updates()
                now = time.monotonic()
                if failing_since is not None:
                    await self._recover()
                    failing_since, checked_at = None, now
                elif self._missed_updates or self.ending is not None or now - checked_at > _CHECK_INTERVAL_S:
                    self._missed_updates, checked_at = False, now
                    await self._check()
                else:
                    await self.read([opened for opened in updated if opened.is_wanted])
                    for opened in updated:
                        if opened.is_announced:
                            opened.notify()
                await self._report_read()
                await self._repeat_cancellations()
                await asyncio.sleep(pacer.pause(num_updates, time.monotonic()))
            except redis.RedisError as error:
                failing_since = failing_since or time.monotonic()
                try:
                    self._policy.raise_unless_retryable(error, failing_since, "receive rollouts")
                except RolloutClientError as failure:
                    self._fail_all(failure)
                await asyncio.sleep(_RETRY_PAUSE_S)
            except Exception as error:  # a task that ended would leave all requests waiting
                self._fail_all(_as_client_error(error, "receiving rollouts"))
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _read_updates(self) -> tuple[list[OpenRequest], int]:
        """Return the open requests with news, and the number of updates; wait up to a second for them."""
        positions: dict[Any, Any] = dict(self._positions)
        reply: Any = await self._client.xread(positions, count=_UPDATES_PER_READ, block=READ_BLOCK_MS)
        updated: dict[OpenRequest, None] = {}
        num_updates = 0
        for stream, entries in reply or ():
            self._positions[stream.decode()] = entries[-1][0].decode()
            num_updates += len(entries)
            for _, fields in entries:
                request_id = fields[REQUEST_FIELD.encode()].decode()
                opened = self._open.get(request_id)
                if opened is not None:
                    updated[opened] = None
                if (sample := fields.get(b"s")) is not None:
                    self._note_result(request_id, opened, int(sample), int(fields[b"b"]), int(fields[b"w"]))
                elif opened is not None and stream.decode() != self._keys.token_updates:
                    opened.announce_any()  # a refusal
        return list(updated), num_updates

    def _note_result(
        self, request_id: str, opened: OpenRequest | None, sample: int, num_bytes: int, written: int
    ) -> None:
        """Record that a result was written, after which all results of this client had *written* bytes."""
        self._missed_updates = self._missed_updates or written - num_bytes != self._written
        self._written = written
        if opened is not None:
            opened.announce(sample, num_bytes)
            self._count(opened)
        elif self._leftovers is not None:
            self._leftovers.add([request_id])

    async def read(self, requests: Sequence[OpenRequest]) -> None:
        """Read what was announced of these requests.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
        """
        for batch in _batches(requests):
            await self._read_batch(batch)

    async def _read_batch(self, batch: Sequence[OpenRequest]) -> None:
        announced = [(opened, *opened.take_announced()) for opened in batch]
        streams = [
            (opened, sample)
            for opened in batch
            if isinstance(opened, AwaitedRequest) and opened.listeners
            for sample in opened.unfinished
        ]

        async def read() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for opened, samples, may_be_refused in announced:
                if may_be_refused:
                    pipeline.get(self._keys.refusal(opened.request.request_id))
                if samples:
                    pipeline.hmget(self._keys.results(opened.request.request_id), samples)
            for opened, sample in streams:
                key = self._keys.tokens(opened.request.request_id, sample)
                pipeline.xrange(key, f"({opened.num_streamed[sample]}-0")
            return list(await pipeline.execute())

        try:
            found = iter(await self._policy.run(read, action="receive rollouts"))
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
                opened.add(samples, results, refusal)
            self._count(opened)
            if opened.was_sent:
                self._sender.count_answered(num_missing - opened.num_missing)
        for opened, sample in streams:
            with _failing(opened):
                opened.add_tokens(sample, next(found))

    async def _read_any(self, requests: Sequence[OpenRequest]) -> None:
        """Read whatever there is of these requests, or tell their steps to do so."""
        for opened in requests:
            opened.announce_any()
        await self.read([opened for opened in requests if opened.is_wanted])
        for opened in requests:
            if opened.is_announced:
                opened.notify()

    async def _check(self) -> None:
        """Read whatever there is of all open requests that were sent. If the job has ended, the others fail."""
        ending = self.ending
        sent = [opened for opened in self._open.values() if opened.was_sent and opened.num_missing]
        await self._read_any(sent)
        if ending is not None:
            for opened in sent:
                if opened.num_missing:
                    opened.fail(ending)
            return
        for batch in _batches(opened for opened in sent if opened.num_missing):
            for opened, (_, mark) in zip(batch, await self._ledger_states(batch), strict=True):
                if mark is not None and self._open.get(opened.request.request_id) is opened:
                    opened.fail(_released_elsewhere(opened.request.request_id, self._name))

    async def _recover(self) -> None:
        """Redis was unreachable, and may have lost requests: send all open ones again. Repetitions are harmless."""
        await self._seek()
        sent = [opened for opened in self._open.values() if opened.was_sent and opened.num_missing]
        await self._read_any(sent)
        self._lost += sent
        self._has_work.set()

    async def _report_read(self) -> None:
        """Tell the job how many bytes of its results this client has read, so that it can hold back others."""
        num_read = self._written - self._num_unread_bytes
        if num_read != self._reported and time.monotonic() >= self._next_report:
            key = self._keys.results_read
            await execute_even_when_full(self._client, key, "HSET", key, self._name, num_read)
            self._reported, self._next_report = num_read, time.monotonic() + _REPORT_INTERVAL_S

    async def _repeat_cancellations(self) -> None:
        """Cancel requests again that were not answered since, because Redis may lose a cancellation in a crash."""
        if not self._next_cancellation or time.monotonic() < self._next_cancellation:
            return
        ids = [opened.request.request_id for opened in self._open.values() if _awaits_cancellation(opened)]
        await self._sender.cancel(ids)
        self._cancel_pause = min(2 * self._cancel_pause, _MAX_CANCEL_PAUSE_S)
        self._next_cancellation = time.monotonic() + self._cancel_pause if ids else 0.0


def first_id(request_id: str) -> str:
    """Return the id that a request had first: each time it is sampled again, it has a suffix, ``.r1``, ``.r2`` etc."""
    return _RESAMPLED_SUFFIX.sub("", request_id)


def _awaits_cancellation(opened: OpenRequest) -> bool:
    return opened.is_cancelled and opened.num_unanswered > 0


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
        opened.fail(_as_client_error(error, "receiving tokens"))


def _as_client_error(error: Exception, action: str) -> RolloutClientError:
    """Return the error for the callers of failed requests; an unexpected one is logged."""
    if isinstance(error, RolloutClientError):
        return error
    logger.error("%s failed.", action.capitalize(), exc_info=error)
    return RolloutClientError(f"{action} failed: {type(error).__name__}: {error}")


def _batches(requests: Iterable[OpenRequest]) -> Iterator[list[OpenRequest]]:
    listed = list(requests)
    for start in range(0, len(listed), _REQUESTS_PER_BATCH):
        yield listed[start : start + _REQUESTS_PER_BATCH]
