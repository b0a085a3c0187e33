"""Finds the primary of a server through its Sentinels, with short timeouts and detailed errors.

Sentinels are asked one after another, and each answers from memory. With redis-py's defaults, Sentinels that do not
answer would cost minutes, and the error would not say what each of them replied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import redis
import redis.asyncio
import redis.asyncio.connection as async_connection
import redis.asyncio.sentinel as async_sentinel
import redis.connection as sync_connection
import redis.sentinel as sync_sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollout_api.redis_client.address import Kind, RedisAddress

_SETTINGS: dict[str, Any] = {
    "socket_timeout": 0.75,
    "socket_connect_timeout": 0.75,
    "decode_responses": False,
    "protocol": 2,
}
"""Settings of connections to Sentinels. Three Sentinels that do not answer cost about 2 s."""

_Answer = tuple[Any, Mapping[str, Any] | redis.RedisError | None]
"""A client of a Sentinel, and its reply: the state of the primary, None for an unknown name, or an error."""


class AsyncSentinelPool(async_sentinel.SentinelConnectionPool):
    """Connections to the primary. The Sentinels are asked for its address before each new connection.

    The pool owns its connections to the Sentinels.
    """

    async def aclose(self) -> None:
        """Close all connections."""
        await super().aclose()
        await self.sentinel_manager.aclose()


class SentinelPool(sync_sentinel.SentinelConnectionPool):
    """The synchronous counterpart of :class:`AsyncSentinelPool`."""

    def close(self) -> None:
        """Close all connections."""
        super().close()
        self.sentinel_manager.close()


class _AsyncSentinel(async_sentinel.Sentinel):
    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return the host and port of the primary."""
        answers: list[_Answer] = []
        for sentinel in tuple(self.sentinels):
            try:
                masters: Any = await sentinel.sentinel_masters()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                answers.append((sentinel, error))
            else:
                answers.append((sentinel, masters.get(service_name)))
            if (found := _primary(self, service_name, answers[-1])) is not None:
                return found
        raise _no_primary(service_name, answers)


class _Sentinel(sync_sentinel.Sentinel):
    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return the host and port of the primary."""
        answers: list[_Answer] = []
        for sentinel in tuple(self.sentinels):
            try:
                masters: Any = sentinel.sentinel_masters()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                answers.append((sentinel, error))
            else:
                answers.append((sentinel, masters.get(service_name)))
            if (found := _primary(self, service_name, answers[-1])) is not None:
                return found
        raise _no_primary(service_name, answers)


class Classes(NamedTuple):
    """redis-py's classes and modules for one kind of client, and the two classes above for it."""

    client: Any
    connections: Any
    managed_connections: Any
    sentinel: Any
    sentinel_pool: Any
    retry: Any


SYNCHRONOUS = Classes(redis.Redis, sync_connection, sync_sentinel, _Sentinel, SentinelPool, Retry)
ASYNCHRONOUS = Classes(
    redis.asyncio.Redis, async_connection, async_sentinel, _AsyncSentinel, AsyncSentinelPool, AsyncRetry
)


def server_pool(classes: Classes, address: RedisAddress, settings: Mapping[str, Any]) -> Any:
    """Return a pool of connections to the server at *address*, or to the primary of its Sentinels; nothing is sent yet.

    Args:
        classes: the kind of client.
        address: address of a server or of Sentinels.
        settings: settings of the connections to the server.
    """
    connections, managed = classes.connections, classes.managed_connections
    kind = connections.SSLConnection if address.tls else connections.Connection
    if address.kind is Kind.SENTINEL:
        primary = managed.SentinelManagedSSLConnection if address.tls else managed.SentinelManagedConnection
        sentinels = [(kind, {"host": host, "port": port, **address.sentinel_options}) for host, port in address.hosts]
        return sentinel_pool(classes, primary, settings, address.service, sentinels)
    if address.path:
        place: dict[str, Any] = {"connection_class": connections.UnixDomainSocketConnection, "path": address.path}
    else:
        ((host, port),) = address.hosts
        place = {"connection_class": kind, "host": host, "port": port}
    return connections.ConnectionPool(**{**settings, **place})


def sentinel_pool(
    classes: Classes,
    connection_class: type,
    settings: Mapping[str, Any],
    service: str,
    sentinels: Iterable[tuple[type, Mapping[str, Any]]],
    manager_options: Mapping[str, Any] | None = None,
) -> Any:
    """Return a pool of connections to the primary of *service*; nothing is sent yet.

    Args:
        classes: the kind of client.
        connection_class: class of the connections to the primary.
        settings: settings of the connections to the primary.
        service: name under which the Sentinels know the primary.
        sentinels: connection class and settings for each Sentinel.
        manager_options: further options of redis-py's ``Sentinel``.
    """
    manager = classes.sentinel([], sentinel_kwargs={}, **(manager_options or {}))
    manager.sentinels = [
        classes.client.from_pool(
            classes.connections.ConnectionPool(
                connection_class=kind, **{**given, **_SETTINGS, "retry": classes.retry(NoBackoff(), 0)}
            )
        )
        for kind, given in sentinels
    ]
    return classes.sentinel_pool(service, manager, connection_class=connection_class, **settings)


def forced_host(manager: Any) -> str | None:
    """Return the host that the user of *manager* configured in place of the one that the Sentinels report."""
    host: str | None = getattr(manager, "_force_master_ip", None)  # redis-py has no public attribute for it
    return host


def endpoint_of(pool: Any) -> str:
    """Return the host and port, or the path of the socket, that the connections of *pool* use."""
    settings = pool.connection_kwargs
    host, port = settings.get("host", "localhost"), settings.get("port", 6379)
    return str(settings.get("path") or (f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))


def _primary(manager: Any, service: str, answer: _Answer) -> tuple[str, int] | None:
    """Return the host and port of the primary if *answer* reports one that is up; that Sentinel is then asked first."""
    sentinel, state = answer
    if not isinstance(state, Mapping) or not manager.check_master_state(state, service):
        return None
    manager.sentinels = [sentinel, *(other for other in manager.sentinels if other is not sentinel)]
    return forced_host(manager) or state["ip"], int(state["port"])


def _no_primary(service: str, answers: Sequence[_Answer]) -> redis.ConnectionError:
    """Return an error that says what each Sentinel replied, which redis-py's own text hides."""
    parts = []
    for sentinel, state in answers:
        if isinstance(state, redis.RedisError):
            reply = f"{type(state).__name__}: {state}"
        else:
            reply = f"knows no {service}" if state is None else "considers it down"
        parts.append(f"{endpoint_of(sentinel.connection_pool)}: {reply}")
    text = f"no Sentinel names a primary {service} that is up ({'; '.join(parts)})"
    if answers and all(isinstance(state, redis.AuthenticationError) for _, state in answers):
        return redis.AuthenticationError(text)
    return sync_sentinel.MasterNotFoundError(text)
