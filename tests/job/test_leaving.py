"""Whether a worker that receives SIGTERM tells its engines to leave the job first."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.connection import connect
from rollout_worker.job.engine_actor import EngineActor
from rollout_worker.job.fleet import Fleet
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.job.setup import JobSetup
from rollout_worker.launch import worker
from rollout_worker.launch.worker import run_worker, shut_down_engines

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


@pytest.fixture
def restored_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which a worker replaces."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("state", ["running", "closed"])
@pytest.mark.usefixtures("restored_handler")
def test_a_worker_tells_whether_the_job_had_ended_when_it_was_terminated(redis_url: str, state: str) -> None:
    connect(redis_url).hset(JOB.job, "state", state)
    setup = JobSetup(MANIFEST, "leaving", redis_url, vocabulary_size=100, tokenizer="fingerprint")
    signal.signal(signal.SIGTERM, lambda *_: None)
    ended = threading.Event()

    def terminate() -> None:
        while not ended.wait(0.5):  # the first signals may come before the worker handles them
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    try:
        assert (state == "closed") == run_worker(setup, name="worker-0", http_port=0)
    finally:
        ended.set()
        thread.join()


@pytest.mark.usefixtures("restored_handler")
def test_the_manifest_says_how_long_rollouts_may_continue(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def terminated_worker(setup: JobSetup, terminated: threading.Event) -> Iterator[Fleet]:
        terminated.set()
        yield Fleet(setup, EngineActor)  # without engines

    monkeypatch.setattr(worker, "running_engines", terminated_worker)
    manifest = {**MANIFEST, "spec": {**MANIFEST["spec"], "workers": {"gpusPerWorker": 0, "drainSeconds": 3}}}
    run_worker(JobSetup(manifest, "leaving", redis_url, 100, "fingerprint"), name="worker-0", http_port=0)
    server = connect(redis_url)
    (told,) = server.scan_iter(f"{JOB.shutdown_grace('worker-0')}/*")
    assert b"3.0" == server.get(told)
