"""What the operator knows of the cluster it runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """Found by discovery at the start, so that the operator does without what an old cluster lacks."""

    disruption_budgets: str | None = "policy/v1"
    """API version of PodDisruptionBudgets; None where there are none that the operator may make."""
    watcher_namespaces: tuple[str, ...] = ()
    """Namespaces of the operator and of the monitoring, whose pods may read heads' /status and /metrics; none: all."""
