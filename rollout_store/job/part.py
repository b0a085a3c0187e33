"""The common part of all parts of a job's state: the connection, the keys, and retries."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any, TypeVar

import redis.asyncio

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.retry import RetryPolicy, retry_async

_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Any]])


class StorePart:
    """A part of a job's state in Redis.

    Its public coroutine methods are repeated while Redis is unreachable or full. They are idempotent, because the reply
    to a command that was executed may be lost.

    Args:
        client: connection to Redis.
        keys: keys of the job.
        retries: how they are repeated; None if they raise an error at once.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, retries: RetryPolicy | None = None) -> None:
        self._client, self._keys, self._retries = client, keys, retries

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if not name.startswith("_") and inspect.iscoroutinefunction(method):
                setattr(cls, name, _retrying(method))


def _retrying(method: _Method) -> _Method:
    @wraps(method)
    async def call(self: StorePart, *args: Any, **kwargs: Any) -> Any:
        if self._retries is None:
            return await method(self, *args, **kwargs)
        return await retry_async(partial(method, self, *args, **kwargs), policy=self._retries)

    return call  # type: ignore[return-value]  # it has the signature of the method


def as_text(value: bytes | str) -> str:
    """Return a reply of Redis as text."""
    return value.decode() if isinstance(value, bytes) else value
