"""Connections of a job's processes to Redis. A person gets an error within 10 s if the server does not answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.connection as async_connection
import redis.asyncio.sentinel as async_sentinel
import redis.connection as sync_connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from rollout_api.redis_client.address import Kind, RedisAddress, parse_address, parse_server_address
from rollout_api.redis_client.checks import RedisUnusableError
from rollout_api.redis_client.cluster import Cluster
from rollout_api.redis_client.pipelined import PipelinedRedis
from rollout_api.redis_client.sentinel import async_sentinel_pool, sentinel_pool

# redis-py repeats the handshake of a connection within each retry of a command, so a server that accepts connections
# and never answers costs (retries + 1)² timeouts: 8 s here, so that a person gets an error within 10 s. redis-py's own
# defaults (ten retries of 5 s) would block for minutes. Three Sentinels that do not answer cost 9 s.
_CONNECT_TIMEOUT_S = 2.0
_REPLY_TIMEOUT_S = 2.0
_RETRIES = 1
_HEALTH_CHECK_INTERVAL_S = 30


def connect(url: str, *, timeout: float = _REPLY_TIMEOUT_S) -> redis.Redis:
    """Return a client for *url*; nothing is sent yet.

    A command whose reply was lost may be sent again, since every write of this project is idempotent.

    Args:
        url: URL of the server or of its Sentinels; see :func:`rollout_api.redis_client.address.parse_address`.
        timeout: seconds to wait for a connection, and for a reply.

    Raises:
        RedisUnusableError: *url* is malformed, or names a cluster.
    """
    return _client(_parse(url, parse_server_address), timeout)


def connect_history(url: str, *, timeout: float = _REPLY_TIMEOUT_S) -> redis.Redis | redis.RedisCluster:
    """Return a client for a history, which may also be on a cluster; nothing is sent yet. See :func:`connect`.

    Raises:
        RedisUnusableError: *url* is malformed.
    """
    address = _parse(url, parse_address)
    if address.kind is not Kind.CLUSTER:
        return _client(address, timeout)
    settings = _settings(address, timeout, timeout)
    if address.tls:
        settings["ssl"] = True
    # A node that does not answer costs (retries + 1) timeouts; after each, the other nodes are asked who has its slots.
    return Cluster(address.hosts, retries=_RETRIES, **settings)


def connect_async(url: str, *, block: float = 0.0) -> redis.asyncio.Redis:
    """Return a client for an asyncio loop; nothing is sent yet. See :func:`connect`.

    Args:
        url: URL of the server or of its Sentinels.
        block: seconds that a command may block in the server; replies are awaited that much longer.

    Raises:
        RedisUnusableError: *url* is malformed, or names a cluster.
    """
    address = _parse(url, parse_server_address)
    retry = AsyncRetry(_backoff(), _RETRIES)
    return async_client(address, _settings(address, _CONNECT_TIMEOUT_S, _REPLY_TIMEOUT_S + block, retry))


def async_client(address: RedisAddress, settings: Mapping[str, Any]) -> redis.asyncio.Redis:
    """Return a client of the server at *address*, or of the primary of its Sentinels; nothing is sent yet.

    Args:
        address: address of a server or of Sentinels.
        settings: settings of the connections to the server, including the options of the address.
    """
    settings = {**settings, "protocol": 2}
    if address.kind is Kind.SENTINEL:
        kind = async_connection.SSLConnection if address.tls else async_connection.Connection
        sentinels = [(kind, {"host": host, "port": port, **address.sentinel_options}) for host, port in address.hosts]
        pool: async_connection.ConnectionPool = async_sentinel_pool(
            async_sentinel.SentinelManagedSSLConnection if address.tls else async_sentinel.SentinelManagedConnection,
            settings,
            address.service,
            sentinels,
        )
    elif address.path:
        pool = async_connection.ConnectionPool(
            connection_class=async_connection.UnixDomainSocketConnection, **{**settings, "path": address.path}
        )
    else:
        ((host, port),) = address.hosts
        pool = async_connection.ConnectionPool(
            connection_class=async_connection.SSLConnection if address.tls else async_connection.Connection,
            **{**settings, "host": host, "port": port},
        )
    return PipelinedRedis.from_pool(pool)


def _client(address: RedisAddress, timeout: float) -> redis.Redis:
    settings = _settings(address, timeout, timeout, Retry(_backoff(), _RETRIES))
    if address.kind is Kind.SENTINEL:
        pool: sync_connection.ConnectionPool = sentinel_pool(address, settings)
    elif address.path:
        pool = sync_connection.ConnectionPool(
            connection_class=sync_connection.UnixDomainSocketConnection, path=address.path, **settings
        )
    else:
        ((host, port),) = address.hosts
        connection_class = sync_connection.SSLConnection if address.tls else sync_connection.Connection
        pool = sync_connection.ConnectionPool(connection_class=connection_class, host=host, port=port, **settings)
    return redis.Redis.from_pool(pool)


def _settings(
    address: RedisAddress, connect_timeout: float, reply_timeout: float, retry: Retry | AsyncRetry | None = None
) -> dict[str, Any]:
    """Return the settings of connections to the server at *address*, or to the nodes of a cluster.

    Args:
        address: address with options, which override the other settings.
        connect_timeout: seconds to wait for a connection.
        reply_timeout: seconds to wait for a reply.
        retry: how failed commands are repeated; None for a cluster, whose client repeats them itself.
    """
    settings: dict[str, Any] = {
        "socket_connect_timeout": connect_timeout,
        "socket_timeout": reply_timeout,
        "health_check_interval": _HEALTH_CHECK_INTERVAL_S,
    }
    if retry is not None:
        settings |= {"retry": retry, "retry_on_error": [redis.ConnectionError, redis.TimeoutError]}
    return settings | dict(address.options)


def _backoff() -> ExponentialWithJitterBackoff:
    return ExponentialWithJitterBackoff(base=0.05, cap=0.5)


def _parse(url: str, parse: Callable[[str], RedisAddress]) -> RedisAddress:
    try:
        return parse(url)
    except ValueError as error:
        raise RedisUnusableError(str(error)) from None
