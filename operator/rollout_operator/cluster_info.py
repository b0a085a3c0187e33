"""Facts about the cluster that the operator runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterInfo:
    """API versions and fields found by discovery when the operator starts, and namespaces from its command line."""

    disruption_budget_api: str | None = "policy/v1"
    """API version of PodDisruptionBudgets; None if the cluster serves none, in which case jobs get none."""
    has_unhealthy_pod_eviction_policy: bool = True
    """Whether PodDisruptionBudgets have the field ``unhealthyPodEvictionPolicy`` (since Kubernetes 1.27)."""
    status_reader_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may read the heads' /status and /metrics; empty means all namespaces."""
