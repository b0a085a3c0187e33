"""The catalog of a history's problems: when each was used and changed last, and how large it is.

Queries about many problems take few round trips.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import redis

from rollout_api.protocol.keys import NUM_SHARDS, HistoryKeys
from rollout_api.redis_client.retry import concerns_server
from rollout_api.redis_client.server_functions import Call, Function, Redis, run, run_all

PROBLEMS_PER_ROUND_TRIP = 256
"""Maximum number of problems in one pipeline of commands."""
RECENT_LENGTHS_PER_SHARD = 512
"""Number of latest rollouts of a shard whose lengths are kept for statistics over all problems."""

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")


def batches(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """Split *items* into consecutive batches of *size*. The last one may be smaller."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def query_problems(
    client: Redis, problem_ids: Iterable[str], command: Callable[[Any, str], object]
) -> dict[str, Any | None]:
    """Run one command per problem, many in one round trip. *command* adds the command for a problem to a pipeline.

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


_RECORD_CHANGES, _UPDATE_SIZE = Function("record_changes"), Function("update_size")
_REMOVE_IF_UNUSED = Function("remove_if_unused")


@dataclass(frozen=True)
class StoredProblem:
    """A problem as its shard lists it."""

    problem_id: str
    last_used: float
    """Unix time of the last append to it or draft from it, by the server's clock."""
    last_changed: float
    """Number of its last change: microseconds since the epoch, by the server's clock, and increasing within a shard."""
    bytes: int
    """Size of its keys in Redis."""


class ProblemChange(NamedTuple):
    """A change of a problem that is recorded in its shard."""

    size: int | str
    """New size of the problem's keys in bytes; '' if it is unchanged."""
    length_entries: bytes = b""
    """Entries for the list of recent lengths, one per new rollout."""


@dataclass(frozen=True)
class Changes:
    """Problems that have changed since the last query."""

    problem_ids: frozenset[str]
    cursors: dict[int, float | None]
    """Shard → cursor of the next query."""
    reset_shards: frozenset[int]
    """Shards that have lost data since the cursor, so that all their problems have to be read again."""


class ProblemCatalog:
    """The problems of one history."""

    def __init__(self, client: Redis, keys: HistoryKeys) -> None:
        self._client = client
        self._keys = keys

    def problems(self) -> list[StoredProblem]:
        """Return all problems, least recently used first."""
        pipeline = self._client.pipeline(transaction=False)
        for shard in range(NUM_SHARDS):
            for key in (self._keys.last_used(shard), self._keys.last_changed(shard), self._keys.sizes(shard)):
                pipeline.zrange(key, 0, -1, withscores=True)
        replies = pipeline.execute()
        used, changed, sizes = (
            {name: score for reply in replies[kind::3] for name, score in reply} for kind in range(3)
        )
        problems = [
            StoredProblem(name, used[key], changed.get(key, 0.0), int(sizes.get(key, 0)))
            for name, key in ((name, name.encode()) for name in decode_names(used))
        ]
        return sorted(problems, key=lambda problem: problem.last_used)

    def changes_since(self, cursors: Mapping[int, float | None]) -> Changes:
        """Return the problems of some shards that have changed, in one round trip.

        *cursors* maps each shard to the cursor of the last :class:`Changes`; for None, only a cursor is returned.
        """
        pipeline = self._client.pipeline(transaction=False)
        for shard, since in cursors.items():
            if since is None:
                pipeline.zrange(self._keys.last_changed(shard), 0, 0, desc=True, withscores=True)
            else:
                pipeline.zrangebyscore(self._keys.last_changed(shard), since, "+inf", withscores=True)
        problem_ids: set[str] = set()
        new_cursors: dict[int, float | None] = {}
        reset_shards = set()
        for (shard, since), reply in zip(cursors.items(), pipeline.execute(), strict=True):
            new_cursors[shard] = max((score for _, score in reply), default=0.0)
            # The last change seen would be in the reply, unless its problem was deleted or the server lost its data.
            if since and not reply:
                reset_shards.add(shard)
            elif since is not None:
                problem_ids |= decode_names(name for name, score in reply if score > since)
        return Changes(frozenset(problem_ids), new_cursors, frozenset(reset_shards))

    def generations(self, problem_ids: Sequence[str]) -> dict[str, list[int] | None]:
        """Return the generations that sampled each problem; None for a problem with a key of the wrong type."""
        names = query_problems(
            self._client, problem_ids, lambda pipeline, problem_id: pipeline.hkeys(self._keys.lengths(problem_id))
        )
        return {
            problem_id: None if fields is None else [int(field) for field in fields if field.isdigit()]
            for problem_id, fields in names.items()
        }

    def log_lengths(self, problem_ids: Iterable[str]) -> dict[str, int | None]:
        """Return the number of entries in problems' logs; None for a problem with a key of the wrong type."""
        return query_problems(
            self._client, problem_ids, lambda pipeline, problem_id: pipeline.xlen(self._keys.log(problem_id))
        )

    def record_changes(self, changes: Mapping[str, ProblemChange]) -> None:
        """Record changed problems, by problem id, in their shards."""
        by_shard: defaultdict[int, list[Any]] = defaultdict(list)
        for problem_id, (size, length_entries) in changes.items():
            by_shard[self._keys.shard_of(problem_id)] += [problem_id, size, length_entries]
        calls = [
            Call(_RECORD_CHANGES, list(self._keys.shard_keys(shard)), [RECENT_LENGTHS_PER_SHARD, *arguments])
            for shard, arguments in by_shard.items()
        ]
        raise_first_error(run_all(self._client, calls))

    def mark_used(self, problem_ids: Iterable[str]) -> None:
        """Record that problems are drafted from; the least recently used ones are evicted first."""
        for batch in batches(list(problem_ids), PROBLEMS_PER_ROUND_TRIP):
            self.record_changes(dict.fromkeys(batch, ProblemChange("")))

    def update_size(self, problem_id: str, size: int) -> None:
        """Correct the recorded size of a problem, unless it was deleted in the meantime."""
        shard = self._keys.shard_of(problem_id)
        run(self._client, Call(_UPDATE_SIZE, [self._keys.sizes(shard)], [problem_id, size]))

    def delete(self, problems: Sequence[StoredProblem]) -> list[StoredProblem]:
        """Delete problems with everything that is kept of them, except those that were used in the meantime.

        A rollout that is appended at this very moment may be deleted as well.

        Returns:
            The problems that were deleted.
        """
        pipeline = self._client.pipeline(transaction=False)
        for problem in problems:
            pipeline.zscore(self._keys.last_used(self._keys.shard_of(problem.problem_id)), problem.problem_id)
        unused = [
            problem for problem, used in zip(problems, pipeline.execute(), strict=True) if used == problem.last_used
        ]
        # The keys go first: after an interruption the shard still lists the problem, so that it is deleted again.
        pipeline = self._client.pipeline(transaction=False)
        for problem in unused:
            for key in self._keys.problem_keys(problem.problem_id):
                pipeline.unlink(key)
        pipeline.execute()
        calls = [
            Call(
                _REMOVE_IF_UNUSED,
                list(self._keys.shard_keys(self._keys.shard_of(problem.problem_id))[:3]),
                [problem.problem_id, repr(problem.last_used)],
            )
            for problem in unused
        ]
        raise_first_error(run_all(self._client, calls))
        return unused
