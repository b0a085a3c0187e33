"""The state of requests: their ledgers, and which of them are cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import redis.asyncio

from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import RolloutRequest, decode
from rollout_api.redis_client.retry import RetryPolicy
from rollout_api.redis_client.server_functions import async_function
from rollout_store.job.ledger import META_FIELDS
from rollout_store.job.part import StorePart


class Admission(IntEnum):
    """The outcome of admitting a request. The values are those that ``admit.lua`` returns."""

    NEW = 2
    """The request is open now; none of its rollouts has been produced."""
    KNOWN = 1
    """The request was opened earlier; those of its rollouts that have not ended are to be produced."""
    REPEATED = 0
    """The request is already open under another entry."""
    ANSWERED = -1
    """The request was already answered."""
    CONFLICT = -2
    """A request with this id is open and asks for another number of samples."""
    GONE = -3
    """The entry does not exist any more: its request is answered, or Redis has lost it in a restart."""


class RequestProgress(NamedTuple):
    """How far a request is answered."""

    done: frozenset[int]
    """Samples in the ledger."""
    cancelled: bool


class RequestStore(StorePart):
    """Admits requests and reads their progress."""

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, retries: RetryPolicy | None = None) -> None:
        super().__init__(client, keys, retries)
        self._admit = async_function(client, __package__, "admit")
        self._cancel = async_function(client, __package__, "cancel")

    async def admit(self, entry_id: str, request: RolloutRequest) -> Admission:
        """Open the ledger of a request. Unless the result is NEW or KNOWN, the entry is deleted."""
        ledger = self._keys.ledger(request.request_id)
        result = await self._admit(keys=[ledger, self._keys.requests], args=[entry_id, request.sampling.n])
        return Admission(int(result))

    async def read(self, entry_id: str) -> RolloutRequest | None:
        """Return the request of an entry as the client sent it; None once the request is answered."""
        found: Any = await self._client.xrange(self._keys.requests, min=entry_id, max=entry_id)
        if not found:
            return None
        message = decode(found[0][1][MESSAGE_FIELD.encode()])
        return message if isinstance(message, RolloutRequest) else None

    async def progress(self, request_ids: Sequence[str]) -> list[RequestProgress]:
        """Return the progress of each request."""
        pipeline = self._client.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.hkeys(self._keys.ledger(request_id))
            pipeline.hget(self._keys.ledger(request_id), "cancelled")
        replies = await pipeline.execute()
        return [
            RequestProgress(frozenset(int(key) for key in fields if key not in META_FIELDS), cancelled == b"1")
            for fields, cancelled in zip(replies[::2], replies[1::2], strict=True)
        ]

    async def mark_cancelled(self, request_ids: Sequence[str]) -> None:
        """Record that requests were cancelled; unknown requests are ignored."""
        await self._cancel(keys=[self._keys.ledger(request_id) for request_id in request_ids])

    async def trajectory_engines(self, requests: Sequence[RolloutRequest]) -> list[str | None]:
        """Return for each request the engine that has its prefix cached; None for the first turn or if none has."""
        if not any(request.turn for request in requests):
            return [None] * len(requests)
        keys = [self._keys.trajectory(request.trajectory_id or "") for request in requests]
        found = await self._client.mget(keys)
        return [
            str(engine, "utf-8") if isinstance(engine, bytes) and request.turn else None
            for engine, request in zip(found, requests, strict=True)
        ]
