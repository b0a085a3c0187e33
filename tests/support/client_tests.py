"""Helpers of the client's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollout_api import ClientLimits, Rollout, RolloutClient, decode
from rollout_api.protocol.keys import TRAINER_GROUP
from tests.support.fake_job import FakeJob
from tests.support.waiting import wait_for

PROMPTS = [[1, 2, 3], [4, 5], [6]]
"""Prompts of a step; each is sampled twice."""
LIMITS = ClientLimits()
"""Default limits of a client."""
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine for at most half a minute."""
    return asyncio.run(asyncio.wait_for(work, 30))


def result_entries(job: FakeJob, client: str = "trainer") -> list[bytes]:
    """Return the ids of the entries with rollouts in a client's result stream. Late refusals are ignored."""
    found = job.redis.xrange(job.keys.results(client))
    return [entry for entry, fields in found if isinstance(decode(fields[b"d"]), Rollout)]


def num_pending(job: FakeJob, client: str = "trainer") -> int:
    """Return the number of results that were delivered to a client and not acknowledged."""
    return int(job.redis.xpending(job.keys.results(client), TRAINER_GROUP)["pending"])


def receive_without_acknowledging(redis_url: str, job: FakeJob, *steps: int) -> None:
    """Run a trainer that receives all rollouts of *steps* and ends before it acknowledges any."""
    with RolloutClient.connect(redis_url, job.name) as client:
        for step in steps:
            client.step(step, PROMPTS).start()
        for request in job.wait_for_requests(len(PROMPTS) * len(steps)):
            job.answer(request)
        wait_for(lambda: num_pending(job) == 2 * len(PROMPTS) * len(steps))
