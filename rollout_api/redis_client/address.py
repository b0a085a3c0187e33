"""Addresses of Redis: a server, the primary that Sentinels know, a cluster. Parsing alone; nothing is connected."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import unquote

from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.connection import SSLConnection, parse_url

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
_OURS = {"decode_responses", "encoding", "encoding_errors", "legacy_responses", "retry_on_timeout", "timeout"}
"""Options that say how a client is used, which whoever connects decides; they are passed over."""
_TLS_OPTIONS = {
    name
    for name in inspect.signature(SSLConnection.__init__).parameters.keys()
    & inspect.signature(AsyncSSLConnection.__init__).parameters.keys()
    if name.startswith("ssl_")
}
_SENTINEL_LOGIN = {"sentinel_username": "username", "sentinel_password": "password"}
_ESCAPE = "write special characters of a user name or password as %XX"


class Kind(StrEnum):
    """What an address names."""

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
"""What the URL of a Redis begins with, before ``://``."""


@dataclass(frozen=True)
class RedisAddress:
    """Where a Redis is and as whom to connect."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()
    """Host and port of the server, of each Sentinel or of some nodes of the cluster; none for a socket."""
    path: str = ""
    """Of a Unix domain socket."""
    service: str = ""
    """What the Sentinels call the primary and its replicas."""
    tls: bool = False
    """Whether servers, and Sentinels, are spoken to in TLS."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """User, password, database, TLS files and the like, as redis-py's connections call them."""
    sentinel_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The same for connections to the Sentinels."""

    def __str__(self) -> str:
        """As it may be shown: without credentials."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        if self.kind is Kind.SENTINEL:
            return f"{self.service}, whose Sentinels are {hosts}"
        return self.path or hosts


def parse_address(url: str) -> RedisAddress:
    """What a URL names.

    Args:
        url: one of

            - ``redis://[user:password@]host[:6379][/db]``, ``rediss://…`` with TLS,
              ``unix://[user:password@]/path``
            - ``redis+sentinel://[user:password@]host[:26379],host…/service[/db]``, ``rediss+sentinel://…``;
              ``?sentinel_username=…&sentinel_password=…`` for Sentinels that want a login of their own
            - ``redis+cluster://[user:password@]host[:6379],host…``, ``rediss+cluster://…``

            and, for each, ``?option=value&…``: ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``, ``ssl_cert_reqs``,
            ``ssl_check_hostname`` and the other settings of redis-py's connections that are numbers or texts.

    Raises:
        ValueError: it is malformed; the text says what is wrong and holds nothing of a password.
    """
    scheme = url.partition("://")[0]
    if scheme not in _KINDS or "://" not in url:
        raise ValueError(f"it must begin with one of {', '.join(f'{one}://' for one in SCHEMES)}")
    shape = _SHAPE.fullmatch(url)
    if shape is None:
        raise ValueError(f"its parts are not [user:password@]host[:port]/…?option=value; {_ESCAPE}")
    kind, tls, path = _KINDS[scheme], scheme.startswith("rediss"), unquote(shape["path"] or "")
    options = _options(shape["query"] or "")
    user, _, password = (unquote(part) for part in (shape["login"] or "").partition(":"))
    options |= {name: value for name, value in (("username", user), ("password", password)) if value}
    sentinel_options = {name: options.pop(option) for option, name in _SENTINEL_LOGIN.items() if option in options}
    if sentinel_options and kind is not Kind.SENTINEL:
        raise ValueError("sentinel_username and sentinel_password are for redis+sentinel:// and rediss+sentinel://")
    tls_options = {name: value for name, value in options.items() if name in _TLS_OPTIONS}
    if tls_options and not tls:
        raise ValueError(f"{min(tls_options)} is of no use without TLS, whose schemes begin with rediss")
    if scheme == "unix":
        if shape["hosts"] or not path:
            raise ValueError("a socket is named as unix:///path")
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
        raise ValueError("a cluster has no database but 0")
    return RedisAddress(
        kind,
        hosts=hosts,
        service=service,
        tls=tls,
        options=options,
        sentinel_options={**tls_options, **sentinel_options} if kind is Kind.SENTINEL else {},
    )


def without_password(url: str) -> str:
    """*url*, well-formed or not, as it may be shown: passwords become ``***``."""
    scheme, separator, rest = url.rpartition("://") if url.count("://") == 1 else url.partition("://")
    if not separator:
        scheme, rest = "", url
    before_query = rest.partition("?")[0]
    # an @ further on belongs to an option's value, unless the ? is one of a password that was not escaped
    end = before_query.rfind("@") if "@" in before_query else _stray_login(rest)
    if end >= 0:
        login, rest = rest[:end], rest[end + 1 :]
        user, colon, password = login.partition(":")
        # a user name alone may be meant for a password
        rest = f"{user}:***@{rest}" if user and colon and password else f"***@{rest}"
    return f"{scheme}{separator}" + re.sub(r"([?&][^=&]*password)=[^&]*", r"\1=***", rest, flags=re.IGNORECASE)


def _stray_login(rest: str) -> int:
    at, equals = rest.find("@"), rest.find("=")
    return rest.rfind("@") if at >= 0 and (equals < 0 or at < equals) else -1


def _options(query: str) -> dict[str, Any]:
    """Options by name, numbers and truth values as such."""
    # redis-py knows of what type each is
    parse: Any = parse_url
    options: dict[str, Any] = {name: value for name, value in parse(f"redis://?{query}").items() if name not in _OURS}
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
