"""Whether the lease of an engine ends as soon as its process has ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.connection import connect
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.launch.engine_watcher import EngineWatcher
from rollout_worker.launch.limits import ENGINE_POLL_INTERVAL_S
from tests.support.redis_servers import Server
from tests.support.waiting import wait_for

KEYS = MessageKeys("watched")
NOTICE_S = 0.5
"""Seconds within which the death of a watched process is noticed; a lease takes 5."""
START_S = 5.0
"""Seconds within which a process is watched, or found to have died before."""


@pytest.fixture
def server(redis_url: str) -> redis.Redis:
    """A server with the leases of two engines."""
    client = redis.Redis.from_url(redis_url)
    for engine in ("watched", "other"):
        client.set(KEYS.lease(engine), "1")
    return client


@pytest.fixture
def watcher(redis_url: str) -> Iterator[EngineWatcher]:
    running = EngineWatcher(LauncherStore(connect(redis_url), KEYS))
    running.start()
    yield running
    running.stop()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until it is killed."""
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield running
    running.kill()
    running.wait()


def test_the_lease_ends_with_the_process(
    server: redis.Redis, watcher: EngineWatcher, process: subprocess.Popen[bytes]
) -> None:
    watcher.watch(process.pid, "earlier-registration")
    watcher.watch(process.pid, "watched")
    time.sleep(2 * ENGINE_POLL_INTERVAL_S)
    assert server.exists(KEYS.lease("watched"))
    process.kill()
    process.wait()
    wait_for(lambda: not server.exists(KEYS.lease("watched")), NOTICE_S)
    assert server.exists(KEYS.lease("other"))


def test_an_engine_that_died_before_it_was_watched_loses_its_lease(
    server: redis.Redis, watcher: EngineWatcher, process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    process.wait()
    watcher.watch(process.pid, "watched")
    wait_for(lambda: not server.exists(KEYS.lease("watched")), START_S)


def test_a_process_that_cannot_be_watched_is_left_to_its_lease(
    server: redis.Redis, watcher: EngineWatcher, process: subprocess.Popen[bytes]
) -> None:
    watcher.watch(-1, "other")
    watcher.watch(process.pid, "watched")
    process.kill()
    wait_for(lambda: not server.exists(KEYS.lease("watched")), START_S)
    assert server.exists(KEYS.lease("other"))


def test_a_death_during_an_outage_of_redis_is_handled_after_it(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    with Server(tmp_path / "redis", appendonly=True) as server:
        client = server.raw_client()
        client.set(KEYS.lease("watched"), "1")
        watcher = EngineWatcher(LauncherStore(connect(f"redis://127.0.0.1:{server.port}/0"), KEYS))
        watcher.start()
        try:
            watcher.watch(process.pid, "watched")
            server.kill()
            process.kill()
            time.sleep(1.0)
            server.start()
            wait_for(lambda: not client.exists(KEYS.lease("watched")), 15, ignored=redis.RedisError)
        finally:
            watcher.stop()
