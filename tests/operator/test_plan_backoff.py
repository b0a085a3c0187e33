"""Failures of pods: whose fault they are, when a pod is replaced, and on which nodes it may run."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from rollout_operator.objects import names
from rollout_operator.objects.observed import PodView, Rejection, Target

from tests.support.planned_jobs import running_job
from tests.support.simulated_cluster import SimulatedCluster

WORKER = "math-worker-1"
REJECTIONS = ["UnexpectedAdmissionError", "OutOfcpu", "OutOfnvidia.com/gpu", "TopologyAffinityError", "NodeAffinity"]


def pods_in_half_an_hour(cluster: SimulatedCluster, end: Callable[[str], None]) -> list[str]:
    """Let *end* end every new pod of a worker for half an hour, and return the uids of these pods."""
    uids: list[str] = []
    for _ in range(360):
        cluster.reconcile()
        if cluster.status["state"] == "Failed":
            break
        pod = cluster.pods.get(WORKER)
        if pod is not None and pod["metadata"]["uid"] not in uids and cluster.can_bind(WORKER):
            uids.append(pod["metadata"]["uid"])
            end(WORKER)
        cluster.now += 5
    return uids


def avoided(cluster: SimulatedCluster, pod: str) -> list[list[str]]:
    """Return the nodes that each term of a pod's node affinity excludes."""
    affinity = cluster.pods[pod]["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    return [
        expression["values"]
        for term in terms
        for expression in term["matchExpressions"]
        if (expression["key"], expression["operator"]) == ("kubernetes.io/hostname", "NotIn")
    ]


@pytest.mark.parametrize("reason", [*REJECTIONS, "Evicted"])
def test_a_pod_that_kubelets_reject_is_replaced_more_and_more_rarely_and_not_counted(reason: str) -> None:
    cluster = running_job(lifecycle={"backoffLimit": 0})
    cluster.terminate(WORKER, 137, disrupted=True)
    uids = pods_in_half_an_hour(cluster, lambda name: cluster.reject(name, reason))
    assert 6 < len(uids) < 14
    assert ("Running", 0) == (cluster.status["state"], cluster.status["failedPods"])
    assert ("False", re.sub("[./]", "_", reason)) == cluster.condition("WorkersReady")
    assert ("False", "Running") == cluster.condition("Stalled")  # the other workers sample


def test_a_job_that_no_node_admits_is_stalled_until_one_does() -> None:
    cluster = running_job(workers={"replicas": 2})
    cluster.head = None
    for name in [*cluster.heads(), *cluster.workers()]:
        cluster.reject(name, "OutOfpods")
    for _ in range(180):
        cluster.reconcile()
        for name in list(cluster.pods):
            if cluster.can_bind(name):
                cluster.reject(name, "OutOfpods")
        cluster.now += 5
    assert ("True", "OutOfpods") == cluster.condition("Stalled")
    assert "Starting" == cluster.status["state"]
    cluster.now += 300
    cluster.reconcile()
    assert 2 == len(cluster.workers())
    cluster.run_all()
    cluster.now += 600
    cluster.reconcile()
    assert ("False", "Starting") == cluster.condition("Stalled")
    assert [] == cluster.status["backoffs"]


@pytest.mark.parametrize("reason", ["Unknown", "ContainerStatusUnknown"])
def test_rebooted_nodes_do_not_fail_a_job(reason: str) -> None:
    cluster = running_job(workers={"replicas": 8, "maxReplicas": 8})
    for name in cluster.workers():
        cluster.terminate(name, 255, reason=reason)
    cluster.reconcile()
    assert "Failed" != cluster.status["state"]
    assert 0 == cluster.status["failedPods"]
    assert 4 == len(cluster.workers())  # maxPendingReplacements


@pytest.mark.parametrize("reports_containers", [False, True])  # kubelets of Kubernetes 1.20 do not
def test_an_eviction_for_exceeding_the_pods_own_limit_counts(reports_containers: bool) -> None:
    cluster = running_job(lifecycle={"backoffLimit": 3})
    message = 'Usage of EmptyDir volume "models" exceeds the limit "10Gi". '

    def evict(name: str) -> None:
        cluster.terminate(name, 137, pod_reason="Evicted")
        cluster.pods[name]["status"]["message"] = message
        if not reports_containers:
            del cluster.pods[name]["status"]["containerStatuses"]

    evict(WORKER)
    uids = pods_in_half_an_hour(cluster, evict)
    assert 3 == len(uids)
    assert ("True", "BackoffLimitExceeded") == cluster.condition("Failed")
    assert ["Evicted"] == sorted({failure["reason"] for failure in cluster.status["failures"]})


def test_a_failing_worker_does_not_delay_the_others() -> None:
    cluster = running_job(lifecycle={"backoffLimit": 100})
    for _ in range(6):
        cluster.terminate(WORKER, 1)
        cluster.reconcile()
        while WORKER not in cluster.pods:
            cluster.now += 5
            cluster.reconcile()
        cluster.run(WORKER)
    cluster.terminate(WORKER, 1)
    cluster.terminate("math-worker-2", 1)
    cluster.reconcile()
    assert ["math-worker-0"] == cluster.workers()
    cluster.now += 5
    cluster.reconcile()
    assert ["math-worker-0", "math-worker-2"] == cluster.workers()


def test_a_pod_that_has_run_for_long_is_soon_replaced_again() -> None:
    cluster = running_job(lifecycle={"backoffLimit": 100})
    for pause, seconds in ((0, 5), (10, 10), (620, 5), (10, 10)):
        cluster.now += pause
        cluster.reconcile()
        cluster.run(WORKER)
        cluster.terminate(WORKER, 1)
        cluster.reconcile()
        assert [seconds] == [backoff["seconds"] for backoff in cluster.status["backoffs"]]


