"""Parses Redis URLs: of a server, of a primary behind Sentinels, or of a cluster. It connects to nothing."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.connection import SSLConnection, parse_url

from rollout_api.str_enum import StrEnum

_PORT, _SENTINEL_PORT = 6379, 26379
_SHAPE = re.compile(
    r"(?P<scheme>[a-z+]+)://(?:(?P<login>[^/?#]*)@)?(?P<hosts>[^/?#@]*)(?P<path>/[^?#]*)?(\?(?P<query>.*))?"
)
_HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\[\]:]*))(?::(?P<port>[0-9]+))?")
_OPTIONS = {
    "client_name",
    "db",
    "health_check_interval",
    "max_connections",
    "password",
    "protocol",
    "socket_connect_timeout",
    "socket_keepalive",
    "socket_read_size",
    "socket_timeout",
    "username",
}
_IGNORED_OPTIONS = {
    "decode_responses",
    "encoding",
    "encoding_errors",
    "legacy_responses",
    "retry_on_timeout",
    "timeout",
}
"""Options that determine how a client is used, which the code that connects decides."""
_TLS_OPTIONS = {
    name
    for name in inspect.signature(SSLConnection.__init__).parameters.keys()
    & inspect.signature(AsyncSSLConnection.__init__).parameters.keys()
    if name.startswith("ssl_")
}
_SENTINEL_LOGIN = {"sentinel_username": "username", "sentinel_password": "password"}
_ESCAPE = "write special characters of a user name or password as %XX"


class Kind(StrEnum):
    """What an address refers to."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_KINDS = {
    "redis": Kind.SERVER,
    "rediss": Kind.SERVER,
    "unix": Kind.SERVER,
    "redis+sentinel": Kind.SENTINEL,
    "rediss+sentinel": Kind.SENTINEL,
    "redis+cluster": Kind.CLUSTER,
    "rediss+cluster": Kind.CLUSTER,
}
SCHEMES = tuple(_KINDS)
"""Schemes of URLs, without ``://``."""
SERVER_SCHEMES = tuple(scheme for scheme, kind in _KINDS.items() if kind is not Kind.CLUSTER)
"""Those of them that refer to a single server, which may be found through Sentinels."""


@dataclass(frozen=True)
class RedisAddress:
    """The address of Redis, and the settings of connections to it."""

    kind: Kind
    """What the address refers to."""
    hosts: tuple[tuple[str, int], ...] = ()
    """Host and port of the server, of each Sentinel, or of some nodes of the cluster; empty for a socket."""
    path: str = ""
    """Path of a Unix domain socket; empty for all other addresses."""
    service: str = ""
    """Name under which the Sentinels know the primary and its replicas."""
    tls: bool = False
    """Whether servers and Sentinels are connected to with TLS."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """User, password, database, TLS files and similar settings, by their names in redis-py's connections."""
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Settings of connections to the Sentinels."""

    def __str__(self) -> str:
        """Return the address without credentials, for messages."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        if self.kind is Kind.SENTINEL:
            return f"{self.service}, whose Sentinels are {hosts}"
        return self.path or hosts


def parse_address(url: str) -> RedisAddress:
    """Parse a URL of Redis.

    Args:
        url: one of

            - ``redis://[user:password@]host[:6379][/db]``, ``rediss://…`` with TLS,
              ``unix://[user:password@]/path``
            - ``redis+sentinel://[user:password@]host[:26379],host…/service[/db]``, ``rediss+sentinel://…``;
              ``?sentinel_username=…&sentinel_password=…`` for Sentinels with a login of their own
            - ``redis+cluster://[user:password@]host[:6379],host…``, ``rediss+cluster://…``

            Each may have options, ``?option=value&…``: ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``,
            ``ssl_cert_reqs``, ``ssl_check_hostname``, and other settings of redis-py's connections that are numbers or
            text.

    Raises:
        ValueError: the URL is malformed. The message says what is wrong, and contains no part of a password, and
            nothing of a value without a scheme of Redis.
    """
    try:
        return _parse(url)
    except ValueError as error:
        # A value without a scheme of Redis may be any secret, for example because a manifest names the wrong key.
        shown = repr(without_password(url)) if url.partition("://")[0] in _KINDS else "this value, which is not shown,"
        raise ValueError(f"{shown} is not a Redis URL: {error}") from None


def parse_server_address(url: str) -> RedisAddress:
    """Parse a URL as :func:`parse_address` does, and reject that of a cluster, where a job's messages cannot be.

    Raises:
        ValueError: the URL is malformed, or is that of a cluster.
    """
    address = parse_address(url)
    if address.kind is Kind.CLUSTER:
        raise ValueError(
            f"{without_password(url)!r} is a cluster, but a job's messages are on one server: use the URL of a server "
            "or of its Sentinels, and that of the cluster for the history alone (spec.history.redis, --history-redis)"
        )
    return address


def split_history_url(url: str) -> tuple[str, str]:
    """Split the URL of a history into that of its server and the history's full name.

    Args:
        url: a URL as of :func:`parse_address`, but not of a socket, whose path ends with the history's name: ``/math``,
            or ``/NAMESPACE/NAME`` for the history of a job. A number before it is that of a database.

    Returns:
        The URL of the server, and ``NAMESPACE/NAME``. A history of which only the name is given is in the namespace
        ``default``.

    Raises:
        ValueError: the URL is malformed, or has no name of a history. The message contains no password.
    """
    shape = _SHAPE.fullmatch(url)
    kind = None if shape is None else _KINDS.get(shape["scheme"])
    path = "" if shape is None else shape["path"] or ""
    # An @ in the path is that of a login with a password that was not escaped.
    if shape is None or kind is None or shape["scheme"] == "unix" or "@" in path:
        raise ValueError(_history_fault(url))
    parts = path.strip("/").split("/")
    server = parts[: 1 if kind is Kind.SENTINEL else 0]
    if len(parts) > len(server) and parts[len(server)].isdigit():
        server = parts[: len(server) + 1]
    *namespaces, name = parts[len(server) :] or [""]
    if not name or len(namespaces) > 1:
        raise ValueError(_history_fault(url))
    start, end = shape.span("path")
    server_url = url[:start] + "".join(f"/{part}" for part in server) + url[end:]
    parse_address(server_url)
    return server_url, f"{namespaces[0] if namespaces else 'default'}/{name}"


