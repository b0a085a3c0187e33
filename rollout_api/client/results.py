"""Requests of a client, and the results that the job keeps under their ids."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from rollout_api.asyncio_tasks import cancel_and_wait
from rollout_api.client.job_channel import JobChannel
from rollout_api.client.job_info import PreparedRequest
from rollout_api.client.open_request import (
    REQUESTS_PER_BATCH,
    AwaitedRequest,
    Leftovers,
    OpenRequest,
    OpenRequests,
    TokensCallback,
)
from rollout_api.client.request_queue import RequestQueue
from rollout_api.client.result_reader import ResultReader
from rollout_api.errors import RolloutClientError
from rollout_api.protocol.keys import LEDGER_RETENTION_S
from rollout_api.protocol.messages import Rollout
from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.redis_client.server_functions import Call, Function, execute_even_when_full, run_async

logger = logging.getLogger(__name__)

_RELEASE = Function("release")


class Results:
    """The requests of a client, and their results.

    The job samples a request once, however many processes send it, and keeps the results under the id of the request.

    Args:
        channel: channel to the job.
        leftovers: receives the requests with results that no step awaits; None if the results expire.
    """

    def __init__(self, channel: JobChannel, leftovers: Leftovers | None = None) -> None:
        self._client, self._keys, self._policy = channel.redis, channel.keys, channel.policy
        self._name, self._leftovers = channel.client_name, leftovers
        self._requests = OpenRequests(leftovers)
        self._reader = ResultReader(channel, self._requests, with_tokens=leftovers is None)
        self._queue = RequestQueue(channel, self._requests, self._reader)
        self._tasks: list[asyncio.Task[None]] = []
        self._newest_step = -1
        """Greatest number of a step that was opened under this name."""

    async def open(self) -> None:
        """Receive results from now on, and send requests."""
        await self._reader.open()
        if self._leftovers is not None:
            found, newest_step = await self._policy.run(self._read_earlier, action="receive rollouts")
            self._newest_step = int(newest_step or -1)
            self._leftovers.add((request_id.decode() for request_id in found), when=0)
            if found:
                logger.info(
                    "Results of %d requests of an earlier trainer with this name are kept; they go to the steps that "
                    "request them again.",
                    len(found),
                )
        self._tasks = [
            asyncio.create_task(self._queue.run(), name=f"requests of {self._name}"),
            asyncio.create_task(self._reader.run(), name=f"results of {self._name}"),
        ]

    async def _read_earlier(self) -> Any:
        """Read which requests have results, and the newest step, of earlier processes with this name."""
        pipeline = self._client.pipeline(transaction=False)
        pipeline.smembers(self._keys.unreleased(self._name))
        pipeline.hget(self._keys.newest_steps, self._name)
        return await pipeline.execute()

    async def open_step(self, number: int) -> bool:
        """Record that a step is opened; return whether its requests may have been sent before."""
        if number <= self._newest_step:
            return True
        key = self._keys.newest_steps
        command = partial(execute_even_when_full, self._client, key, "HSET", key, self._name, number)
        await self._policy.run(command, action="open a step")
        self._newest_step = max(self._newest_step, number)
        return False

    async def close(self, error: RolloutClientError) -> None:
        """Stop sending and receiving; whoever waits for results gets *error*."""
        await cancel_and_wait(*self._tasks)
        self._requests.fail_all(error)

    @property
    def num_awaited(self) -> int:
        """Number of rollouts that were requested and have not been received."""
        return self._requests.num_awaited

    @property
    def digests(self) -> Mapping[str, str]:
        """Rollout id → digest of the tokens that were received, for the training rollouts received last."""
        return self._requests.digests

    def observe(self, status: CoordinatorStatus | None, ending: RolloutClientError | None) -> None:
        """Take note of the job's state.

        Args:
            status: its status, which says how many rollouts it has room for.
            ending: why no further results will come; None while they may. Results that are in Redis are still read.
        """
        self._queue.observe_status(status)
        self._requests.ending = ending

    def add(self, requests: Sequence[OpenRequest]) -> None:
        """Send requests when the job has room for them, and receive their results."""
        for opened in requests:
            self._requests.register(opened)
        self._requests.unsent.extend(requests)
        self._requests.has_work.set()

    def remove(self, requests: Iterable[OpenRequest], *, keep: bool = False) -> None:
        """Stop receiving the results of requests.

        Args:
            requests: the requests.
            keep: whether to remember that their results may be there for a later step.
        """
        for opened in requests:
            self._requests.unregister(opened, keep=keep)
            opened.has_ended = True
            self._requests.count(opened)

    async def read(self, requests: Sequence[OpenRequest]) -> None:
        """Read what was announced of these requests."""
        await self._reader.read(requests)

    async def cancel(self, requests: Iterable[OpenRequest], *, withdrawal: RolloutClientError) -> None:
        """Cancel requests; see :meth:`RequestQueue.cancel`."""
        await self._queue.cancel(requests, withdrawal=withdrawal)

    async def release(self, request_ids: Sequence[str]) -> None:
        """Delete results that are not needed any more. Later results of these requests are dropped.

        The results of one request are deleted in one command, which also runs while Redis is full.
        """
        for start in range(0, len(request_ids), REQUESTS_PER_BATCH):
            batch = request_ids[start : start + REQUESTS_PER_BATCH]
            keys = [self._keys.job, self._keys.unreleased(self._name)]
            keys += [key for name in batch for key in (self._keys.ledger(name), self._keys.results(name))]
            call = Call(_RELEASE, keys, [LEDGER_RETENTION_S, *batch])
            await self._policy.run(partial(run_async, self._client, call), action="release results")

    async def rollouts(
        self,
        request: PreparedRequest,
        *,
        may_be_answered: bool,
        on_tokens: TokensCallback | None = None,
        may_wait: bool = True,
    ) -> list[Rollout]:
        """See :meth:`rollout_api.RequestClient.receive`."""
        found = self._requests.get(request.request_id)
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
                        self._requests.abandoned.append(opened.request.request_id)
                        self._requests.has_work.set()
                self.remove([opened])
