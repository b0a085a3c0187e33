"""Functions that run in the Redis server, many calls in one round trip, on a single server and on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha1
from importlib import resources
from typing import Any

import redis
from redis.cluster import PipelineCommand

from rollout_api.redis_client.connection import passes
from rollout_worker.history.redis_cluster import Cluster

Redis = redis.Redis | redis.RedisCluster
"""What ``connect_history`` returns: a client of a server, found by Sentinels or not, or of a cluster."""
_REDIRECTED = redis.exceptions.AskError | redis.exceptions.TryAgainError
"""A slot that is being moved, or (``MovedError`` is an ``AskError``) was."""
_DENIED = "The user executing the script can't"
"""What Redis 7.0 says within a script in place of NOPERM."""


@dataclass(frozen=True)
class Function:
    """The Lua script ``functions/<name>.lua`` of this package."""

    name: str
    even_when_full: bool = False
    """Carry it out on a server that is out of memory, too."""

    @cached_property
    def source(self) -> str:
        """Its text."""
        text = resources.files(__package__).joinpath("functions", f"{self.name}.lua").read_text()
        return text.replace("#!lua\n", "#!lua flags=allow-oom\n", 1) if self.even_when_full else text

    @cached_property
    def sha1(self) -> str:
        """What a server that has it knows it by."""
        return sha1(self.source.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Call:
    """One call of a function."""

    function: Function
    keys: Sequence[str]
    """At least one; on a cluster all of them in one slot."""
    args: Sequence[str | bytes | int | float] = ()

    def by_name(self) -> tuple[str | bytes | int | float, ...]:
        """The command for a server that has the function."""
        return "EVALSHA", self.function.sha1, len(self.keys), *self.keys, *self.args

    def by_source(self) -> tuple[str | bytes | int | float, ...]:
        """The command for any server; it has the function from then on."""
        return "EVAL", self.function.source, len(self.keys), *self.keys, *self.args


def run(client: Redis, call: Call) -> Any:
    """What the function returns.

    Raises:
        redis.RedisError: the call failed; see :func:`run_all`.
    """
    (reply,) = run_all(client, [call])
    if isinstance(reply, redis.ResponseError):
        raise reply
    return reply


def run_all(client: Redis, calls: Sequence[Call]) -> list[Any]:
    """What the functions return, in the order of *calls*, in one round trip.

    A server that lacks a function (it was started anew, or has just become the primary) is given it, in a second one.
    Calls of one key are carried out in order, unless their server lacked a function or their slot was being moved.

    Args:
        client: of a single server or of a cluster.
        calls: each of them idempotent: one whose reply was lost may be carried out twice.

    Returns:
        For each call its reply, or the :class:`redis.ResponseError` that concerns this call alone (a key of the
        wrong type, an error of the script), so that one bad key does not fail the others.

    Raises:
        redis.RedisError: what concerns the server and not a call: it is away, full or a replica, or this user may not
            do that. Some of the calls may have been carried out.
    """
    commands = [call.by_name() for call in calls]
    replies = _carry_out(client, calls, commands)
    unknown = [i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.NoScriptError)]
    if unknown:
        again = [calls[i] for i in unknown]
        for i, reply in zip(unknown, _carry_out(client, again, [call.by_source() for call in again]), strict=True):
            replies[i] = reply
    return replies


def _carry_out(client: Redis, calls: Sequence[Call], commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    if isinstance(client, Cluster):
        replies = _on_cluster(client, calls, commands)
    else:
        pipeline: Any = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies = pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, redis.RedisError):
            if str(reply).startswith(_DENIED):
                raise redis.exceptions.NoPermissionError(str(reply)) from reply
            if concerns_the_server(reply):
                raise reply
    return replies


def _on_cluster(client: Cluster, calls: Sequence[Call], commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    replies = _to_their_nodes(client, calls, commands)
    moved = [i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.MovedError)]
    if moved:
        client.refresh()
        again = _to_their_nodes(client, [calls[i] for i in moved], [commands[i] for i in moved])
        for i, reply in zip(moved, again, strict=True):
            replies[i] = reply
    for i, reply in enumerate(replies):
        if isinstance(reply, redis.ConnectionError | redis.TimeoutError | redis.exceptions.ClusterDownError):
            client.refresh()  # so that whoever tries again finds the new primary
            raise reply
        if isinstance(reply, _REDIRECTED):
            # on its way from one node to another: this follows it; the node that gets it may lack the function
            try:
                replies[i] = client.execute_command(*calls[i].by_source())
            except redis.ResponseError as error:
                replies[i] = error
    return replies


def _to_their_nodes(client: Cluster, calls: Sequence[Call], commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Replies and errors of *commands*, each sent once, to the node that has its keys as far as *client* knows."""
    # redis-py refuses EVALSHA in a cluster's pipeline because of its own scripts, which it could not load there
    command: Any = PipelineCommand
    node_of: Any = client.get_node_from_key
    with client.noticing():
        stack = [
            command(words, {"target_nodes": node_of(call.keys[0])}, position)
            for position, (call, words) in enumerate(zip(calls, commands, strict=True))
        ]
        replies: list[Any] = client.pipeline(transaction=False).send_cluster_commands(
            stack, raise_on_error=False, allow_redirections=False
        )
    return replies


def concerns_the_server(error: redis.RedisError) -> bool:
    """Whether *error* is of the server, or of this user there, and not of the keys of one call."""
    return passes(error) or isinstance(
        error,
        redis.exceptions.OutOfMemoryError
        | redis.exceptions.NoPermissionError
        | redis.AuthenticationError
        | redis.exceptions.AuthorizationError,
    )
