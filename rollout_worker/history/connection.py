"""Connections to Redis with timeouts that were chosen, and errors that say what to do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

import redis
import redis.asyncio
import redis.connection as synchronous
import redis.sentinel as synchronous_sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from rollout_api.redis_client.address import Kind, RedisAddress, parse_address
from rollout_api.redis_client.connection import (
    SENTINEL,
    Said,
    async_client,
    no_primary,
    passes,
    primary_of,
    without_password,
)
from rollout_worker.history.redis_cluster import Cluster

if TYPE_CHECKING:
    from redis.commands.core import AsyncScript

# redis-py retries the handshake of a connection within each retry of a command, so a server that takes connections
# and never answers costs (retries + 1)² timeouts: 8 s here, so that a person is told within 10 s. Its own defaults
# (ten retries of 5 s) keep silent for minutes. Silent Sentinels cost as often the timeouts of all: 9 s for three.
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
        url: of the server, or of the Sentinels that know it (:func:`rollout_api.redis_client.address.parse_address`).
        timeout: seconds to wait for a connection, and for a reply.

    Raises:
        RedisUnusableError: if *url* is malformed, or a cluster's.
    """
    where = _address(url)
    if where.kind is Kind.CLUSTER:
        raise _cluster_for_messages(url)
    return _connected(where, timeout)


def connect_history(url: str, *, timeout: float = _REPLY_TIMEOUT_S) -> redis.Redis | redis.RedisCluster:
    """As :func:`connect`, for a history, which may be on a cluster as well; nothing is sent yet.

    Raises:
        RedisUnusableError: if *url* is malformed.
    """
    where = _address(url)
    if where.kind is not Kind.CLUSTER:
        return _connected(where, timeout)
    settings: dict[str, Any] = {
        "socket_connect_timeout": timeout,
        "socket_timeout": timeout,
        "health_check_interval": 30,
        **where.options,
    }
    if where.tls:
        settings["ssl"] = True
    # A node that is silent costs (retries + 1) timeouts; each time the others are asked who has its slots.
    return Cluster(where.hosts, retries=_RETRIES, **settings)


def _connected(where: RedisAddress, timeout: float) -> redis.Redis:
    settings: dict[str, Any] = {
        "socket_connect_timeout": timeout,
        "socket_timeout": timeout,
        "health_check_interval": 30,
        "retry": Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), _RETRIES),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
        **where.options,
    }
    if where.kind is Kind.SENTINEL:
        make: Any = _SentinelPool
        pool: synchronous.ConnectionPool = make(
            where.service,
            _sentinels(where),
            connection_class=synchronous_sentinel.SentinelManagedSSLConnection
            if where.tls
            else synchronous_sentinel.SentinelManagedConnection,
            **settings,
        )
    elif where.path:
        pool = synchronous.ConnectionPool(
            connection_class=synchronous.UnixDomainSocketConnection, path=where.path, **settings
        )
    else:
        ((host, port),) = where.hosts
        connection_class = synchronous.SSLConnection if where.tls else synchronous.Connection
        pool = synchronous.ConnectionPool(connection_class=connection_class, host=host, port=port, **settings)
    return redis.Redis.from_pool(pool)


class _SentinelPool(synchronous_sentinel.SentinelConnectionPool):
    """Connections to the primary that Sentinels name, which are asked before each new one; it owns those to them."""

    def close(self) -> None:
        """Close all of them."""
        super().close()
        self.sentinel_manager.close()


