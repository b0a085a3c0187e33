"""Heads, workers and followers, as pods run them, with a dataset source from start to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_api.protocol.keys import MessageKeys
from rollout_api.protocol.status import EXIT_INTERRUPTED
from tests.support.pod_processes import EPOCHS, UID, PodProcesses

pytestmark = pytest.mark.engine

ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environments"
DAY_S = 24 * 3600
EXPIRED = -2
PODS = ("head", "worker", "follower")
NewPods = Callable[..., PodProcesses]


@pytest.fixture
def new_pods(tmp_path: Path) -> Iterator[NewPods]:
    created: list[PodProcesses] = []

    def create(**settings: Any) -> PodProcesses:
        created.append(PodProcesses(tmp_path, **settings))
        return created[-1]

    yield create
    for pods in created:
        pods.close()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_dataset_job_runs_from_start_to_end(new_pods: NewPods) -> None:
    pods = new_pods()
    os.kill(pods.redis, signal.SIGSTOP)
    pods.start_worker()
    pods.start_head()
    pods.wait(lambda: "Waiting: Redis" in pods.log("head"), "head", "worker")  # it keeps waiting
    assert (503, "the worker is starting\n") == pods.wait(lambda: pods.ready()[0] and pods.ready(), "worker")
    os.kill(pods.redis, signal.SIGCONT)

    status = pods.wait(pods.status, "head", "worker")
    assert (pods.num_rollouts, None) == (status["total"], status["redis_error"])
    pods.wait(lambda: pods.ready() == (200, "ok\n"), "head", "worker")
    (engine,) = pods.wait(lambda: pods.status().get("engines"), "head", "worker")
    assert ("pods-worker-0", "pods-worker-0/engine-0") == (engine["worker"], engine["name"])
    status = pods.wait(lambda: (now := pods.status()).get("assigned") and now, "head", "worker")
    assert [0.0] == [one["idle_seconds"] for one in status["engines"] if one["assigned"]]
    assert 1 <= status["epoch"] <= EPOCHS

    # While Redis is unavailable, the head reports this and waits; afterwards it continues its dataset.
    os.kill(pods.redis, signal.SIGSTOP)
    outage = pods.wait(lambda: pods.status().get("redis_error"), "head", "worker")
    assert outage.startswith("Redis has not answered the coordinator for ")
    os.kill(pods.redis, signal.SIGCONT)

    assert 0 == pods.end("head", 180), pods.log("head")
    assert {1} == set(pods.in_history().values())
    assert pods.num_rollouts == len(pods.in_history())
    keys = MessageKeys(UID)
    assert b"closed" == pods.client.hget(keys.job, "state")
    expiries = {key: pods.client.ttl(key) for key in pods.client.scan_iter(keys.pattern())}
    assert keys.totals.encode() in expiries
    assert all(0 < seconds <= DAY_S or seconds == EXPIRED for seconds in expiries.values()), expiries
    assert 0 == pods.end("worker", 20, signal.SIGTERM), pods.log("worker")  # the worker has nothing to hand over


@pytest.mark.nightly
def test_a_head_that_is_killed_continues_the_trajectories_of_its_environment(
    new_pods: NewPods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    calls = tmp_path / "calls"
    actions = ["one", "one", "one", "raise"]
    environment = {"entryPoint": "scripted:SlowDialogue", "args": {"actions": actions, "calls": str(calls)}}
    source = {"dataset": {"environment": environment}}
    pods = new_pods(samples=4, source=source, sampling={"maxTokens": 40})

    def num_scored() -> int:
        return len(calls.read_text().splitlines()) if calls.exists() else 0

    pods.start_worker()
    pods.start_head()
    pods.wait(lambda: num_scored() >= 4, "head", "worker", seconds=240)
    pods.kill("head")
    pods.start_head()
    errors = pods.wait(lambda: pods.status().get("environment_errors"), "head", "worker", seconds=120)
    assert ["exception"] == list(errors)
    assert ("3-raise", True) == (errors["exception"]["problem"], "judge" in errors["exception"]["message"])
    assert 0 == pods.end("head", 180), pods.log("head")
    # At most the trajectory that ended while the head was killed is scored again, and no turn is sampled again.
    assert 16 <= num_scored() <= 17
    assert 3 * 16 == len(pods.in_history())


@pytest.mark.nightly
def test_an_engine_on_two_machines_survives_the_loss_of_one_and_the_drain_of_both(new_pods: NewPods) -> None:
    """``rollout worker`` and ``rollout follower`` with tensor parallelism over two machines."""
    pods = new_pods(samples=4, engine={"tensorParallelSize": 2}, workers={"podsPerWorker": 2})

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
