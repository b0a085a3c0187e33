"""Receives a client's results: reads its result stream in one task, and acknowledges what its steps have consumed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgpack
import redis

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.limits import ClientLimits
from rollout_api.client.result_router import ResultRouter
from rollout_api.client.result_stream import ResultStream, is_stream_gone
from rollout_api.client.step_state import DeferredResult, Entries, StepState
from rollout_api.errors import NameInUseError, RolloutClientError, UnreadableResultError
from rollout_api.protocol.messages import CodecError, Refusal, Rollout, RolloutId, decode
from rollout_api.redis_client.batch_pacer import BatchPacer
from rollout_api.redis_client.retry import ClientRetryPolicy

logger = logging.getLogger(__name__)

_READ_RETRY_PAUSE_S = 0.2
"""Pause after a failed read of results."""


class ResultReceiver:
    """Reads one client's results in one task and puts each into the state of the step that requested it.

    A result is acknowledged when its step has ended. What was delivered but not acknowledged is delivered again to the
    next client of this name.

    Args:
        stream: result stream of the client.
        name: name of the client.
        policy: how failing reads are retried.
        limits: limits of the client.
        ending: error to raise for missing results if the job has ended already.
    """

    def __init__(
        self,
        stream: ResultStream,
        name: str,
        policy: ClientRetryPolicy,
        limits: ClientLimits,
        ending: RolloutClientError | None = None,
    ) -> None:
        self._stream, self._name = stream, name
        self._policy, self._limits = policy, limits
        self._router = ResultRouter(name)
        self.ending = ending
        """Why no further results will come; None while they may. Results that are in Redis are still received."""
        self._to_acknowledge: list[str] = []
        """Ids of entries that no step needs and that are not acknowledged yet."""
        self._last_entry_id = "0-0"
        self._was_interrupted = False
        """Whether Redis may have lost data, or the reply to a read, since the last successful read."""
        self._demand = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Create the consumer group, and learn which results were delivered to an earlier client of this name.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long.
            RedisRefusedError: Redis refused a command.
        """
        await self._stream.create()
        while entries := await self._stream.read_delivered(self._last_entry_id):
            await self._route_all(entries)
        num_results, num_requests = self._router.num_held
        if num_results:
            logger.info(
                "%d results of %d requests were delivered before and not acknowledged; they go to the steps that "
                "request them again.",
                num_results,
                num_requests,
            )

    def start(self) -> None:
        """Start reading, or start again after a failure."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"results of {self._name}")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    @property
    def num_awaited(self) -> int:
        """Number of rollouts that were requested and have not been received, over all open steps."""
        return self._router.num_awaited

    # Steps.

    def is_registered(self, request_id: str) -> bool:
        """Return whether an open step has requested this id."""
        return self._router.is_registered(request_id)

    def register(self, state: StepState, request_ids: Iterable[str]) -> None:
        """Put the results of these requests into *state* from now on."""
        self._router.register(state, request_ids)

    def release(self, state: StepState) -> None:
        """Keep the results of a step that was left by an exception until it is opened again."""
        self._router.release(state)
        self.notify_demand()

    async def finish(self, state: StepState) -> None:
        """Acknowledge the results of a step that has ended. Later results of it or of earlier steps are dropped.

        The results of one request are acknowledged in one command. If that fails, either all results of the request are
        still in Redis or none are.

        Raises:
            RedisUnreachableError: Redis was unreachable for too long; *state* still has the entries that are left.
        """
        self._to_acknowledge += self._router.finish(state)
        self.notify_demand()
        await self._flush_acknowledgements()
        for batch in list(_batches(state.entry_ids, self._limits.acknowledge_batch)):
            await self._stream.acknowledge(
                [entry_id for request_id in batch for entry_id in state.entry_ids[request_id]]
            )
            for request_id in batch:
                state.mark_acknowledged(request_id)

    async def fetch(self, deferred: Sequence[DeferredResult]) -> Entries:
        """Read results that were received before but stayed in Redis.

        Raises:
            RolloutClientError: Redis failed.
        """
        return await self._stream.fetch([result.entry_id for result in deferred])

    async def dead_letter(self, entry_id: str, data: bytes, reason: str) -> None:
        """Move a result that cannot be read to the dead letters.

        Raises:
            RolloutClientError: Redis failed.
        """
        await self._stream.dead_letter(entry_id, data, reason)

    def notify_demand(self) -> None:
        """Make the task check again whether it should read: a rollout was consumed, or a consumer waits for one."""
        self._demand.set()

    # Reading.

    async def _run(self) -> None:
        try:
            await self._read_forever()
        except RolloutClientError as error:
            failure = error
        except Exception as error:
            logger.exception("Reading results failed.")
            failure = RolloutClientError(f"reading results failed: {type(error).__name__}: {error}")
        self._was_interrupted = True
        self._router.fail_all(failure)

    async def _read_forever(self) -> None:
        position = self._last_entry_id if self._was_interrupted else ">"
        failing_since: float | None = None
        pacer, next_read = BatchPacer(), 0.0
        while True:
            await self._wait_for_demand()
            if (pause := next_read - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            ending = self.ending
            if isinstance(ending, NameInUseError):
                raise ending  # another read would take results from the process that has the name now
            try:
                entries = await self._stream.read(position)
            except redis.RedisError as error:
                if is_stream_gone(error):
                    if (gone := await self._stream.recreate()) is not None:
                        self._router.fail_all(gone)
                else:
                    failing_since = failing_since or time.monotonic()
                    self._policy.raise_unless_retryable(error, failing_since, "read results")
                    # Entries of a reply that was lost are behind the last entry that arrived.
                    position, self._was_interrupted = self._last_entry_id, True
                await asyncio.sleep(_READ_RETRY_PAUSE_S)
                continue
            failing_since = None
            now = time.monotonic()
            pause = pacer.pause(len(entries), now)
            next_read = now + pause if len(entries) < self._limits.read_batch else now
            await self._route_all(entries)
            await self._flush_acknowledgements()
            if position != ">":
                position = self._last_entry_id if entries else ">"
            elif self._was_interrupted:
                self._was_interrupted = False
                self._router.request_resend()
            elif not entries and ending is not None:
                self._router.fail_all(ending)

    async def _wait_for_demand(self) -> None:
        while self._is_full() and not self._router.has_waiter:
            self._demand.clear()
            await self._demand.wait()

    def _is_full(self) -> bool:
        """Return whether as many rollouts are unread as may be in memory."""
        return self._router.num_unread >= self._limits.max_unread

    async def _route_all(self, entries: Entries) -> None:
        for entry_id, data in entries:
            self._last_entry_id = entry_id
            if data is None:
                # It was delivered once, and something other than an acknowledgement has deleted it since.
                self._to_acknowledge.append(entry_id)
                continue
            try:
                self._route(entry_id, decode(data))
            except CodecError as error:
                await self._handle_unreadable(entry_id, data, str(error))

    def _route(self, entry_id: str, message: object) -> None:
        if isinstance(message, Refusal):
            self._router.refuse(entry_id, message)
            # It need not be kept: a request that is sent again is refused again.
            self._to_acknowledge.append(entry_id)
            return
        if not isinstance(message, Rollout):
            raise CodecError(f"it is a {type(message).__name__}, not a result")
        try:
            rollout_id = RolloutId.parse(message.rollout_id)
        except ValueError as error:
            raise CodecError(str(error)) from None
        self._to_acknowledge += self._router.route(entry_id, rollout_id, message, is_full=self._is_full())

    async def _handle_unreadable(self, entry_id: str, data: bytes, reason: str) -> None:
        await self._stream.dead_letter(entry_id, data, reason)
        if (rollout_id := _rollout_id_of(data)) is None:
            self._router.fail_all(UnreadableResultError({f"entry {entry_id}": reason}))
        else:
            self._router.mark_unreadable(rollout_id, reason)

    async def _flush_acknowledgements(self) -> None:
        entry_ids, self._to_acknowledge = self._to_acknowledge, []
        try:
            await self._stream.acknowledge(entry_ids)
        except RolloutClientError:
            self._to_acknowledge += entry_ids
            raise


def _batches(entry_ids: Mapping[str, Mapping[str, int]], size: int) -> Iterator[list[str]]:
    """Divide requests into batches of about *size* entries that are acknowledged together."""
    batch: list[str] = []
    num_entries = 0
    for request_id, of_request in entry_ids.items():
        if batch and num_entries + len(of_request) > size:
            yield batch
            batch, num_entries = [], 0
        batch.append(request_id)
        num_entries += len(of_request)
    if batch:
        yield batch


def _rollout_id_of(data: bytes) -> RolloutId | None:
    """Return the rollout id in a result that cannot be decoded completely; None if the id cannot be decoded."""
    try:
        return RolloutId.parse(msgpack.unpackb(data, raw=False)["rollout_id"])
    except Exception:  # msgpack raises a dozen unrelated types, and the id may be of any type
        return None
