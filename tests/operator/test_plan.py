"""The planner, on a cluster that is played: what it makes of each situation, and what always holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from rollout_operator import names
from rollout_operator.head_status import EngineStatus, HeadStatus
from rollout_operator.observed import Obstacle

from tests.support.simulated_cluster import ModelCluster

SPEC: dict[str, Any] = {
    "source": {"trainer": {}},
    "model": {"uri": "Qwen/Qwen3-8B"},
    "workers": {"replicas": 3, "minReplicas": 1, "maxReplicas": 6},
}


def spec(**sections: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(SPEC)
    for name, changes in sections.items():
        made[name] = {**made.get(name, {}), **changes}
    return made


def started(**sections: dict[str, Any]) -> ModelCluster:
    """A job all of whose pods run."""
    cluster = ModelCluster(spec(**sections))
    cluster.settle()
    for name in list(cluster.pods):
        cluster.run(name)
    cluster.head = sampling(cluster.workers())
    cluster.settle()
    return cluster


def sampling(workers: list[str], *, waiting: int = 0, assigned: int = 4, idle: float = 0.0) -> HeadStatus:
    engines = tuple(EngineStatus(worker=name, slots=16, assigned=assigned, idle_seconds=idle) for name in workers)
    return HeadStatus(waiting=waiting, assigned=assigned * len(workers), engines=engines, seconds_left=1000.0)


def test_a_new_job_gets_a_head_its_workers_and_what_they_need() -> None:
    cluster = ModelCluster(spec())
    cluster.settle()
    assert ["math-head"] == cluster.heads()
    assert [f"math-worker-{slot}" for slot in range(3)] == cluster.workers()
    assert {
        ("ServiceAccount", "math-rollout"),
        ("ConfigMap", "math-manifest"),
        ("ConfigMap", "math-connection"),
        ("Service", "math-head"),
        ("NetworkPolicy", "math-rollout"),
        ("PodDisruptionBudget", "math-workers"),
    } == set(cluster.objects)
    assert "Starting" == cluster.status["state"]
    assert "0/3" == cluster.status["workers"]["summary"]


def test_it_runs_when_an_engine_samples() -> None:
    cluster = started()
    assert "Running" == cluster.status["state"]
    assert ("True", "AllReady") == cluster.condition("WorkersReady")
    assert ("True", "Sampling") == cluster.condition("Progressing")
    assert "3/3" == cluster.status["workers"]["summary"]


def test_what_drafts_do_is_a_condition_and_an_event_where_it_is_bad() -> None:
    cluster = started()
    assert ("Unknown", "NotCheckedYet") == cluster.condition("DraftsHealthy")
    for said, condition in (
        ({"canaries": 50}, ("True", "Checked")),
        ({"unverified": ("a",)}, ("False", "NotVerified")),
        ({"distribution_drift": True}, ("False", "DistributionDrift")),
    ):
        cluster.notes.clear()
        cluster.head = cluster.head.model_copy(update=said)
        cluster.settle()
        assert condition == cluster.condition("DraftsHealthy")
        bad = [condition[1]] if condition[0] == "False" else []
        assert bad == [note.reason for note in cluster.notes if note.type == "Warning"]


def test_a_head_that_ends_well_is_the_end_of_the_job() -> None:
    cluster = started(lifecycle={"ttlSecondsAfterFinished": 60})
    cluster.head = cluster.head.model_copy(update={"done": 90})
    cluster.settle()
    assert "90" == cluster.status["progress"]["summary"]
    cluster.end(
        "math-head", 0, message='{"done": 128, "tokens": 1000, "steps": 400, "accepted_per_step": 1.5, "saved": 0.381}'
    )
    cluster.settle()
    assert "Succeeded" == cluster.status["state"]
    last = {"summary": "128", "tokens": 1000, "acceptedPerStep": "1.50", "tokensPerSecond": 0}
    assert last.items() <= cluster.status["progress"].items()
    assert "38%" == cluster.status["saved"]
    for name in cluster.workers():
        cluster.vanish(name)
    cluster.settle()
    assert ["math-head"] == list(cluster.pods)  # for its log
    assert [] == cluster.job["metadata"]["finalizers"]
    assert 60 == cluster.look().again
    cluster.now += 60
    cluster.settle()
    assert cluster.job is None


def test_a_failed_worker_is_recorded_counted_and_replaced_after_a_pause() -> None:
    cluster = started()
    cluster.end("math-worker-1", 1, message="Traceback …\nValueError: no\n")
    cluster.settle()
    (failure,) = cluster.status["failures"]
    assert ("math-worker-1", "Error", 1, True) == (
        failure["pod"],
        failure["reason"],
        failure["exitCode"],
        failure["counted"],
    )
    assert "ValueError: no" in failure["message"]
    assert 1 == cluster.status["failedPods"]
    assert any(note.reason == "PodFailed" and "ValueError: no" in note.message for note in cluster.notes)
    assert "math-worker-1" not in cluster.pods
    cluster.now += 5
    cluster.settle()
    assert "math-worker-1" in cluster.pods
    assert "true" == cluster.pods["math-worker-1"]["metadata"]["annotations"][names.REPLACEMENT]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"code": 137, "reason": "OOMKilled"}, "OOMKilled"),
        ({"code": 3}, "RedisUnreachable"),
        ({"code": 7}, "ModelNotFound"),
        ({"code": 1}, "PodFailed"),
    ],
)
def test_why_a_pod_failed_is_said(end: dict[str, Any], reason: str) -> None:
    cluster = started()
    cluster.end("math-worker-0", **end)
    cluster.settle()
    assert reason in {note.reason for note in cluster.notes}


def test_what_the_cluster_did_is_not_counted_and_replaced_at_once() -> None:
    cluster = started(lifecycle={"backoffLimit": 0})
    cluster.end("math-worker-1", 137, pod_reason="Evicted")
    cluster.settle()
    assert 0 == cluster.status["failedPods"]
    assert not cluster.status["failures"][0]["counted"]
    assert "math-worker-1" in cluster.pods
    assert "Pending" == cluster.pods["math-worker-1"]["status"]["phase"]


def test_beyond_the_limit_the_job_fails_and_redis_is_told() -> None:
    cluster = started(lifecycle={"backoffLimit": 1})
    for _ in range(2):
        cluster.end("math-worker-0", 1, message="boom")
        cluster.settle()
        cluster.now += 300
        cluster.settle()
        if "math-worker-0" in cluster.pods:
            cluster.run("math-worker-0")
    assert "Failed" == cluster.status["state"]
    assert ("True", "BackoffLimitExceeded") == cluster.condition("Failed")
    for name in [*cluster.workers(), *cluster.heads()]:
        cluster.vanish(name)
    cluster.settle()
    assert ["math-end"] == list(cluster.pods)
    assert "--delete" not in cluster.pods["math-end"]["spec"]["containers"][0]["args"]
    assert [names.FINALIZER] == cluster.job["metadata"]["finalizers"]
    cluster.end("math-end", 0)
    cluster.settle()
    assert [] == cluster.job["metadata"]["finalizers"]


def test_a_refused_manifest_fails_the_job_at_once() -> None:
    cluster = started()
    cluster.end("math-head", 2, message="error: /etc/rollout/job.yaml has 1 error")
    cluster.settle()
    assert ("True", "ManifestRefused") == cluster.condition("Failed")


@pytest.mark.parametrize(
    ("rule", "state", "failed"),
    [
        ({"action": "FailJob", "onExitCodes": {"values": [42]}}, "Failed", 0),
        ({"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [42]}}, "Running", 1),
        ({"action": "Ignore", "onExitCodes": {"values": [41, 42]}}, "Running", 0),
        ({"action": "Ignore", "component": "head", "onExitCodes": {"values": [42]}}, "Running", 1),
        ({"action": "FailJob", "onReasons": ["Gone"]}, "Failed", 0),
        ({"action": "Replace", "onReasons": ["Gone"]}, "Running", 1),
    ],
)
def test_rules_decide_about_failures(rule: dict[str, Any], state: str, failed: int) -> None:
    cluster = started(lifecycle={"failurePolicy": {"rules": [rule]}})
    cluster.end("math-worker-2", 42, reason="Gone")
    cluster.settle()
    assert (state, failed) == (cluster.status["state"], cluster.status["failedPods"])


def test_a_worker_that_fails_while_it_is_ending_and_stays_does_not_hold_a_suspension_up() -> None:
    cluster = started()
    cluster.change(lifecycle={"suspend": True})
    cluster.settle()
    for name in cluster.workers():
        cluster.end(name, 1)  # its node is gone: nobody removes it
    cluster.settle()
    assert "deletionTimestamp" not in cluster.pods["math-head"]["metadata"]
    cluster.now += 100
    cluster.settle()
    assert [] == cluster.workers()
    assert "deletionTimestamp" in cluster.pods["math-head"]["metadata"]


def test_suspended_workers_hand_over_before_the_head_ends_and_the_job_goes_on_later() -> None:
    cluster = started(lifecycle={"activeDeadlineSeconds": 1000})
    cluster.now += 400
    cluster.change(lifecycle={"suspend": True})
    cluster.settle()
    assert "Suspending" == cluster.status["state"]
    assert "deletionTimestamp" not in cluster.pods["math-head"]["metadata"]
    for name in cluster.workers():
        cluster.vanish(name)
    cluster.settle()
    assert "deletionTimestamp" in cluster.pods["math-head"]["metadata"]
    cluster.vanish("math-head")
    cluster.settle()
    assert "Suspended" == cluster.status["state"]
    assert 400 == cluster.status["activeSeconds"]
    assert cluster.look().again is None  # nothing to do until somebody changes something
    cluster.now += 5000
    cluster.change(lifecycle={"suspend": False})
    cluster.settle()
    assert 3 == len(cluster.workers())
    assert "Starting" == cluster.status["state"]
    cluster.now += 600
    cluster.settle()
    assert ("True", "DeadlineExceeded") == cluster.condition("Failed")


def test_deleted_the_job_waits_for_its_pods_and_for_redis_to_be_told() -> None:
    cluster = started()
    cluster.delete_job()
    cluster.settle()
    assert cluster.job is not None
    for name in [*cluster.workers(), *cluster.heads()]:
        cluster.vanish(name)
    cluster.settle()
    assert "--delete" in cluster.pods["math-end"]["spec"]["containers"][0]["args"]
    cluster.end("math-end", 0)
    cluster.settle()
    assert cluster.job is None


@pytest.mark.parametrize("how", ["failed", "hangs", "refused", "does not start"])
def test_a_redis_that_is_gone_does_not_hold_the_job(how: str) -> None:
    cluster = started()
    cluster.delete_job()
    cluster.settle()
    for name in [*cluster.workers(), *cluster.heads()]:
        cluster.vanish(name)
    if how == "refused":  # a namespace that is being deleted takes nothing new
        cluster.obstacles = (Obstacle("Pod math-end", "Forbidden", "namespace rl is being terminated", cluster.now),)
    cluster.settle()
    if how == "failed":
        cluster.end("math-end", 3, message="error: Redis cannot be reached")
    if how == "hangs":
        cluster.now += 120
    if how == "does not start":
        waiting = {"reason": "CreateContainerConfigError", "message": 'secret "rollout-redis" not found'}
        cluster.pods["math-end"]["status"]["containerStatuses"] = [{"name": "end", "state": {"waiting": waiting}}]
        cluster.settle()
        assert cluster.job is not None
        cluster.now += 20
    cluster.settle()
    assert "RedisNotTold" in {note.reason for note in cluster.notes}
    assert cluster.job is None


def test_a_worker_on_a_lost_node_is_replaced_and_not_counted() -> None:
    cluster = started()
    cluster.delete_pod("math-worker-1")  # by the taint manager; nobody confirms it
    cluster.settle()
    lost = cluster.pods["math-worker-1"]["metadata"]["uid"]
    cluster.now += 45 + 31
    cluster.settle()
    assert 3 == len(cluster.workers())
    assert lost != cluster.pods["math-worker-1"]["metadata"]["uid"]
    assert 0 == cluster.status["failedPods"]


def test_pending_replacements_are_capped() -> None:
    cluster = started(workers={"replicas": 6, "maxPendingReplacements": 2})
    for name in cluster.workers():
        cluster.end(name, 137, pod_reason="NodeLost")
    cluster.settle()
    assert 2 == len(cluster.workers())
    for name in cluster.workers():
        cluster.run(name)
    cluster.settle()
    assert 4 == len(cluster.workers())


def test_scaled_down_workers_end_and_up_come_back() -> None:
    cluster = started()
    cluster.change(workers={"replicas": 1})
    cluster.settle()
    ending = [name for name in cluster.workers() if "deletionTimestamp" in cluster.pods[name]["metadata"]]
    assert 2 == len(ending)
    cluster.change(workers={"replicas": 3})
    cluster.settle()
    assert 3 == cluster.gpus()  # those that end have theirs still
    for name in ending:
        cluster.vanish(name)
    cluster.settle()
    assert 3 == len(cluster.workers())


def test_autoscale_follows_the_queue_and_gives_idle_workers_back() -> None:
    cluster = started(workers={"autoscale": True, "replicas": 2})
    cluster.head = sampling(cluster.workers(), waiting=60, assigned=16)
    cluster.settle()
    assert 6 == len(cluster.workers())  # 92 rollouts, 16 a worker
    for name in cluster.workers():
        cluster.run(name)
    busy, *idle = cluster.workers()
    engines = (EngineStatus(worker=busy, slots=16, assigned=3), *sampling(idle, assigned=0, idle=100.0).engines)
    cluster.head = HeadStatus(assigned=3, engines=engines)
    cluster.settle()
    alive = [name for name in cluster.workers() if "deletionTimestamp" not in cluster.pods[name]["metadata"]]
    assert [busy] == alive


def test_autoscale_ends_no_worker_that_has_work() -> None:
    cluster = started(workers={"autoscale": True, "replicas": 4})
    cluster.change(workers={"replicas": 1, "minReplicas": 1, "maxReplicas": 1})
    cluster.settle()
    assert all("deletionTimestamp" not in pod["metadata"] for pod in cluster.pods.values())


def test_engines_that_cannot_start_are_said_in_their_own_words() -> None:
    cluster = started()
    for name in cluster.workers():
        cluster.pods[name]["status"]["conditions"] = []
    why = {"engine-0": "no room for the KV cache", "engine-1": "no room for the KV cache"}
    cluster.head = HeadStatus(engine_errors=why)
    cluster.settle()
    assert ("False", "EngineFailed") == cluster.condition("EngineReady")
    assert ("False", "EngineFailed") == cluster.condition("WorkersReady")
    assert "engine-1: no room for the KV cache" in [note.message for note in cluster.notes][-1]
    assert "Starting" == cluster.status["state"]


def test_short_queues_start_no_worker() -> None:
    cluster = started(workers={"autoscale": True, "replicas": 2})
    cluster.head = sampling(cluster.workers(), waiting=60, assigned=16).model_copy(update={"seconds_left": 20.0})
    cluster.settle()
    assert 2 == len(cluster.workers())


def test_no_worker_is_started_that_would_only_wait_for_the_longest_rollout() -> None:
    cluster = started(workers={"autoscale": True, "replicas": 2, "maxReplicas": 16})
    busy = sampling(cluster.workers(), waiting=400, assigned=16)
    # all of it takes two workers 400 s, and the longest rollout takes 100 s however many there are
    cluster.head = busy.model_copy(update={"work_seconds": 400.0, "tail_seconds": 100.0})
    cluster.settle()
    assert 8 == len(cluster.workers())


def test_what_somebody_changed_or_removed_comes_back() -> None:
    cluster = started()
    del cluster.objects["Service", "math-head"]
    cluster.objects["ConfigMap", "math-connection"]["data"]["uid"] = "other"
    cluster.settle()
    assert "job-uid" == cluster.objects["ConfigMap", "math-connection"]["data"]["uid"]
    assert ("Service", "math-head") in cluster.objects


def test_a_job_that_another_controller_manages_is_left_alone() -> None:
    cluster = ModelCluster(spec() | {"managedBy": "kueue.x-k8s.io/multikueue"})
    cluster.settle()
    assert not cluster.pods
    assert "status" not in cluster.job


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"redis": {"url": "unix:///run/redis.sock"}}, "spec.redis.url"),
        ({"history": {"redis": {"url": "unix:///run/redis.sock"}}}, "spec.history.redis.url"),
        ({"workers": {"podTemplate": {"spec": {"containers": [{"image": "x"}]}}}}, "spec.workers.podTemplate"),
        ({"source": {"dataset": {"tasks": []}}}, "spec.source"),
    ],
)
def test_what_cannot_run_on_a_cluster_is_refused_by_field(sections: dict[str, Any], field: str) -> None:
    cluster = ModelCluster(spec(**sections))
    cluster.settle()
    assert ("False", "Invalid") == cluster.condition("Accepted")
    assert any(field in note.message for note in cluster.notes)
    assert "Pending" == cluster.status["state"]
    assert not cluster.pods


def test_a_queue_that_holds_pods_back_is_said() -> None:
    cluster = ModelCluster(spec())
    cluster.job["metadata"]["labels"] = {names.QUEUE_LABEL: "team"}
    cluster.settle()
    for pod in cluster.pods.values():
        assert "team" == pod["metadata"]["labels"][names.QUEUE_LABEL]
        pod["spec"]["schedulingGates"] = [{"name": names.QUEUE_GATE}]
    grouped = [name for name, pod in cluster.pods.items() if names.POD_GROUP_LABEL in pod["metadata"]["labels"]]
    assert {"math-head", "math-worker-0"} == set(grouped)
    cluster.settle()
    assert "Queued" == cluster.status["state"]
    assert ("False", "Waiting") == cluster.condition("QuotaReserved")
