"""Queries about many problems in few round trips, and the interpretation of their replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import redis

from rollout_api.redis_client.retry import concerns_server
from rollout_api.redis_client.server_functions import Redis
from rollout_worker.history.limits import PROBLEMS_PER_ROUND_TRIP

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")


def batches(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """Split *items* into consecutive batches of *size*, the last of which may be smaller."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def query_problems(
    client: Redis, problem_ids: Iterable[str], command: Callable[[Any, str], object]
) -> dict[str, Any | None]:
    """Run one command per problem, many in one round trip.

    Args:
        client: client of the history's server or cluster.
        problem_ids: ids of the problems; duplicates are ignored.
        command: adds the command for a problem to a pipeline.

    Returns:
        Problem id → reply, or None if a key of the problem has the wrong type.

    Raises:
        redis.RedisError: the server fails.
    """
    replies: dict[str, Any | None] = {}
    for batch in batches(list(dict.fromkeys(problem_ids)), PROBLEMS_PER_ROUND_TRIP):
        pipeline = client.pipeline(transaction=False)
        for problem_id in batch:
            command(pipeline, problem_id)
        for problem_id, reply in zip(batch, pipeline.execute(raise_on_error=False), strict=True):
            if isinstance(reply, Exception):
                raise_unless_key_error(reply)
                reply = None
            replies[problem_id] = reply
    return replies


def raise_unless_key_error(error: Exception) -> None:
    """Raise *error*, unless it concerns a single key, for example one of the wrong type."""
    if not isinstance(error, redis.ResponseError) or concerns_server(error):
        raise error


def raise_first_error(replies: Iterable[Any]) -> None:
    """Raise the first error among the replies of server functions."""
    for reply in replies:
        if isinstance(reply, redis.ResponseError):
            raise reply


def decode_names(names: Iterable[bytes]) -> set[str]:
    """Decode names of histories or problems; names that are not text, which this project never writes, are ignored."""
    decoded = set()
    for name in names:
        try:
            decoded.add(name.decode())
        except UnicodeDecodeError:
            logger.warning(
                "%r is not the name of a history or problem. Does another program write to this Redis?", name[:40]
            )
    return decoded
