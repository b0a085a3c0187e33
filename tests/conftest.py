"""Redis servers and settings that all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from rollout_store.runtime.embedded_redis import EmbeddedRedis
from rollout_worker.engine_worker.local_ray import configure_ray

# Four processes run tests on machines with two cores, so an example may be delayed for longer than Hypothesis's default
# of 0.2 s. Examples that take seconds are still found.
settings.register_profile("shared machine", deadline=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

configure_ray()  # before a test module imports Ray

_SHARED_ENGINE_TESTS = (
    "adapters",
    "continuation",
    "drafting",
    "kept_tokens",
    "lossless",
    "prompt_logprobs",
    "stop_strings",
    "weights",
)
SHARED_ENGINES = {f"tests/engine/test_{name}.py": "engine" for name in _SHARED_ENGINE_TESTS}
SHARED_ENGINES["tests/job/test_with_engines"] = "job"
"""How the paths of test files that share engines begin → the engines that they share."""
LONG_FILES = (
    *SHARED_ENGINES,
    "tests/job/test_several_machines.py",
    "tests/job/test_head_and_worker.py",
    "tests/job/test_tutorials.py",
    "tests/server/",
)
"""Files that take the longest. They begin first, so that none is left at the end for one process."""


VIRTUAL_NODES = "tests/cluster/virtual_nodes/"
"""Tests that run on one or both of two control planes, whose names are in the ids of the tests."""


class SharedEngineScheduling(LoadFileScheduling):
    """Runs the tests of a file, of files that share engines, and of a control plane in one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        if file.startswith(VIRTUAL_NODES):
            return "complete_cluster" if "complete_cluster" in nodeid else "current_cluster"
        shared = (group for prefix, group in SHARED_ENGINES.items() if file.startswith(prefix))
        return next(shared, file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of the longest files to the beginning, in the order of ``LONG_FILES``."""

    def position(item: pytest.Item) -> int:
        found = (index for index, file in enumerate(LONG_FILES) if item.nodeid.startswith(file))
        return next(found, len(LONG_FILES))

    items.sort(key=position)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedEngineScheduling:
    """Return the scheduler for ``--numprocesses``."""
    return SharedEngineScheduling(config, log)


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
