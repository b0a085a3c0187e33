"""Helpers of the client's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollout_api import RolloutClient
from tests.support.fake_job import FakeJob

PROMPTS = [[1, 2, 3], [4, 5], [6]]
"""Prompts of a step; each is sampled twice."""
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine for at most half a minute."""
    return asyncio.run(asyncio.wait_for(work, 30))


def num_results(job: FakeJob) -> int:
    """Return the number of rollouts that the job keeps for clients, after a check of the list of their requests."""
    kept = job.redis.keys(job.keys.results("*"))
    listed = job.redis.smembers(job.keys.unreleased("trainer"))
    assert {key.decode() for key in kept} == {job.keys.results(request_id.decode()) for request_id in listed}
    return sum(job.redis.hlen(key) for key in kept)


def leave_steps(redis_url: str, job: FakeJob, *steps: int) -> None:
    """Run a trainer that requests the rollouts of *steps* and ends before it releases any; answer its requests."""
    with RolloutClient.connect(redis_url, job.name) as client:
        for step in steps:
            client.step(step, PROMPTS).start()
        for request in job.wait_for_requests(len(PROMPTS) * len(steps)):
            job.answer(request)
