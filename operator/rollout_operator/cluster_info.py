"""Facts about the cluster that the operator runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClusterInfo:
    """API versions and fields found by discovery when the operator starts, and what its command line says."""

    disruption_budget_api: str | None = "policy/v1"
    """API version of PodDisruptionBudgets; None if the cluster serves none, in which case jobs get none."""
    has_unhealthy_pod_eviction_policy: bool = True
    """Whether PodDisruptionBudgets have the field ``unhealthyPodEvictionPolicy`` (since Kubernetes 1.27)."""
    gang_api: str | None = None
    """API version of the PodGroups of a scheduler that does gang scheduling; None if there is none."""
    status_reader_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may read the heads' /status and /metrics; empty means all namespaces."""
    egress_rules: tuple[dict[str, Any], ...] | None = None
    """Rules of a NetworkPolicy for connections that all jobs need; None if connections of pods are not limited."""
    status_token_hash: str = ""
    """SHA-256 hash of the token that heads require for /status and /metrics; empty if they require none."""
    creates_redis_users: bool = False
    """Whether rollout-redis-users creates a Redis user for each job whose manifest names no Redis server."""
