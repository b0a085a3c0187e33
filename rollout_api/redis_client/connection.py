"""A client's connection to Redis: settings that were chosen, patience with a server that is away or full."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import redis
import redis.asyncio
import redis.asyncio.connection as asynchronous
import redis.asyncio.sentinel as asynchronous_sentinel
import redis.connection as synchronous
import redis.sentinel as synchronous_sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from rollout_api.errors import InvalidRequestError, RedisAwayError, RedisRefusedError
from rollout_api.redis_client.address import Kind, RedisAddress, parse_address
from rollout_api.redis_client.address import without_password as without_password

logger = logging.getLogger(__name__)

BLOCK_MS = 1000
"""How long a read waits in the server for the first result."""
_CONNECT_TIMEOUT_S = 2.0
_REPLY_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_SAY_EVERY_S = 10.0

# No retries inside redis-py: a read of a consumer group whose reply was lost, silently sent again, would skip what the
# first one was given, and its own pauses would add up behind our patience. RESP2: replies have one shape.
_OURS: dict[str, Any] = {
    "socket_timeout": BLOCK_MS / 1000 + _REPLY_TIMEOUT_S,
    "socket_connect_timeout": _CONNECT_TIMEOUT_S,
    "health_check_interval": 30,
    "decode_responses": False,
    "protocol": 2,
}
SENTINEL: dict[str, Any] = {
    # A Sentinel answers from memory, and the next one is asked after it: three that are silent cost some 2 s. Without
    # timeouts of their own, a lookup would take as long as they keep silent.
    "socket_timeout": 0.75,
    "socket_connect_timeout": 0.75,
    "decode_responses": False,
    "protocol": 2,
}
"""Settings of connections to Sentinels."""
_NOT_COPIED = {
    *_OURS,
    "retry",
    "retry_on_error",
    "retry_on_timeout",
    "encoding",
    "encoding_errors",
    "socket_read_size",
    "parser_class",
    "driver_info",
    "lib_name",
    "lib_version",
    "legacy_responses",
    "event_dispatcher",
    "himport_registry",
    "max_connections",
    "connection_class",
    "connection_pool",
}
"""Settings of another client that say how it is used, not where and as whom it connects."""
_COUNTERPARTS: dict[type, type[asynchronous.AbstractConnection]] = {
    synchronous.Connection: asynchronous.Connection,
    synchronous.SSLConnection: asynchronous.SSLConnection,
    synchronous.UnixDomainSocketConnection: asynchronous.UnixDomainSocketConnection,
    asynchronous.Connection: asynchronous.Connection,
    asynchronous.SSLConnection: asynchronous.SSLConnection,
    asynchronous.UnixDomainSocketConnection: asynchronous.UnixDomainSocketConnection,
    synchronous_sentinel.SentinelManagedConnection: asynchronous_sentinel.SentinelManagedConnection,
    synchronous_sentinel.SentinelManagedSSLConnection: asynchronous_sentinel.SentinelManagedSSLConnection,
    asynchronous_sentinel.SentinelManagedConnection: asynchronous_sentinel.SentinelManagedConnection,
    asynchronous_sentinel.SentinelManagedSSLConnection: asynchronous_sentinel.SentinelManagedSSLConnection,
}

RedisTarget = str | redis.Redis | redis.asyncio.Redis
"""A URL, or a client whose settings (address, TLS, user, password, database) are taken over."""
_Result = TypeVar("_Result")


class _SentinelPool(asynchronous_sentinel.SentinelConnectionPool):
    """Connections to the primary that Sentinels name, which are asked before each new one; it owns those to them."""

    async def aclose(self) -> None:
        """Close all of them."""
        await super().aclose()
        await self.sentinel_manager.aclose()


class _Sentinel(asynchronous_sentinel.Sentinel):
    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port of the primary, as :func:`primary_of` understands what the Sentinels say."""
        said: list[Said] = []
        for sentinel in tuple(self.sentinels):
            try:
                masters: Any = await sentinel.sentinel_masters()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                said.append((sentinel, error))
            else:
                said.append((sentinel, masters.get(service_name)))
            if (found := primary_of(self, service_name, said)) is not None:
                return found
        raise no_primary(service_name, said)


