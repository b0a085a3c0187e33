"""Tensor parallelism over two machines: ``rollout worker`` and ``rollout follower``, as pods run them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_api.protocol.status import EXIT_INTERRUPTED
from tests.support.pod_processes import PodProcesses

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PODS = ("head", "worker", "follower")


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodProcesses]:
    running = PodProcesses(tmp_path, samples=4, engine={"tensorParallelSize": 2}, workers={"podsPerWorker": 2})
    yield running
    running.close()


def test_an_engine_on_two_machines_survives_the_loss_of_one_and_the_drain_of_both(pods: PodProcesses) -> None:
    def wait_until_sampling() -> str:
        (engine,) = pods.wait(lambda: pods.status().get("engines"), *PODS, seconds=240)
        pods.wait(lambda: pods.status().get("assigned"), *PODS)
        assert "pods-worker-0/engine-0" == engine["name"]
        return str(engine["id"])

    def wait_until_lost(engine: str) -> None:
        pods.wait(lambda: engine not in {one["id"] for one in pods.status()["engines"]}, "head", seconds=20)

    pods.start_head()
    pods.start_worker()
    pods.start_follower()
    first = wait_until_sampling()

    pods.kill("follower")
    wait_until_lost(first)
    pods.start_follower()
    second = wait_until_sampling()
    assert first != second

    # Both pods are deleted at the same time, and the worker hands over its rollouts before the follower ends.
    assert EXIT_INTERRUPTED == pods.end("worker", 60, signal.SIGTERM), pods.log("worker")
    assert EXIT_INTERRUPTED == pods.end("follower", 60, signal.SIGTERM), pods.log("follower")
    wait_until_lost(second)
    pods.start_worker()
    pods.start_follower()
    assert 0 == pods.end("head", 400), pods.log("head")
    assert {1} == set(pods.in_history().values())
    assert pods.num_rollouts == len(pods.in_history())
