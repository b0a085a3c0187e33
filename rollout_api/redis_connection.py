"""A client's connection to Redis: settings that were chosen, patience with a server that is away or full."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio
import redis.asyncio.connection as asynchronous
import redis.connection as synchronous
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollout_api.errors import InvalidRequestError, RedisAwayError, RedisRefusedError

logger = logging.getLogger(__name__)

BLOCK_MS = 1000
"""How long a read waits in the server for the first result."""
_CONNECT_TIMEOUT_S = 2.0
_REPLY_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_SAY_EVERY_S = 10.0

# No retries inside redis-py: a read of a consumer group whose reply was lost, silently sent again, would skip what the
# first one was given, and its own pauses would add up behind our patience. RESP2: replies have one shape.
_OURS: dict[str, Any] = {
    "socket_timeout": BLOCK_MS / 1000 + _REPLY_TIMEOUT_S,
    "socket_connect_timeout": _CONNECT_TIMEOUT_S,
    "health_check_interval": 30,
    "decode_responses": False,
    "protocol": 2,
}
_NOT_COPIED = {
    *_OURS,
    "retry",
    "retry_on_error",
    "retry_on_timeout",
    "encoding",
    "encoding_errors",
    "socket_read_size",
    "parser_class",
    "driver_info",
    "lib_name",
    "lib_version",
    "legacy_responses",
    "event_dispatcher",
    "himport_registry",
    "max_connections",
    "connection_class",
}
"""Settings of another client that say how it is used, not where and as whom it connects."""
_COUNTERPARTS: dict[type, type[asynchronous.AbstractConnection]] = {
    synchronous.Connection: asynchronous.Connection,
    synchronous.SSLConnection: asynchronous.SSLConnection,
    synchronous.UnixDomainSocketConnection: asynchronous.UnixDomainSocketConnection,
    asynchronous.Connection: asynchronous.Connection,
    asynchronous.SSLConnection: asynchronous.SSLConnection,
    asynchronous.UnixDomainSocketConnection: asynchronous.UnixDomainSocketConnection,
}

RedisTarget = str | redis.Redis | redis.asyncio.Redis
"""A URL, or a client whose settings (address, TLS, user, password, database) are taken over."""
_Result = TypeVar("_Result")


def connection_to(target: RedisTarget) -> redis.asyncio.Redis:
    """A connection pool of its own to the same server as *target*; nothing is sent yet.

    Raises:
        InvalidRequestError: for a malformed URL, or a client whose settings cannot be taken over (a cluster's,
            Sentinel's, one with a connection class or callback of its own).
    """
    if isinstance(target, str):
        try:
            given: dict[str, Any] = dict(asynchronous.parse_url(target))
        except ValueError as error:
            raise InvalidRequestError(f"{without_password(target)!r} is no Redis URL: {error}") from None
        kind = given.get("connection_class", asynchronous.Connection)
    elif isinstance(target, redis.Redis | redis.asyncio.Redis):
        given, kind = dict(target.connection_pool.connection_kwargs), target.connection_pool.connection_class
    else:
        raise InvalidRequestError(
            f"redis: a {type(target).__module__}.{type(target).__qualname__} cannot be taken over; give the URL of one "
            "server, or a redis.Redis or redis.asyncio.Redis client of it"
        )
    connection_class = _COUNTERPARTS.get(kind)
    if connection_class is None:
        raise InvalidRequestError(
            f"redis: a client that connects by {kind.__qualname__} (Sentinel, or a class of your own) cannot be taken "
            "over; give the URL of the primary"
        )
    settings = {**_transferred(given, connection_class), **_OURS}
    retry = Retry(NoBackoff(), 0)
    pool = asynchronous.ConnectionPool(connection_class=connection_class, retry=retry, **settings)
    return redis.asyncio.Redis.from_pool(pool)


def _transferred(given: dict[str, Any], connection_class: type) -> dict[str, Any]:
    """Those of a client's settings that say where it connects and as whom."""
    known = {
        name for base in connection_class.__mro__ if "__init__" in vars(base) for name in _parameters(vars(base))
    } - {"self", "kwargs"}
    settings = {}
    for name, value in given.items():
        chosen_by_redis_py = name.startswith(("maint_", "orig_")) or type(value) is object
        if name in _NOT_COPIED or chosen_by_redis_py or value is None:
            continue
        callback = name == "redis_connect_func"
        if name in known and not callback:
            settings[name] = value
        elif value or callback:
            raise InvalidRequestError(
                f"redis: the setting {name} of your client cannot be taken over; give a URL, or a client without it"
            )
    return settings


def _parameters(namespace: Any) -> Iterable[str]:
    return inspect.signature(namespace["__init__"]).parameters


def address(client: redis.asyncio.Redis) -> str:
    """Where *client* connects to, as it may be shown."""
    settings = client.connection_pool.connection_kwargs
    where = settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
    return f"Redis at {where}"


def without_password(url: str) -> str:
    """*url* as it may be shown: a password becomes ``***``."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        user = f"{parts.username}:" if parts.username and parts.password else ""  # alone it may be meant for a password
        parts = parts._replace(netloc=f"{user}***@{parts.netloc.rpartition('@')[2]}")
    return urlunsplit(parts._replace(query=re.sub(r"(^|&)password=[^&]*", r"\1password=***", parts.query)))


@cache
def server_function(name: str) -> str:
    """Source of the Lua script ``functions/<name>.lua``."""
    return resources.files(__package__).joinpath("functions", f"{name}.lua").read_text()


async def even_when_full(client: redis.asyncio.Redis, key: str, *command: str | bytes | int) -> Any:
    """Carry out a small *command* of *key*, also on a server that is out of memory."""
    return await client.register_script(server_function("even_when_full"))(keys=[key], args=command)


def passes(error: redis.RedisError) -> bool:
    """Whether *error* may pass by itself: the server is slow, away, loading, or was just demoted by a failover."""
    refused = redis.AuthenticationError | redis.exceptions.AuthorizationError
    away = redis.ConnectionError | redis.TimeoutError | redis.exceptions.ReadOnlyError
    return isinstance(error, away) and not isinstance(error, refused)


class Patience:
    """Tries a command again while Redis is away, for so long; and while it is full, for as long as that lasts.

    Every command that goes through here must be idempotent: a reply may have been lost.
    """

    def __init__(self, where: str, seconds: float) -> None:
        """Name the server, and say how long it may be away."""
        self._where, self._seconds = where, seconds
        self._said = -_SAY_EVERY_S

    async def of(self, command: Callable[[], Awaitable[_Result]], *, what: str) -> _Result:
        """The result of *command*, which does *what*.

        Raises:
            RedisAwayError: the server was away for too long.
            RedisRefusedError: an error that does not pass by itself.
        """
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return await command()
            except redis.RedisError as error:
                self.judge(error, began, what)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def judge(self, error: redis.RedisError, began: float, what: str) -> None:
        """Return if *what* failed in a way that is worth another try, and say so now and then.

        Raises:
            RedisAwayError: it has been failing since *began* (``time.monotonic()``), which is too long.
            RedisRefusedError: *error* does not pass by itself.
        """
        full = isinstance(error, redis.exceptions.OutOfMemoryError)
        if not full and not passes(error):
            raise RedisRefusedError(_refusal(self._where, what, error)) from error
        now = time.monotonic()
        if not full and now - began > self._seconds:
            raise RedisAwayError(
                f"{self._where} has been away for {now - began:.0f} s while this client wanted to {what} "
                f"({type(error).__name__}: {error}); is it running, and is the address right? What was sent is kept: "
                "the same step, opened again, gets its results"
            ) from error
        if now - self._said >= _SAY_EVERY_S:
            self._said = now
            if full:
                logger.warning(
                    "%s is out of memory, so this client waits to %s; it goes on by itself when results are "
                    "acknowledged or maxmemory is raised. (%s)",
                    self._where,
                    what,
                    error,
                )
            else:
                logger.warning(
                    "%s does not answer (%s: %s); trying again to %s, for up to %.0f s.",
                    self._where,
                    type(error).__name__,
                    error,
                    what,
                    self._seconds - (now - began),
                )


def _refusal(where: str, what: str, error: redis.RedisError) -> str:
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        remedy = "correct the user name or password"
    elif isinstance(error, redis.exceptions.NoPermissionError):
        remedy = "extend the user's ACL"
    else:
        remedy = "see docs/protocol.md for the commands that a client needs"
    return f"{where} refused to {what}: {type(error).__name__}: {error}; {remedy}"
