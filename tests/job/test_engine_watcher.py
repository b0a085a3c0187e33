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
from rollout_worker.job.job_store import EngineReport
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.launch.engine_watcher import EngineWatcher
from tests.support.redis_servers import Server
from tests.support.waiting import wait_for

KEYS = MessageKeys("watched")
WORKER = "worker-0/1a2b"
NOTICE_S = 0.5
"""Seconds within which the death of a watched process is noticed; a lease takes 5."""


def register(server: redis.Redis, engine: str, pid: int, worker: str = WORKER) -> None:
    """Register an engine with a lease."""
    server.hset(KEYS.engines, engine, EngineReport(name=engine, worker=worker, pid=pid).pack())
    server.set(KEYS.lease(engine), "1")


@pytest.fixture
def watcher(redis_url: str) -> Iterator[EngineWatcher]:
    running = EngineWatcher(LauncherStore(connect(redis_url), KEYS), WORKER)
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
    redis_url: str, watcher: EngineWatcher, process: subprocess.Popen[bytes]
) -> None:
    server = redis.Redis.from_url(redis_url)
    register(server, "watched", process.pid)
    register(server, "of-another-process", process.pid + 1)
    register(server, "of-another-worker", process.pid, worker="worker-1/3c4d")
    for _ in range(2):
        watcher.watch(process.pid)
    watcher.start()
    process.kill()
    process.wait()
    wait_for(lambda: not server.exists(KEYS.lease("watched")), NOTICE_S)
    assert server.exists(KEYS.lease("of-another-process"))
    assert server.exists(KEYS.lease("of-another-worker"))


def test_the_lease_of_a_running_process_does_not_end(
    redis_url: str, watcher: EngineWatcher, process: subprocess.Popen[bytes]
) -> None:
    server = redis.Redis.from_url(redis_url)
    register(server, "running", process.pid)
    watcher.start()
    watcher.watch(process.pid)
    time.sleep(2 * NOTICE_S)
    assert server.exists(KEYS.lease("running"))


def test_an_engine_that_died_before_it_was_watched_loses_its_lease(
    redis_url: str, watcher: EngineWatcher, process: subprocess.Popen[bytes]
) -> None:
    server = redis.Redis.from_url(redis_url)
    process.kill()
    process.wait()
    register(server, "dead", process.pid)
    watcher.start()
    watcher.watch(process.pid)
    wait_for(lambda: not server.exists(KEYS.lease("dead")), NOTICE_S)


def test_a_death_during_an_outage_of_redis_is_handled_after_it(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    with Server(tmp_path / "redis", appendonly=True) as server:
        client = server.raw_client()
        register(client, "watched", process.pid)
        watcher = EngineWatcher(LauncherStore(connect(f"redis://127.0.0.1:{server.port}/0"), KEYS), WORKER)
        watcher.start()
        watcher.watch(process.pid)
        server.kill()
        process.kill()
        process.wait()
        time.sleep(1.0)
        server.start()
        wait_for(lambda: not client.exists(KEYS.lease("watched")), 15, ignored=redis.RedisError)
        watcher.stop()
