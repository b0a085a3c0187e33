"""The nodes that a real scheduler chooses for workers, in two racks of two nodes with eight GPUs each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.virtual_nodes import VirtualNodes

pytestmark = pytest.mark.complete_cluster
RACK = "example.com/rack"
SELECTED = {"test": "placement"}
"""Label of the nodes of these tests."""
EIGHTH = {"cpu": "7", "memory": "56Gi"}
"""Resources of a worker with one GPU of a node with eight."""


@pytest.fixture
def racks(cluster: ControlPlane, nodes: VirtualNodes, operated_jobs: Jobs) -> Iterator[dict[str, str]]:
    """The rack of each node. Heads run on the node without GPUs."""
    racks = [VirtualNodes(cluster.client(), 2, labels={**SELECTED, RACK: name}, prefix=f"rack-{name}") for name in "ab"]
    for rack in racks:
        rack.start()
    yield {node: name for name, rack in zip("ab", racks, strict=True) for node in rack.names}
    operated_jobs.clear()
    for rack in racks:
        rack.stop()


def nodes_of(jobs: Jobs, name: str) -> dict[str, str]:
    """Return the node of each worker pod of a job."""
    return {pod_name: pod.spec.node_name for pod_name, pod in jobs.pods(name, "worker").items()}


def create(jobs: Jobs, name: str, tensor_parallel_size: int = 1, **workers: object) -> None:
    """Create a job whose workers run in the racks."""
    jobs.create(
        name,
        head={"nodeSelector": {"kubernetes.io/hostname": "cpu-0"}},
        engine={"tensorParallelSize": tensor_parallel_size},
        workers={"accelerator": None, "nodeSelector": SELECTED, **workers},
    )


def test_small_workers_leave_whole_nodes_to_large_ones(operated_jobs: Jobs, racks: dict[str, str]) -> None:
    create(operated_jobs, "small", replicas=4, gpusPerWorker=1, resources=EIGHTH)
    operated_jobs.wait_for_running("small", 5)
    create(operated_jobs, "more", replicas=4, gpusPerWorker=1, resources=EIGHTH)
    operated_jobs.wait_for_running("more", 5)
    assert 1 == len({*nodes_of(operated_jobs, "small").values(), *nodes_of(operated_jobs, "more").values()})
    create(operated_jobs, "large", replicas=3, gpusPerWorker=8)
    operated_jobs.wait_for_running("large", 4)


def test_the_pods_of_a_worker_are_in_one_rack(operated_jobs: Jobs, racks: dict[str, str]) -> None:
    create(operated_jobs, "wide", 16, replicas=2, podsPerWorker=2, gpusPerWorker=16, topologyKey=RACK)
    operated_jobs.wait_for_running("wide", 5)
    chosen = {name: racks[node] for name, node in nodes_of(operated_jobs, "wide").items()}
    assert chosen["wide-worker-0"] == chosen["wide-worker-0-1"]
    assert chosen["wide-worker-1"] == chosen["wide-worker-1-1"]


def test_workers_of_one_pod_prefer_one_rack(operated_jobs: Jobs, racks: dict[str, str]) -> None:
    create(operated_jobs, "close", replicas=2, gpusPerWorker=8, topologyKey=RACK)
    operated_jobs.wait_for_running("close", 3)
    assert 1 == len({racks[node] for node in nodes_of(operated_jobs, "close").values()})
