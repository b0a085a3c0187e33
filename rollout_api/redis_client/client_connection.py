"""Connections of a trainer's client to Redis, from a URL or from the trainer's own Redis client."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.connection as async_connection
import redis.asyncio.sentinel as async_sentinel
import redis.connection as sync_connection
import redis.sentinel as sync_sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollout_api.errors import InvalidRequestError
from rollout_api.redis_client.address import parse_server_address
from rollout_api.redis_client.connection import async_client
from rollout_api.redis_client.pipelined import PipelinedRedis
from rollout_api.redis_client.sentinel import async_sentinel_pool, endpoint_of, forced_host

READ_BLOCK_MS = 1000
"""Milliseconds that a read of results blocks in the server."""
_CONNECT_TIMEOUT_S = 2.0
_REPLY_TIMEOUT_S = 5.0

# redis-py itself must not retry: a client must learn of an interruption to send its requests again,
# and the pauses would add to those of the client's retry policy. With RESP2, replies have one shape.
_CLIENT_SETTINGS: dict[str, Any] = {
    "socket_timeout": READ_BLOCK_MS / 1000 + _REPLY_TIMEOUT_S,
    "socket_connect_timeout": _CONNECT_TIMEOUT_S,
    "health_check_interval": 30,
    "decode_responses": False,
    "protocol": 2,
}
_NOT_COPIED = {
    *_CLIENT_SETTINGS,
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
    "connection_pool",
}
"""Settings of another client that determine how it is used, not where and as which user it connects."""
_ASYNC_CLASSES: dict[type, type[async_connection.AbstractConnection]] = {
    sync_connection.Connection: async_connection.Connection,
    sync_connection.SSLConnection: async_connection.SSLConnection,
    sync_connection.UnixDomainSocketConnection: async_connection.UnixDomainSocketConnection,
    async_connection.Connection: async_connection.Connection,
    async_connection.SSLConnection: async_connection.SSLConnection,
    async_connection.UnixDomainSocketConnection: async_connection.UnixDomainSocketConnection,
    sync_sentinel.SentinelManagedConnection: async_sentinel.SentinelManagedConnection,
    sync_sentinel.SentinelManagedSSLConnection: async_sentinel.SentinelManagedSSLConnection,
    async_sentinel.SentinelManagedConnection: async_sentinel.SentinelManagedConnection,
    async_sentinel.SentinelManagedSSLConnection: async_sentinel.SentinelManagedSSLConnection,
}

RedisTarget = str | redis.Redis | redis.asyncio.Redis
"""A URL, or a client whose settings (address, TLS, user, password, database) are copied."""


def open_client(target: RedisTarget) -> redis.asyncio.Redis:
    """Return a client with separate connections to the server of *target*; nothing is sent yet.

    Args:
        target: URL of a server or of Sentinels (see :mod:`rollout_api.redis_client.address`), or a client of a server,
            which may come from ``Sentinel.master_for``.

    Raises:
        InvalidRequestError: the URL is malformed, or the client's settings cannot be copied because it is a client of
            a cluster or of replicas, or has a custom connection class or callback.
    """
    if isinstance(target, str):
        return _open_url(target)
    if not isinstance(target, redis.Redis | redis.asyncio.Redis):
        raise InvalidRequestError(
            f"redis: the settings of a {type(target).__module__}.{type(target).__qualname__} cannot be copied; pass "
            "the URL of a server or of its Sentinels, or a redis.Redis or redis.asyncio.Redis client of it"
        )
    pool: Any = target.connection_pool
    connection_class, settings = _copy_settings(pool)
    settings |= {**_CLIENT_SETTINGS, "retry": Retry(NoBackoff(), 0)}
    if not isinstance(pool, sync_sentinel.SentinelConnectionPool | async_sentinel.SentinelConnectionPool):
        return PipelinedRedis.from_pool(async_connection.ConnectionPool(connection_class=connection_class, **settings))
    if not pool.is_master:
        raise InvalidRequestError("redis: a client of Sentinel's replicas cannot write; create one with master_for")
    sentinels = [_copy_settings(sentinel.connection_pool) for sentinel in pool.sentinel_manager.sentinels]
    manager = pool.sentinel_manager
    options = {"min_other_sentinels": manager.min_other_sentinels, "force_master_ip": forced_host(manager)}
    return PipelinedRedis.from_pool(
        async_sentinel_pool(connection_class, settings, pool.service_name, sentinels, options)
    )


def server_name(client: redis.asyncio.Redis) -> str:
    """Return the server that *client* connects to, for messages; it contains no credentials."""
    pool: Any = client.connection_pool
    if isinstance(pool, async_sentinel.SentinelConnectionPool):
        sentinels = ",".join(endpoint_of(one.connection_pool) for one in pool.sentinel_manager.sentinels)
        return f"Redis {pool.service_name}, whose Sentinels are {sentinels}"
    return f"Redis at {endpoint_of(pool)}"


def _open_url(url: str) -> redis.asyncio.Redis:
    try:
        address = parse_server_address(url)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
    return async_client(address, {**address.options, **_CLIENT_SETTINGS, "retry": Retry(NoBackoff(), 0)})


def _copy_settings(pool: Any) -> tuple[type[async_connection.AbstractConnection], dict[str, Any]]:
    """Return the asynchronous connection class and the settings for connecting as the client of *pool* does."""
    connection_class = _ASYNC_CLASSES.get(pool.connection_class)
    if connection_class is None:
        raise InvalidRequestError(
            f"redis: the settings of a client with its own connection class ({pool.connection_class.__qualname__}) "
            "cannot be copied; pass the URL"
        )
    known = {
        name for base in connection_class.__mro__ if "__init__" in vars(base) for name in _parameters(vars(base))
    } - {"self", "kwargs"}
    settings = {}
    given: Mapping[str, Any] = pool.connection_kwargs
    for name, value in given.items():
        set_by_redis_py = name.startswith(("maint_", "orig_")) or type(value) is object
        if name in _NOT_COPIED or set_by_redis_py or value is None:
            continue
        is_callback = name == "redis_connect_func"
        if name in known and not is_callback:
            settings[name] = value
        elif value or is_callback:
            raise InvalidRequestError(
                f"redis: the setting {name} of your client cannot be copied; pass a URL, or a client without it"
            )
    return connection_class, settings


def _parameters(namespace: Any) -> Iterable[str]:
    return inspect.signature(namespace["__init__"]).parameters
