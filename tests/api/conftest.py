"""A job and a client for the tests of the API."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout_api import RolloutClient
from tests.support.fake_job import FakeJob


@pytest.fixture
def job(redis_url: str) -> FakeJob:
    """A job in an empty Redis; the test answers its requests."""
    return FakeJob(redis_url)


@pytest.fixture
def client(redis_url: str, job: FakeJob) -> Iterator[RolloutClient]:
    """A client of that job."""
    with RolloutClient.connect(redis_url, job.name, reconnect_timeout=10) as connected:
        yield connected
