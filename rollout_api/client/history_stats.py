"""Statistics of a history, read directly from Redis: lengths and rewards of its rollouts.

The functions that read them raise :class:`redis.RedisError`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from typing_extensions import Self

from rollout_api.length_stats import MIN_ROLLOUTS_OF_ALL, LengthStats
from rollout_api.protocol.history_encoding import LengthEntry, unpack_entries, unpack_recent
from rollout_api.protocol.keys import NUM_SHARDS, HistoryKeys
from rollout_api.redis_client.address import Kind, RedisAddress, parse_address
from rollout_api.redis_client.client_connection import RedisTarget, open_client, server_name

HistoryClient = redis.asyncio.Redis | redis.asyncio.RedisCluster

# The client's retry policy repeats failed commands. redis-py itself retries once, which makes it reload the cluster's
# slot map.
_CLUSTER_SETTINGS: dict[str, Any] = {"socket_timeout": 5.0, "socket_connect_timeout": 2.0, "protocol": 2}
_CLUSTER_RETRIES = 1
_PROBLEMS_PER_ROUND_TRIP = 256
"""Maximum number of problems in one pipeline of commands. Each command returns some kilobytes."""
DEFAULT_THRESHOLD = 0.5
"""Default of the lowest reward of a rollout that passes: it separates rewards of 0 and 1, and of −1 and 1."""


@dataclass(frozen=True)
class RewardStats:
    """Rewards of one problem's rollouts."""

    num_rollouts: int
    """Number of rollouts, with and without a reward."""
    count: int
    """Number of rollouts with a reward."""
    mean: float | None
    """Mean reward; None without rewards."""
    pass_rate: float | None
    """Share of the rewards that are at least the threshold; None without rewards."""
    newest_generation: int | None
    """Newest generation of a rollout with a reward; None without rewards."""

    @classmethod
    def from_entries(
        cls,
        entries: Iterable[LengthEntry],
        *,
        threshold: float = DEFAULT_THRESHOLD,
        generations: int | None = None,
    ) -> Self:
        """Compute the statistics of a problem's entries.

        Args:
            entries: the entries of the problem's rollouts.
            threshold: lowest reward of a rollout that passes. It is rounded to binary32, as the rewards are, so that a
                reward that was reported as 0.9 reaches a threshold of 0.9.
            generations: number of the problem's newest generations whose rollouts count, at least 1; None for all.
        """
        counted = list(entries)
        if generations is not None:
            newest = set(sorted({entry.generation for entry in counted})[-generations:])
            counted = [entry for entry in counted if entry.generation in newest]
        rewarded = [
            (entry.generation, entry.reward)
            for entry in counted
            if entry.reward is not None and math.isfinite(entry.reward)
        ]
        rewards = [reward for _, reward in rewarded]
        rounded = _binary32(threshold)
        return cls(
            num_rollouts=len(counted),
            count=len(rewards),
            mean=math.fsum(rewards) / len(rewards) if rewards else None,
            pass_rate=sum(reward >= rounded for reward in rewards) / len(rewards) if rewards else None,
            newest_generation=max((generation for generation, _ in rewarded), default=None),
        )


def _binary32(value: float) -> float:
    """Return *value* rounded to binary32, which is infinite beyond its range."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def connect_to_history(target: RedisTarget) -> tuple[HistoryClient, str]:
    """Return a connection to the Redis of a history, and its address without credentials; nothing is sent yet.

    Args:
        target: as for :func:`rollout_api.redis_client.client_connection.open_client`, or the URL of a cluster.

    Raises:
        InvalidRequestError: *target* cannot be used.
    """
    if isinstance(target, str) and (cluster := _cluster_address(target)) is not None:
        nodes = [ClusterNode(host, port) for host, port in cluster.hosts]
        settings = {**cluster.options, **_CLUSTER_SETTINGS}
        retry = Retry(NoBackoff(), _CLUSTER_RETRIES)
        client = redis.asyncio.RedisCluster(startup_nodes=nodes, ssl=cluster.tls, retry=retry, **settings)
        return client, f"Redis at {cluster}"
    server = open_client(target)
    return server, server_name(server)


def _cluster_address(url: str) -> RedisAddress | None:
    """Return the address of a cluster; None if *url* is not one."""
    try:
        address = parse_address(url)
    except ValueError:
        return None  # open_client raises an error that says what is wrong
    return address if address.kind is Kind.CLUSTER else None


async def read_length_stats(client: HistoryClient, keys: HistoryKeys, problem: str | None = None) -> LengthStats:
    """See :meth:`rollout_api.AsyncRolloutClient.length_stats`.

    Without a problem, the statistics are those of up to 512 rollouts in each of 16 shards.
    """
    # Each command names one key, because the keys may be on different nodes of a cluster.
    pipeline = client.pipeline(transaction=False)
    if problem is not None:
        pipeline.hgetall(keys.lengths(problem))
    else:
        for shard in range(NUM_SHARDS):
            pipeline.lrange(keys.recent_lengths(shard), 0, -1)
    stored = await _execute(pipeline)
    if problem is not None:
        return LengthStats.from_lengths((one.generation, one.length, one.cut_off) for one in unpack_entries(stored[0]))
    lengths = unpack_recent(entry for entries in stored for entry in entries)
    return LengthStats.from_lengths(lengths, min_rollouts=MIN_ROLLOUTS_OF_ALL)


async def read_reward_stats(
    client: HistoryClient,
    keys: HistoryKeys,
    problems: Iterable[str],
    *,
    threshold: float,
    generations: int | None = None,
) -> dict[str, RewardStats]:
    """See :meth:`rollout_api.AsyncRolloutClient.reward_stats`."""
    distinct = list(dict.fromkeys(problems))
    read: dict[str, RewardStats] = {}
    for start in range(0, len(distinct), _PROBLEMS_PER_ROUND_TRIP):
        batch = distinct[start : start + _PROBLEMS_PER_ROUND_TRIP]
        pipeline = client.pipeline(transaction=False)
        for problem in batch:
            pipeline.hgetall(keys.lengths(problem))
        for problem, entries in zip(batch, await _execute(pipeline), strict=True):
            read[problem] = RewardStats.from_entries(
                unpack_entries(entries), threshold=threshold, generations=generations
            )
    return read


async def _execute(pipeline: Any) -> list[Any]:
    """Execute the commands of a pipeline, and return their replies."""
    try:
        replies: list[Any] = await pipeline.execute()
    except (redis.exceptions.RedisClusterException, redis.exceptions.ClusterError) as error:
        # The retry policy repeats connection errors. The first of these is not even a RedisError.
        raise redis.ConnectionError(str(error)) from error
    return replies