Said = tuple[Any, Mapping[str, Any] | redis.RedisError | None]
"""A client of a Sentinel, and its state of the primary: None if it knows none of that name; or why it did not say."""


def primary_of(manager: Any, service: str, said: Sequence[Said]) -> tuple[str, int] | None:
    """Host and port of the primary, if the Sentinel that was asked last names one that is up; it is asked first then.

    Args:
        manager: redis-py's, of the Sentinels.
        service: what they call the primary.
        said: what each has said so far.
    """
    sentinel, state = said[-1]
    if not isinstance(state, Mapping) or not manager.check_master_state(state, service):
        return None
    manager.sentinels = [sentinel, *(other for other in manager.sentinels if other is not sentinel)]
    return _instead(manager) or state["ip"], int(state["port"])


def _instead(manager: Any) -> str | None:
    """The host that the user of *manager* wants in place of the one that Sentinels name."""
    host: str | None = getattr(manager, "_force_master_ip", None)  # redis-py keeps it nowhere else
    return host


def no_primary(service: str, said: Sequence[Said]) -> redis.ConnectionError:
    """Why no Sentinel names a primary that is up; redis-py's own text hides what each of them said."""
    parts = []
    for sentinel, state in said:
        if isinstance(state, redis.RedisError):
            what = f"{type(state).__name__}: {state}"
        else:
            what = f"knows no {service}" if state is None else "takes it to be down"
        parts.append(f"{_place(sentinel.connection_pool)}: {what}")
    text = f"no Sentinel names a primary {service} that is up ({'; '.join(parts)})"
    if said and all(isinstance(state, redis.AuthenticationError) for _, state in said):
        return redis.AuthenticationError(text)
    return synchronous_sentinel.MasterNotFoundError(text)


def connection_to(target: RedisTarget) -> redis.asyncio.Redis:
    """A connection pool of its own to the same server as *target*; nothing is sent yet.

    Args:
        target: a URL of a server or of Sentinels (see :mod:`rollout_api.redis_client.address`), or a client of
            one, or a client that ``Sentinel.master_for`` made.

    Raises:
        InvalidRequestError: for a malformed URL, or a client whose settings cannot be taken over (a cluster's, one of
            replicas, one with a connection class or callback of its own).
    """
    if isinstance(target, str):
        return _connection_to_address(target)
    if not isinstance(target, redis.Redis | redis.asyncio.Redis):
        raise InvalidRequestError(
            f"redis: a {type(target).__module__}.{type(target).__qualname__} cannot be taken over; give the URL of a "
            "server or of its Sentinels, or a redis.Redis or redis.asyncio.Redis client of it"
        )
    theirs: Any = target.connection_pool
    connection_class, settings = _taken_over(theirs)
    settings |= {**_OURS, "retry": Retry(NoBackoff(), 0)}
    if not isinstance(
        theirs, synchronous_sentinel.SentinelConnectionPool | asynchronous_sentinel.SentinelConnectionPool
    ):
        return _client(connection_class, settings)
    if not theirs.is_master:
        raise InvalidRequestError("redis: a client of Sentinel's replicas cannot write; make one by master_for")
    sentinels = [_taken_over(sentinel.connection_pool) for sentinel in theirs.sentinel_manager.sentinels]
    manager = theirs.sentinel_manager
    rules = {"min_other_sentinels": manager.min_other_sentinels, "force_master_ip": _instead(manager)}
    return _client_by_sentinel(connection_class, settings, theirs.service_name, sentinels, rules)


def _connection_to_address(url: str) -> redis.asyncio.Redis:
    try:
        where = parse_address(url)
    except ValueError as error:
        raise InvalidRequestError(f"{without_password(url)!r} is no Redis URL: {error}") from None
    if where.kind is Kind.CLUSTER:
        raise InvalidRequestError(
            f"redis: {without_password(url)!r} is a cluster, and a job's messages are on one server; give the URL of "
            "that, or of its Sentinels"
        )
    return async_client(where, {**where.options, **_OURS, "retry": Retry(NoBackoff(), 0)})


