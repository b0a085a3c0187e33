"""The metrics of a job: those that its head serves, or else those that follow from its status."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest

from rollout_api.protocol.status import CoordinatorStatus
from rollout_api.status_token import StatusToken
from rollout_worker.cli.bundle.job_parts import read_status
from rollout_worker.cli.job_address import FoundJob
from rollout_worker.job.coordinator.metrics import StatusMetrics

METRICS = ("metrics.txt", "The metrics of the head, or those that follow from the status: then without histograms.")
_URL = "http://127.0.0.1:8080/metrics"
"""Where a head serves its metrics by default."""
_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class _PublishedStatus:
    """A status that was read from Redis."""

    last: CoordinatorStatus
    distributions: None = None
    age_s: float = 0.0


def read_metrics(job: FoundJob) -> str:
    """Return the metrics of a job in the text format of Prometheus.

    Raises:
        LookupError: if neither a head on this machine nor Redis has a status of the job.
        RedisUnusableError: if Redis cannot be used.
    """
    served = _read_served()
    if served is not None and f'job="{job.name}"' in served:
        return served
    status = read_status(job)
    if "engines" not in status:
        raise LookupError(f"no coordinator runs; the job is {status['state']}")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusMetrics(_PublishedStatus(cast(CoordinatorStatus, status))))
    return generate_latest(registry).decode()


def _read_served() -> str | None:
    """Return the metrics that a head on this machine serves; None if there is none, or if it does not permit it."""
    token = StatusToken.from_environment().value
    request = urllib.request.Request(_URL, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 - the URL is a constant
            text: str = response.read().decode(errors="replace")
            return text
    except (OSError, ValueError):
        return None
