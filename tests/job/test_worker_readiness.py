"""Whether a worker is ready: it knows this from its own engines, and reads nothing from Redis."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rollout_worker.engine_worker.worker_process import WorkerReadiness


def test_a_worker_is_ready_when_all_of_its_own_engines_serve() -> None:
    readiness = WorkerReadiness(engines=2)
    assert "the worker is starting" == readiness.why_not_ready()
    fleet = SimpleNamespace(num_serving=1)
    readiness.fleet = cast("Any", fleet)
    assert "1 of 2 engines serve" == readiness.why_not_ready()
    fleet.num_serving = 2
    assert "" == readiness.why_not_ready()
