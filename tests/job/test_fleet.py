"""The fleet of engine actors on a real Ray cluster; what the actors do, die above all, is made up."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_worker.job.fleet import ENGINE_RESOURCE, Fleet, namespace
from rollout_worker.job.ray_job import join_ray
from rollout_worker.job.setup import JobSetup

MANIFEST = {
    "apiVersion": "das.rollout.dev/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "fleet"},
    "spec": {"source": {"trainer": {}}, "model": {"uri": "any/model"}, "workers": {"gpusPerWorker": 0}},
}


class SlowToComeBack:
    """Has started at once; its process takes several of the fleet's passes to come up."""

    def __init__(self, *_: object) -> None:
        time.sleep(4)
        self._process = secrets.token_hex(4)

    def state(self) -> tuple[str, bool, str]:
        return self._process, True, ""

    def pid(self) -> int:
        return os.getpid()


class DiesWhileItStarts:
    """Lives until it was heard of: a busy machine may take longer over a pass of the fleet than any fixed time."""

    def __init__(self, *_: object) -> None:
        self._process = secrets.token_hex(4)

    def state(self) -> tuple[str, bool, str]:
        threading.Timer(0.5, os._exit, [1]).start()
        return self._process, False, ""


class CannotStart:
    def __init__(self, *_: object) -> None:
        self._process = secrets.token_hex(4)

    def state(self) -> tuple[str, bool, str]:
        return self._process, True, "no such model"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors' processes do not find this module
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "resources": {ENGINE_RESOURCE: 1}})
    join_ray(made.address)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def setup() -> Iterator[JobSetup]:
    """Of a job of its own, whose engines are ended after the test."""
    made = JobSetup(MANIFEST, f"fleet-{secrets.token_hex(4)}", "redis://127.0.0.1:1/0", 100, "fingerprint")
    yield made
    for number in range(2):
        with contextlib.suppress(ValueError):  # there is none, or the fleet has ended it
            ray.kill(engine_of(made, number), no_restart=True)
        with contextlib.suppress(ValueError):
            named = f"{namespace(made.uid)}-engine-{number}"
            ray.util.remove_placement_group(ray.util.get_placement_group(named))


def engine_of(setup: JobSetup, number: int = 0) -> ray.actor.ActorHandle:
    return ray.get_actor(f"engine-{number}", namespace=namespace(setup.uid))


def look(fleet: Fleet, seconds: float) -> bool:
    """Make passes as the fleet does; whether an engine was in error after any of them."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        fleet._look()
        if fleet.errors:
            return True
        time.sleep(0.5)
    return False


def pid_of(setup: JobSetup, number: int = 0) -> int:
    deadline = time.monotonic() + 60
    while True:
        try:
            return int(ray.get(engine_of(setup, number).pid.remote(), timeout=60))
        except (ray.exceptions.RayError, ValueError):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_an_engine_that_was_killed_comes_back_and_is_no_error(setup: JobSetup) -> None:
    fleet = Fleet(setup, SlowToComeBack)
    fleet._look()
    first = pid_of(setup)
    assert not look(fleet, 2)
    os.kill(first, signal.SIGKILL)
    assert not look(fleet, 8), fleet.errors
    assert first != pid_of(setup)


def test_an_engine_whose_process_dies_again_and_again_while_it_starts_is_an_error(setup: JobSetup) -> None:
    fleet = Fleet(setup, DiesWhileItStarts)
    assert look(fleet, 240)
    assert "died 3 times while it started" in fleet.errors["engine-0"]


def test_an_engine_that_says_that_it_cannot_start_is_an_error(setup: JobSetup) -> None:
    fleet = Fleet(setup, CannotStart)
    assert look(fleet, 60)
    assert {"engine-0": "no such model"} == fleet.errors


def test_a_worker_that_joins_brings_an_engine_and_one_that_leaves_takes_it_along(
    cluster: Cluster, setup: JobSetup
) -> None:
    fleet = Fleet(setup, SlowToComeBack)
    fleet._look()
    first = pid_of(setup)
    with pytest.raises(ValueError, match="engine-1"):
        engine_of(setup, 1)

    worker = cluster.add_node(num_cpus=0, resources={ENGINE_RESOURCE: 1})
    fleet._look()
    second = pid_of(setup, 1)
    cluster.remove_node(worker)
    assert not look(fleet, 5), fleet.errors
    assert first == pid_of(setup)

    worker = cluster.add_node(num_cpus=0, resources={ENGINE_RESOURCE: 1})
    assert not look(fleet, 2), fleet.errors
    assert second != pid_of(setup, 1)
    cluster.remove_node(worker)
