"""Control planes with virtual nodes, and operators as processes of this machine.

A test runs on both control planes unless it has one of the markers ``complete_cluster`` and ``current_cluster``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.support.cluster.complete_control_plane import CompleteControlPlane
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.current_control_plane import CurrentControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess, running_operator
from tests.support.cluster.virtual_nodes import VirtualNodes

_CLUSTERS: dict[str, type[ControlPlane]] = {
    "complete_cluster": CompleteControlPlane,
    "current_cluster": CurrentControlPlane,
}
_numbers = itertools.count()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on the control planes that can run it."""
    if "cluster" in metafunc.fixturenames:
        required = [name for name in _CLUSTERS if metafunc.definition.get_closest_marker(name)]
        metafunc.parametrize("cluster", required or list(_CLUSTERS), indirect=True, scope="package")


@pytest.fixture(scope="package")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane without nodes."""
    control_plane = _CLUSTERS[request.param](tmp_path_factory.mktemp("cluster"))
    try:
        control_plane.start()
        yield control_plane
    finally:
        control_plane.stop()


@pytest.fixture(scope="package")
def nodes(cluster: ControlPlane) -> Iterator[VirtualNodes]:
    """Two virtual nodes with H100 GPUs; there is also one without GPUs."""
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    gpu_nodes = VirtualNodes(cluster.client(), 2, labels=labels, prefix="h100")
    cpu_capacity = {"cpu": "64", "memory": "512Gi", "pods": "500"}
    cpu_nodes = VirtualNodes(cluster.client(), 1, capacity=cpu_capacity, prefix="cpu")
    gpu_nodes.start()
    cpu_nodes.start()
    yield gpu_nodes
    gpu_nodes.stop()
    cpu_nodes.stop()


@pytest.fixture
def jobs(cluster: ControlPlane) -> Iterator[Jobs]:
    """A namespace for the jobs of one test, without an operator."""
    jobs = Jobs(cluster, f"test-{next(_numbers)}")
    yield jobs
    jobs.close()


@pytest.fixture
def operator(cluster: ControlPlane, jobs: Jobs) -> Iterator[OperatorProcess]:
    """An operator for the namespace of one test."""
    with running_operator(cluster, jobs.namespace) as process:
        yield process


@pytest.fixture(scope="package")
def _shared_namespace(cluster: ControlPlane) -> Iterator[Jobs]:
    """A namespace with an operator, for the tests that do not restart it or count what it does."""
    jobs = Jobs(cluster, "shared")
    with running_operator(cluster, jobs.namespace):
        yield jobs
    jobs.close()


@pytest.fixture
def operated_jobs(_shared_namespace: Jobs) -> Iterator[Jobs]:
    """A namespace with an operator. The test's jobs are deleted at its end."""
    yield _shared_namespace
    _shared_namespace.clear()
