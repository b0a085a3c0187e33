"""Changes of a running job's settings reach its pods at the right time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.planned_jobs import image_of, running_job, spec, suspend_and_resume
from tests.support.simulated_cluster import SimulatedCluster


def test_replacements_have_the_image_with_which_the_job_has_started() -> None:
    cluster = running_job()
    cluster.default_image = "worker:2"  # the operator was upgraded
    cluster.terminate("math-worker-0", 1)
    cluster.reconcile()
    cluster.now += 10
    cluster.reconcile()
    assert "worker:1" == image_of(cluster, "math-worker-0")
    assert ("False", "ChangesPending") == cluster.condition("UpToDate")
    suspend_and_resume(cluster)
    assert {"worker:2"} == {image_of(cluster, pod) for pod in cluster.pods}
    assert ("True", "UpToDate") == cluster.condition("UpToDate")


def test_a_change_of_the_pods_is_not_applied_to_some_of_them() -> None:
    cluster = running_job(workers={"replicas": 2, "gpusPerWorker": 1})
    manifest = cluster.objects["ConfigMap", "math-manifest"]
    cluster.change(workers={"gpusPerWorker": 4, "nodeSelector": {"pool": "new"}, "replicas": 3})
    cluster.reconcile()
    assert manifest == cluster.objects["ConfigMap", "math-manifest"]
    limits = cluster.pods["math-worker-2"]["spec"]["containers"][0]["resources"]["limits"]
    assert "1" == limits["nvidia.com/gpu"]  # the number of workers changes at once
    assert "nodeSelector" not in cluster.pods["math-worker-2"]["spec"]
    condition = next(one for one in cluster.status["conditions"] if one["type"] == "UpToDate")
    assert "workers.gpusPerWorker, workers.nodeSelector" in condition["message"]
    suspend_and_resume(cluster)
    assert {"pool": "new"} == cluster.pods["math-worker-0"]["spec"]["nodeSelector"]
    assert manifest != cluster.objects["ConfigMap", "math-manifest"]


def test_a_rolling_update_replaces_one_worker_after_the_other_and_then_the_head() -> None:
    cluster = running_job(workers={"replicas": 3}, lifecycle={"updateStrategy": "RollingUpdate"})
    cluster.change(image={"name": "worker:2"})
    replaced = []
    for _ in range(20):
        cluster.reconcile()
        deleting = [name for name, pod in cluster.pods.items() if pod["metadata"].get("deletionTimestamp")]
        assert len(deleting) <= 1
        replaced += deleting
        for name in deleting:
            cluster.finish_deletion(name)
        cluster.reconcile()
        for name in list(cluster.pods):
            cluster.run(name)
    assert ["math-worker-0", "math-worker-1", "math-worker-2", "math-head"] == replaced
    assert {"worker:2"} == {image_of(cluster, pod) for pod in cluster.pods}
    assert ("True", "UpToDate") == cluster.condition("UpToDate")
    assert 0 == cluster.status["failedPods"]


def test_a_rolling_update_waits_while_a_new_pod_is_not_ready() -> None:
    cluster = running_job(workers={"replicas": 3}, lifecycle={"updateStrategy": "RollingUpdate"})
    cluster.change(image={"name": "worker:2"})
    cluster.reconcile()
    cluster.finish_deletion("math-worker-0")
    cluster.reconcile()
    cluster.run("math-worker-0", ready=False)
    cluster.reconcile()
    assert not any(pod["metadata"].get("deletionTimestamp") for pod in cluster.pods.values())
    assert ("False", "Updating") == cluster.condition("UpToDate")


def test_a_rolling_update_repairs_pods_that_cannot_become_ready() -> None:
    cluster = SimulatedCluster(spec(image={"name": "mistyped"}, lifecycle={"updateStrategy": "RollingUpdate"}))
    cluster.reconcile()
    for name in cluster.pods:
        cluster.bind(name)
    cluster.change(image={"name": "worker:2"})
    for _ in range(4):
        cluster.reconcile()
        for name in list(cluster.pods):
            cluster.finish_deletion(name)
    cluster.reconcile()
    assert {"worker:2"} == {image_of(cluster, pod) for pod in cluster.pods}
    assert 4 == len(cluster.pods)
    assert ("True", "UpToDate") == cluster.condition("UpToDate")


def test_pods_of_a_queue_are_not_replaced_one_by_one() -> None:
    cluster = SimulatedCluster(spec(lifecycle={"updateStrategy": "RollingUpdate"}), queued=True)
    cluster.reconcile()
    cluster.reconcile_queue()
    for name in list(cluster.pods):
        cluster.run(name)
    cluster.change(image={"name": "worker:2"})
    cluster.reconcile()
    assert ("False", "ChangesPending") == cluster.condition("UpToDate")


@pytest.mark.parametrize("strategy", ["OnResume", "RollingUpdate"])
def test_an_invalid_template_of_a_running_job_is_reported_and_the_job_continues(strategy: str) -> None:
    cluster = running_job(lifecycle={"updateStrategy": strategy})
    cluster.change(workers={"podTemplate": {"spec": {"containers": [{"image": "x"}]}}})
    cluster.terminate("math-worker-0", 1)
    cluster.reconcile()
    cluster.now += 10
    cluster.reconcile()
    assert "math-worker-0" in cluster.workers()
    assert ("False", "InvalidUpdate") == cluster.condition("UpToDate")
    assert ("True", "Valid") == cluster.condition("Accepted")


def test_an_invalid_template_is_not_applied_when_all_pods_are_gone() -> None:
    cluster = running_job()
    cluster.change(workers={"podTemplate": {"spec": {"containers": [{"image": "x"}]}}})
    for name in list(cluster.pods):
        cluster.delete_pod(name)
        cluster.finish_deletion(name)
    cluster.reconcile()
    assert ["math-head"] == cluster.heads()
    assert 3 == len(cluster.workers())
    assert ("False", "InvalidUpdate") == cluster.condition("UpToDate")


def test_a_revision_that_a_newer_operator_does_not_accept_is_replaced() -> None:
    cluster = running_job()
    cluster.job["status"]["revision"]["settings"]["workers"] = {"fieldOfThePast": 1}
    cluster.reconcile()
    assert ("True", "Valid") == cluster.condition("Accepted")
    assert "fieldOfThePast" not in json.dumps(cluster.status["revision"])


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"volumes": [{"emptyDir": {}}]}},
        {"spec": {"containers": "head"}},
        {"spec": {"containers": ["head"]}},
        {"spec": "head"},
        {"spec": None},
        {"metadata": None},
        {"$patch": "replace"},
    ],
    ids=str,
)
def test_a_job_with_an_invalid_template_of_the_head_can_be_deleted(template: dict[str, Any]) -> None:
    cluster = running_job()
    # Without pinned settings, the cleanup pod would be built from this template.
    cluster.job["status"].pop("revision")
    cluster.change(head={"podTemplate": template})
    cluster.delete_job()
    cluster.reconcile()
    for name in list(cluster.pods):
        cluster.finish_deletion(name)
    cluster.reconcile()
    cluster.terminate("math-cleanup", 0)
    cluster.reconcile()
    assert cluster.job is None


def test_a_rolling_update_that_is_called_off_halfway_is_reported() -> None:
    cluster = running_job(lifecycle={"updateStrategy": "RollingUpdate"})
    cluster.change(image={"name": "worker:2"})
    cluster.reconcile()
    assert ("False", "Updating") == cluster.condition("UpToDate")
    cluster.change(lifecycle={"updateStrategy": "OnResume"})
    cluster.reconcile()
    assert ("False", "ChangesPending") == cluster.condition("UpToDate")