class _Sentinel(synchronous_sentinel.Sentinel):
    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port of the primary, as :func:`primary_of` understands what the Sentinels say."""
        said: list[Said] = []
        for sentinel in tuple(self.sentinels):
            try:
                masters: Any = sentinel.sentinel_masters()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                said.append((sentinel, error))
            else:
                said.append((sentinel, masters.get(service_name)))
            if (found := primary_of(self, service_name, said)) is not None:
                return found
        raise no_primary(service_name, said)


def _sentinels(where: RedisAddress) -> synchronous_sentinel.Sentinel:
    make: Any = _Sentinel
    manager: synchronous_sentinel.Sentinel = make([], sentinel_kwargs={})
    connection_class = synchronous.SSLConnection if where.tls else synchronous.Connection
    manager.sentinels = [
        redis.Redis.from_pool(
            synchronous.ConnectionPool(
                connection_class=connection_class,
                host=host,
                port=port,
                retry=Retry(NoBackoff(), 0),
                **{**where.sentinel_options, **SENTINEL},
            )
        )
        for host, port in where.hosts
    ]
    return manager


def connect_async(url: str, *, block: float = 0.0) -> redis.asyncio.Redis:
    """A client for an asyncio loop, as :func:`connect`.

    Args:
        url: of the server, or of the Sentinels that know it.
        block: seconds for which a command may wait in the server; a reply is waited for that much longer.

    Raises:
        RedisUnusableError: if *url* is malformed, or a cluster's.
    """
    where = _address(url)
    if where.kind is Kind.CLUSTER:
        raise _cluster_for_messages(url)
    settings: dict[str, Any] = {
        "socket_connect_timeout": _CONNECT_TIMEOUT_S,
        "socket_timeout": _REPLY_TIMEOUT_S + block,
        "health_check_interval": 30,
        "retry": AsyncRetry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), _RETRIES),
        "retry_on_error": [redis.ConnectionError, redis.TimeoutError],
        **where.options,
    }
    return async_client(where, settings)


def _address(url: str) -> RedisAddress:
    try:
        return parse_address(url)
    except ValueError as error:
        raise RedisUnusableError(f"{without_password(url)!r} is no Redis URL: {error}") from None


def _cluster_for_messages(url: str) -> RedisUnusableError:
    return RedisUnusableError(
        f"{without_password(url)!r} is a cluster, and a job's messages are on one server: name that, or its Sentinels, "
        "and the cluster for the history alone (spec.history.redis, --history-redis)"
    )


def check(client: redis.Redis | redis.RedisCluster, url: str) -> dict[str, Any]:
    """Make sure that the server, or each primary of a cluster, answers, is new enough and never evicts.

    Returns:
        The server's ``INFO``; of a cluster, that of a primary that is full, if there is one.

    Raises:
        RedisUnusableError: if one of these fails.
    """
    try:
        infos = list(_infos(client))
    except redis.RedisError as error:
        raise explain_error(error, url) from error
    for info in infos:
        _check_server(info, url)
    return max(infos, key=_is_full)


def _infos(client: redis.Redis | redis.RedisCluster) -> Iterator[dict[str, Any]]:
    """``INFO`` of the server, or of each primary of a cluster that serves all slots.

    Raises:
        redis.RedisError: it could not be had.
    """
    anything: Any = client
    if isinstance(client, redis.Redis):
        yield anything.info()
        return
    for node in anything.get_primaries():
        if (state := anything.cluster_info(target_nodes=node)["cluster_state"]) != "ok":
            raise redis.exceptions.ClusterDownError(f"cluster_state is {state} at {node.name}")
        yield anything.info(target_nodes=node)


def _check_server(info: Mapping[str, Any], url: str) -> None:
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


def wait_until_usable(client: redis.Redis | redis.RedisCluster, url: str) -> None:
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
            raise explain_error(full, url) from full
        except RedisUnusableError as error:
            cause = error.__cause__
            if not (isinstance(cause, redis.RedisError) and _may_pass(cause)) or time.monotonic() > deadline:
                raise
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                logger.warning("Waiting: %s", error)
            time.sleep(_LONGEST_PAUSE_S)


def _is_full(info: Mapping[str, Any]) -> bool:
    """Whether a server refuses writes for want of memory, as Redis' ``getMaxmemoryState`` counts."""
    counted = int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))
    return 0 < int(info.get("maxmemory", 0)) < counted


def _may_pass(error: redis.RedisError) -> bool:
    """Whether *error* may pass by itself, or by somebody's making room."""
    return passes(error) or isinstance(error, redis.exceptions.OutOfMemoryError)


def explain_error(error: redis.RedisError, url: str) -> RedisUnusableError:
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
    if isinstance(error, redis.exceptions.AskError):
        return RedisUnusableError(
            f"{where} is a node of a cluster, and the key is on another one: {error}; name the cluster "
            "(redis+cluster://…) for a history, and a server of its own for a job's messages"
        )
    if isinstance(error, redis.exceptions.ClusterError | redis.exceptions.TryAgainError):
        return RedisUnusableError(
            f"{where} does not serve all slots: {error}; is a node down, or are slots on the move? See CLUSTER INFO "
            f"and CLUSTER SHARDS ({kept})"
        )
    if isinstance(error, synchronous_sentinel.MasterNotFoundError):
        return RedisUnusableError(
            f"{where} cannot be reached: {error}; are its servers and Sentinels running, and is the service's name "
            f"right? A failover passes ({kept})"
        )
    if "cluster support disabled" in str(error):
        return RedisUnusableError(f"{where} is no cluster: {error}; write redis://… or rediss://…")
    if "MISCONF" in str(error):
        return RedisUnusableError(f"{where} cannot write to its disk: {error}; see its log, and make room ({kept})")
    if isinstance(error, redis.TimeoutError):
        return RedisUnusableError(f"{where} does not answer in time: {error}; check the network and its load ({kept})")
    if isinstance(error, redis.exceptions.InvalidResponse):
        return RedisUnusableError(
            f"what answers at {without_password(url)} is not Redis: {error}; is Redis running, and is the URL right? "
            f"({kept})"
        )
    if isinstance(error, redis.ConnectionError):
        return RedisUnusableError(f"{where} cannot be reached: {error}; is it running, and is the URL right? ({kept})")
    return RedisUnusableError(f"{where} failed: {type(error).__name__}: {error}")


def retry(command: Callable[..., _Result], *args: Any) -> _Result:
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


async def retry_async(command: Callable[..., Awaitable[_Result]], *args: Any) -> _Result:
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


def async_server_function(client: redis.asyncio.Redis, package: str, name: str) -> AsyncScript:
    """The Lua script ``functions/<name>.lua`` of *package*, to be awaited with ``keys`` and ``args``."""
    source = resources.files(package).joinpath("functions", f"{name}.lua").read_text()
    return client.register_script(source)