def test_a_worker_of_several_pods_that_fail_together_is_delayed_once() -> None:
    cluster = running_job(
        workers={"replicas": 1, "gpusPerWorker": 2, "podsPerWorker": 2}, engine={"tensorParallelSize": 2}
    )
    cluster.now += 100
    for name in cluster.workers():
        cluster.terminate(name, 1)
    cluster.reconcile()
    assert [5] == [backoff["seconds"] for backoff in cluster.status["backoffs"]]
    cluster.now += 5
    cluster.reconcile()
    assert 2 == len(cluster.workers())


def test_a_node_that_rejects_pods_repeatedly_is_avoided_for_a_limited_time() -> None:
    cluster = running_job(workers={"accelerator": "nvidia-h100"})
    cluster.terminate(WORKER, 137, disrupted=True)
    for _ in range(2):
        cluster.now += 100
        cluster.reconcile()
        assert [] == avoided(cluster, WORKER)
        cluster.reject(WORKER, "UnexpectedAdmissionError", "bad")
        cluster.reconcile()
    cluster.now += 10
    cluster.reconcile()
    pod = cluster.pods[WORKER]
    terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert len(terms["nodeSelectorTerms"]) * [["bad"]] == avoided(cluster, WORKER)
    assert all(len(term["matchExpressions"]) == 2 for term in terms["nodeSelectorTerms"])
    assert [] == avoided(cluster, "math-worker-0")
    cluster.now += 590
    cluster.reconcile()
    assert pod["metadata"]["uid"] == cluster.pods[WORKER]["metadata"]["uid"]
    cluster.now += 20
    cluster.reconcile()
    assert [] == avoided(cluster, WORKER)  # no other node was found in time


def test_a_template_cannot_make_the_operator_replace_pods_that_wait_for_a_node() -> None:
    cluster = running_job(workers={"podTemplate": {"metadata": {"annotations": {names.AVOIDED_NODES_ANNOTATION: "a"}}}})
    cluster.terminate(WORKER, 137, disrupted=True)
    cluster.reconcile()
    waiting = cluster.pods[WORKER]["metadata"]["uid"]
    cluster.reconcile()
    assert waiting == cluster.pods[WORKER]["metadata"]["uid"]


def test_a_pod_that_avoids_a_node_keeps_running() -> None:
    cluster = running_job()
    cluster.terminate(WORKER, 137, disrupted=True)
    for _ in range(2):
        cluster.now += 10
        cluster.reconcile()
        cluster.reject(WORKER, "OutOfcpu", "bad")
        cluster.reconcile()
    cluster.now += 10
    cluster.reconcile()
    cluster.run(WORKER)
    cluster.now += 10_000
    cluster.reconcile()
    assert [] == cluster.status["backoffs"]
    assert [["bad"]] == avoided(cluster, WORKER)


def allowed_disruptions(cluster: SimulatedCluster) -> int:
    """Return how many ready pods may be evicted, as the disruption controller computes it."""
    pods = [PodView.from_pod(pod) for pod in cluster.pods.values()]
    healthy = sum(pod.ready and not pod.deleting for pod in pods)
    return healthy - int(cluster.objects["PodDisruptionBudget", "math-rollout"]["spec"]["minAvailable"])


def unschedulable(cluster: SimulatedCluster, name: str) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
    cluster.pods[name]["status"]["conditions"] = [condition]


def job_with_16_of_24_workers() -> SimulatedCluster:
    cluster = SimulatedCluster(
        {
            "source": {"trainer": {}},
            "model": {"uri": "Qwen/Qwen3-8B"},
            "workers": {"replicas": 24},
        }
    )
    cluster.reconcile()
    for slot, name in enumerate(sorted(cluster.workers(), key=lambda name: int(name.rpartition("-")[2]))):
        if slot < 16:
            cluster.run(name)
        else:
            unschedulable(cluster, name)
    cluster.run("math-head")
    cluster.reconcile()
    return cluster


def test_pods_can_be_evicted_one_by_one_while_others_cannot_be_scheduled() -> None:
    cluster = job_with_16_of_24_workers()
    for slot in range(4):
        name = f"math-worker-{slot}"
        assert 1 == allowed_disruptions(cluster)
        cluster.delete_pod(name)
        cluster.reconcile()
        assert 0 == allowed_disruptions(cluster)  # until the rollouts have been handed over
        cluster.finish_deletion(name)
        cluster.reconcile()
        assert 0 == allowed_disruptions(cluster)  # until it is known whether there is a node for the replacement
        unschedulable(cluster, name)
        cluster.reconcile()
    assert 1 == allowed_disruptions(cluster)


def test_a_replacement_that_starts_is_waited_for_but_not_for_ever() -> None:
    cluster = running_job()
    cluster.delete_pod(WORKER)
    cluster.finish_deletion(WORKER)
    cluster.reconcile()
    cluster.run(WORKER, ready=False)
    cluster.reconcile()
    assert 0 == allowed_disruptions(cluster)
    cluster.now += 601
    cluster.reconcile()
    assert 1 == allowed_disruptions(cluster)


def test_pods_that_the_api_server_rejects_do_not_block_evictions() -> None:
    cluster = running_job()
    del cluster.pods[WORKER]
    cluster.rejections = (Rejection(Target("Pod", WORKER), "Forbidden", "exceeded quota", cluster.now),)
    cluster.execute(cluster.plan())
    assert 1 == allowed_disruptions(cluster)
