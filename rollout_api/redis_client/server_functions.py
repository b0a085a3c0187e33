"""Functions in Lua that run in the Redis server: many calls in one round trip, on a single server and on a cluster.

Each file ``functions/<name>.lua`` is a library of Redis Functions. Its name contains a digest of its source, so a
library never changes, and several versions of this package can use one server. They share what does not differ.

A server keeps its functions when it restarts with its data, and its replicas have them, too. Where they are missing, a
client loads all of them if its user may. The users of jobs may not, because the author of a function could let it run
without end, which blocks the server for everyone: whoever creates these users loads the functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

import redis
import redis.asyncio
from redis.cluster import PipelineCommand

from rollout_api.redis_client.cluster import Cluster
from rollout_api.redis_client.retry import concerns_server, lacks_function

Redis = redis.Redis | redis.RedisCluster
"""A client that ``connect_history`` returns: of a server, found through Sentinels or not, or of a cluster."""
_REDIRECTED = redis.exceptions.AskError | redis.exceptions.TryAgainError
"""Errors about a slot that is being migrated, or (``MovedError`` is an ``AskError``) that was migrated."""
_DENIED = "The user executing the script can't"
"""Beginning of the error that Redis 7.0 raises within a function in place of NOPERM."""
FUNCTIONS: Any = resources.files(__package__) / "functions"
"""Directory of the functions."""
_EVEN_WHEN_FULL = "_even_when_full"
# The source begins in the second line, as in its file, so that errors name the lines of the file.
_LIBRARY = """#!lua name={name}
local function run(KEYS, ARGV) {source}
end
redis.register_function{{function_name='{name}', callback=run, flags={{{flags}}}}}
redis.register_function{{function_name='{name}{even_when_full}', callback=run, flags={{'allow-oom'}}}}
"""


@dataclass(frozen=True)
class Function:
    """The function ``functions/<name>.lua``."""

    name: str
    even_when_full: bool = False
    """Whether to run it on a server that is out of memory, even if its file does not say so."""

    @property
    def registered_name(self) -> str:
        """Name of the function on the server."""
        return _library(self.name)[0] + (_EVEN_WHEN_FULL if self.even_when_full else "")


@dataclass(frozen=True)
class Call:
    """One call of a function."""

    function: Function
    keys: Sequence[str]
    """At least one key; on a cluster, all of them must be in one slot."""
    args: Sequence[str | bytes | int | float] = ()

    def command(self) -> tuple[str | bytes | int | float, ...]:
        """Return the command."""
        return "FCALL", self.function.registered_name, len(self.keys), *self.keys, *self.args


@cache
def _library(name: str) -> tuple[str, str]:
    """Return the name and the code of the library of ``functions/<name>.lua``."""
    header, _, source = FUNCTIONS.joinpath(f"{name}.lua").read_text().partition("\n")
    flags = "'allow-oom'" if "allow-oom" in header else ""
    parts = {"source": source, "flags": flags, "even_when_full": _EVEN_WHEN_FULL}
    digest = sha256(_LIBRARY.format(name="", **parts).encode()).hexdigest()[:12]
    library = f"rollout_{name}_{digest}"
    return library, _LIBRARY.format(name=library, **parts)


@cache
def libraries() -> Mapping[str, str]:
    """Return the code of all libraries by their names."""
    return dict(_library(file.name.removesuffix(".lua")) for file in FUNCTIONS.iterdir())


async def execute_even_when_full(client: redis.asyncio.Redis, key: str, *command: str | bytes | int) -> Any:
    """Execute a small *command* on *key*, even if the server is out of memory."""
    return await run_async(client, Call(Function("even_when_full"), [key], command))


async def run_async(client: redis.asyncio.Redis, call: Call) -> Any:
    """Return the result of one call.

    Raises:
        redis.RedisError: the call failed.
    """
    try:
        return await client.execute_command(*call.command())
    except redis.ResponseError as error:
        if not lacks_function(error):
            raise
    with _explained(call):
        await load_async(client)
    return await client.execute_command(*call.command())


async def load_async(client: redis.asyncio.Redis) -> None:
    """Load all functions; see :func:`load`."""
    for code in libraries().values():
        with _unless_loaded():
            await client.execute_command("FUNCTION", "LOAD", code)


def load(client: redis.Redis) -> None:
    """Load all functions that a single server lacks, because it refuses them once it is full and some free memory.

    Raises:
        redis.RedisError: they could not be loaded.
    """
    execute: Any = client.execute_command
    for code in libraries().values():
        with _unless_loaded():
            execute("FUNCTION", "LOAD", code)


def load_everywhere(client: Redis) -> None:
    """Load all functions on a server, or on all primaries of a cluster.

    Raises:
        redis.RedisError: they could not be loaded.
    """
    for server in _servers(client):
        load(server)


@contextmanager
def _unless_loaded() -> Iterator[None]:
    try:
        yield
    except redis.ResponseError as error:
        if "already exists" not in str(error):
            raise


@contextmanager
def _explained(call: Call) -> Iterator[None]:
    """Convert the error for a user who may not load functions into that of the call, and say what to do."""
    try:
        yield
    except redis.exceptions.NoPermissionError as error:
        raise redis.ResponseError(
            f"Function not found: {call.function.registered_name}. rollout-redis-users of the same release loads it; "
            "without that, load it with python -m rollout_api.redis_client.load_functions, or let this user do so "
            "(ACL rule +function|load)"
        ) from error


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

    Where the server lacks a function, all functions are loaded, and the call is repeated. Calls on one key are executed
    in order, unless their server lacked a function or their slot was being migrated.

    Args:
        client: client of a single server or of a cluster.
        calls: each must be idempotent, since a call whose reply was lost may be executed twice.

    Returns:
        For each call its reply, or the :class:`redis.ResponseError` that concerns this call alone (a key of the
        wrong type, an error of the function), so that one bad key does not fail the others.

    Raises:
        redis.RedisError: an error that concerns the server and not a single call: it is unreachable, full or a
            replica, it lacks a function that this user may not load, or this user lacks a permission. Some of the calls
            may have been executed.
    """
    replies = _execute(client, calls)
    unknown = [i for i, reply in enumerate(replies) if isinstance(reply, redis.RedisError) and lacks_function(reply)]
    if unknown:
        repeated = [calls[i] for i in unknown]
        with _explained(repeated[0]):
            for server in _servers(client, repeated):
                load(server)
        for i, reply in zip(unknown, _execute(client, repeated), strict=True):
            replies[i] = reply
    for reply in replies:
        if isinstance(reply, redis.RedisError):
            if str(reply).startswith(_DENIED):
                raise redis.exceptions.NoPermissionError(str(reply)) from reply
            if concerns_server(reply):
                raise reply
    return replies


