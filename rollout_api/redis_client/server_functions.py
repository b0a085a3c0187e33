"""Lua functions that run in the Redis server: many calls in one round trip, on a single server and on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha1
from importlib import resources
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio
from redis.cluster import PipelineCommand

from rollout_api.redis_client.cluster import Cluster
from rollout_api.redis_client.retry import concerns_server

if TYPE_CHECKING:
    from redis.commands.core import AsyncScript

Redis = redis.Redis | redis.RedisCluster
"""A client that ``connect_history`` returns: of a server, found through Sentinels or not, or of a cluster."""
_REDIRECTED = redis.exceptions.AskError | redis.exceptions.TryAgainError
"""Errors about a slot that is being migrated, or (``MovedError`` is an ``AskError``) that was migrated."""
_DENIED = "The user executing the script can't"
"""Beginning of the error that Redis 7.0 raises within a script in place of NOPERM."""


@dataclass(frozen=True)
class Function:
    """The Lua script ``functions/<name>.lua`` of a package."""

    package: str
    name: str
    even_when_full: bool = False
    """Whether to run it on a server that is out of memory, too."""

    @cached_property
    def source(self) -> str:
        """Source of the script."""
        text = read_source(self.package, self.name)
        return text.replace("#!lua\n", "#!lua flags=allow-oom\n", 1) if self.even_when_full else text

    @cached_property
    def sha1(self) -> str:
        """Digest that identifies the script on a server that has it."""
        return sha1(self.source.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Call:
    """One call of a function."""

    function: Function
    keys: Sequence[str]
    """At least one key; on a cluster, all of them must be in one slot."""
    args: Sequence[str | bytes | int | float] = ()

    def by_digest(self) -> tuple[str | bytes | int | float, ...]:
        """Return the command for a server that has the function."""
        return "EVALSHA", self.function.sha1, len(self.keys), *self.keys, *self.args

    def by_source(self) -> tuple[str | bytes | int | float, ...]:
        """Return the command for any server; the server has the function from then on."""
        return "EVAL", self.function.source, len(self.keys), *self.keys, *self.args


@cache
def read_source(package: str, name: str) -> str:
    """Return the source of the Lua script ``functions/<name>.lua`` of *package*."""
    return (resources.files(package) / "functions" / f"{name}.lua").read_text()


def async_function(client: redis.asyncio.Redis, package: str, name: str) -> AsyncScript:
    """Return the Lua script ``functions/<name>.lua`` of *package*, to be awaited with ``keys`` and ``args``."""
    return client.register_script(read_source(package, name))


async def execute_even_when_full(client: redis.asyncio.Redis, key: str, *command: str | bytes | int) -> Any:
    """Execute a small *command* on *key*, even if the server is out of memory."""
    return await async_function(client, __package__, "even_when_full")(keys=[key], args=command)


def run(client: Redis, call: Call) -> Any:
    """Return the result of one call.

    Raises:
        redis.RedisError: the call failed; see :func:`run_all`.
    """
    (reply,) = run_all(client, [call])
    if isinstance(reply, redis.ResponseError):
        raise reply
    return reply


def run_all(client: Redis, calls: Sequence[Call]) -> list[Any]:
    """Return the results of *calls*, in their order, usually after one round trip.

    A server that lacks a function, because it was restarted or has just become the primary, receives it in a second
    round trip. Calls on one key are executed in order, unless their server lacked a function or their slot was being
    migrated.

    Args:
        client: client of a single server or of a cluster.
        calls: each must be idempotent, since a call whose reply was lost may be executed twice.

    Returns:
        For each call its reply, or the :class:`redis.ResponseError` that concerns this call alone (a key of the
        wrong type, an error of the script), so that one bad key does not fail the others.

    Raises:
        redis.RedisError: an error that concerns the server and not a single call: it is unreachable, full or a
            replica, or this user lacks a permission. Some of the calls may have been executed.
    """
    commands = [call.by_digest() for call in calls]
    replies = _execute(client, calls, commands)
    unknown = [i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.NoScriptError)]
    if unknown:
        repeated = [calls[i] for i in unknown]
        for i, reply in zip(unknown, _execute(client, repeated, [call.by_source() for call in repeated]), strict=True):
            replies[i] = reply
    return replies


def _execute(client: Redis, calls: Sequence[Call], commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    if isinstance(client, Cluster):
        replies = _execute_on_cluster(client, calls, commands)
    else:
        pipeline: Any = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies = pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, redis.RedisError):
            if str(reply).startswith(_DENIED):
                raise redis.exceptions.NoPermissionError(str(reply)) from reply
            if concerns_server(reply):
                raise reply
    return replies


def _execute_on_cluster(client: Cluster, calls: Sequence[Call], commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    replies = _send_to_nodes(client, calls, commands)
    moved = [i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.MovedError)]
    if moved:
        client.refresh()
        repeated = _send_to_nodes(client, [calls[i] for i in moved], [commands[i] for i in moved])
        for i, reply in zip(moved, repeated, strict=True):
            replies[i] = reply
    for i, reply in enumerate(replies):
        if isinstance(reply, redis.ConnectionError | redis.TimeoutError | redis.exceptions.ClusterDownError):
            client.refresh()  # so that a retry finds the new primary
            raise reply
        if isinstance(reply, _REDIRECTED):
            # The slot is being migrated. execute_command follows the redirection; the new node may lack the function.
            try:
                replies[i] = client.execute_command(*calls[i].by_source())
            except redis.ResponseError as error:
                replies[i] = error
    return replies


def _send_to_nodes(client: Cluster, calls: Sequence[Call], commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Send each command once, to the node that has its keys according to *client*; return replies and errors."""
    # redis-py rejects EVALSHA in a cluster's pipeline, because it cannot load its own scripts there.
    command: Any = PipelineCommand
    node_of: Any = client.get_node_from_key
    with client.reconnect_when_lost():
        stack = [
            command(words, {"target_nodes": node_of(call.keys[0])}, position)
            for position, (call, words) in enumerate(zip(calls, commands, strict=True))
        ]
        replies: list[Any] = client.pipeline(transaction=False).send_cluster_commands(
            stack, raise_on_error=False, allow_redirections=False
        )
    return replies
