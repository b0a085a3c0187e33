"""Asks a Redis server what it is and how fast it answers.

Only keys that are named for this are written. They are deleted at the end.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import redis

from rollout_api.redis_client.address import Kind, RedisAddress, parse_address, without_password
from rollout_api.redis_client.checks import RedisUnusableError, check, explain_error
from rollout_api.redis_client.connection import connect, connect_history
from rollout_api.redis_client.retry import is_out_of_memory
from rollout_worker.doctor.redis_server import RedisFacts

_PINGS = 300
_EXPIRY_S = 60
"""Seconds after which a key disappears that could not be deleted."""
_CERTIFICATE_TIMEOUT_S = 2.0
_FUNCTION = "return redis.call('GET', KEYS[1])"


def read_redis(url: str, *, keys: Sequence[str], may_be_cluster: bool) -> RedisFacts:
    """Return the facts about the server at *url*.

    Args:
        url: URL of the server, of its Sentinels or of a cluster.
        keys: keys that do not exist, for which the user's permissions are tried. Names that begin with them are used,
            too.
        may_be_cluster: whether a Redis Cluster is permitted, as it is for a history.
    """
    where = without_password(url)
    try:
        address = parse_address(url)
    except ValueError as failure:
        return RedisFacts(where, Kind.SERVER, unusable=str(failure))
    try:
        with contextlib.closing(connect_history(url) if may_be_cluster else connect(url)) as client:
            info = check(client, url)
            return _examine(client, address, where, info, keys)
    except RedisUnusableError as failure:
        return RedisFacts(where, address.kind, unusable=str(failure))
    except redis.RedisError as failure:
        return RedisFacts(where, address.kind, unusable=str(explain_error(failure, url)))


def _examine(client: Any, address: RedisAddress, where: str, info: dict[str, Any], keys: Sequence[str]) -> RedisFacts:
    denied = dict.fromkeys(text for key in keys for text in _denied(client, key))
    return RedisFacts(
        where,
        address.kind,
        info=info,
        appendfsync=_appendfsync(client),
        round_trips_ms=_round_trips(client),
        function_ms=_function_ms(client, keys[0]),
        clock_difference_s=_clock_difference(client, address),
        denied=list(denied),
        certificate_expiry=_certificate_expiry(address),
    )


def _appendfsync(client: Any) -> str | None:
    try:
        found = client.config_get("appendfsync")
    except redis.RedisError:  # the user of a job may not read settings
        return None
    text = {_text(name): _text(value) for name, value in found.items()}.get("appendfsync")
    return text or None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _round_trips(client: Any) -> list[float]:
    durations = []
    for _ in range(_PINGS):
        started = time.perf_counter()
        client.ping()
        durations.append((time.perf_counter() - started) * 1000)
    return durations


def _function_ms(client: Any, key: str) -> float | None:
    """Return how long a call of a function takes that the server has compiled already."""
    try:
        client.eval(_FUNCTION, 1, key)
        started = time.perf_counter()
        client.eval(_FUNCTION, 1, key)
    except redis.ResponseError:  # it is denied, and reported as such
        return None
    return (time.perf_counter() - started) * 1000


def _clock_difference(client: Any, address: RedisAddress) -> float | None:
    """Return by how many seconds the server's clock is ahead, as far as the duration of the round trip tells.

    None if the user may not read the server's clock.
    """
    target = {"target_nodes": redis.RedisCluster.RANDOM} if address.kind is Kind.CLUSTER else {}
    before = time.time()
    try:
        reply = client.execute_command("TIME", **target)
    except redis.exceptions.NoPermissionError:
        return None
    after = time.time()
    seconds, microseconds = reply
    return int(seconds) + int(microseconds) / 1e6 - (before + after) / 2


def _denied(client: Any, key: str) -> Iterator[str]:
    """Yield what the user may not do with *key*, for commands of each kind that jobs use."""
    stream, values, scores = key + ":stream", key + ":hash", key + ":zset"
    commands: list[tuple[str | int, ...]] = [
        ("SET", key, "1", "EX", _EXPIRY_S),
        ("GET", key),
        ("XADD", stream, "*", "d", "1"),
        ("EXPIRE", stream, _EXPIRY_S),
        ("XGROUP", "CREATE", stream, "doctor", "0"),
        ("XREADGROUP", "GROUP", "doctor", "doctor", "COUNT", 1, "STREAMS", stream, ">"),
        ("XTRIM", stream, "MAXLEN", 0),
        ("HSET", values, "a", "1"),
        ("EXPIRE", values, _EXPIRY_S),
        ("HGETALL", values),
        ("ZADD", scores, 1, "a"),
        ("EXPIRE", scores, _EXPIRY_S),
        ("EVAL", _FUNCTION, 1, key),
        *(("UNLINK", name) for name in (key, stream, values, scores)),
    ]
    denied: dict[str, str] = {}
    for command in commands:
        try:
            client.execute_command(*command)
        except redis.exceptions.NoPermissionError as failure:
            denied.setdefault(str(failure), str(command[0]))
        except redis.ResponseError as failure:
            if is_out_of_memory(failure) or isinstance(failure, redis.exceptions.ReadOnlyError):
                break  # nobody may write; the memory and the role of the server are judged on their own
            # Without the permission to write, a stream and its group do not exist.
            if not denied:
                raise
            if "can't" in str(failure):  # Redis 7.0 reports so what a script may not do
                denied.setdefault(str(failure), str(command[0]))
    yield from (f"{command} {key}: {reason}" for reason, command in denied.items())


def _certificate_expiry(address: RedisAddress) -> datetime | None:
    """Return when the certificate of the first named host expires.

    None without TLS, or if the authorities of the URL or of this machine do not vouch for the certificate; the client
    has then failed, or its URL says that certificates are not verified.
    """
    if not address.tls:
        return None
    context = ssl.create_default_context(cafile=address.options.get("ssl_ca_certs"))
    if certificate := address.options.get("ssl_certfile"):
        context.load_cert_chain(certificate, address.options.get("ssl_keyfile"))
    try:
        with (
            socket.create_connection(address.hosts[0], timeout=_CERTIFICATE_TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=address.hosts[0][0]) as secured,
        ):
            found: Any = secured.getpeercert()
    except OSError:  # ssl.SSLError is one
        return None
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(found["notAfter"]), UTC)
