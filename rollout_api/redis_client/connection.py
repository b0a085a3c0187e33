"""Connections of a job's processes to Redis. A person gets an error within 10 s if the server does not answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.connection as async_connection
import redis.asyncio.sentinel as async_sentinel
import redis.connection as sync_connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from rollout_api.redis_client.address import Kind, RedisAddress, parse_address, without_password
from rollout_api.redis_client.checks import RedisUnusableError
from rollout_api.redis_client.cluster import Cluster
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
    address = _parse(url)
    if address.kind is Kind.CLUSTER:
        raise _cluster_for_messages(url)
    return _client(address, timeout)


def connect_history(url: str, *, timeout: float = _REPLY_TIMEOUT_S) -> redis.Redis | redis.RedisCluster:
    """Return a client for a history, which may also be on a cluster; nothing is sent yet. See :func:`connect`.

    Raises:
        RedisUnusableError: *url* is malformed.
    """
    address = _parse(url)
    if address.kind is not Kind.CLUSTER:
        return _client(address, timeout)
    settings: dict[str, Any] = {
        "socket_connect_timeout": timeout,
        "socket_timeout": timeout,
        "health_check_interval": _HEALTH_CHECK_INTERVAL_S,
        **address.options,
    }
    if address.tls:
        settings["ssl"] = True
    # A node that does not answer costs (retries + 1) timeouts; after each, the other nodes are asked who has its slots.
    return Cluster(address.hosts, retries=_RETRIES, **settings)


def connect_async(url: str, *, block: float = 0.0) -> redis.asyncio.Redis:
    """Return a client for an asyncio loop; nothing is sent yet. See :func:`connect`.

    Args:
        url: URL of the server or of its Sentinels.
        block: seconds for which a command may block in the server; replies are awaited that much longer.

    Raises:
        RedisUnusableError: *url* is malformed, or names a cluster.
    """
    address = _parse(url)
    if address.kind is Kind.CLUSTER:
        raise _cluster_for_messages(url)
    settings: dict[str, Any] = {
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": _REPLY_TIMEOUT_S + block,
        "health_check_interval": _HEALTH_CHECK_INTERVAL_S,
        "retry": AsyncRetry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), _RETRIES),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
        **address.options,
    }
    return async_client(address, settings)


def async_client(address: RedisAddress, settings: Mapping[str, Any]) -> redis.asyncio.Redis:
    """Return a client of the server at *address*, or of the primary of its Sentinels; nothing is sent yet.

    Args:
        address: address of a server or of Sentinels.
        settings: settings of the connections to the server, including the options of the address.
    """
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
    return redis.asyncio.Redis.from_pool(pool)


def _client(address: RedisAddress, timeout: float) -> redis.Redis:
    settings: dict[str, Any] = {
        "socket_connect_timeout": timeout,
        "socket_timeout": timeout,
        "health_check_interval": _HEALTH_CHECK_INTERVAL_S,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), _RETRIES),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
        **address.options,
    }
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


def _parse(url: str) -> RedisAddress:
    try:
        return parse_address(url)
    except ValueError as error:
        raise RedisUnusableError(f"{without_password(url)!r} is no Redis URL: {error}") from None


def _cluster_for_messages(url: str) -> RedisUnusableError:
    return RedisUnusableError(
        f"{without_password(url)!r} is a cluster, but a job's messages are on one server: use the URL of a server or "
        "of its Sentinels, and that of the cluster for the history alone (spec.history.redis, --history-redis)"
    )