def async_client(where: RedisAddress, settings: Mapping[str, Any]) -> redis.asyncio.Redis:
    """A client of the server at *where*, or behind the Sentinels there; nothing is sent yet.

    Args:
        where: not a cluster.
        settings: of the connections to the server, those of the address included.
    """
    if where.kind is Kind.SENTINEL:
        kind = asynchronous.SSLConnection if where.tls else asynchronous.Connection
        sentinels = [(kind, {"host": host, "port": port, **where.sentinel_options}) for host, port in where.hosts]
        return _client_by_sentinel(
            asynchronous_sentinel.SentinelManagedSSLConnection
            if where.tls
            else asynchronous_sentinel.SentinelManagedConnection,
            settings,
            where.service,
            sentinels,
        )
    if where.path:
        return _client(asynchronous.UnixDomainSocketConnection, {**settings, "path": where.path})
    ((host, port),) = where.hosts
    return _client(
        asynchronous.SSLConnection if where.tls else asynchronous.Connection, {**settings, "host": host, "port": port}
    )


def _taken_over(pool: Any) -> tuple[type[asynchronous.AbstractConnection], dict[str, Any]]:
    """How the connections of another client's pool, and with what settings of it, are made here."""
    connection_class = _COUNTERPARTS.get(pool.connection_class)
    if connection_class is None:
        raise InvalidRequestError(
            f"redis: a client that connects by {pool.connection_class.__qualname__} (a class of your own) cannot be "
            "taken over; give the URL"
        )
    return connection_class, _transferred(pool.connection_kwargs, connection_class)


def _client(
    connection_class: type[asynchronous.AbstractConnection], settings: Mapping[str, Any]
) -> redis.asyncio.Redis:
    return redis.asyncio.Redis.from_pool(asynchronous.ConnectionPool(connection_class=connection_class, **settings))


def _client_by_sentinel(
    connection_class: type[asynchronous.AbstractConnection],
    settings: Mapping[str, Any],
    service: str,
    sentinels: Iterable[tuple[type[asynchronous.AbstractConnection], Mapping[str, Any]]],
    rules: Mapping[str, Any] | None = None,
) -> redis.asyncio.Redis:
    make_manager: Any = _Sentinel
    manager = make_manager([], sentinel_kwargs={}, **(rules or {}))
    manager.sentinels = [_client(kind, {**one, **SENTINEL, "retry": Retry(NoBackoff(), 0)}) for kind, one in sentinels]
    make: Any = _SentinelPool
    return redis.asyncio.Redis.from_pool(make(service, manager, connection_class=connection_class, **settings))


def _transferred(given: Mapping[str, Any], connection_class: type) -> dict[str, Any]:
    """Those of a client's settings that say where it connects and as whom."""
    known = {
        name for base in connection_class.__mro__ if "__init__" in vars(base) for name in _parameters(vars(base))
    } - {"self", "kwargs"}
    settings = {}
    for name, value in given.items():
        chosen_by_redis_py = name.startswith(("maint_", "orig_")) or type(value) is object
        if name in _NOT_COPIED or chosen_by_redis_py or value is None:
            continue
        callback = name == "redis_connect_func"
        if name in known and not callback:
            settings[name] = value
        elif value or callback:
            raise InvalidRequestError(
                f"redis: the setting {name} of your client cannot be taken over; give a URL, or a client without it"
            )
    return settings


def _parameters(namespace: Any) -> Iterable[str]:
    return inspect.signature(namespace["__init__"]).parameters


def address(client: redis.asyncio.Redis) -> str:
    """Where *client* connects to, as it may be shown."""
    pool: Any = client.connection_pool
    if isinstance(pool, asynchronous_sentinel.SentinelConnectionPool):
        sentinels = ",".join(_place(one.connection_pool) for one in pool.sentinel_manager.sentinels)
        return f"Redis {pool.service_name}, whose Sentinels are {sentinels}"
    return f"Redis at {_place(pool)}"


def _place(pool: Any) -> str:
    settings = pool.connection_kwargs
    host, port = settings.get("host", "localhost"), settings.get("port", 6379)
    return str(settings.get("path") or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))


