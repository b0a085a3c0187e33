"""Connections of a job's processes to Redis, and checks that a server can be used.

A person gets an error within 10 s if the server does not answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import redis
import redis.asyncio
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from rollout_api.redis_client.address import Kind, RedisAddress, parse_address, parse_server_address, without_password
from rollout_api.redis_client.cluster import Cluster
from rollout_api.redis_client.pipelined import PipelinedRedis
from rollout_api.redis_client.retry import is_out_of_memory, is_refused, is_transient
from rollout_api.redis_client.sentinel import ASYNCHRONOUS, SYNCHRONOUS, server_pool

# redis-py repeats the handshake of a connection within each retry of a command, so a server that accepts connections
# and never answers costs (retries + 1)² timeouts: 8 s here, so that a person gets an error within 10 s. redis-py's own
# defaults (ten retries of 5 s) would block for minutes. Three Sentinels that do not answer cost 9 s.
_CONNECT_TIMEOUT_S = 2.0
_REPLY_TIMEOUT_S = 2.0
_RETRIES = 1
_HEALTH_CHECK_INTERVAL_S = 30
logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Seconds that a starting head or worker waits for its server."""
_MIN_VERSION = (7, 0)
_POLL_INTERVAL_S = 2.0
_LOG_INTERVAL_S = 10.0


class RedisUnusableError(RuntimeError):
    """Redis cannot be used. The text names the server, what is wrong, and what to do about it."""


def check(client: redis.Redis | redis.RedisCluster, url: str) -> dict[str, Any]:
    """Check that the server, or each primary of a cluster, answers, is new enough and never evicts keys.

    Returns:
        The server's ``INFO``; for a cluster that of a full primary, if there is one.

    Raises:
        RedisUnusableError: one of the checks failed.
    """
    try:
        infos = list(_infos(client))
    except redis.RedisError as error:
        raise explain_error(error, url) from error
    for info in infos:
        _check_server(info, url)
    return max(infos, key=is_full)


def wait_until_usable(client: redis.Redis | redis.RedisCluster, url: str) -> None:
    """Run :func:`check`, and repeat it while it fails for a transient reason or the server is full.

    This is for processes that are restarted when they fail.

    Raises:
        RedisUnusableError: at once for other failures, or after :data:`START_TIMEOUT_S`.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    next_log = float("-inf")
    while True:
        try:
            info = check(client, url)
            if not is_full(info):
                return
            full = redis.exceptions.OutOfMemoryError(f"{info['used_memory']} bytes of {info['maxmemory']} are used")
            raise explain_error(full, url) from full
        except RedisUnusableError as error:
            if not _is_temporary(error.__cause__) or time.monotonic() > deadline:
                raise
            if time.monotonic() > next_log:
                next_log = time.monotonic() + _LOG_INTERVAL_S
                logger.warning("Waiting: %s", error)
            time.sleep(_POLL_INTERVAL_S)


def explain_error(error: redis.RedisError, url: str) -> RedisUnusableError:
    """Return an error that tells a person what *error* means and what to do."""
    server = f"Redis at {without_password(url)}"
    text = str(error).rstrip(".")
    if is_refused(error):
        return RedisUnusableError(f"{server} refused the user name or password: {text}; correct them in the URL")
    if isinstance(error, redis.exceptions.NoPermissionError):
        return RedisUnusableError(f"{server} denies this user a command: {text}; extend its ACL")
    if is_out_of_memory(error):
        return RedisUnusableError(f"{server} is out of memory: {text}; raise maxmemory or free some")
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return RedisUnusableError(f"{server} is a read-only replica: {text}; connect to the primary")
    if isinstance(error, redis.exceptions.AskError):
        return RedisUnusableError(
            f"{server} is a node of a cluster, and the key is on another node: {text}; use the URL of the cluster "
            "(redis+cluster://…) for a history, and a single server for a job's messages"
        )
    if isinstance(error, redis.exceptions.ClusterError | redis.exceptions.TryAgainError):
        return RedisUnusableError(
            f"{server} does not serve all slots: {text}; is a node down, or are slots being migrated? See CLUSTER "
            "INFO and CLUSTER SHARDS"
        )
    if isinstance(error, redis.sentinel.MasterNotFoundError):
        return RedisUnusableError(
            f"{server} cannot be reached: {text}; are its servers and Sentinels running, and is the service name "
            "correct? During a failover this is temporary"
        )
    if "cluster support disabled" in str(error):
        return RedisUnusableError(f"{server} is not a Redis Cluster: {text}; write redis://… or rediss://…")
    if "MISCONF" in str(error):
        return RedisUnusableError(f"{server} cannot write to its disk: {text}; see its log, and free disk space")
    if isinstance(error, redis.TimeoutError):
        return RedisUnusableError(f"{server} does not answer in time: {text}; check the network and its load")
    if isinstance(error, redis.exceptions.InvalidResponse):
        return RedisUnusableError(
            f"what answers at {without_password(url)} is not Redis: {text}; is Redis running, and is the URL correct?"
        )
    if isinstance(error, redis.ConnectionError):
        return RedisUnusableError(f"{server} cannot be reached: {text}; is it running, and is the URL correct?")
    return RedisUnusableError(f"{server} failed: {type(error).__name__}: {text}")


def _is_temporary(cause: BaseException | None) -> bool:
    return isinstance(cause, redis.RedisError) and (is_transient(cause) or is_out_of_memory(cause))


def _infos(client: redis.Redis | redis.RedisCluster) -> Iterator[dict[str, Any]]:
    """Yield the ``INFO`` of the server, or of each primary of a cluster that serves all slots.

    Raises:
        redis.RedisError: a server did not answer, or the cluster does not serve all slots.
    """
    untyped: Any = client
    if isinstance(client, redis.Redis):
        yield untyped.info()
        return
    for node in untyped.get_primaries():
        if (state := untyped.cluster_info(target_nodes=node)["cluster_state"]) != "ok":
            raise redis.exceptions.ClusterDownError(f"cluster_state is {state} at {node.name}")
        yield untyped.info(target_nodes=node)


def _check_server(info: Mapping[str, Any], url: str) -> None:
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < _MIN_VERSION:
        raise RedisUnusableError(
            f"Redis at {without_password(url)} is version {info['redis_version']}; 7.0 or newer (or Valkey) is needed"
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info.get("maxmemory", 0):
        raise RedisUnusableError(
            f"Redis at {without_password(url)} evicts keys when it is full (maxmemory-policy {policy}), which would "
            "silently lose rollouts; set 'maxmemory-policy noeviction'"
        )


def is_full(info: Mapping[str, Any]) -> bool:
    """Return whether a server refuses writes for lack of memory, computed like Redis' ``getMaxmemoryState``."""
    counted = int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))
    return 0 < int(info.get("maxmemory", 0)) < counted


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
    return PipelinedRedis.from_pool(server_pool(ASYNCHRONOUS, address, {**settings, "protocol": 2}))


def _client(address: RedisAddress, timeout: float) -> redis.Redis:
    settings = _settings(address, timeout, timeout, Retry(_backoff(), _RETRIES))
    return redis.Redis.from_pool(server_pool(SYNCHRONOUS, address, settings))


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
