"""The life of a job, from its creation to its deletion, with a real API server, scheduler and controllers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TypeAlias

import pytest
from rollout_operator.objects import names
from rollout_operator.objects.observed import STATUS_PERIOD_S

from tests.support.cluster.complete_control_plane import GARBAGE_COLLECTION_TIMEOUT_S, CompleteControlPlane
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.heads import Heads
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess, running_operator
from tests.support.cluster.virtual_nodes import CAPACITY, VirtualNodes
from tests.support.waiting import wait_for

REPLACEMENT_TIMEOUT_S = 180.0
"""Seconds from the loss of a node until its worker is replaced.

The node is considered lost after 12 s, the worker tolerates that for 30 s, and its grace period is 45 s. The operator
replaces it another 30 s later.
"""
SETTLING_S = 2.0
"""Seconds for the operator to handle the last events about a job that has reached its state."""
OBSERVATION_S = 1.2 * STATUS_PERIOD_S
JobOnLostNode: TypeAlias = tuple[Jobs, datetime]
"""The namespace of the job ``math``, and when the node of its worker was lost."""


@pytest.fixture
def jobs(operated_jobs: Jobs) -> Jobs:
    """A namespace with an operator."""
    return operated_jobs


@pytest.fixture(scope="module", autouse=True)
def job_on_lost_node(cluster: ControlPlane, nodes: VirtualNodes) -> Iterator[JobOnLostNode | None]:
    """A job whose worker is replaced while the other tests run, which takes two minutes, because its node is lost.

    None without the controller that notices the loss of a node.
    """
    if not isinstance(cluster, CompleteControlPlane):
        yield None
        return
    labels = {"test": "node-loss"}
    # There is room for the job's worker only, so that no pod of another test is lost.
    lost = VirtualNodes(cluster.client(), 1, labels=labels, capacity={**CAPACITY, "pods": "1"}, prefix="lost")
    other = VirtualNodes(cluster.client(), 1, labels=labels, prefix="other")
    jobs = Jobs(cluster, "node-loss")
    with running_operator(cluster, jobs.namespace):
        lost.start()
        jobs.create(
            "math",
            lifecycle={"backoffLimit": 0},
            head={"nodeSelector": {"kubernetes.io/hostname": "cpu-0"}},
            workers={"replicas": 1, "accelerator": None, "nodeSelector": labels},
        )
        jobs.wait_for_running("math", 2)
        other.start()
        lost.lose("lost-0")
        yield jobs, datetime.now(UTC)
    jobs.close()
    lost.stop()
    other.stop()


def test_a_job_gets_pods_on_h100_nodes_and_its_objects(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.create("math", workers={"replicas": 3, "gpusPerWorker": 4})
    jobs.wait_for_running("math", 4)
    pods = jobs.pods("math")
    assert {"math-head", "math-worker-0", "math-worker-1", "math-worker-2"} == set(pods)
    workers = [pod for name, pod in pods.items() if "worker" in name]
    assert {pod.spec.node_name for pod in workers} <= set(nodes.names)
    assert all("4" == pod.spec.containers[0].resources.limits["nvidia.com/gpu"] for pod in workers)
    assert jobs.core.read_namespaced_service("math-head", jobs.namespace)
    connection = jobs.core.read_namespaced_config_map("math-connection", jobs.namespace).data
    jobs.wait(lambda: jobs.status("math")["workers"]["summary"] == "3/3")
    job = jobs.get("math")
    assert job is not None
    assert job["metadata"]["uid"] == connection["uid"] == job["status"]["connection"]["uid"]
    assert {"secretName": "rollout-redis", "secretKey": "url"}.items() <= connection.items()
    assert "Starting" == job["status"]["state"]


@pytest.fixture
def network() -> str:
    """A random network of this machine: the port of heads is fixed, and other test runs may use it."""
    return f"127.{1 + secrets.randbelow(254)}.{1 + secrets.randbelow(254)}"


def test_a_job_with_64_engines_runs_and_succeeds(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes, network: str
) -> None:
    labels = {"test": "engines"}
    head_node = VirtualNodes(
        cluster.client(), 1, labels={"test": "head"}, prefix="head", address=lambda _: f"{network}.1"
    )
    gpu_nodes = VirtualNodes(cluster.client(), 8, labels=labels, prefix="engines")
    heads = Heads(64, f"{network}.1")
    head_node.start()
    gpu_nodes.start()
    try:
        jobs.create(
            "engines",
            head={"nodeSelector": {"test": "head"}},
            workers={"replicas": 8, "gpusPerWorker": 8, "accelerator": None, "nodeSelector": labels},
        )
        jobs.wait_for_running("engines", 9)
        jobs.wait_for_state("engines", "Running")
        assert ("True", "EngineRunning") == jobs.condition("engines", "EngineReady")
        workers = jobs.pods("engines", names.WORKER).values()
        assert 8 == len({pod.spec.node_name for pod in workers})
        nodes.terminate_pod(jobs.namespace, "engines-head")
        jobs.wait_for_state("engines", "Succeeded")
        jobs.wait(lambda: not jobs.running("engines"))
    finally:
        head_node.stop()
        gpu_nodes.stop()
        heads.close()


def test_a_job_that_needs_too_many_gpus_reports_the_message_of_the_scheduler(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.create("large", workers={"replicas": 5, "gpusPerWorker": 8})
    jobs.wait(lambda: jobs.condition("large", "WorkersReady") == ("False", "Unschedulable"))
    assert "Insufficient nvidia.com/gpu" in jobs.wait_for_event("large", "Unschedulable")


def test_a_suspended_job_has_no_pods_and_can_be_resumed(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.create("suspended")
    jobs.wait_for_running("suspended", 3)
    jobs.patch("suspended", lifecycle={"suspend": True})
    jobs.wait_for_state("suspended", "Suspended")
    assert not jobs.pods("suspended")
    jobs.patch("suspended", lifecycle={"suspend": False})
    jobs.wait_for_running("suspended", 3)


def test_workers_follow_the_scale_subresource(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.create("scaled")
    jobs.wait_for_running("scaled", 3)
    jobs.cluster.kubectl("-n", jobs.namespace, "scale", "rj/scaled", "--replicas=4")
    jobs.wait_for_running("scaled", 5)
    jobs.cluster.kubectl("-n", jobs.namespace, "scale", "rj/scaled", "--replicas=1")
    jobs.wait(lambda: len(jobs.pods("scaled")) == 2)
    jobs.wait(lambda: jobs.status("scaled")["workers"]["replicas"] == 1)


def test_deleting_a_job_deletes_its_objects(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.create("deleted")
    jobs.wait_for_running("deleted", 3)
    jobs.delete("deleted")
    jobs.wait(lambda: jobs.running("deleted") == {"deleted-cleanup"})
    nodes.terminate_pod(jobs.namespace, "deleted-cleanup")
    jobs.wait(lambda: jobs.get("deleted") is None)
    selector = f"{names.JOB_LABEL}=deleted"
    lists = (jobs.core.list_namespaced_config_map, jobs.core.list_namespaced_service)
    jobs.wait(
        lambda: not any(list_objects(jobs.namespace, label_selector=selector).items for list_objects in lists),
        GARBAGE_COLLECTION_TIMEOUT_S,
    )


def test_a_job_that_is_deleted_in_the_foreground_is_cleaned_up(
    cluster: ControlPlane, jobs: Jobs, nodes: VirtualNodes
) -> None:
    jobs.create("foreground")
    jobs.wait_for_running("foreground", 3)
    # Kubernetes deletes the job's objects first, among them those that the cleanup pod needs.
    cluster.kubectl("-n", jobs.namespace, "delete", "rj/foreground", "--cascade=foreground", "--wait=false")
    jobs.wait(lambda: jobs.running("foreground") == {"foreground-cleanup"}, GARBAGE_COLLECTION_TIMEOUT_S)
    assert jobs.core.read_namespaced_service_account("foreground-rollout", jobs.namespace)
    assert (
        jobs.core.read_namespaced_config_map("foreground-manifest", jobs.namespace).metadata.deletion_timestamp is None
    )
    nodes.terminate_pod(jobs.namespace, "foreground-cleanup")
    jobs.wait(lambda: jobs.get("foreground") is None)
    assert "CleanupFailed" not in jobs.events("foreground")


def test_an_operator_of_selected_namespaces_leaves_the_others_alone(cluster: ControlPlane) -> None:
    def label(jobs: Jobs, change: str) -> None:
        cluster.kubectl("label", "--overwrite", "namespace", jobs.namespace, change)

    selected, other = Jobs(cluster, "selected"), Jobs(cluster, "not-selected")
    label(selected, "rollouts=ours")
    log = cluster.directory / "log" / "operator-selected.log"
    operator = OperatorProcess(cluster.kubeconfig, log, "--namespace-selector=rollouts=ours", "--log-format=text")
    for jobs in (selected, other):
        jobs.create("math", workers={"accelerator": "none"})
    operator.start()
    try:
        operator.wait_until_ready()
        selected.wait(lambda: len(selected.pods("math")) == 3)
        assert not other.finalizers("math")
        assert not other.pods("math")
        # A job is served when its namespace gets the label.
        label(other, "rollouts=ours")
        other.wait(lambda: len(other.pods("math")) == 3)
        label(selected, "rollouts-")
        wait_for(lambda: operator.metric("rollout_operator_jobs") == 1)
        selected.create("second")
        time.sleep(SETTLING_S)
        assert not selected.pods("second")
    finally:
        operator.terminate()
        selected.close()
        other.close()


def test_an_object_that_belongs_to_somebody_else_is_left_alone(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.core.create_namespaced_config_map(
        jobs.namespace, {"metadata": {"name": "conflicting-manifest"}, "data": {"mine": "yes"}}
    )
    jobs.create("conflicting")
    assert "conflicting-manifest" in jobs.wait_for_event("conflicting", "NameConflict")
    assert {"mine": "yes"} == jobs.core.read_namespaced_config_map("conflicting-manifest", jobs.namespace).data


def test_idle_jobs_are_not_reconciled_and_unchanged_ones_cause_no_requests(
    cluster: ControlPlane, nodes: VirtualNodes
) -> None:
    jobs = Jobs(cluster, "idle")
    with running_operator(cluster, jobs.namespace) as operator:

        def num_reconciles() -> float:
            return operator.metric("rollout_operator_reconciles_total")

        def wait_until_settled() -> None:
            """Wait until the operator has handled the last events about a job that has reached its state."""
            counted = changed_at = 0.0

            def is_settled() -> bool:
                nonlocal counted, changed_at
                if (now_counted := num_reconciles()) != counted:
                    counted, changed_at = now_counted, time.monotonic()
                return time.monotonic() - changed_at >= SETTLING_S

            wait_for(is_settled, 60, "The operator does not stop reconciling.")

        idle = [f"idle-{number}" for number in range(5)]
        for name in idle:
            jobs.create(name, lifecycle={"suspend": True})
        for name in idle:
            jobs.wait_for_state(name, "Suspended")
        wait_until_settled()
        before = num_reconciles()
        time.sleep(OBSERVATION_S)
        assert before == num_reconciles()

        jobs.create("running")
        jobs.wait(lambda: jobs.status("running").get("workers", {}).get("summary") == "2/2")
        wait_until_settled()
        before, requests = num_reconciles(), operator.metric("rollout_operator_api_requests_total")
        time.sleep(OBSERVATION_S)
        # The running job is reconciled once per status period.
        assert num_reconciles() <= before + 2
        assert requests == operator.metric("rollout_operator_api_requests_total")
    jobs.close()


@pytest.mark.complete_cluster
def test_a_worker_on_a_lost_node_is_replaced_and_not_counted(job_on_lost_node: JobOnLostNode) -> None:
    jobs, lost_at = job_on_lost_node
    jobs.wait(
        lambda: (worker := jobs.pods("math").get("math-worker-0")) and worker.spec.node_name == "other-0",
        REPLACEMENT_TIMEOUT_S,
    )
    replacement = jobs.pods("math")["math-worker-0"].metadata
    assert (replacement.creation_timestamp - lost_at).total_seconds() <= REPLACEMENT_TIMEOUT_S
    assert 0 == jobs.status("math").get("failedPods", 0)
