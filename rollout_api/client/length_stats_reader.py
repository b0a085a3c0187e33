"""Reads the length statistics of a history, for whoever has no store of it."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.keys import SHARDS, HistoryKeys
from rollout_api.protocol.length_entries import unpack_entries, unpack_recent
from rollout_api.redis_client.address import Kind, RedisAddress, parse_address
from rollout_api.redis_client.connection import RedisTarget, address, connection_to

HistoryClient = redis.asyncio.Redis | redis.asyncio.RedisCluster

# RetryPolicy tries again. Here once more, by which redis-py learns anew which node has what.
_CLUSTER: dict[str, Any] = {"socket_timeout": 5.0, "socket_connect_timeout": 2.0, "protocol": 2}
_RETRIES = 1


def connection_to_history(target: RedisTarget) -> tuple[HistoryClient, str]:
    """A connection to the server or cluster of histories, and where that is, as it may be shown; nothing is sent yet.

    Args:
        target: as for :func:`rollout_api.redis_client.connection.connection_to`; the URL of a cluster as well.

    Raises:
        InvalidRequestError: if *target* cannot be used.
    """
    if isinstance(target, str) and (cluster := _cluster_of(target)) is not None:
        nodes = [ClusterNode(host, port) for host, port in cluster.hosts]
        settings = {**cluster.options, **_CLUSTER}
        retry = Retry(NoBackoff(), _RETRIES)
        client = redis.asyncio.RedisCluster(startup_nodes=nodes, ssl=cluster.tls, retry=retry, **settings)
        return client, f"Redis at {cluster}"
    server = connection_to(target)
    return server, address(server)


def _cluster_of(url: str) -> RedisAddress | None:
    try:
        where = parse_address(url)
    except ValueError:
        return None  # connection_to says what is wrong with it
    return where if where.kind is Kind.CLUSTER else None


async def read_length_stats(client: HistoryClient, keys: HistoryKeys, problem: str | None = None) -> LengthStats:
    """The lengths of a history's rollouts, weighted by their ages in its generations.

    Args:
        client: connection to the history's server or cluster, which returns bytes.
        keys: of the history.
        problem: whose rollouts; None: the last rollouts of all problems, up to 512 of each of 16 groups of problems.

    Returns:
        Empty if there are none.

    Raises:
        redis.RedisError: if Redis fails.
    """
    # one key a command: on a cluster they lie on different nodes
    pipeline = client.pipeline(transaction=False)
    if problem is not None:
        pipeline.hgetall(keys.lengths(problem))
    else:
        for shard in range(SHARDS):
            pipeline.lrange(keys.recent(shard), 0, -1)
    try:
        stored = await pipeline.execute()
    except (redis.exceptions.RedisClusterException, redis.exceptions.ClusterError) as error:
        # of these the first is no RedisError, and both pass when the nodes are back
        raise redis.ConnectionError(str(error)) from error
    if problem is not None:
        lengths = [(entry.generation, entry.length, entry.cut_off) for entry in unpack_entries(stored[0])]
    else:
        lengths = unpack_recent(entry for entries in stored for entry in entries)
    return LengthStats.of(lengths)