def _servers(client: Redis, calls: Iterable[Call] | None = None) -> list[redis.Redis]:
    """Return a client of each server that has the keys of *calls*, or of each primary if they are None."""
    if isinstance(client, redis.Redis):
        return [client]
    cluster: Any = client
    nodes = cluster.get_primaries() if calls is None else [cluster.get_node_from_key(call.keys[0]) for call in calls]
    return [cluster.get_redis_connection(node) for node in {node.name: node for node in nodes}.values()]


def _execute(client: Redis, calls: Sequence[Call]) -> list[Any]:
    if isinstance(client, Cluster):
        return _execute_on_cluster(client, calls)
    pipeline: Any = client.pipeline(transaction=False)
    for call in calls:
        pipeline.execute_command(*call.command())
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _execute_on_cluster(client: Cluster, calls: Sequence[Call]) -> list[Any]:
    replies = _send_to_nodes(client, calls)
    moved = [i for i, reply in enumerate(replies) if isinstance(reply, redis.exceptions.MovedError)]
    if moved:
        client.refresh()
        for i, reply in zip(moved, _send_to_nodes(client, [calls[i] for i in moved]), strict=True):
            replies[i] = reply
    for i, reply in enumerate(replies):
        if isinstance(reply, redis.ConnectionError | redis.TimeoutError | redis.exceptions.ClusterDownError):
            client.refresh()  # so that a retry finds the new primary
            raise reply
        if isinstance(reply, _REDIRECTED):
            replies[i] = _follow(client, calls[i], reply)
    return replies


def _follow(client: Cluster, call: Call, redirection: redis.ResponseError) -> Any:
    """Return the reply to a call, or its error, while its slot is being migrated."""
    try:
        return client.execute_command(*call.command())  # follows redirections
    except redis.ResponseError as error:
        if not (lacks_function(error) and isinstance(redirection, redis.exceptions.AskError)):
            return error
        missing = error
    # The new node lacks the function. It may have no slot yet.
    node = client.get_node(node_name=f"{redirection.host}:{redirection.port}")
    with _explained(call):
        load(client.get_redis_connection(node))
    return _follow(client, call, missing)


def _send_to_nodes(client: Cluster, calls: Sequence[Call]) -> list[Any]:
    """Send each call once, to the node that has its keys according to *client*; return replies and errors."""
    # The pipeline of redis-py would ask a server for the keys of each call.
    command: Any = PipelineCommand
    node_of: Any = client.get_node_from_key
    with client.reconnect_when_lost():
        stack = [
            command(call.command(), {"target_nodes": node_of(call.keys[0])}, position)
            for position, call in enumerate(calls)
        ]
        replies: list[Any] = client.pipeline(transaction=False).send_cluster_commands(
            stack, raise_on_error=False, allow_redirections=False
        )
    return replies
