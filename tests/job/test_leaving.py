"""Whether a worker that receives SIGTERM tells its engines to leave the job first."""

from __future__ import annotations

import pytest

from rollout_api.protocol.keys import MessageKeys
from rollout_api.redis_client.connection import connect
from rollout_worker.job.job_store.launcher import LauncherStore
from rollout_worker.launch.worker import shut_down_engines

JOB = MessageKeys("leaving")


@pytest.mark.parametrize(("state", "told"), [("running", True), (None, True), ("closed", False), ("failed", False)])
def test_engines_are_told_unless_the_job_has_ended(redis_url: str, state: str | None, told: bool) -> None:
    server = connect(redis_url)
    if state is not None:  # None means that Redis has lost its data; the engines still have rollouts
        server.hset(JOB.job, "state", state)
    shut_down_engines(LauncherStore(server, JOB), "worker-0/1", 25.0)
    assert told == (b"25.0" == server.get(JOB.shutdown_grace("worker-0/1")))
