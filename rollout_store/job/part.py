"""The common part of all parts of a job's state: the connection, the keys, and retries."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import redis.asyncio

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.retry import RetryPolicy, retry_async
from rollout_api.redis_client.server_functions import Call, Function, run_async

JOB_RETENTION_S = 24 * 3600
"""Seconds that clients have to read their results after a job has ended."""
MAX_EVENTS = 4096
"""Number of latest entries that the event stream keeps."""
KEYS_PER_SCAN = 500
"""Number of keys that are expired or deleted in one round trip."""

_Method = TypeVar("_Method", bound=Callable[..., Awaitable[Any]])


class StaleCoordinatorError(RuntimeError):
    """Another coordinator has taken over; this one must end."""


class StorePart:
    """A part of a job's state in Redis.

    Its public coroutine methods are repeated while Redis is unreachable or full. They are idempotent, because the reply
    to a command that was executed may be lost. Without *retries*, they raise an error at once.
    """

    def __init__(self, client: redis.asyncio.Redis, keys: MessageKeys, retries: RetryPolicy | None = None) -> None:
        self._client, self._keys, self._retries = client, keys, retries

    def __init_subclass__(cls) -> None:
        for name, method in list(vars(cls).items()):
            if not name.startswith("_") and inspect.iscoroutinefunction(method):
                setattr(cls, name, _retrying(method))

    async def _call(self, function: str, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        """Run a function in the server."""
        return await run_async(self._client, Call(Function(function), keys, args))


def _retrying(method: _Method) -> _Method:
    @wraps(method)
    async def call(self: StorePart, *args: Any, **kwargs: Any) -> Any:
        if self._retries is None:
            return await method(self, *args, **kwargs)
        return await retry_async(partial(method, self, *args, **kwargs), policy=self._retries)

    return call  # type: ignore[return-value]  # it has the signature of the method


def check_current(reply: Any) -> None:
    """Check the reply of a function that only the newest coordinator may run.

    Raises:
        StaleCoordinatorError: if another coordinator has taken over.
    """
    if reply == b"stale":
        raise StaleCoordinatorError("another coordinator has taken over")


def as_text(value: bytes | str) -> str:
    """Return a reply of Redis as text."""
    return value.decode() if isinstance(value, bytes) else value


def add_expiry(pipeline: Any, keys: Iterable[bytes]) -> None:
    """Add commands to *pipeline*, synchronous or not, that let *keys* expire after :data:`JOB_RETENTION_S`."""
    for key in keys:
        pipeline.expire(key, JOB_RETENTION_S, lt=True)  # keys that expire earlier, such as leases, still do
