"""A real Kubernetes for all tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.cluster.real_cluster import RealCluster, real_cluster
from tests.support.cluster.virtual_nodes import VirtualNodes

_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane without nodes."""
    plane = ControlPlane(tmp_path_factory.mktemp("cluster"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def nodes(cluster: ControlPlane) -> Iterator[VirtualNodes]:
    """Virtual nodes with H100 GPUs, and others without any."""
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    with_gpus = VirtualNodes(cluster.client(), 2, labels=labels, prefix="h100")
    plain = VirtualNodes(cluster.client(), 1, capacity={"cpu": "64", "memory": "512Gi", "pods": "500"}, prefix="plain")
    with_gpus.start()
    plain.start()
    yield with_gpus
    with_gpus.stop()
    plain.stop()


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """A cluster whose pods really run."""
    with real_cluster(tmp_path_factory.mktemp("real")) as made:
        yield made


@pytest.fixture
def jobs(cluster: ControlPlane) -> Iterator[Jobs]:
    """RolloutJobs in a namespace of the test's own."""
    made = Jobs(cluster, f"test-{next(_numbers)}")
    yield made
    made.clear()


@pytest.fixture
def operator(cluster: ControlPlane, jobs: Jobs) -> Iterator[OperatorProcess]:
    """An operator for that namespace."""
    log = cluster.directory / "log" / f"operator-{jobs.namespace}.log"
    process = OperatorProcess(cluster.kubeconfig, log, f"--namespace={jobs.namespace}", "--log-format=text")
    process.start()
    process.wait_until_ready()
    yield process
    if not process.ended():
        process.terminate()
