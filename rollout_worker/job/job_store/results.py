"""The result streams, from which clients read their rollouts."""

from __future__ import annotations

from typing import NamedTuple

import redis.asyncio

from rollout_api.protocol.keys import MESSAGE_FIELD, MessageKeys
from rollout_api.protocol.messages import Message, encode


class UnreadResults(NamedTuple):
    """Results that a client has not read."""

    num_results: int
    size_bytes: int
    """Approximate memory of the results."""


class ResultStore:
    """Sends messages to clients and counts what they have not read."""

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys) -> None:
        self._client, self._keys = client, keys

    async def send(self, client: str, message: Message) -> None:
        """Append a message to a client's result stream."""
        await self._client.xadd(self._keys.results(client), {MESSAGE_FIELD: encode(message)})

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
