"""Redis servers and settings that all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings

from rollout_worker.runtime.embedded_redis import EmbeddedRedis

ROOT = Path(__file__).parents[1]
SHARED_ENGINES = {"tests/engine": "engine", "tests/job/test_with_engines": "job"}
"""Beginnings of the names of files that share engines; the tests of such files run in one process."""

# Machines differ in speed, and other processes may run beside the tests.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for ``--dist loadgroup``: by file, because the tests of a file share servers, or by shared engine."""
    for item in items:
        file = item.path.relative_to(ROOT).as_posix()
        shared = (group for prefix, group in SHARED_ENGINES.items() if file.startswith(prefix))
        item.add_marker(pytest.mark.xdist_group(next(shared, file)))


@pytest.fixture(scope="module", autouse=True)
def fresh_heap() -> None:
    """Exclude the objects of earlier modules from garbage collection, which could pause event loops for a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Redis server that the test run shares."""
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
