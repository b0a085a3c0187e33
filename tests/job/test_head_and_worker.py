"""``rollout head`` and ``rollout worker``, as pods run them, with a dataset source from start to end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_api.protocol.keys import MessageKeys
from tests.support.pod_processes import EPOCHS, UID, PodProcesses

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENVIRONMENTS = Path(__file__).parents[1] / "support" / "environments"
DAY_S = 24 * 3600
EXPIRED = -2


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodProcesses]:
    running = PodProcesses(tmp_path)
    yield running
    running.close()


def test_a_dataset_job_runs_from_start_to_end(pods: PodProcesses) -> None:
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


def test_a_head_that_is_killed_continues_the_trajectories_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))
    calls = tmp_path / "calls"
    actions = ["one", "one", "one", "raise"]
    environment = {"entryPoint": "scripted:SlowDialogue", "args": {"actions": actions, "calls": str(calls)}}
    source = {"dataset": {"environment": environment}}
    pods = PodProcesses(tmp_path, samples=4, source=source, sampling={"maxTokens": 40})

    def num_scored() -> int:
        return len(calls.read_text().splitlines()) if calls.exists() else 0

    try:
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
    finally:
        pods.close()
