"""Nodes that reject pods, drains while workers lack nodes, and quotas, with real controllers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from rollout_operator.objects import names

from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess, new_operator
from tests.support.cluster.virtual_nodes import VirtualNodes

NUM_CARELESS = 20
MAX_REQUESTS = 200
"""Requests of the operator until it has created the head of a new job, which itself needs about 15."""


def test_a_node_that_rejects_pods_is_avoided(cluster: ControlPlane, nodes: VirtualNodes, operated_jobs: Jobs) -> None:
    labels = {"test": "rejection"}
    bad = VirtualNodes(cluster.client(), 1, labels=labels, prefix="bad")
    good = VirtualNodes(cluster.client(), 1, labels=labels, prefix="good")
    bad.rejects_with = "UnexpectedAdmissionError"
    bad.start()
    try:
        operated_jobs.create(
            "rejected",
            lifecycle={"backoffLimit": 0},
            head={"nodeSelector": {"kubernetes.io/hostname": "cpu-0"}},
            workers={"replicas": 1, "accelerator": None, "nodeSelector": labels},
        )
        operated_jobs.wait(lambda: "Unschedulable" in operated_jobs.condition("rejected", "WorkersReady"))
        status = operated_jobs.status("rejected")
        assert (2, 0) == (len(status["failures"]), status["failedPods"])
        assert [["bad-0", "bad-0"]] == [backoff["nodes"] for backoff in status["backoffs"]]
        good.start()
        operated_jobs.wait_for_running("rejected", 2)
        assert "good-0" == operated_jobs.pods("rejected")["rejected-worker-0"].spec.node_name
    finally:
        bad.stop()
        good.stop()


@pytest.mark.complete_cluster  # needs the disruption controller
def test_a_node_is_drained_while_some_workers_cannot_be_scheduled(
    cluster: ControlPlane, nodes: VirtualNodes, operated_jobs: Jobs
) -> None:
    operated_jobs.create("large", workers={"replicas": 6, "gpusPerWorker": 4})
    operated_jobs.wait_for_running("large", 5)
    operated_jobs.wait(lambda: operated_jobs.condition("large", "WorkersReady") == ("False", "Unschedulable"))
    node = nodes.names[0]
    selector = ",".join(f"{key}={value}" for key, value in names.selector("large").items())
    try:
        cluster.kubectl(
            "drain", node, f"--pod-selector={selector}", "--force", "--delete-emptydir-data", "--timeout=60s"
        )
        workers = operated_jobs.pods("large", names.WORKER).values()
        assert {nodes.names[1], None} >= {pod.spec.node_name for pod in workers}
    finally:
        cluster.kubectl("uncordon", node)


@pytest.fixture
def other(cluster: ControlPlane) -> Iterator[Jobs]:
    """A namespace of another tenant."""
    jobs = Jobs(cluster, "other-tenant")
    yield jobs
    jobs.close()


@pytest.fixture
def shared_operator(cluster: ControlPlane, jobs: Jobs, other: Jobs) -> Iterator[OperatorProcess]:
    """An operator for both namespaces."""
    process = new_operator(cluster, jobs.namespace, "operator", f"--namespace={other.namespace}")
    process.start()
    process.wait_until_ready()
    yield process
    process.terminate()


@pytest.mark.complete_cluster  # needs the controller of quotas
def test_jobs_beyond_their_quota_do_not_delay_those_of_another_tenant(
    jobs: Jobs, other: Jobs, nodes: VirtualNodes, shared_operator: OperatorProcess
) -> None:
    jobs.core.create_namespaced_resource_quota(
        jobs.namespace, {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": "2"}}}
    )
    jobs.wait(lambda: jobs.core.read_namespaced_resource_quota("pods", jobs.namespace).status.hard)
    careless = [f"careless-{number}" for number in range(NUM_CARELESS)]
    for name in careless:
        jobs.create(name, workers={"replicas": 64})
    jobs.wait(lambda: all(jobs.condition(name, "WorkersReady") == ("False", "Forbidden") for name in careless))
    before = shared_operator.metric("rollout_operator_api_requests_total")
    started = time.monotonic()
    other.create("math")
    other.wait(lambda: "math-head" in other.pods("math"))
    seconds = time.monotonic() - started
    print(f"The other tenant's head was created after {seconds:.2f} s.")  # noqa: T201 (a figure, not a verdict)
    assert shared_operator.metric("rollout_operator_api_requests_total") - before < MAX_REQUESTS
    rejections = Counter(
        event.involved_object.name
        for event in jobs.core.list_namespaced_event(jobs.namespace).items
        if event.reason == "Forbidden"
    )
    assert max(rejections.values()) <= 2
