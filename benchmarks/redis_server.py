"""A temporary Redis server for a benchmark."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_store.runtime.embedded_redis import EmbeddedRedis


@contextmanager
def redis_server() -> Iterator[str]:
    """Start an empty Redis server on the loopback interface, yield its URL, and delete its data at the end."""
    with tempfile.TemporaryDirectory(prefix="benchmark-redis-") as directory:
        lock = os.open(Path(directory) / "lock", os.O_CREAT | os.O_RDWR)
        server = EmbeddedRedis(Path(directory) / "redis", keep_open=lock)
        try:
            yield server.start()
        finally:
            server.stop()
            os.close(lock)
