"""The processes of a job's coordinator and relay: restarts, the end of the job, and a second head."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import redis

from rollout_api import RolloutClient
from rollout_api.ports import free_port
from rollout_head.child_services import JobServices
from rollout_head.services import Service
from rollout_store.job.engines import EngineError
from rollout_store.job.setup import JobSetup
from tests.support.waiting import wait_for

MANIFEST = {
    "apiVersion": "das.rollout.dev/v1beta1",
    "kind": "RolloutJob",
    "metadata": {"name": "services"},
    "spec": {"source": {"trainer": {}}, "model": {"uri": "any/model"}, "workers": {"gpusPerWorker": 0}},
}
START_S = 30.0
"""Seconds until a process has started and published its first state, on a busy machine."""


@pytest.fixture
def setup(redis_url: str) -> JobSetup:
    return JobSetup(MANIFEST, "services", redis_url, 100, "fingerprint", http_port=free_port())


@pytest.fixture
def services(setup: JobSetup) -> Iterator[JobServices]:
    running = JobServices(setup)
    running.start()
    yield running
    running.stop()
    assert not processes()


def processes() -> dict[str, psutil.Process]:
    """Return the running services of this process by name."""
    found = {}
    for child in psutil.Process().children():
        try:
            line = child.cmdline()
        except psutil.Error:
            continue
        if "rollout_head.services" in line and child.status() != psutil.STATUS_ZOMBIE:
            found[line[-1]] = child
    return found


def coordinator_number(setup: JobSetup) -> int:
    """Return the number of the last coordinator that took over."""
    server: Any = redis.Redis.from_url(setup.redis_url)
    return int(server.get(setup.keys.fencing_token) or 0)


def test_both_processes_are_restarted(setup: JobSetup, services: JobServices) -> None:
    wait_for(lambda: coordinator_number(setup) == 1, START_S)
    first = wait_for(lambda: len(found := processes()) == 2 and found, START_S)
    for process in first.values():
        process.kill()
    wait_for(lambda: coordinator_number(setup) == 2, START_S)
    second = wait_for(lambda: len(found := processes()) == 2 and found, START_S)
    assert set(Service) == set(second)
    assert not {process.pid for process in first.values()} & {process.pid for process in second.values()}
    assert not services.ended()


def test_the_services_end_with_the_job(setup: JobSetup, services: JobServices) -> None:
    wait_for(lambda: coordinator_number(setup) == 1, START_S)
    with RolloutClient.connect(setup.redis_url, uid=setup.uid, name="trainer") as client:
        client.close_job()
    wait_for(services.ended, START_S)


def test_a_head_ends_when_another_one_has_taken_over(setup: JobSetup, services: JobServices) -> None:
    wait_for(lambda: coordinator_number(setup) == 1, START_S)
    redis.Redis.from_url(setup.redis_url).incr(setup.keys.fencing_token)

    def is_superseded() -> bool:
        try:
            services.ended()
        except EngineError as error:
            return "another head" in str(error)
        return False

    wait_for(is_superseded, START_S)
    wait_for(lambda: [Service.RELAY] == list(processes()), START_S)  # it starts a second after the coordinator


def test_a_service_that_cannot_be_started_is_started_later(setup: JobSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/missing")
    services = JobServices(setup)
    services.start()
    try:
        assert not processes()
        monkeypatch.undo()
        wait_for(lambda: coordinator_number(setup) == 1, START_S)
    finally:
        services.stop()


def test_the_services_survive_ctrl_c(setup: JobSetup, services: JobServices) -> None:
    wait_for(lambda: coordinator_number(setup) == 1, START_S)
    groups = {os.getpgid(process.pid) for process in processes().values()}
    assert os.getpgid(0) not in groups


def test_a_closed_job_is_recorded_as_closed_before_the_wait_ends(setup: JobSetup, services: JobServices) -> None:
    server = redis.Redis.from_url(setup.redis_url)
    wait_for(lambda: server.exists(setup.keys.status), START_S)
    asyncio.run(services.wait_ended(0.1))
    assert not services.ended()
    with RolloutClient.connect(setup.redis_url, uid=setup.uid, name="trainer") as client:
        client.close_job()
    asyncio.run(services.wait_ended(START_S))
    services.stop()
    assert b"closed" == server.hget(setup.keys.job, "state")
