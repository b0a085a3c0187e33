"""Names of the LoRA adapters that were published over HTTP, which all servers of a job share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from typing_extensions import Self

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.retry import ClientRetryPolicy


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter that has a name."""

    path: str
    """Directory of the adapter, as the engines see it."""
    weight_version: int
    """Version under which it was published."""

    def encode(self) -> str:
        """Return the adapter as JSON."""
        return json.dumps({"path": self.path, "weight_version": self.weight_version})

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the adapter that *data* encodes."""
        return cls(**json.loads(data))


class AdapterNames:
    """Reads and writes the names of a job's adapters.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        policy: how failing commands are retried.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, policy: ClientRetryPolicy) -> None:
        self._client, self._key, self._policy = client, keys.adapters, policy

    async def set(self, name: str, adapter: NamedAdapter) -> None:
        """Give an adapter a name; an adapter that has this name loses it.

        Raises:
            RolloutClientError: Redis cannot be written.
        """
        await self._policy.run(
            lambda: self._client.hset(self._key, name, adapter.encode()), action="store the name of an adapter"
        )

    async def get(self, name: str) -> NamedAdapter | None:
        """Return the adapter with this name; None if there is none.

        Raises:
            RolloutClientError: Redis cannot be read.
        """
        found: Any = await self._policy.run(
            lambda: self._client.hget(self._key, name), action="read the name of an adapter"
        )
        return None if found is None else NamedAdapter.decode(found)

    async def delete(self, name: str) -> bool:
        """Forget a name; return whether an adapter had it.

        Raises:
            RolloutClientError: Redis cannot be written.
        """
        deleted: Any = await self._policy.run(
            lambda: self._client.hdel(self._key, name), action="delete the name of an adapter"
        )
        return bool(deleted)
