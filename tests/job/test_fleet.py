"""The fleet of engine actors on a real Ray cluster, with fake actors that fail in various ways."""

from __future__ import annotations

import asyncio
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

from rollout_worker.job.fleet import EngineState, Fleet, ray_namespace
from rollout_worker.job.job_store import JobStore
from rollout_worker.job.setup import JobSetup
from rollout_worker.launch.local_ray import start_local_ray, stop_local_ray
from tests.support.waiting import wait_for

MANIFEST = {
    "apiVersion": "das.rollout.dev/v1alpha1",
    "kind": "RolloutJob",
    "metadata": {"name": "fleet"},
    "spec": {"source": {"trainer": {}}, "model": {"uri": "any/model"}, "workers": {"gpusPerWorker": 0}},
}


class SlowEngine:
    """An engine whose process takes several passes of the fleet to start."""

    def __init__(self, *_: object) -> None:
        time.sleep(2)
        self._process = secrets.token_hex(4)

    def state(self) -> EngineState:
        return EngineState(self._process, os.getpid(), True, "")

    def pid(self) -> int:
        return os.getpid()


class CrashingEngine:
    """An engine that dies once the fleet has read its state, however long the fleet's pass takes."""

    def __init__(self, *_: object) -> None:
        self._process = secrets.token_hex(4)

    def state(self) -> EngineState:
        threading.Timer(0.5, os._exit, [1]).start()
        return EngineState(self._process, os.getpid(), False, "")


class FailingEngine:
    def __init__(self, *_: object) -> None:
        self._process = secrets.token_hex(4)

    def state(self) -> EngineState:
        return EngineState(self._process, os.getpid(), True, "no such model")


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """Ray with room for one engine."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors' processes cannot import this module
    start_local_ray(1)
    yield
    stop_local_ray()


@pytest.fixture
def setup(redis_url: str) -> Iterator[JobSetup]:
    """The setup of a new job, whose engines are killed after the test."""
    job = JobSetup(MANIFEST, f"fleet-{secrets.token_hex(4)}", redis_url, 100, "fingerprint", worker="machine-7/1a2b")
    yield job
    with contextlib.suppress(ValueError):  # it does not exist, or the fleet has killed it
        ray.kill(engine_of(job), no_restart=True)
    with contextlib.suppress(ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(f"{ray_namespace(job.uid)}-engine-0"))


def engine_of(setup: JobSetup) -> ray.actor.ActorHandle:
    return ray.get_actor("engine-0", namespace=ray_namespace(setup.uid))


def wait_for_error(fleet: Fleet, seconds: float) -> None:
    """Run passes of the fleet until one finds an engine that cannot start."""

    def has_error() -> bool:
        fleet.run_once()
        return bool(fleet.errors)

    wait_for(has_error, seconds)


def wait_for_pid(fleet: Fleet, setup: JobSetup, *, other_than: int | None = None) -> int:
    """Run passes of the fleet, none of which may find an error, until an engine has started; return its process id.

    Args:
        fleet: the fleet.
        setup: the job.
        other_than: process id of the engine before it was killed.
    """

    def new_pid() -> int | None:
        fleet.run_once()
        assert {} == fleet.errors
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it restarts, or does not exist yet
            pid = int(ray.get(engine_of(setup).pid.remote(), timeout=0.5))
            return pid if pid != other_than else None
        return None

    found: int = wait_for(new_pid, 60, "The engine has not started.")
    return found


def test_an_engine_that_was_killed_restarts_without_an_error(setup: JobSetup) -> None:
    reported: set[int] = set()
    fleet = Fleet(setup, SlowEngine, on_process=reported.add)
    first = wait_for_pid(fleet, setup)
    os.kill(first, signal.SIGKILL)
    second = wait_for_pid(fleet, setup, other_than=first)
    assert first != second
    wait_for(lambda: fleet.run_once() or {first, second} == reported, 60)


def test_an_engine_whose_process_dies_repeatedly_during_its_start_is_an_error(setup: JobSetup) -> None:
    fleet = Fleet(setup, CrashingEngine)
    wait_for_error(fleet, 240)
    assert "died 3 times while it started" in fleet.errors["engine-0"]


def test_an_engine_that_reports_that_it_cannot_start_is_an_error(setup: JobSetup) -> None:
    fleet = Fleet(setup, FailingEngine)
    wait_for_error(fleet, 60)
    assert {"engine-0": "no such model"} == fleet.errors


def test_the_coordinator_learns_which_engines_cannot_start(setup: JobSetup) -> None:
    async def failed() -> dict[str, str]:
        store = JobStore.connect(setup.redis_url, setup.keys)
        return await store.engines.failed()

    fleet, stopping = Fleet(setup, FailingEngine), threading.Event()
    thread = threading.Thread(target=fleet.run, args=(stopping,))
    thread.start()
    wait_for(lambda: {"machine-7/engine-0": "no such model"} == asyncio.run(failed()), 60)
    stopping.set()
    thread.join()
    assert 0.0 == fleet.failing_seconds()
