"""What a Redis server says about itself."""

from __future__ import annotations

import contextlib
from typing import Any

import redis

from rollout_api.redis_client.connection import connect_history

REDIS = ("redis.json", "INFO of Redis (selected sections), and the settings that matter.")
_SECTIONS = ("server", "clients", "memory", "persistence", "stats", "replication", "errorstats", "keyspace")
_SETTINGS = (
    "maxmemory",
    "maxmemory-policy",
    "appendonly",
    "appendfsync",
    "save",
    "timeout",
    "maxclients",
    "client-output-buffer-limit",
    "lua-time-limit",
)


def read_redis_facts(url: str) -> dict[str, Any]:
    """Return selected sections of INFO, and selected settings, as far as the user may read them.

    Raises:
        redis.RedisError: if the server does not answer.
    """
    # This client accepts a cluster, too.
    with contextlib.closing(connect_history(url)) as client:
        info = {section: _read_section(client, section) for section in _SECTIONS}
        return {"info": info, "settings": _read_settings(client)}


def _read_section(client: Any, section: str) -> Any:
    try:
        return client.info(section)
    except redis.ResponseError as error:
        return f"cannot be read: {error}"


def _read_settings(client: Any) -> dict[str, str]:
    settings: dict[str, str] = {}
    for name in _SETTINGS:
        try:
            found = client.config_get(name)
        except redis.ResponseError as error:
            return settings | {name: f"cannot be read: {error}"}
        settings |= {_text(key): _text(value) for key, value in found.items()}
    return settings


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