@cache
def server_function(package: str, name: str) -> str:
    """Return the source of the Lua script ``functions/<name>.lua`` of a package."""
    return resources.files(package).joinpath("functions", f"{name}.lua").read_text()


async def even_when_full(client: redis.asyncio.Redis, key: str, *command: str | bytes | int) -> Any:
    """Carry out a small *command* of *key*, also on a server that is out of memory."""
    return await client.register_script(server_function(__package__, "even_when_full"))(keys=[key], args=command)


_PASSING_CODES = re.compile(r"(?:.* caused error: )?(BUSY|MISCONF|NOREPLICAS) ", re.DOTALL)
"""Of errors that redis-py has no class for: a script is running, its disk is full, too few replicas are connected.

Those of a pipeline begin with the command.
"""


def passes(error: redis.RedisError) -> bool:
    """Whether *error* may pass by itself: the server is slow, away, loading, or a failover or move of slots goes on.

    Or something else answers in its place: a proxy, mostly, of a service that has no server now.
    """
    refused = redis.AuthenticationError | redis.exceptions.AuthorizationError
    away = (
        redis.ConnectionError | redis.TimeoutError | redis.exceptions.ReadOnlyError | redis.exceptions.InvalidResponse
    )
    # ClusterError: a slot's nodes referred to each other for too long. But MOVED reaches us only where a cluster's node
    # is used as if it were a server of its own.
    on_cluster = redis.exceptions.ClusterError | redis.exceptions.TryAgainError
    if isinstance(error, redis.ResponseError) and _PASSING_CODES.match(str(error)):
        return True
    return isinstance(error, away | on_cluster) and not isinstance(error, refused)


class RetryPolicy:
    """Tries a command again while Redis is away, for so long; and while it is full, for as long as that lasts.

    Every command that goes through here must be idempotent: a reply may have been lost.
    """

    def __init__(self, where: str, seconds: float) -> None:
        """Name the server, and say how long it may be away."""
        self._where, self._seconds = where, seconds
        self._said = -_SAY_EVERY_S

    async def of(self, command: Callable[[], Awaitable[_Result]], *, what: str) -> _Result:
        """The result of *command*, which does *what*.

        Raises:
            RedisAwayError: the server was away for too long.
            RedisRefusedError: an error that does not pass by itself.
        """
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return await command()
            except redis.RedisError as error:
                self.judge(error, began, what)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def judge(self, error: redis.RedisError, began: float, what: str) -> None:
        """Return if *what* failed in a way that is worth another try, and say so now and then.

        Raises:
            RedisAwayError: it has been failing since *began* (``time.monotonic()``), which is too long.
            RedisRefusedError: *error* does not pass by itself.
        """
        full = isinstance(error, redis.exceptions.OutOfMemoryError)
        if not full and not passes(error):
            raise RedisRefusedError(_refusal(self._where, what, error)) from error
        now = time.monotonic()
        if not full and now - began > self._seconds:
            raise RedisAwayError(
                f"{self._where} has been away for {now - began:.0f} s while this client wanted to {what} "
                f"({type(error).__name__}: {error}); is it running, and is the address right? What was sent is kept: "
                "the same step, opened again, gets its results"
            ) from error
        if now - self._said >= _SAY_EVERY_S:
            self._said = now
            if full:
                logger.warning(
                    "%s is out of memory, so this client waits to %s; it goes on by itself when results are "
                    "acknowledged or maxmemory is raised. (%s)",
                    self._where,
                    what,
                    error,
                )
            else:
                logger.warning(
                    "%s does not answer (%s: %s); trying again to %s, for up to %.0f s.",
                    self._where,
                    type(error).__name__,
                    error,
                    what,
                    self._seconds - (now - began),
                )


def _refusal(where: str, what: str, error: redis.RedisError) -> str:
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        remedy = "correct the user name or password"
    elif isinstance(error, redis.exceptions.NoPermissionError):
        remedy = "extend the user's ACL"
    elif isinstance(error, redis.exceptions.AskError):
        remedy = "it is a node of a cluster, and a job's messages are on one server: give the URL of that"
    else:
        remedy = "see docs/protocol.md for the commands that a client needs"
    return f"{where} refused to {what}: {type(error).__name__}: {error}; {remedy}"
