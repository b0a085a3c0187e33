"""The operator against a real API server, scheduler and controllers; pods run on virtual nodes."""

from __future__ import annotations

import time

import pytest
from rollout_operator import names

from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs
from tests.support.cluster.operator_process import OperatorProcess
from tests.support.cluster.virtual_nodes import VirtualNodes

pytestmark = pytest.mark.usefixtures("operator")


def test_a_job_gets_h100_pods_and_what_they_need(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.make("math", workers={"replicas": 3, "gpusPerWorker": 4})
    jobs.wait(lambda: len(jobs.running("math")) == 4)
    pods = jobs.pods("math")
    assert {"math-head", "math-worker-0", "math-worker-1", "math-worker-2"} == set(pods)
    workers = [pod for name, pod in pods.items() if "worker" in name]
    assert {pod.spec.node_name for pod in workers} <= set(nodes.names)
    assert all("4" == pod.spec.containers[0].resources.limits["nvidia.com/gpu"] for pod in workers)
    assert jobs.core.read_namespaced_service("math-head", jobs.namespace)
    connection = jobs.core.read_namespaced_config_map("math-connection", jobs.namespace).data
    job = jobs.get("math")
    assert job is not None
    assert job["metadata"]["uid"] == connection["uid"] == job["status"]["connection"]["uid"]
    assert {"secretName": "rollout-redis", "secretKey": "url"}.items() <= connection.items()
    assert "Starting" == job["status"]["state"]
    assert "3/3" == jobs.wait(lambda: (s := jobs.status("math")["workers"]["summary"]) == "3/3" and s)


def test_no_more_gpus_than_there_are_is_said_in_the_schedulers_words(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.make("large", workers={"replicas": 5, "gpusPerWorker": 8})
    jobs.wait(lambda: jobs.condition("large", "WorkersReady") == ("False", "Unschedulable"))
    assert "Insufficient nvidia.com/gpu" in jobs.wait(lambda: jobs.events("large").get("Unschedulable"))


def test_a_closed_job_succeeds_and_is_deleted_in_time(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.make("math", lifecycle={"ttlSecondsAfterFinished": 3})
    jobs.wait(lambda: len(jobs.running("math")) == 3)
    nodes.end(jobs.namespace, "math-head")
    jobs.wait_for_state("math", "Succeeded")
    jobs.wait(lambda: set(jobs.pods("math")) <= {"math-head"})
    jobs.wait(lambda: jobs.get("math") is None)


def test_a_failed_worker_is_replaced_and_said(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.make("math")
    jobs.wait(lambda: len(jobs.running("math")) == 3)
    before = jobs.pods("math")["math-worker-1"].metadata.uid
    nodes.end(jobs.namespace, "math-worker-1", 137, "OOMKilled")
    jobs.wait(
        lambda: (
            "math-worker-1" in (there := jobs.running("math"))
            and len(there) == 3
            and jobs.pods("math")["math-worker-1"].metadata.uid != before
        )
    )
    assert 1 == jobs.status("math")["failedPods"]
    assert "OOMKilled" in jobs.events("math")


def test_beyond_the_limit_the_job_fails_with_its_last_words(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.make("math", lifecycle={"backoffLimit": 0})
    jobs.wait(lambda: len(jobs.running("math")) == 3)
    nodes.end(jobs.namespace, "math-head", 1, message="Traceback\nRuntimeError: no luck\n")
    jobs.wait_for_state("math", "Failed")
    assert "no luck" in str(jobs.status("math")["failures"])
    jobs.wait(lambda: set(jobs.pods("math")) == {"math-end"})
    nodes.end(jobs.namespace, "math-end")
    jobs.wait(lambda: not jobs.finalizers("math"))


def test_suspend_and_resume(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.make("math")
    jobs.wait(lambda: len(jobs.running("math")) == 3)
    jobs.patch("math", lifecycle={"suspend": True})
    jobs.wait_for_state("math", "Suspended")
    assert not jobs.pods("math")
    jobs.patch("math", lifecycle={"suspend": False})
    jobs.wait(lambda: len(jobs.running("math")) == 3)


def test_scale_up_and_down(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.make("math")
    jobs.wait(lambda: len(jobs.running("math")) == 3)
    jobs.cluster.kubectl("-n", jobs.namespace, "scale", "rj/math", "--replicas=4")
    jobs.wait(lambda: len(jobs.running("math")) == 5)
    jobs.cluster.kubectl("-n", jobs.namespace, "scale", "rj/math", "--replicas=1")
    jobs.wait(lambda: len(jobs.pods("math")) == 2)
    assert 1 == jobs.wait(lambda: jobs.status("math")["workers"]["replicas"] == 1)


def test_a_lost_node_costs_no_backoff(jobs: Jobs, cluster: ControlPlane) -> None:
    lost = VirtualNodes(cluster.client(), 1, labels={"for": "loss"}, prefix="lost")
    other = VirtualNodes(cluster.client(), 1, labels={"for": "loss"}, prefix="other")
    lost.start()
    try:
        jobs.make(
            "math",
            lifecycle={"backoffLimit": 0},
            workers={"replicas": 1, "accelerator": None, "nodeSelector": {"for": "loss"}},
        )
        jobs.wait(lambda: len(jobs.running("math")) == 2)
        other.start()
        lost.lose("lost-0")
        jobs.wait(lambda: (pod := jobs.pods("math").get("math-worker-0")) and pod.spec.node_name == "other-0", 180)
        assert 0 == jobs.status("math").get("failedPods", 0)
    finally:
        lost.stop()
        other.stop()


def test_deleting_a_job_leaves_nothing(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.make("math")
    jobs.wait(lambda: len(jobs.running("math")) == 3)
    jobs.delete("math")
    jobs.wait(lambda: set(jobs.pods("math")) == {"math-end"})
    nodes.end(jobs.namespace, "math-end")
    jobs.wait(lambda: jobs.get("math") is None)
    selector = f"{names.JOB_LABEL}=math"
    # the collector learns of new kinds now and then
    jobs.wait(lambda: not jobs.core.list_namespaced_config_map(jobs.namespace, label_selector=selector).items, 90)
    assert not jobs.core.list_namespaced_service(jobs.namespace, label_selector=selector).items


def test_what_belongs_to_others_is_not_touched(jobs: Jobs, nodes: VirtualNodes) -> None:
    jobs.core.create_namespaced_config_map(
        jobs.namespace, {"metadata": {"name": "math-manifest"}, "data": {"mine": "yes"}}
    )
    jobs.make("math")
    assert "math-manifest" in jobs.wait(lambda: jobs.events("math").get("NameTaken"))
    assert {"mine": "yes"} == jobs.core.read_namespaced_config_map("math-manifest", jobs.namespace).data


def test_idle_jobs_cost_nothing_and_running_ones_no_changes(
    jobs: Jobs, operator: OperatorProcess, nodes: VirtualNodes
) -> None:
    def looks() -> float:
        return operator.metric("rollout_operator_reconciles_total")

    for number in range(5):
        jobs.make(f"idle-{number}", lifecycle={"suspend": True})
    for number in range(5):
        jobs.wait_for_state(f"idle-{number}", "Suspended")
    before = looks()
    time.sleep(12)
    assert before == looks()

    jobs.make("math")
    jobs.wait(lambda: jobs.status("math").get("workers", {}).get("summary") == "2/2")
    time.sleep(2)
    before, calls = looks(), operator.metric("rollout_operator_api_calls_total")
    time.sleep(12)
    assert looks() <= before + 2
    assert calls == operator.metric("rollout_operator_api_calls_total")
