"""Jobs on a simulated cluster, for the tests of the planner."""

from __future__ import annotations

import copy
from typing import Any

from rollout_operator.objects.observed import EngineStatus, HeadStatus

from tests.support.simulated_cluster import SimulatedCluster

SPEC: dict[str, Any] = {
    "source": {"trainer": {}},
    "model": {"uri": "Qwen/Qwen3-8B"},
    "workers": {"replicas": 3, "minReplicas": 1, "maxReplicas": 6},
}


def spec(**sections: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(SPEC)
    for name, changes in sections.items():
        merged[name] = {**merged.get(name, {}), **changes}
    return merged


def running_job(**sections: dict[str, Any]) -> SimulatedCluster:
    """Return a cluster with a job whose pods all run."""
    cluster = SimulatedCluster(spec(**sections))
    cluster.reconcile()
    run_all(cluster)
    return cluster


def head_status(workers: list[str], *, waiting: int = 0, assigned: int = 4, idle: float = 0.0) -> HeadStatus:
    engines = tuple(EngineStatus(worker=name, max_running=16, assigned=assigned, idle_seconds=idle) for name in workers)
    return HeadStatus(waiting=waiting, assigned=assigned * len(workers), engines=engines, remaining_seconds=1000.0)


def image_of(cluster: SimulatedCluster, pod: str) -> str:
    """Return the image of a pod."""
    image: str = cluster.pods[pod]["spec"]["containers"][0]["image"]
    return image


def suspend_and_resume(cluster: SimulatedCluster) -> None:
    """Suspend a job until all its pods are gone, and resume it."""
    cluster.change(lifecycle={"suspend": True})
    for _ in range(3):
        cluster.reconcile()
        cluster.finish_deletions()
    cluster.reconcile()
    cluster.change(lifecycle={"suspend": False})
    cluster.reconcile()


def container_of(cluster: SimulatedCluster, name: str) -> dict[str, Any]:
    (container,) = cluster.pods[name]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def run_all(cluster: SimulatedCluster) -> None:
    """Run all pods, and let an engine of each worker sample."""
    cluster.run_all()
    cluster.head = head_status(cluster.workers())
    cluster.reconcile()
