"""Jobs in a queue of Kueue, whose controller is a stand-in, see tests/support/kueue.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rollout_operator.objects import names

from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.kueue_controller import KueueController, install_kueue
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.cluster.virtual_nodes import VirtualNodes

pytestmark = pytest.mark.current_cluster
JOB = "math"
QUEUE = "research"


@pytest.fixture
def kueue(
    cluster: ControlPlane, jobs: Jobs, operator: OperatorProcess, nodes: VirtualNodes
) -> Iterator[KueueController]:
    """The stand-in for Kueue in the namespace of a test, which has an operator."""
    install_kueue(cluster)
    controller = KueueController(cluster.client(), jobs.namespace)
    controller.start()
    yield controller
    controller.stop()
    jobs.clear()
    controller.remove_finalizers()


def create(jobs: Jobs, **sections: Any) -> None:
    """Create a job with two workers, both of which Kueue has to admit together with the head."""
    manifest = jobs.manifest(JOB, **{"workers": {"replicas": 2, "minReplicas": 2}, **sections})
    manifest["metadata"]["labels"] = {names.QUEUE_LABEL: QUEUE}
    jobs.create_from(manifest)


def uids(jobs: Jobs) -> set[str]:
    """Return the uids of the job's running pods."""
    return {pod.metadata.uid for pod in jobs.pods(JOB).values() if pod.status.phase == "Running"}


def worker(jobs: Jobs, slot: int) -> str:
    """Return the name of the pod that runs in a slot."""
    pods = jobs.pods(JOB, names.WORKER).values()
    (name,) = [pod.metadata.name for pod in pods if pod.metadata.labels[names.SLOT_LABEL] == str(slot)]
    return str(name)


def wait_until_only_running_pods_exist(jobs: Jobs, kueue: KueueController, count: int) -> None:
    """Wait until *count* pods run and no other pods exist."""
    jobs.wait(lambda: len(kueue.pods()) == count and len(jobs.running(JOB)) == count)


def test_a_job_waits_for_its_queue_and_starts_as_a_whole(jobs: Jobs, kueue: KueueController) -> None:
    kueue.quota = 2
    create(jobs)
    jobs.wait_for_state(JOB, "Queued")
    assert not jobs.running(JOB)
    kueue.quota = 3
    jobs.wait_for_running(JOB, 3)
    assert {jobs.status(JOB)["podGroup"]["name"]} == kueue.workloads()


def test_a_failed_worker_is_replaced(jobs: Jobs, kueue: KueueController, nodes: VirtualNodes) -> None:
    create(jobs)
    for failed in range(1, 4):
        jobs.wait_for_running(JOB, 3)
        nodes.terminate_pod(jobs.namespace, worker(jobs, 1), 1)
        jobs.wait(lambda failed=failed: jobs.status(JOB).get("failedPods") == failed, 60)
        wait_until_only_running_pods_exist(jobs, kueue, 3)


def test_a_failed_head_is_replaced(jobs: Jobs, kueue: KueueController, nodes: VirtualNodes) -> None:
    create(jobs)
    jobs.wait_for_running(JOB, 3)
    nodes.terminate_pod(jobs.namespace, f"{JOB}-head", 1)
    jobs.wait(lambda: jobs.status(JOB).get("failedPods") == 1)
    wait_until_only_running_pods_exist(jobs, kueue, 3)


def test_drained_pods_are_replaced_and_not_counted_as_succeeded(jobs: Jobs, kueue: KueueController) -> None:
    create(jobs)
    jobs.wait_for_running(JOB, 3)
    before = uids(jobs)
    for name in list(jobs.pods(JOB)):
        jobs.core.delete_namespaced_pod(name, jobs.namespace)
    jobs.wait(lambda: len(uids(jobs) - before) == 3)
    wait_until_only_running_pods_exist(jobs, kueue, 3)
    assert 0 == jobs.status(JOB).get("failedPods", 0)


