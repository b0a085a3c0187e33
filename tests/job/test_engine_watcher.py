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
from rollout_store.job.engines import EngineReport
from rollout_store.job.launcher import LauncherStore
from rollout_worker.engine_worker.engines import ENGINE_POLL_INTERVAL_S, EngineWatcher
from tests.support.redis_servers import Server
from tests.support.waiting import wait_for

KEYS = MessageKeys("watched")
WORKER = "worker-0/1a2b"
NOTICE_S = 0.5
"""Seconds within which the death of a watched process is noticed; a lease takes 5."""
START_S = 5.0
"""Seconds within which a process is watched, or found to have died before."""


@pytest.fixture
def server(redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(redis_url)


def register(server: redis.Redis, engine: str, pid: int, worker: str = WORKER) -> None:
    """Register an engine, as its actor does."""
    report = EngineReport(engine, worker=worker, pid=pid)
    server.hset(KEYS.engines, engine, report.pack())
    server.set(KEYS.lease(engine), "1")


def has_lease(server: redis.Redis, engine: str) -> bool:
    return bool(server.exists(KEYS.lease(engine)))


@pytest.fixture
def watcher(redis_url: str) -> Iterator[EngineWatcher]:
    running = EngineWatcher(LauncherStore(connect(redis_url), KEYS), WORKER)
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


def test_the_leases_of_a_process_end_with_it(
    server: redis.Redis, watcher: EngineWatcher, process: subprocess.Popen[bytes]
) -> None:
    """The engine registers after the watch has begun, twice, and dies at once."""
    watcher.watch(process.pid)
    time.sleep(2 * ENGINE_POLL_INTERVAL_S)
    register(server, "earlier-registration", process.pid)
    register(server, "watched", process.pid)
    register(server, "other-process", process.pid + 1)
    register(server, "other-machine", process.pid, worker="worker-1/3c4d")
    process.kill()
    process.wait()
    wait_for(lambda: not has_lease(server, "watched"), NOTICE_S)
    assert not has_lease(server, "earlier-registration")
    assert has_lease(server, "other-process")
    assert has_lease(server, "other-machine")


def test_a_living_process_keeps_its_lease(
    server: redis.Redis, watcher: EngineWatcher, process: subprocess.Popen[bytes]
) -> None:
    register(server, "watched", process.pid)
    watcher.watch(process.pid)
    watcher.watch(process.pid)
    time.sleep(3 * ENGINE_POLL_INTERVAL_S)
    assert has_lease(server, "watched")


def test_an_engine_that_died_before_it_was_watched_loses_its_lease(
    server: redis.Redis, watcher: EngineWatcher, process: subprocess.Popen[bytes]
) -> None:
    register(server, "watched", process.pid)
    process.kill()
    process.wait()
    watcher.watch(process.pid)
    wait_for(lambda: not has_lease(server, "watched"), START_S)


def test_a_process_that_cannot_be_watched_is_left_to_its_lease(
    server: redis.Redis, watcher: EngineWatcher, process: subprocess.Popen[bytes]
) -> None:
    register(server, "other", -1)
    register(server, "watched", process.pid)
    watcher.watch(-1)
    watcher.watch(process.pid)
    process.kill()
    wait_for(lambda: not has_lease(server, "watched"), START_S)
    assert has_lease(server, "other")


def test_a_death_during_an_outage_of_redis_is_handled_after_it(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    with Server(tmp_path / "redis", appendonly=True) as server:
        client = server.raw_client()
        register(client, "watched", process.pid)
        watcher = EngineWatcher(LauncherStore(connect(f"redis://127.0.0.1:{server.port}/0"), KEYS), WORKER)
        watcher.start()
        try:
            watcher.watch(process.pid)
            server.kill()
            process.kill()
            time.sleep(1.0)
            server.start()
            wait_for(lambda: not has_lease(client, "watched"), 15, ignored=redis.RedisError)
        finally:
            watcher.stop()
