"""The fleet of engine actors on a real Ray cluster, with fake actors that fail in various ways."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import ray

from rollout_store.job import JobStore
from rollout_store.job.setup import JobSetup
from rollout_worker.engine_worker import fleet as fleet_module
from rollout_worker.engine_worker.engines import start_local_ray, stop_local_ray
from rollout_worker.engine_worker.fleet import EngineState, Fleet
from tests.support.waiting import wait_for

MANIFEST = {
    "apiVersion": "das.rollout.dev/v1beta1",
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
        return EngineState(self._process, os.getpid(), True, "engine-0-5e6f", "")


class CrashingEngine:
    """An engine that dies once the fleet has read its state, however long the fleet's pass takes."""

    def __init__(self, *_: object) -> None:
        self._process = secrets.token_hex(4)

    def state(self) -> EngineState:
        threading.Timer(0.5, os._exit, [1]).start()
        return EngineState(self._process, os.getpid(), False, "", "")


class KilledEngine:
    """An engine whose process is always killed before it can answer."""

    def __init__(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def state(self) -> EngineState:
        raise AssertionError


class FailingEngine:
    def __init__(self, *_: object) -> None:
        self._process = secrets.token_hex(4)

    def state(self) -> EngineState:
        return EngineState(self._process, os.getpid(), True, "", "no such model")


class BrokenEngine:
    """An engine whose constructor fails, after which Ray does not restart the actor."""

    def __init__(self, *_: object) -> None:
        raise RuntimeError("can't start new thread")

    def state(self) -> EngineState:
        raise AssertionError


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """Ray with room for one engine."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors' processes cannot import this module
    with pytest.MonkeyPatch.context() as patch:
        # Were Ray's memory monitor enabled, it would now kill every engine.
        patch.setenv("RAY_memory_usage_threshold", "0")
        start_local_ray(1)
    yield
    stop_local_ray()


@pytest.fixture
def setup(redis_url: str) -> JobSetup:
    """The setup of a new job with one engine, whose worker is called machine-7."""
    return JobSetup(MANIFEST, f"fleet-{secrets.token_hex(4)}", redis_url, 100, "fingerprint", worker="machine-7/1a2b")


@pytest.fixture
def states() -> list[EngineState]:
    """The states that the engines have answered."""
    return []


@pytest.fixture
def fleet(request: pytest.FixtureRequest, setup: JobSetup, states: list[EngineState]) -> Fleet:
    """The fleet of a job, whose engines are of the class that the test names. Ray ends them when it is collected."""
    return Fleet(setup, request.param, on_state=states.append)


def wait_for_error(fleet: Fleet, seconds: float) -> None:
    """Run passes of the fleet until one finds an engine that cannot start."""

    def has_error() -> bool:
        fleet.run_once()
        return bool(fleet.errors)

    wait_for(has_error, seconds)


def wait_for_process(fleet: Fleet, states: list[EngineState], *, other_than: int = 0) -> int:
    """Run passes of the fleet, without any error, until an engine serves; return its process id."""

    def process() -> int:
        fleet.run_once()
        assert {} == fleet.errors
        serving = [state.pid for state in states if state.engine and state.pid != other_than]
        return serving[-1] if serving else 0

    found: int = wait_for(process, 60, "The engine has not started.")
    return found


@pytest.mark.parametrize("fleet", [SlowEngine], indirect=True)
def test_an_engine_that_was_killed_restarts_without_an_error(
    fleet: Fleet, states: list[EngineState], caplog: pytest.LogCaptureFixture
) -> None:
    first = wait_for_process(fleet, states)
    assert 1 == fleet.num_serving
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: fleet.run_once() or not fleet.num_serving, 30)
    assert "The process of engine-0 has ended" in caplog.text
    assert first != wait_for_process(fleet, states, other_than=first)
    assert 1 == fleet.num_serving


@pytest.mark.parametrize("fleet", [CrashingEngine], indirect=True)
def test_an_engine_whose_process_dies_repeatedly_during_its_start_is_an_error(fleet: Fleet) -> None:
    wait_for_error(fleet, 240)
    assert "died 3 times while it started" in fleet.errors["engine-0"]


@pytest.mark.parametrize("fleet", [KilledEngine], indirect=True)
def test_an_engine_whose_process_never_answers_is_reported(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "SILENCE_LOG_INTERVAL_S", 1.0)
    with running(fleet):
        wait_for(lambda: "The process of engine-0 has not answered" in caplog.text, 60)


@pytest.mark.parametrize("fleet", [FailingEngine], indirect=True)
def test_an_engine_that_reports_that_it_cannot_start_is_an_error(fleet: Fleet) -> None:
    wait_for_error(fleet, 60)
    assert {"engine-0": "no such model"} == fleet.errors
    assert 0 == fleet.num_serving


@pytest.mark.parametrize("fleet", [BrokenEngine], indirect=True)
def test_an_engine_whose_actor_cannot_be_created_is_an_error(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "ACTOR_RESTART_TIMEOUT_S", 2.0)
    wait_for_error(fleet, 60)
    assert "can't start new thread" in fleet.errors["engine-0"]


@pytest.mark.parametrize("fleet", [FailingEngine], indirect=True)
def test_the_coordinator_learns_which_engines_cannot_start(fleet: Fleet, setup: JobSetup) -> None:
    async def failed() -> dict[str, str]:
        return await JobStore.connect(setup.redis_url, setup.keys).engines.failed()

    with running(fleet):
        wait_for(lambda: {"machine-7/engine-0": "no such model"} == asyncio.run(failed()), 60)


@pytest.mark.parametrize("fleet", [SlowEngine], indirect=True)
def test_a_fleet_tells_for_how_long_ray_has_not_answered(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(fleet):
        wait_for(lambda: fleet.num_serving == 1, 60)
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": False}])
        wait_for(lambda: fleet.failing_seconds > 3, 30)
        monkeypatch.undo()
        wait_for(lambda: fleet.failing_seconds < 2, 30)


def test_ray_listens_on_the_loopback_interface_only() -> None:
    processes = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    listening = [
        connection
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.pid in processes
    ]
    assert len({connection.pid for connection in listening}) >= 2  # at least the raylet and the control store
    assert all(
        ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:")).is_loopback for connection in listening
    )


@contextlib.contextmanager
def running(fleet: Fleet) -> Iterator[None]:
    """Run a fleet in a thread."""
    stopping = threading.Event()
    thread = threading.Thread(target=fleet.run, args=(stopping,))
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
