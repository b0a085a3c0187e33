"""Whether a worker that is told to end tells its engines to leave the job first."""

from __future__ import annotations

import pytest

from rollout_api.protocol.keys import MessageKeys
from rollout_worker.distributed import _let_engines_leave
from rollout_worker.history.connection import connect

JOB = MessageKeys("leaving")


@pytest.mark.parametrize(("state", "told"), [("running", True), (None, True), ("closed", False), ("failed", False)])
def test_engines_are_told_unless_the_job_has_ended(redis_url: str, state: str | None, told: bool) -> None:
    server = connect(redis_url)
    if state is not None:  # none in a Redis that has lost its data: engines go on with what they have
        server.hset(JOB.job, "state", state)
    _let_engines_leave(server, JOB, "worker-0/1", 25.0)
    assert told == (b"25.0" == server.get(JOB.leaving("worker-0/1")))
