"""Whether a worker that receives SIGTERM tells its engines to leave the job first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.connection import connect
from rollout_store.job.launcher import LauncherStore
from rollout_store.job.setup import JobSetup
from rollout_worker.engine_worker.engine_actor import EngineActor
from rollout_worker.engine_worker.fleet import Fleet
from rollout_worker.engine_worker.worker_process import run_worker, shut_down_engines
from tests.support.waiting import wait_for

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