def test_a_preempted_job_is_queued_and_starts_again(jobs: Jobs, kueue: KueueController) -> None:
    create(jobs)
    jobs.wait_for_running(JOB, 3)
    before = uids(jobs)
    kueue.quota = 0
    kueue.preempt()
    jobs.wait_for_state(JOB, "Queued")
    jobs.wait(lambda: not jobs.running(JOB))
    kueue.quota = 3
    wait_until_only_running_pods_exist(jobs, kueue, 3)
    assert not uids(jobs) & before
    assert 0 == jobs.status(JOB).get("failedPods", 0)


@pytest.mark.parametrize("quota", [0, 3], ids=["queued", "running"])
def test_a_suspended_job_releases_its_quota_and_can_be_resumed(jobs: Jobs, kueue: KueueController, quota: int) -> None:
    kueue.quota = quota
    create(jobs)
    jobs.wait(kueue.workloads)
    if quota:
        jobs.wait_for_running(JOB, 3)
    jobs.patch(JOB, lifecycle={"suspend": True})
    jobs.wait_for_state(JOB, "Suspended")
    jobs.wait(lambda: not kueue.pods() and not kueue.workloads())
    kueue.quota = 3
    jobs.patch(JOB, lifecycle={"suspend": False})
    wait_until_only_running_pods_exist(jobs, kueue, 3)


def test_a_deleted_job_releases_its_quota(jobs: Jobs, kueue: KueueController, nodes: VirtualNodes) -> None:
    create(jobs)
    jobs.wait_for_running(JOB, 3)
    jobs.delete(JOB)
    jobs.wait(lambda: f"{JOB}-cleanup" in jobs.running(JOB))
    nodes.terminate_pod(jobs.namespace, f"{JOB}-cleanup")
    jobs.wait(lambda: jobs.get(JOB) is None and not kueue.pods() and not kueue.workloads())


def test_a_failed_job_releases_its_quota(jobs: Jobs, kueue: KueueController, nodes: VirtualNodes) -> None:
    create(jobs, lifecycle={"backoffLimit": 0})
    jobs.wait_for_running(JOB, 3)
    nodes.terminate_pod(jobs.namespace, worker(jobs, 0), 1)
    jobs.wait_for_state(JOB, "Failed")
    jobs.wait(lambda: not kueue.pods() and not kueue.workloads())


def test_a_job_that_succeeds_after_a_failure_releases_its_quota(
    jobs: Jobs, kueue: KueueController, nodes: VirtualNodes
) -> None:
    create(jobs)
    jobs.wait_for_running(JOB, 3)
    nodes.terminate_pod(jobs.namespace, worker(jobs, 0), 1)
    jobs.wait(lambda: jobs.status(JOB).get("failedPods") == 1)
    wait_until_only_running_pods_exist(jobs, kueue, 3)
    nodes.terminate_pod(jobs.namespace, f"{JOB}-head")
    jobs.wait_for_state(JOB, "Succeeded")
    jobs.wait(lambda: not kueue.pods() and not kueue.workloads())


def test_a_changed_minimum_leaves_the_size_of_the_group(
    jobs: Jobs, kueue: KueueController, nodes: VirtualNodes
) -> None:
    create(jobs)
    jobs.wait_for_running(JOB, 3)
    jobs.patch(JOB, workers={"replicas": 4, "minReplicas": 4})
    jobs.wait_for_running(JOB, 5)
    nodes.terminate_pod(jobs.namespace, worker(jobs, 0), 1)
    jobs.wait(lambda: jobs.status(JOB).get("failedPods") == 1)
    wait_until_only_running_pods_exist(jobs, kueue, 5)
    assert 3 == jobs.status(JOB)["podGroup"]["totalCount"]
    assert not any(kueue.errors.values())
    jobs.patch(JOB, workers={"replicas": 2, "minReplicas": 1})
    wait_until_only_running_pods_exist(jobs, kueue, 3)
