"""The process of a worker: readiness, the leases of engines that have died, and leaving after SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis

from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.messages import PauseMode
from rollout_api.redis_client.connection import connect
from rollout_store.job.engines import EngineError, EngineReport
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.setup import JobSetup
from rollout_worker.engine.engine import Engine
from rollout_worker.engine_worker.engine_actor import EngineActor
from rollout_worker.engine_worker.engines import ENGINE_POLL_INTERVAL_S, EngineWatcher
from rollout_worker.engine_worker.fleet import Fleet
from rollout_worker.engine_worker.worker_process import WorkerReadiness, run_worker, shut_down_engines
from tests.support.redis_servers import Server
from tests.support.waiting import wait_for


def test_a_worker_is_ready_when_all_of_its_own_engines_serve() -> None:
    readiness = WorkerReadiness(engines=2)
    assert "the worker is starting" == readiness.why_not_ready()
    fleet = SimpleNamespace(num_serving=1)
    readiness.fleet = cast("Any", fleet)
    assert "1 of 2 engines serve" == readiness.why_not_ready()
    fleet.num_serving = 2
    assert "" == readiness.why_not_ready()


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


JOB = MessageKeys("leaving")
MANIFEST: dict[str, Any] = {
    "apiVersion": "das.rollout.dev/v1beta1",
    "kind": "RolloutJob",
    "metadata": {"name": "leaving"},
    "spec": {"source": {"trainer": {}}, "model": {"uri": "missing/model"}, "workers": {"gpusPerWorker": 0}},
}


@pytest.mark.parametrize(("state", "told"), [("running", True), (None, True), ("closed", False), ("failed", False)])
def test_engines_are_told_unless_the_job_has_ended(redis_url: str, state: str | None, told: bool) -> None:
    server = connect(redis_url)
    if state is not None:  # None means that Redis has lost its data; the engines still have rollouts
        server.hset(JOB.job, "state", state)
    fleet = Fleet(JobSetup(MANIFEST, "leaving", redis_url, 100, "fingerprint"), EngineActor)  # without engines
    shut_down_engines(LauncherStore(server, JOB), "worker-0/1", fleet, 25.0)
    assert told == (b"25.0" == server.get(JOB.shutdown_grace("worker-0/1")))


def test_an_engine_that_starts_while_the_job_sleeps_waits_until_it_wakes(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would take the memory that the trainer uses."""

    async def start(_: object) -> Engine:
        raise EngineError("it would start now")

    server = connect(redis_url)
    server.hset(JOB.job, "pause", PauseMode.DEEP_SLEEP)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    manifest = {**MANIFEST, "spec": {**MANIFEST["spec"], "model": {"uri": str(tmp_path)}}}
    monkeypatch.setattr(Engine, "start", start)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # it would remove the handler of this test
    actor = EngineActor(JobSetup(manifest, "leaving", redis_url, 100, "fingerprint"), "engine-0", speculative=False)
    wait_for(lambda: actor.started or "The job sleeps, so that engine-0 waits" in caplog.text, 60)
    assert not actor.started, actor.error
    server.hset(JOB.job, "pause", PauseMode.KEEP)
    wait_for(lambda: actor.started, 60)
    assert "it would start now" == actor.state().error


@pytest.fixture
def restored_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which a worker replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("state", ["running", "closed"])
@pytest.mark.usefixtures("restored_handler")
def test_a_terminated_worker_tells_its_engines_the_time_to_drain_unless_the_job_has_ended(
    redis_url: str, state: str
) -> None:
    connect(redis_url).hset(JOB.job, "state", state)
    manifest = {**MANIFEST, "spec": {**MANIFEST["spec"], "workers": {"gpusPerWorker": 0, "drainSeconds": 3}}}
    setup = JobSetup(manifest, "leaving", redis_url, vocabulary_size=100, tokenizer="fingerprint")
    server = connect(redis_url)

    def terminate() -> None:
        wait_for(lambda: server.hlen(JOB.failed_engines), 120)  # its engine has no model
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        assert (state == "closed") == run_worker(setup, name="worker-0", http_port=0)
    finally:
        thread.join()
    told = [server.get(key) for key in server.scan_iter(f"{JOB.shutdown_grace('worker-0')}/*")]
    assert ([b"3.0"] if state == "running" else []) == told
