"""Real servers for the tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from rollout_worker.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="module", autouse=True)
def fresh_heap() -> None:
    """Let no collection of what earlier modules left hold the loops of this one up, for a second and more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis server of the test run's own."""
    directory: Path = tmp_path_factory.mktemp("redis")
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR)
    server = EmbeddedRedis(directory, keep_open=lock)
    yield server.start()
    server.stop()
    os.close(lock)


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """URL of an empty Redis server."""
    redis.Redis.from_url(redis_server).flushall()
    return redis_server
