"""The status of a job, as a coordinator publishes it, for tests of what is served and scraped."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_api.manifest.rollout_job import API_VERSION, KIND, parse_job
from rollout_head.coordinator.state import CoordinatorLimits, CoordinatorState
from rollout_head.coordinator.status import StatusBuilder
from rollout_store.job import EngineReport


def job_status(engines: Mapping[str, EngineReport] | None = None) -> StatusBuilder:
    """Return the status of a job that serves one client."""
    spec = {"model": {"uri": "policy"}, "source": {"trainer": {}}}
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "math"}, "spec": spec}
    state = CoordinatorState(CoordinatorLimits())
    state.engines, state.unread_bytes = dict(engines or {}), {"client": 0}
    builder = StatusBuilder(state, parse_job(manifest), "uid")
    builder.update({}, {}, {})
    return builder
