"""Connections to Redis with timeouts that were chosen, and errors that say what to do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from rollout_api.redis_connection import passes, without_password

if TYPE_CHECKING:
    from redis.commands.core import AsyncScript, Script

# redis-py retries the handshake of a connection within each retry of a command, so a server that takes connections
# and never answers costs (retries + 1)² timeouts: 8 s here, so that a person is told within 10 s. Its own defaults
# (ten retries of 5 s) keep silent for minutes.
_CONNECT_TIMEOUT_S = 2.0
_REPLY_TIMEOUT_S = 2.0
_RETRIES = 1
_OLDEST_VERSION = (7, 0)
PATIENCE_S = 7.0
"""How long a server may be away before a job gives up: a hiccup is waited out, a person is still told within 10 s."""
START_PATIENCE_S = 120.0
"""How long the head or a worker that starts waits for its server."""
_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 2.0
_SAY_EVERY_S = 10.0

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class RedisUnusableError(RuntimeError):
    """Redis cannot be used; the text names the server, what is wrong and what to do about it."""


def connect(url: str, *, timeout: float = _REPLY_TIMEOUT_S) -> redis.Redis:
    """A client for *url*; nothing is sent yet.

    Every write of this project is idempotent, so a command whose reply was lost may be sent again.

    Args:
        url: of the server.
        timeout: seconds to wait for a connection, and for a reply.

    Raises:
        RedisUnusableError: if *url* is malformed.
    """
    try:
        client: redis.Redis = redis.Redis.from_url(
            url,
            socket_connect_timeout=timeout,
            socket_timeout=timeout,
            health_check_interval=30,
            retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), _RETRIES),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        )
    except ValueError as error:
        raise RedisUnusableError(f"{without_password(url)!r} is no Redis URL: {error}") from None
    return client


def connect_async(url: str, *, block: float = 0.0) -> redis.asyncio.Redis:
    """A client for an asyncio loop, as :func:`connect`.

    Args:
        url: of the server.
        block: seconds for which a command may wait in the server; a reply is waited for that much longer.

    Raises:
        RedisUnusableError: if *url* is malformed.
    """
    try:
        return redis.asyncio.Redis.from_url(
            url,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=_REPLY_TIMEOUT_S + block,
            health_check_interval=30,
            retry=AsyncRetry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), _RETRIES),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        )
    except ValueError as error:
        raise RedisUnusableError(f"{without_password(url)!r} is no Redis URL: {error}") from None


def check(client: redis.Redis, url: str) -> dict[str, Any]:
    """Make sure that the server answers, is new enough and never evicts what it was given.

    Returns:
        The server's ``INFO``.

    Raises:
        RedisUnusableError: if one of these fails.
    """
    try:
        info: dict[str, Any] = client.info()
    except redis.RedisError as error:
        raise problem(error, url) from error
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < _OLDEST_VERSION:
        raise RedisUnusableError(
            f"Redis at {without_password(url)} is version {info['redis_version']}; 7.0 or newer (or Valkey) is needed"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info.get("maxmemory", 0):
        raise RedisUnusableError(
            f"Redis at {without_password(url)} evicts keys when it is full (maxmemory-policy {policy}), which would "
            "silently lose rollouts; set 'maxmemory-policy noeviction'"
        )
    return info


def wait_until_usable(client: redis.Redis, url: str) -> None:
    """As :func:`check`, for a process that is started anew when it fails: what may pass by itself is waited out.

    A server without room for a write is waited for as well.

    Raises:
        RedisUnusableError: at once for what does not pass, or after :data:`START_PATIENCE_S`.
    """
    deadline = time.monotonic() + START_PATIENCE_S
    said = float("-inf")
    while True:
        try:
            info = check(client, url)
            if not _is_full(info):
                return
            full = redis.exceptions.OutOfMemoryError(f"{info['used_memory']} bytes of {info['maxmemory']} are used")
            raise problem(full, url) from full
        except RedisUnusableError as error:
            cause = error.__cause__
            if not (isinstance(cause, redis.RedisError) and _may_pass(cause)) or time.monotonic() > deadline:
                raise
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                logger.warning("Waiting: %s", error)
            time.sleep(_LONGEST_PAUSE_S)


def _is_full(info: dict[str, Any]) -> bool:
    """Whether a server refuses writes for want of memory, as Redis' ``getMaxmemoryState`` counts."""
    counted = int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))
    return 0 < int(info.get("maxmemory", 0)) < counted


def _may_pass(error: redis.RedisError) -> bool:
    """Whether *error* may pass by itself, or by somebody's making room."""
    return passes(error) or isinstance(error, redis.exceptions.OutOfMemoryError)


def problem(error: redis.RedisError, url: str) -> RedisUnusableError:
    """Say in a person's words what *error* means and what to do."""
    where = f"Redis at {without_password(url)}"
    kept = "rollouts reported as done are kept, and the same command goes on from there"
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return RedisUnusableError(f"{where} refused the user name or password: {error}; correct them in the URL")
    if isinstance(error, redis.exceptions.NoPermissionError):
        return RedisUnusableError(f"{where} denies this user a command: {error}; extend its ACL")
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return RedisUnusableError(f"{where} is out of memory: {error}; raise maxmemory or free some ({kept})")
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return RedisUnusableError(f"{where} is a read-only replica: {error}; connect to the primary")
    if isinstance(error, redis.TimeoutError):
        return RedisUnusableError(f"{where} does not answer in time: {error}; check the network and its load ({kept})")
    if isinstance(error, redis.ConnectionError):
        return RedisUnusableError(f"{where} cannot be reached: {error}; is it running, and is the URL right? ({kept})")
    return RedisUnusableError(f"{where} failed: {type(error).__name__}: {error}")


def persist(command: Callable[..., _Result], *args: Any) -> _Result:
    """``command(*args)``, tried again while Redis is away, for :data:`PATIENCE_S`; the command must be idempotent.

    Raises:
        redis.RedisError: the last failure, or at once one that does not pass by itself.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return command(*args)
        except redis.RedisError as error:
            if not passes(error) or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)


async def patiently(command: Callable[..., Awaitable[_Result]], *args: Any) -> _Result:
    """``await command(*args)``, tried again for as long as Redis is away or full; the command must be idempotent.

    What runs in a job waits for its server rather than lose what it has: a full server is back-pressure.

    Raises:
        redis.RedisError: one that does not pass by itself.
    """
    pause, said = 0.05, 0.0
    while True:
        try:
            return await command(*args)
        except redis.RedisError as error:
            if not _may_pass(error):
                raise
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                logger.warning("Redis: %s: %s; trying again until it is back.", type(error).__name__, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def server_function(client: redis.Redis, package: str, name: str) -> Script:
    """The Lua script ``functions/<name>.lua`` of *package*, callable with ``keys`` and ``args``."""
    source = resources.files(package).joinpath("functions", f"{name}.lua").read_text()
    return client.register_script(source)


def async_server_function(client: redis.asyncio.Redis, package: str, name: str) -> AsyncScript:
    """As :func:`server_function`, to be awaited."""
    source = resources.files(package).joinpath("functions", f"{name}.lua").read_text()
    return client.register_script(source)
