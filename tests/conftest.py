"""Redis servers and settings that all tests share."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from rollout_store.runtime.embedded_redis import EmbeddedRedis
from rollout_worker.engine_worker.engines import configure_ray

# Four processes run tests on machines with two cores, so an example may be delayed for longer than Hypothesis's default
# of 0.2 s. Examples that take seconds are still found.
settings.register_profile("shared machine", deadline=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

configure_ray()  # before a test module imports Ray

ROOT = Path(__file__).parents[1]
ENGINE_FIXTURES = frozenset({"drafting_engine", "engines", "job_harness", "plain_engine"})
"""Fixtures with vLLM engines that several files share. Files that use them run in one process per folder."""
USES_V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
CONTROL_PLANES = ("complete_cluster", "current_cluster")
"""Tests of tests/cluster/virtual_nodes run on one or both of these, which are in the ids of the tests."""


class GroupScheduling(LoadFileScheduling):
    """Runs in one process: the tests of a file, of the files of a folder that share engines, and of a control plane."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        control_plane = next((name for name in CONTROL_PLANES if name in nodeid), None)
        return control_plane or (f"engines of {Path(file).parent}" if _shares_engines(file) else file)


@cache
def _shares_engines(file: str) -> bool:
    return not ENGINE_FIXTURES.isdisjoint(re.findall(r"\w+", (ROOT / file).read_text()))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """Return the scheduler for ``--numprocesses``."""
    return GroupScheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use shared engines, and those for every night, and begin with what takes longest."""
    for item in items:
        if item.get_closest_marker("v2") and USES_V2 != (item.get_closest_marker("slow") is not None):
            item.add_marker("nightly")  # by day, slow tests run with V2 alone, and others with V1 alone
        if ENGINE_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("engine")
    # One process would otherwise be left with the longest group at the end.
    items.sort(key=lambda item: (item.get_closest_marker("engine") is None, item.get_closest_marker("slow") is None))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, for at most two minutes."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 120))
    return True


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
