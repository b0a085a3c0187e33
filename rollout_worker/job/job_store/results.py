"""Results for clients: the streams from which they read their rollouts, and results that are kept by request."""

from __future__ import annotations

from typing import NamedTuple

import redis.asyncio

from rollout_api.protocol.keys import KEPT_REFUSAL_FIELD, MESSAGE_FIELD, REQUEST_FIELD, MessageKeys
from rollout_api.protocol.messages import Refusal, RolloutRequest, encode
from rollout_worker.job.limits import MAX_EVENTS


class UnreadResults(NamedTuple):
    """Results that a client has not read."""

    num_results: int
    size_bytes: int
    """Approximate memory of the results."""


class ResultStore:
    """Refuses requests, and counts the results that clients have not read."""

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys) -> None:
        self._client, self._keys = client, keys

    async def refuse(self, request: RolloutRequest, refusal: Refusal) -> None:
        """Tell the client of a request that it is refused, where it would get the rollouts."""
        if request.keep_seconds is None:
            await self._client.xadd(self._keys.results(request.reply_to), {MESSAGE_FIELD: encode(refusal)})
            return
        kept = self._keys.kept(request.request_id)
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.hset(kept, KEPT_REFUSAL_FIELD, encode(refusal))
            pipeline.expire(kept, request.keep_seconds)
            pipeline.xadd(self._keys.kept_updates, {REQUEST_FIELD: request.request_id}, maxlen=MAX_EVENTS)
            await pipeline.execute()

    async def unread(self, client: str) -> UnreadResults:
        """Return how many results a client has not read."""
        stream = self._keys.results(client)
        length = int(await self._client.xlen(stream))
        if not length:
            return UnreadResults(0, 0)
        groups = await self._client.xinfo_groups(stream)
        lags = [group.get("lag") for group in groups]
        # Redis cannot always tell the lag (None); the whole stream is then counted as unread.
        unread = max((length if lag is None else int(lag) for lag in lags), default=length)
        size = int(await self._client.memory_usage(stream, samples=5) or 0)
        return UnreadResults(unread, size * unread // length)
