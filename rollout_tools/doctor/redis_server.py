"""Asks a Redis server, the primary of Sentinels, or a Redis Cluster what it is and how fast it answers, and checks it.

Only keys that are named for this are written. They are deleted at the end. The functions that jobs call are loaded if
they are missing and the user may load them, and stay.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import redis

from rollout_api.redis_client.address import Kind, RedisAddress, parse_address, without_password
from rollout_api.redis_client.connection import (
    RedisUnusableError,
    check,
    connect,
    connect_history,
    explain_error,
    is_full,
)
from rollout_api.redis_client.retry import is_out_of_memory, lacks_function
from rollout_api.redis_client.server_functions import Call, Function, run
from rollout_tools.doctor.findings import Finding, error, error_if, ok, size_text, warning, warning_if

_MAX_MEDIAN_MS = 2.0
"""Milliseconds of a round trip above which it is noticeable beside a decoding step."""
_MAX_TAIL_MS = 50.0
_MAX_CLOCK_DIFFERENCE_S = 1.0
_MAX_USED_SHARE = 0.8
_MIN_CERTIFICATE_DAYS = 14
_ACCESS_RULES = "give the user the rules that python -m rollout_api.protocol.access_rules prints"


@dataclass(frozen=True)
class RedisFacts:
    """What a server has answered."""

    where: str
    """URL without passwords."""
    kind: Kind
    unusable: str = ""
    """Why it cannot be used, and what to do; the other fields are empty then."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Its ``INFO``; for a cluster, that of one primary."""
    appendfsync: str | None = None
    """When the append-only file is written to the disk; None if the user may not read the setting."""
    round_trips_ms: Sequence[float] = ()
    """Duration of each of some PINGs."""
    function_ms: float | None = None
    """Duration of a call of a function; None if it failed."""
    function_error: str = ""
    """Why the call failed; empty if it did not, or if the server is full or a replica."""
    clock_difference_s: float | None = None
    """How many seconds the server's clock is ahead of this machine's; None if the user may not read it."""
    denied: Sequence[str] = ()
    """Commands that the user may not run, each with the server's reason."""
    certificate_expiry: datetime | None = None
    """When the server's certificate expires; None without TLS."""


def check_redis(facts: RedisFacts, *, holds_messages: bool, now: datetime) -> list[Finding]:
    """Check a server.

    *holds_messages* says whether it holds a job's messages; otherwise it holds a history only. *now* has a time zone.
    """
    if facts.unusable:
        return [error("connection", facts.where, facts.unusable)]
    server = "Valkey" if facts.info.get("server_name") == "valkey" else "Redis"
    version = facts.info.get("valkey_version") or facts.info.get("redis_version", "?")
    policy = facts.info.get("maxmemory_policy", "noeviction")
    return [
        ok("connection", f"{server} {version} at {facts.where}"),
        warning_if(
            policy != "noeviction",
            "eviction",
            f"maxmemory-policy {policy}",
            "keys will be evicted, and rollouts lost, as soon as maxmemory is set; set maxmemory-policy noeviction",
        ),
        _check_memory(facts.info),
        _check_persistence(facts.info, facts.appendfsync, holds_messages=holds_messages),
        _check_role(facts, holds_messages=holds_messages),
        *_check_durations(facts),
        *([_check_clock(facts.clock_difference_s)] if facts.clock_difference_s is not None else []),
        error_if(
            bool(facts.denied),
            "permissions",
            "; ".join(facts.denied) or "the user may run the commands of a job on its keys",
            f"{_ACCESS_RULES}; if it is the user of one job alone, examine that job's keys with --uid, and its history "
            "with the job's manifest",
        ),
        *([_check_certificate(facts.certificate_expiry, now)] if facts.certificate_expiry is not None else []),
    ]


def _check_memory(info: Mapping[str, Any]) -> Finding:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        total = int(info.get("total_system_memory", 0))
        return warning(
            "memory",
            f"{size_text(used)} in use without a limit",
            "the kernel kills Redis when the machine is full, instead of jobs waiting for memory; set maxmemory"
            + (f" to less than the machine's {size_text(total)}" if total else ""),
        )
    seen = f"{size_text(used)} of {size_text(limit)} in use"
    if is_full(info):
        return error("memory", seen, "writes are refused until memory is free; raise maxmemory or reduce histories")
    return warning_if(
        used > limit * _MAX_USED_SHARE,
        "memory",
        seen,
        "jobs wait when it is full; raise maxmemory, or reduce history.maxBytes",
    )


def _check_persistence(info: Mapping[str, Any], appendfsync: str | None, *, holds_messages: bool) -> Finding:
    check = "persistence"
    if info.get("aof_last_write_status", "ok") != "ok" or info.get("rdb_last_bgsave_status", "ok") != "ok":
        return error(
            check,
            "the last write to the disk has failed",
            "Redis refuses writes when it cannot save; see its log, and free disk space",
        )
    if int(info.get("aof_enabled", 0)):
        return warning_if(
            appendfsync == "no",
            check,
            "append-only file" + (f", appendfsync {appendfsync}" if appendfsync is not None else ""),
            "a crash of the machine loses what the kernel has not written; set appendfsync everysec",
        )
    what = "unfinished rollouts of all jobs" if holds_messages else "the history"
    if int(info.get("rdb_saves", 0)):
        return warning(
            check,
            "snapshots (RDB) only",
            f"a crash of Redis loses what has changed in {what} since the last snapshot; set appendonly yes",
        )
    return warning(
        check, "no append-only file, and no snapshot", f"a restart of Redis loses {what}; set appendonly yes"
    )


