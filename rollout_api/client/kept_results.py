"""Requests whose rollouts are kept under their ids: sends them, and receives their rollouts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.asyncio

from rollout_api.client.job_info import PreparedRequest
from rollout_api.client.request_sender import RequestSender
from rollout_api.errors import JobFullError, RequestRefusedError, RolloutClientError, UnreadableResultError
from rollout_api.protocol.keys import KEPT_REFUSAL_FIELD, MESSAGE_FIELD, REQUEST_FIELD, MessageKeys
from rollout_api.protocol.messages import CodecError, FinishReason, Partial, Refusal, Rollout, decode
from rollout_api.redis_client.client_connection import READ_BLOCK_MS
from rollout_api.redis_client.retry import ClientRetryPolicy

logger = logging.getLogger(__name__)

TokensCallback = Callable[[int, Partial], None]
"""Receives a sample, and the tokens that follow those of the previous call for this sample."""

_LOST_TOKENS = (
    "Redis was restarted and has lost tokens that were streamed; send the request again to receive the rollout that "
    "was sampled instead"
)
_UPDATES_PER_READ = 1000
"""Updates that are read from Redis at once."""
_REQUESTS_PER_BATCH = 256
"""Requests that are sent, or whose rollouts are read, in one round trip."""
_CHECK_INTERVAL_S = 5.0
"""Time between two checks of all open requests, because the stream of updates is trimmed."""
_RETRY_PAUSE_S = 0.2
"""Pause after a failed read."""


@dataclass(eq=False)
class _OpenRequest:
    """A request whose rollouts are awaited."""

    request: PreparedRequest
    may_be_answered: bool
    """Whether the rollouts may be there already."""
    may_wait: bool
    """Whether it may wait in Redis while the job has no room for it."""
    answer: asyncio.Future[list[Rollout]]
    received: dict[int, Rollout] = field(default_factory=dict)
    """Sample → rollout."""
    listeners: list[TokensCallback] = field(default_factory=list)
    """Receive the tokens of unfinished rollouts."""
    streamed: dict[int, list[Partial]] = field(default_factory=dict)
    """Sample → its tokens that were streamed."""
    num_streamed: Counter[int] = field(default_factory=Counter)
    """Sample → number of its tokens that were streamed."""
    num_waiters: int = 0
    was_sent: bool = False

    @property
    def num_missing(self) -> int:
        """Number of rollouts that were not received yet."""
        return self.request.n - len(self.received)

    def fail(self, error: RolloutClientError) -> None:
        """Make all waiters raise *error*."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # it is no mistake if nobody waits any more

    def listen(self, listener: TokensCallback) -> None:
        """Pass all tokens of unfinished rollouts to *listener*, beginning with those that have been streamed before."""
        for sample, parts in self.streamed.items():
            for part in parts:
                listener(sample, part)
        self.listeners.append(listener)

    def add_tokens(self, sample: int, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
        """Pass on what was read from the stream of a sample's tokens.

        Raises:
            CodecError: an entry cannot be decoded.
        """
        if sample in self.received or self.answer.done():
            return
        for entry_id, fields in entries:
            part = decode(fields[MESSAGE_FIELD.encode()])
            if not isinstance(part, Partial):
                raise CodecError(f"a {part.kind} in place of tokens")
            end, num_streamed = int(entry_id.partition(b"-")[0]), self.num_streamed[sample]
            if end <= num_streamed:  # another task has read it meanwhile
                continue
            if end - part.num_tokens != num_streamed:
                raise CodecError(_LOST_TOKENS)
            self.streamed.setdefault(sample, []).append(part)
            self.num_streamed[sample] = end
            for listener in self.listeners:
                listener(sample, part)

    def add(self, fields: Sequence[str], values: Sequence[bytes | None]) -> None:
        """Add what was read.

        Args:
            fields: samples, and the field of a refusal.
            values: encoded message of each; None for those that are not there.

        Raises:
            CodecError: a message cannot be decoded.
        """
        refusal: Refusal | None = None
        for name, value in zip(fields, values, strict=True):
            message = None if value is None else decode(value)
            if isinstance(message, Rollout):
                self._check_streamed(int(name), message)
                self.received[int(name)] = message
            elif isinstance(message, Refusal):
                refusal = message
        if self.answer.done():
            return
        if len(self.received) == self.request.n:
            self.answer.set_result([self.received[sample] for sample in range(self.request.n)])
        elif refusal is not None:
            self.fail(RequestRefusedError({refusal.request_id: refusal.reason}))

    def _check_streamed(self, sample: int, rollout: Rollout) -> None:
        streamed = [token for part in self.streamed.get(sample, ()) for token in part.token_ids]
        if rollout.finish_reason is not FinishReason.FAILED and rollout.token_ids[: len(streamed)] != streamed:
            raise CodecError(_LOST_TOKENS)


class KeptResults:
    """Sends requests that have ``keep_seconds``, and receives their rollouts.

    The job samples a request once, however many processes send it, and each of them receives the same rollouts.

    One task sends requests, another one receives. The job names requests with new rollouts in a short stream. Since old
    entries of it are trimmed, all open requests are checked every few seconds, too.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        sender: appends requests to the job's stream.
        policy: how failing commands are retried.
    """

    def __init__(
        self, client: redis.asyncio.Redis, keys: MessageKeys, sender: RequestSender, policy: ClientRetryPolicy
    ) -> None:
        self.ending: RolloutClientError | None = None
        """Why no further rollouts will come; None while they may."""
        self._client, self._keys, self._sender, self._policy = client, keys, sender, policy
        self._open: dict[str, _OpenRequest] = {}
        self._unsent: list[_OpenRequest] = []
        self._abandoned: list[str] = []
        self._has_work = asyncio.Event()
        self._positions: dict[str, str] = dict.fromkeys((keys.kept_updates, keys.token_updates), "0")
        """Stream of updates → id of the last entry that was read."""

    @property
    def num_awaited(self) -> int:
        """Number of rollouts that are awaited."""
        return sum(opened.num_missing for opened in self._open.values())

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
            may_wait: whether it may wait in Redis while the job has no room for it.

        Raises:
            JobFullError: the job has no room, and the request may not wait.
            RequestRefusedError: the job refused the request, or no longer keeps its rollouts.
            UnreadableResultError: a rollout cannot be decoded.
            JobEndedError: the job has ended.
            RedisUnreachableError: Redis was unreachable for too long.
        """
        opened = self._open.get(request.request_id)
        if opened is None:
            answer: asyncio.Future[list[Rollout]] = asyncio.get_running_loop().create_future()
            opened = self._open[request.request_id] = _OpenRequest(request, may_be_answered, may_wait, answer)
            self._unsent.append(opened)
            self._has_work.set()
        opened.num_waiters += 1
        if on_tokens is not None:
            opened.listen(on_tokens)
        try:
            return await asyncio.shield(opened.answer)
        finally:
            opened.num_waiters -= 1
            if on_tokens is not None:
                opened.listeners.remove(on_tokens)
            if not opened.num_waiters:
                del self._open[request.request_id]
                if not opened.answer.done():
                    opened.answer.cancel()
                    self._abandon(opened)

    def fail_all(self, error: RolloutClientError) -> None:
        """Make all open requests fail."""
        for opened in self._open.values():
            opened.fail(error)

    def _abandon(self, opened: _OpenRequest) -> None:
        """Cancel a request for which nobody waits, unless it may be repeated."""
        if opened.was_sent and not opened.may_be_answered:
            self._abandoned.append(opened.request.request_id)
            self._has_work.set()

    # Sending.

    async def send(self) -> None:
        """Send requests and cancellations until this task is cancelled."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            unsent, self._unsent = self._unsent, []
            for batch in _batches(opened for opened in unsent if not opened.answer.done()):
                try:
                    await self._send(batch)
                except Exception as error:
                    failure = _as_client_error(error, "sending requests")
                    for opened in batch:
                        opened.fail(failure)
            abandoned, self._abandoned = self._abandoned, []
            if abandoned:
                try:
                    await self._sender.cancel(abandoned)
                except RolloutClientError as error:
                    logger.warning("Cannot cancel %d requests: %s", len(abandoned), error)

    async def _send(self, batch: Sequence[_OpenRequest]) -> None:
        await self._fetch([opened for opened in batch if opened.may_be_answered])
        batch = [opened for opened in batch if not opened.answer.done()]
        if batch and self.ending is not None:
            raise self.ending
        num_awaited = sum(opened.num_missing for opened in self._open.values() if opened.was_sent)
        excess: list[_OpenRequest] = []
        for opened in batch:
            if opened.may_wait or self._sender.has_room(opened.request.n, num_awaited):
                opened.was_sent = True
                self._sender.count_sent(opened.request.n)
                num_awaited += opened.request.n
            else:
                excess.append(opened)
        for opened in await self._not_admitted(excess):
            opened.fail(
                JobFullError(
                    "the job has as many open rollouts as it may have (spec.queue.maxRollouts); try again later"
                )
            )
        for opened in excess:
            opened.was_sent = not opened.answer.done()
        batch = [opened for opened in batch if opened.was_sent]
        await self._sender.append(self._keys.requests, [opened.request.data for opened in batch], "send requests")

    async def _not_admitted(self, batch: Sequence[_OpenRequest]) -> list[_OpenRequest]:
        """Return the requests that the job has not admitted before, from this process or another one."""

        async def read() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for opened in batch:
                pipeline.exists(self._keys.ledger(opened.request.request_id))
            return list(await pipeline.execute())

        found = await self._policy.run(read, action="send requests") if batch else []
        return [opened for opened, is_admitted in zip(batch, found, strict=True) if not is_admitted]

    # Receiving.

    async def open(self) -> None:
        """Receive updates from now on.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
            RedisRefusedError: Redis refused a command.
        """

        async def last_updates() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for stream in self._positions:
                pipeline.xrevrange(stream, count=1)
            return list(await pipeline.execute())

        newest = await self._policy.run(last_updates, action="receive rollouts")
        self._positions = {
            stream: entries[0][0].decode() if entries else "0"
            for stream, entries in zip(self._positions, newest, strict=True)
        }

    async def receive(self) -> None:
        """Receive rollouts until this task is cancelled. While Redis is unreachable for too long, requests fail."""
        failing_since: float | None = None
        checked_at = time.monotonic()
        while True:
            try:
                updated = await self._read_updates()
                if failing_since is not None:
                    await self._send_again()
                    failing_since = None
                is_check_due = time.monotonic() - checked_at > _CHECK_INTERVAL_S
                if is_check_due:
                    checked_at = time.monotonic()
                selected = list(self._open.values()) if is_check_due else updated
                for batch in _batches(opened for opened in selected if not opened.answer.done()):
                    await self._fetch(batch)
                if self.ending is not None and is_check_due:
                    self.fail_all(self.ending)
            except redis.RedisError as error:
                failing_since = failing_since or time.monotonic()
                try:
                    self._policy.raise_unless_retryable(error, failing_since, "receive rollouts")
                except RolloutClientError as failure:
                    self.fail_all(failure)
                await asyncio.sleep(_RETRY_PAUSE_S)
            except Exception as error:  # a task that ended would leave all requests waiting
                self.fail_all(_as_client_error(error, "receiving rollouts"))
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _read_updates(self) -> list[_OpenRequest]:
        """Return the open requests with new rollouts, or with new tokens; wait up to a second for them."""
        positions: dict[Any, Any] = dict(self._positions)
        reply: Any = await self._client.xread(positions, count=_UPDATES_PER_READ, block=READ_BLOCK_MS)
        updated: set[str] = set()
        for stream, entries in reply or ():
            self._positions[stream.decode()] = entries[-1][0].decode()
            updated |= {fields[REQUEST_FIELD.encode()].decode() for _, fields in entries}
        return [opened for request_id in updated if (opened := self._open.get(request_id)) is not None]

    async def _send_again(self) -> None:
        """Send all open requests again: Redis was unreachable and may have lost them. Repetitions are harmless."""
        for batch in _batches(opened for opened in self._open.values() if opened.was_sent):
            await self._fetch(batch)
            lost = [opened.request.data for opened in batch if not opened.answer.done()]
            await self._sender.append(self._keys.requests, lost, "send requests")

    async def _fetch(self, batch: Sequence[_OpenRequest]) -> None:
        """Read what is kept for these requests."""
        if not batch:
            return
        fields = [
            [*(str(sample) for sample in range(opened.request.n) if sample not in opened.received), KEPT_REFUSAL_FIELD]
            for opened in batch
        ]

        streams = [
            (opened, sample)
            for opened in batch
            if opened.listeners
            for sample in range(opened.request.n)
            if sample not in opened.received
        ]

        async def read() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for opened, names in zip(batch, fields, strict=True):
                pipeline.hmget(self._keys.kept(opened.request.request_id), names)
            for opened, sample in streams:
                key = self._keys.tokens(opened.request.request_id, sample)
                pipeline.xrange(key, f"({opened.num_streamed[sample]}-0")
            return list(await pipeline.execute())

        found = await self._policy.run(read, action="receive rollouts")
        for opened, names, values in zip(batch, fields, found[: len(batch)], strict=True):
            was_awaited = opened.was_sent and not opened.answer.done()
            with _failing(opened):
                opened.add(names, values)
            if was_awaited and opened.answer.done():
                self._sender.count_answered(opened.request.n)
        for (opened, sample), entries in zip(streams, found[len(batch) :], strict=True):
            with _failing(opened):
                opened.add_tokens(sample, entries)


@contextmanager
def _failing(opened: _OpenRequest) -> Iterator[None]:
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


def _batches(requests: Iterable[_OpenRequest]) -> Iterable[list[_OpenRequest]]:
    listed = list(requests)
    return [listed[start : start + _REQUESTS_PER_BATCH] for start in range(0, len(listed), _REQUESTS_PER_BATCH)]