def _history_fault(url: str) -> str:
    return (
        "the URL of a history is that of a Redis server with the history's name behind it, such as "
        f"redis://redis:6379/math or redis://redis:6379/NAMESPACE/math, not {without_password(url)!r}"
    )


def without_password(url: str) -> str:
    """Return *url*, which may be malformed, with ``***`` in place of passwords and of certificates, which are long."""
    scheme, separator, rest = url.rpartition("://") if url.count("://") == 1 else url.partition("://")
    if not separator:
        scheme, rest = "", url
    before_query = rest.partition("?")[0]
    # An @ after the ? belongs to the value of an option, unless the ? is part of a password that was not escaped.
    end = before_query.rfind("@") if "@" in before_query else _end_of_unescaped_login(rest)
    if end >= 0:
        login, rest = rest[:end], rest[end + 1 :]
        user, colon, password = login.partition(":")
        # A user name without a password may be meant as a password.
        rest = f"{user}:***@{rest}" if user and colon and password else f"***@{rest}"
    return f"{scheme}{separator}" + re.sub(
        r"([?&](?:[^=&]*password|ssl_ca_data))=[^&]*", r"\1=***", rest, flags=re.IGNORECASE
    )


def _parse(url: str) -> RedisAddress:
    scheme = url.partition("://")[0]
    if scheme not in _KINDS or "://" not in url:
        raise ValueError(f"it must begin with one of {', '.join(f'{one}://' for one in SCHEMES)}")
    shape = _SHAPE.fullmatch(url)
    if shape is None:
        raise ValueError(f"it does not have the form [user:password@]host[:port]/…?option=value; {_ESCAPE}")
    kind, tls, path = _KINDS[scheme], scheme.startswith("rediss"), unquote(shape["path"] or "")
    options = _options(shape["query"] or "")
    user, _, password = (unquote(part) for part in (shape["login"] or "").partition(":"))
    options |= {name: value for name, value in (("username", user), ("password", password)) if value}
    sentinel_options = {name: options.pop(option) for option, name in _SENTINEL_LOGIN.items() if option in options}
    if sentinel_options and kind is not Kind.SENTINEL:
        raise ValueError("sentinel_username and sentinel_password are for redis+sentinel:// and rediss+sentinel://")
    tls_options = {name: value for name, value in options.items() if name in _TLS_OPTIONS}
    if tls_options and not tls:
        raise ValueError(f"{min(tls_options)} has no effect without TLS, whose schemes begin with rediss")
    if scheme == "unix":
        if shape["hosts"] or not path:
            raise ValueError("the URL of a socket has the form unix:///path")
        return RedisAddress(kind, path=path, options=options)
    port = _SENTINEL_PORT if kind is Kind.SENTINEL else _PORT
    hosts = tuple(_host(one, port) for one in shape["hosts"].split(",")) if shape["hosts"] else (("localhost", port),)
    service, database = "", path.strip("/")
    if kind is Kind.SENTINEL:
        service, _, database = database.partition("/")
        if not service:
            raise ValueError("the name by which the Sentinels know the primary must follow the hosts, as in …/mymaster")
    elif kind is Kind.SERVER and len(hosts) > 1:
        raise ValueError("it names several hosts, so it must be redis+sentinel://… or redis+cluster://…")
    if database and not (database.isascii() and database.isdigit()):
        raise ValueError("the database, after the last /, must be a number")
    if database and "db" not in options:
        options["db"] = int(database)
    if kind is Kind.CLUSTER and options.pop("db", 0):
        raise ValueError("a cluster only has database 0")
    return RedisAddress(
        kind,
        hosts=hosts,
        service=service,
        tls=tls,
        options=options,
        sentinel_options={**tls_options, **sentinel_options} if kind is Kind.SENTINEL else {},
    )


def _end_of_unescaped_login(rest: str) -> int:
    """Return the position of the @ after a login that contains a ?, or -1 if there is none."""
    at, equals = rest.find("@"), rest.find("=")
    return rest.rfind("@") if at >= 0 and (equals < 0 or at < equals) else -1


def _options(query: str) -> dict[str, Any]:
    """Return the options of a query string, converted to the types that redis-py expects."""
    parse: Any = parse_url
    options: dict[str, Any] = {
        name: value for name, value in parse(f"redis://?{query}").items() if name not in _IGNORED_OPTIONS
    }
    unknown = options.keys() - _OPTIONS - _TLS_OPTIONS - _SENTINEL_LOGIN.keys()
    if unknown:
        raise ValueError(f"it has no option {min(unknown)!r}; an & within a value is written as %26")
    return options


def _host(text: str, port: int) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    if found is None or not (found["ipv6"] or found["host"]):
        raise ValueError(f"a host must be name, name:port or [IPv6 address]:port; {_ESCAPE}")
    if found["port"] is not None:
        port = int(found["port"])
        if not 0 < port < 65536:
            raise ValueError("a port must be between 1 and 65535")
    return found["ipv6"] or unquote(found["host"]), port