def _check_role(facts: RedisFacts, *, holds_messages: bool) -> Finding:
    check, role, replicas = "role", facts.info.get("role", "?"), int(facts.info.get("connected_slaves", 0))
    if facts.kind is Kind.CLUSTER:
        return ok(check, "Redis Cluster, whose primaries serve all hash slots")
    if role != "master":
        return error(check, "a read-only replica", "jobs must write; use the URL of the primary, or of its Sentinels")
    if facts.info.get("redis_mode") == "cluster":
        what = "a job's messages must be on a single server" if holds_messages else "use redis+cluster://…"
        return error(check, "one node of a Redis Cluster", f"it has only some of the hash slots; {what}")
    seen = f"primary with {replicas} replica{'' if replicas == 1 else 's'}" + (
        ", found by Sentinels" if facts.kind is Kind.SENTINEL else ""
    )
    return warning_if(
        facts.kind is Kind.SENTINEL and not replicas,
        check,
        seen,
        "no replica can take over if the primary fails; add one",
    )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least *share* of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _check_durations(facts: RedisFacts) -> Iterator[Finding]:
    durations = facts.round_trips_ms
    median, tail = percentile(durations, 0.5), percentile(durations, 0.99)
    yield warning_if(
        median > _MAX_MEDIAN_MS or tail > _MAX_TAIL_MS,
        "round trips",
        f"p50 {median:.2f} ms, p99 {tail:.2f} ms over {len(durations)} PINGs",
        "decoding does not wait for Redis, but the start of each rollout and its result do; use a server in the same "
        "zone, and see SLOWLOG and LATENCY DOCTOR",
    )
    if facts.function_ms is not None:
        yield warning_if(
            facts.function_ms > _MAX_TAIL_MS,
            "functions",
            f"{facts.function_ms:.2f} ms for a call of a Lua function",
            "other commands may block the server; see SLOWLOG",
        )
    if facts.function_error:
        yield error(
            "functions",
            facts.function_error,
            f"{_ACCESS_RULES}, and load the functions of this release: rollout-redis-users does both, and "
            "python -m rollout_api.redis_client.load_functions loads them on other servers",
        )


def _check_clock(difference: float) -> Finding:
    return warning_if(
        abs(difference) > _MAX_CLOCK_DIFFERENCE_S,
        "clock",
        f"the clock of Redis is {abs(difference):.3f} s {'ahead' if difference >= 0 else 'behind'}",
        "leases and deadlines follow the clock of Redis, and logs that of this machine; synchronize both with NTP",
    )


def _check_certificate(expiry: datetime, now: datetime) -> Finding:
    days = (expiry - now).total_seconds() / 86_400
    return warning_if(
        days < _MIN_CERTIFICATE_DAYS,
        "TLS certificate",
        f"valid until {expiry:%Y-%m-%d %H:%M} UTC",
        f"it expires in {days:.0f} days, and connections fail from then on; renew it",
    )


_PINGS = 300
_EXPIRY_S = 60
"""Seconds after which a key disappears that could not be deleted."""
_CERTIFICATE_TIMEOUT_S = 2.0


def read_redis(url: str, *, keys: Sequence[str], may_be_cluster: bool) -> RedisFacts:
    """Return the facts about the server at *url*.

    Args:
        url: URL of the server, of its Sentinels or of a cluster.
        keys: keys that do not exist, for trying the user's permissions. Names that begin with them are used,
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
    function_ms, function_error = _call_function(client, keys[0])
    return RedisFacts(
        where,
        address.kind,
        info=info,
        appendfsync=_appendfsync(client),
        round_trips_ms=_measure_round_trips(client),
        function_ms=function_ms,
        function_error=function_error,
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


def _measure_round_trips(client: Any) -> list[float]:
    durations = []
    for _ in range(_PINGS):
        started = time.perf_counter()
        client.ping()
        durations.append((time.perf_counter() - started) * 1000)
    return durations


def _call_function(client: Any, key: str) -> tuple[float | None, str]:
    """Return how many milliseconds a call of a function takes that the server has, and why it failed."""
    call = Call(Function("even_when_full"), [key], ["EXISTS", key])
    try:
        run(client, call)
        started = time.perf_counter()
        run(client, call)
    except redis.ResponseError as failure:
        # The memory and the role of the server are checked on their own.
        if is_out_of_memory(failure) or isinstance(failure, redis.exceptions.ReadOnlyError):
            return None, ""
        if lacks_function(failure):
            return None, "the server lacks the functions of this release, and the user may not load them"
        return None, str(failure)
    return (time.perf_counter() - started) * 1000, ""


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
                break  # nobody may write; the memory and the role of the server are checked on their own
            # Without the permission to write, a stream and its group do not exist.
            if not denied:
                raise
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
