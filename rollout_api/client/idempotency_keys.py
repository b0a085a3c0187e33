"""Which request an idempotency key belongs to, so that all servers of a job refuse the key for other requests."""

from __future__ import annotations

from typing import Any

import redis.asyncio

from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import MAX_KEEP_SECONDS
from rollout_api.redis_client.retry import ClientRetryPolicy


class IdempotencyKeys:
    """Reads and writes the fingerprints of the requests that have idempotency keys.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        policy: how failing commands are retried.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, policy: ClientRetryPolicy) -> None:
        self._client, self._keys, self._policy = client, keys, policy

    async def claim(self, key: str, fingerprint: bytes) -> bytes | None:
        """Give a key to a request unless another one has it; return the fingerprint of the one that had it before.

        The request has the key for a day, unless :meth:`keep` or :meth:`release` ends this earlier.

        Raises:
            RolloutClientError: Redis cannot be written.
        """
        name = self._keys.idempotency(key)
        owner: Any = await self._policy.run(
            lambda: self._client.set(name, fingerprint, nx=True, get=True, ex=MAX_KEEP_SECONDS),
            action="record an idempotency key",
        )
        return None if owner is None else bytes(owner)

    async def keep(self, key: str, seconds: int) -> None:
        """Let a request have its key for this many seconds from now on, or for less if less is left.

        Raises:
            RolloutClientError: Redis cannot be written.
        """
        name = self._keys.idempotency(key)
        await self._policy.run(
            lambda: self._client.expire(name, seconds, lt=True), action="limit the lifetime of an idempotency key"
        )

    async def release(self, key: str) -> None:
        """Let any request have the key.

        Raises:
            RolloutClientError: Redis cannot be written.
        """
        name = self._keys.idempotency(key)
        await self._policy.run(lambda: self._client.delete(name), action="release an idempotency key")
