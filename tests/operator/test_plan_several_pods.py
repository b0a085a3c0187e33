"""Workers that have several pods."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_operator.objects.names import GANG_APIS, NATIVE_GANG_API

from tests.support.planned_jobs import running_job, spec, suspend_and_resume
from tests.support.simulated_cluster import SimulatedCluster

TWO_PODS = {"podsPerWorker": 2, "gpusPerWorker": 4}


def two_pod_job(replicas: int = 2, **sections: dict[str, Any]) -> SimulatedCluster:
    """Return a cluster with a running job whose workers have two pods each."""
    return running_job(engine={"tensorParallelSize": 4}, workers={**TWO_PODS, "replicas": replicas}, **sections)


def test_all_pods_of_a_worker_share_its_gpus() -> None:
    cluster = two_pod_job()
    assert ["math-worker-0", "math-worker-0-1", "math-worker-1", "math-worker-1-1"] == cluster.workers()
    assert 8 == cluster.gpus() == cluster.status["workers"]["gpus"]
    assert "2/2" == cluster.status["workers"]["summary"]
    for name in cluster.workers():
        (container,) = cluster.pods[name]["spec"]["containers"]
        assert "--group=" + name[: len("math-worker-0")] in container["args"]
        is_follower = name.endswith("-1") and name.count("-") == 3
        assert ("follower" if is_follower else "worker") == container["command"][1]
        assert ("--rank=1" in container["args"]) == is_follower
    assert 4 == cluster.objects["PodDisruptionBudget", "math-rollout"]["spec"]["minAvailable"]
    assert "das.rollout.dev/rank=0" in cluster.status["workers"]["selector"]


def test_a_failed_follower_is_replaced_and_its_leader_stays() -> None:
    cluster = two_pod_job()
    leader = cluster.pods["math-worker-1"]["metadata"]["uid"]
    cluster.terminate("math-worker-1-1", 1)
    cluster.reconcile()
    assert 1 == cluster.status["failedPods"]
    cluster.now += 10
    cluster.reconcile()
    assert "math-worker-1-1" in cluster.workers()
    assert leader == cluster.pods["math-worker-1"]["metadata"]["uid"]


def test_the_leader_hands_over_its_rollouts_when_a_follower_is_drained() -> None:
    cluster = two_pod_job()
    cluster.delete_pod("math-worker-0-1")
    cluster.reconcile()
    assert "deletionTimestamp" in cluster.pods["math-worker-0"]["metadata"]
    assert "deletionTimestamp" not in cluster.pods["math-worker-1"]["metadata"]
    cluster.finish_deletion("math-worker-0")
    cluster.reconcile()
    assert "math-worker-0" not in cluster.pods  # it would be deleted together with the follower
    cluster.finish_deletion("math-worker-0-1")
    cluster.reconcile()
    assert 4 == len(cluster.workers())


def test_a_follower_is_kept_until_its_leader_has_handed_over_its_rollouts() -> None:
    cluster = two_pod_job()
    cluster.change(workers={"replicas": 1})
    cluster.reconcile()
    deleting = {name for name, pod in cluster.pods.items() if "deletionTimestamp" in pod["metadata"]}
    assert {"math-worker-1"} == deleting
    cluster.finish_deletion("math-worker-1")
    cluster.reconcile()
    assert "deletionTimestamp" in cluster.pods["math-worker-1-1"]["metadata"]
    cluster.finish_deletion("math-worker-1-1")
    cluster.reconcile()
    assert ["math-worker-0", "math-worker-0-1"] == cluster.workers()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_pods_is_applied_only_on_resume(before: int, after: int) -> None:
    workers = {"gpusPerWorker": 4, "replicas": 2, "podsPerWorker": before}
    cluster = running_job(
        engine={"tensorParallelSize": 4}, workers=workers, lifecycle={"updateStrategy": "RollingUpdate"}
    )
    cluster.change(workers={"podsPerWorker": after})
    cluster.reconcile()
    assert 2 * before == len(cluster.workers())
    assert not any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())
    assert ("False", "ChangesPending") == cluster.condition("UpToDate")
    suspend_and_resume(cluster)
    assert 2 * after == len(cluster.workers())


def test_a_queue_admits_all_pods_of_all_workers_as_a_whole() -> None:
    workers = {**TWO_PODS, "replicas": 3, "minReplicas": 1}
    cluster = SimulatedCluster(spec(engine={"tensorParallelSize": 4}, workers=workers), queued=True)
    cluster.reconcile()
    annotation = "kueue.x-k8s.io/pod-group-total-count"
    totals = {name: pod["metadata"]["annotations"][annotation] for name, pod in cluster.pods.items()}
    assert dict.fromkeys(["math-head", *cluster.workers()], "7") == totals
    for replicas in (5, 2):
        cluster.change(workers={"replicas": replicas})
        cluster.reconcile()
        assert 6 == len(cluster.workers())


@pytest.mark.parametrize("api", GANG_APIS)
def test_a_scheduler_with_pod_groups_places_the_pods_of_a_worker_as_a_whole(api: str) -> None:
    workers = {**TWO_PODS, "replicas": 2}
    cluster = SimulatedCluster(spec(engine={"tensorParallelSize": 4}, workers=workers), gang_api=api)
    cluster.reconcile()
    groups = {name: group for (kind, name), group in cluster.objects.items() if kind == "PodGroup"}
    assert {"math-worker-0", "math-worker-1"} == set(groups)
    gang = {"schedulingPolicy": {"gang": {"minCount": 2}}} if api == NATIVE_GANG_API else {"minMember": 2}
    assert [(api, gang)] * 2 == [(group["apiVersion"], group["spec"]) for group in groups.values()]
    for name in cluster.workers():
        metadata = cluster.pods[name]["metadata"]
        named = cluster.pods[name]["spec"].get("schedulingGroup", {})
        joined = {*metadata["labels"].values(), *metadata["annotations"].values(), *named.values()} & set(groups)
        assert {name[: len("math-worker-0")]} == joined
    assert not any("pod-group" in label for label in cluster.pods["math-head"]["metadata"]["labels"])
    assert "schedulingGroup" not in cluster.pods["math-head"]["spec"]


def test_the_pods_of_a_worker_have_the_priority_of_their_native_pod_group() -> None:
    workers = {**TWO_PODS, "replicas": 1}
    manifest = spec(engine={"tensorParallelSize": 4}, workers=workers)
    cluster = SimulatedCluster({**manifest, "priorityClassName": "high"}, gang_api=NATIVE_GANG_API)
    cluster.reconcile()

    def priorities() -> dict[str, tuple[str, str]]:
        """Return the priority of each pod of the worker and of its group."""
        found = {}
        for name in cluster.workers():
            pod = cluster.pods[name]["spec"]
            group = cluster.objects["PodGroup", pod["schedulingGroup"]["podGroupName"]]
            found[name] = (pod["priorityClassName"], group["spec"]["priorityClassName"])
        return found

    assert {"math-worker-0": ("high", "high"), "math-worker-0-1": ("high", "high")} == priorities()
    before = {name for kind, name in cluster.objects if kind == "PodGroup"}
    # The API server rejects another priority of an existing group, so the pods have to join another group.
    assert cluster.job is not None
    cluster.job["spec"]["priorityClassName"] = "low"
    cluster.change()
    suspend_and_resume(cluster)
    assert {"math-worker-0": ("low", "low"), "math-worker-0-1": ("low", "low")} == priorities()
    assert {"high"} == {cluster.objects["PodGroup", name]["spec"]["priorityClassName"] for name in before}


def test_a_pod_of_a_worker_that_cannot_be_scheduled_is_named() -> None:
    cluster = SimulatedCluster(spec(engine={"tensorParallelSize": 4}, workers={**TWO_PODS, "replicas": 1}))
    cluster.reconcile()
    cluster.run("math-worker-0", ready=False)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPUs"}
    cluster.pods["math-worker-0-1"]["status"]["conditions"] = [condition]
    cluster.reconcile()
    assert ("False", "Unschedulable") == cluster.condition("WorkersReady")
