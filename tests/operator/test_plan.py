"""The planner's actions in each situation, on a simulated cluster."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from rollout_operator.objects import names
from rollout_operator.objects.observed import EngineStatus, HeadStatus, Rejection, Target

from tests.support.planned_jobs import head_status, running_job, spec
from tests.support.simulated_cluster import SimulatedCluster

QUEUE_SCHEDULING_GATE = "kueue.x-k8s.io/admission"
"""Kueue's scheduling gate for holding pods back."""


def test_a_new_job_gets_a_head_workers_and_their_objects() -> None:
    cluster = SimulatedCluster(spec())
    cluster.reconcile()
    assert ["math-head"] == cluster.heads()
    assert [f"math-worker-{slot}" for slot in range(3)] == cluster.workers()
    assert {
        ("ServiceAccount", "math-rollout"),
        ("ConfigMap", "math-manifest"),
        ("ConfigMap", "math-connection"),
        ("Service", "math-head"),
        ("NetworkPolicy", "math-rollout"),
        ("PodDisruptionBudget", "math-rollout"),
    } == set(cluster.objects)
    assert "Starting" == cluster.status["state"]
    assert "0/3" == cluster.status["workers"]["summary"]


def test_a_job_is_running_once_an_engine_samples() -> None:
    cluster = running_job()
    assert "Running" == cluster.status["state"]
    assert ("True", "AllReady") == cluster.condition("WorkersReady")
    assert ("True", "Sampling") == cluster.condition("Progressing")
    assert "3/3" == cluster.status["workers"]["summary"]


def test_faulty_drafting_sets_a_condition_and_posts_an_event() -> None:
    cluster = running_job()
    assert ("Unknown", "TooFewCanaries") == cluster.condition("DraftsHealthy")
    for reported, condition in (
        ({"canaries": 50}, ("True", "NoDriftDetected")),
        ({"unverified": ("a",)}, ("False", "DraftsNotVerified")),
        ({"distribution_drift": True}, ("False", "DistributionDrift")),
    ):
        cluster.events.clear()
        cluster.head = cluster.head.model_copy(update=reported)
        cluster.reconcile()
        assert condition == cluster.condition("DraftsHealthy")
        expected = [condition[1]] if condition[0] == "False" else []
        assert expected == [event.reason for event in cluster.events if event.type == "Warning"]


def test_a_job_succeeds_when_its_head_does() -> None:
    cluster = running_job(lifecycle={"ttlSecondsAfterFinished": 60})
    cluster.head = cluster.head.model_copy(update={"done": 90})
    cluster.now += 60
    cluster.reconcile()
    assert "90" == cluster.status["progress"]["summary"]
    cluster.terminate(
        "math-head",
        0,
        message='{"done": 128, "tokens": 1000, "decoding_steps": 400, "accepted_per_step": 1.5, "saved": 0.381}',
    )
    cluster.reconcile()
    assert "Succeeded" == cluster.status["state"]
    last = {"summary": "128", "tokens": 1000, "acceptedPerStep": "1.50", "tokensPerSecond": 0}
    assert last.items() <= cluster.status["progress"].items()
    assert "38%" == cluster.status["timeSaved"]
    cluster.finish_deletions(cluster.workers())
    cluster.reconcile()
    assert ["math-head"] == list(cluster.pods)  # kept for its log
    assert [] == cluster.job["metadata"]["finalizers"]
    assert 60 == cluster.plan().requeue_after
    cluster.now += 60
    cluster.reconcile()
    assert cluster.job is None


@pytest.mark.parametrize(("pod", "code"), [("math-head", 0), ("math-worker-1", 1)])
def test_a_pod_has_ended_when_its_main_container_has(pod: str, code: int) -> None:
    cluster = running_job()
    sidecar = {"name": "proxy", "state": {"running": {}}}
    main = {"name": "worker" if code else "head", "state": {"terminated": {"exitCode": code, "message": "the end"}}}
    cluster.pods[pod]["status"]["containerStatuses"] = [sidecar, main]
    cluster.reconcile()
    assert "deletionTimestamp" in cluster.pods[pod]["metadata"]  # the sidecar does not end by itself
    if code:
        assert ("Running", 1) == (cluster.status["state"], cluster.status["failedPods"])
        assert "the end" in cluster.status["failures"][0]["message"]
        cluster.now += 10
        cluster.reconcile()
        assert 3 == cluster.gpus()  # the sidecar's pod still holds them
    else:
        assert "Succeeded" == cluster.status["state"]


def test_it_does_not_matter_how_an_added_container_ends() -> None:
    cluster = running_job()
    failed = {"name": "proxy", "state": {"terminated": {"exitCode": 1}}}
    cluster.pods["math-worker-1"]["status"]["containerStatuses"] = [
        failed,
        {"name": "worker", "state": {"running": {}}},
    ]
    cluster.reconcile()
    assert ("True", "AllReady") == cluster.condition("WorkersReady")
    cluster.pods["math-head"]["status"] = {
        "phase": "Failed",
        "containerStatuses": [failed, {"name": "head", "state": {"terminated": {"exitCode": 0, "message": ""}}}],
    }
    cluster.reconcile()
    assert "Succeeded" == cluster.status["state"]


def test_a_failed_worker_is_recorded_counted_and_replaced_after_a_backoff() -> None:
    cluster = running_job()
    cluster.terminate("math-worker-1", 1, message="Traceback …\nValueError: no\n")
    cluster.reconcile()
    (failure,) = cluster.status["failures"]
    assert ("math-worker-1", "Error", 1, True) == (
        failure["pod"],
        failure["reason"],
        failure["exitCode"],
        failure["counted"],
    )
    assert "ValueError: no" in failure["message"]
    assert 1 == cluster.status["failedPods"]
    assert any(event.reason == "PodFailed" and "ValueError: no" in event.message for event in cluster.events)
    assert "math-worker-1" not in cluster.pods
    cluster.now += 5
    cluster.reconcile()
    assert "math-worker-1" in cluster.pods
    assert "true" == cluster.pods["math-worker-1"]["metadata"]["annotations"][names.REPLACEMENT_ANNOTATION]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ({"code": 137, "reason": "OOMKilled"}, "OOMKilled"),
        ({"code": 3}, "RedisUnreachable"),
        ({"code": 7}, "ModelNotFound"),
        ({"code": 1}, "PodFailed"),
    ],
)
def test_an_event_states_why_a_pod_failed(end: dict[str, Any], reason: str) -> None:
    cluster = running_job()
    cluster.terminate("math-worker-0", **end)
    cluster.reconcile()
    assert reason in {event.reason for event in cluster.events}


def test_an_evicted_worker_is_not_counted_and_is_replaced_at_once() -> None:
    cluster = running_job(lifecycle={"backoffLimit": 0})
    cluster.terminate("math-worker-1", 137, pod_reason="Evicted", disrupted=True)
    cluster.reconcile()
    assert 0 == cluster.status["failedPods"]
    assert not cluster.status["failures"][0]["counted"]
    assert "math-worker-1" in cluster.pods
    assert "Pending" == cluster.pods["math-worker-1"]["status"]["phase"]


def test_a_job_fails_beyond_the_backoff_limit_and_is_cleaned_up() -> None:
    cluster = running_job(lifecycle={"backoffLimit": 1})
    for _ in range(2):
        cluster.terminate("math-worker-0", 1, message="boom")
        cluster.reconcile()
        cluster.now += 300
        cluster.reconcile()
        if "math-worker-0" in cluster.pods:
            cluster.run("math-worker-0")
    assert "Failed" == cluster.status["state"]
    assert ("True", "BackoffLimitExceeded") == cluster.condition("Failed")
    cluster.finish_deletions()
    cluster.reconcile()
    assert ["math-cleanup"] == list(cluster.pods)
    assert "--delete" not in cluster.pods["math-cleanup"]["spec"]["containers"][0]["args"]
    assert [names.FINALIZER] == cluster.job["metadata"]["finalizers"]
    cluster.terminate("math-cleanup", 0)
    cluster.reconcile()
    assert [] == cluster.job["metadata"]["finalizers"]


def test_only_failures_within_the_window_count_towards_the_backoff_limit() -> None:
    cluster = running_job(lifecycle={"backoffLimit": 1, "backoffWindowSeconds": 1000})
    for _ in range(5):
        cluster.terminate("math-worker-0", 1)
        cluster.reconcile()
        assert 1 == cluster.status["failedPods"]
        cluster.now += 1000
        cluster.reconcile()
        cluster.run("math-worker-0")
    cluster.reconcile()
    assert ("Running", 0) == (cluster.status["state"], cluster.status["failedPods"])


def test_many_failures_at_once_do_not_exceed_the_size_of_the_status_nor_flood_events() -> None:
    cluster = running_job(workers={"replicas": 1024, "maxReplicas": 1024}, lifecycle={"backoffLimit": 10_000})
    cluster.events.clear()
    for name in cluster.workers():
        cluster.terminate(name, 1, message=1000 * "x")
    largest, passes = 0, 0
    while (planned := cluster.plan()).status is not None or planned.actions:
        cluster.execute(planned)
        largest = max(largest, len(json.dumps(cluster.status)))
        passes += 1
        assert passes < 50
    assert largest < 200_000
    assert 1024 == cluster.status["failedPods"]
    assert len([event for event in cluster.events if event.type == "Warning"]) < 160
    assert any("more pods have failed" in event.message for event in cluster.events)


def test_a_manifest_that_the_head_rejects_fails_the_job_at_once() -> None:
    cluster = running_job()
    cluster.terminate("math-head", 2, message="error: /etc/rollout/job.yaml has 1 error")
    cluster.reconcile()
    assert ("True", "ManifestInvalid") == cluster.condition("Failed")


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
def test_failure_policy_rules_decide_what_a_failure_does(rule: dict[str, Any], state: str, failed: int) -> None:
    cluster = running_job(lifecycle={"failurePolicy": {"rules": [rule]}})
    cluster.terminate("math-worker-2", 42, reason="Gone")
    cluster.reconcile()
    assert (state, failed) == (cluster.status["state"], cluster.status["failedPods"])


def test_a_worker_that_cannot_be_deleted_does_not_block_suspension() -> None:
    cluster = running_job()
    cluster.change(lifecycle={"suspend": True})
    cluster.reconcile()
    for name in cluster.workers():
        cluster.terminate(name, 1)  # its node is lost, so that nothing removes it
    cluster.reconcile()
    assert "deletionTimestamp" not in cluster.pods["math-head"]["metadata"]
    cluster.now += 100
    cluster.reconcile()
    assert [] == cluster.workers()
    assert "deletionTimestamp" in cluster.pods["math-head"]["metadata"]


def test_workers_hand_over_before_the_head_is_deleted_and_the_job_can_be_resumed() -> None:
    cluster = running_job(lifecycle={"activeDeadlineSeconds": 1000})
    cluster.now += 400
    cluster.change(lifecycle={"suspend": True})
    cluster.reconcile()
    assert "Suspending" == cluster.status["state"]
    assert "deletionTimestamp" not in cluster.pods["math-head"]["metadata"]
    cluster.finish_deletions(cluster.workers())
    cluster.reconcile()
    assert "deletionTimestamp" in cluster.pods["math-head"]["metadata"]
    cluster.finish_deletion("math-head")
    cluster.reconcile()
    assert "Suspended" == cluster.status["state"]
    assert 400 == cluster.status["activeSeconds"]
    assert cluster.plan().requeue_after is None  # nothing to do until the job is changed
    cluster.now += 5000
    cluster.change(lifecycle={"suspend": False})
    cluster.reconcile()
    assert 3 == len(cluster.workers())
    assert "Starting" == cluster.status["state"]
    cluster.now += 600
    cluster.reconcile()
    assert ("True", "DeadlineExceeded") == cluster.condition("Failed")


def test_a_deleted_job_waits_for_its_pods_and_the_cleanup() -> None:
    cluster = running_job()
    cluster.delete_job()
    cluster.reconcile()
    assert cluster.job is not None
    cluster.finish_deletions()
    cluster.reconcile()
    assert "--delete" in cluster.pods["math-cleanup"]["spec"]["containers"][0]["args"]
    cluster.terminate("math-cleanup", 0)
    cluster.reconcile()
    assert cluster.job is None


def test_a_job_that_is_deleted_in_the_foreground_is_cleaned_up_when_its_objects_are_gone() -> None:
    cluster = running_job()
    cluster.delete_job(foreground=True)
    cluster.reconcile()
    cluster.delete_dependents()
    assert {*cluster.workers(), *cluster.heads()} == set(cluster.pods)
    cluster.finish_deletions()
    cluster.reconcile()
    # Kubernetes would delete whatever is created now.
    assert not cluster.pods
    assert not cluster.objects
    cluster.delete_dependents()
    cluster.reconcile()
    assert ["math-cleanup"] == list(cluster.pods)
    # What the pod mounts, uses and needs to connect.
    assert {
        ("ServiceAccount", "math-rollout"),
        ("ConfigMap", "math-manifest"),
        ("NetworkPolicy", "math-rollout"),
    } == set(cluster.objects)
    cluster.terminate("math-cleanup", 0)
    cluster.reconcile()
    assert cluster.job is None
    assert "CleanupFailed" not in {event.reason for event in cluster.events}


def test_the_quota_of_a_job_that_is_deleted_in_the_foreground_is_released() -> None:
    cluster = SimulatedCluster(spec(), queued=True)
    cluster.reconcile()
    cluster.reconcile_queue()
    cluster.run_all()
    cluster.delete_job(foreground=True)
    cluster.delete_dependents()
    cluster.finish_deletions()
    # Kueue keeps the pods until its Workload is deleted, and Kubernetes waits for the pods.
    assert cluster.pods
    cluster.reconcile()
    cluster.reconcile_queue()
    cluster.reconcile_queue()
    assert not cluster.pods
    cluster.delete_dependents()
    cluster.reconcile()
    assert ["math-cleanup"] == list(cluster.pods)


def test_a_cleanup_pod_that_somebody_deletes_is_created_again() -> None:
    cluster = running_job(lifecycle={"backoffLimit": 0})
    cluster.terminate("math-worker-0", 1)
    cluster.reconcile()
    cluster.finish_deletions()
    cluster.reconcile()
    cluster.run("math-cleanup")
    cluster.delete_job(foreground=True)
    cluster.delete_dependents()
    cluster.reconcile()
    first = cluster.pods["math-cleanup"]["metadata"]["uid"]
    cluster.terminate("math-cleanup", 143)
    # The finalizer of the foreground deletion may be gone before the watch reports that the pod is.
    cluster.set_finalizer(names.FOREGROUND_FINALIZER, present=False)
    cluster.reconcile()
    assert cluster.job is not None
    cluster.finish_deletion("math-cleanup")
    cluster.reconcile()
    assert first != cluster.pods["math-cleanup"]["metadata"]["uid"]
    assert "CleanupFailed" not in {event.reason for event in cluster.events}


@pytest.mark.parametrize("how", ["failed", "hangs", "rejected", "does not start"])
def test_an_impossible_cleanup_does_not_block_deletion(how: str) -> None:
    cluster = running_job()
    cluster.delete_job()
    cluster.reconcile()
    cluster.finish_deletions()
    if how == "rejected":  # as in a namespace that is being deleted
        target = Target("Pod", "math-cleanup")
        cluster.rejections = (Rejection(target, "Forbidden", "namespace rl is being terminated", cluster.now),)
    cluster.reconcile()
    if how == "failed":
        cluster.terminate("math-cleanup", 3, message="error: Redis cannot be reached")
    if how == "hangs":
        cluster.now += 120
    if how == "does not start":
        waiting = {"reason": "CreateContainerConfigError", "message": 'secret "rollout-redis" not found'}
        cluster.pods["math-cleanup"]["status"]["containerStatuses"] = [
            {"name": "cleanup", "state": {"waiting": waiting}}
        ]
        cluster.reconcile()
        assert cluster.job is not None
        cluster.now += 20
    cluster.reconcile()
    assert "CleanupFailed" in {event.reason for event in cluster.events}
    assert cluster.job is None


def test_a_worker_on_a_lost_node_is_replaced_and_not_counted() -> None:
    cluster = running_job()
    cluster.lose_node("math-worker-1")
    cluster.reconcile()
    lost = cluster.pods["math-worker-1"]["metadata"]["uid"]
    cluster.now += 45 + 31
    cluster.reconcile()
    assert 3 == len(cluster.workers())
    assert lost != cluster.pods["math-worker-1"]["metadata"]["uid"]
    assert 0 == cluster.status["failedPods"]


def test_a_worker_that_does_not_terminate_on_a_node_that_is_ready_keeps_its_gpus() -> None:
    cluster = running_job()
    stuck = cluster.pods["math-worker-1"]["metadata"]["uid"]
    cluster.delete_pod("math-worker-1")
    cluster.now += 45 + 1000
    cluster.execute(cluster.plan())
    assert stuck == cluster.pods["math-worker-1"]["metadata"]["uid"]
    assert "PodNotTerminating" == cluster.events[-1].reason
    assert "node-of-math-worker-1" in cluster.events[-1].message
    assert ("False", "PodNotTerminating") == cluster.condition("WorkersReady")
    cluster.finish_deletion("math-worker-1")
    cluster.reconcile()
    assert stuck != cluster.pods["math-worker-1"]["metadata"]["uid"]


def test_pending_replacements_are_capped() -> None:
    cluster = running_job(workers={"replicas": 6, "maxPendingReplacements": 2})
    for name in cluster.workers():
        cluster.terminate(name, 137, disrupted=True)
    cluster.reconcile()
    assert 2 == len(cluster.workers())
    cluster.run_all()
    cluster.reconcile()
    assert 4 == len(cluster.workers())


def test_workers_follow_replicas_down_and_up() -> None:
    cluster = running_job()
    cluster.change(workers={"replicas": 1})
    cluster.reconcile()
    deleting = [name for name in cluster.workers() if "deletionTimestamp" in cluster.pods[name]["metadata"]]
    assert 2 == len(deleting)
    cluster.change(workers={"replicas": 3})
    cluster.reconcile()
    assert 3 == cluster.gpus()  # workers being deleted still occupy theirs
    for name in deleting:
        cluster.finish_deletion(name)
    cluster.reconcile()
    assert 3 == len(cluster.workers())


def test_autoscaling_follows_the_queue_and_removes_idle_workers() -> None:
    cluster = running_job(workers={"autoscale": True, "replicas": 2})
    cluster.head = head_status(cluster.workers(), waiting=60, assigned=16)
    cluster.reconcile()
    assert 6 == len(cluster.workers())  # for 92 rollouts, 16 per worker
    cluster.run_all()
    busy, *idle = cluster.workers()
    engines = (
        EngineStatus(worker=busy, max_running=16, assigned=3),
        *head_status(idle, assigned=0, idle=100.0).engines,
    )
    cluster.head = HeadStatus(assigned=3, engines=engines)
    cluster.reconcile()
    remaining = [name for name in cluster.workers() if "deletionTimestamp" not in cluster.pods[name]["metadata"]]
    assert [busy] == remaining


def test_autoscaling_removes_no_worker_with_rollouts() -> None:
    cluster = running_job(workers={"autoscale": True, "replicas": 4})
    cluster.change(workers={"replicas": 1, "minReplicas": 1, "maxReplicas": 1})
    cluster.reconcile()
    assert all("deletionTimestamp" not in pod["metadata"] for pod in cluster.pods.values())


def test_a_worker_that_a_group_needs_replaces_one_that_it_does_not_need() -> None:
    cluster = SimulatedCluster(spec(workers={"replicas": 3}), queued=True)
    cluster.reconcile()
    cluster.delete_pod("math-worker-0")
    cluster.change(workers={"replicas": 2})
    for _ in range(4):
        cluster.reconcile()
        cluster.reconcile_queue()
    slots = {cluster.pods[name]["metadata"]["labels"][names.SLOT_LABEL] for name in cluster.workers()}
    assert {"0", "1"} == slots
    assert not any(pod["spec"].get("schedulingGates") for pod in cluster.pods.values())


def test_a_group_is_replaced_if_a_needed_worker_has_succeeded_and_its_place_cannot_be_taken() -> None:
    cluster = SimulatedCluster(spec(workers={"replicas": 1}), queued=True)
    cluster.reconcile()
    for _ in range(3):
        cluster.reconcile_queue()
    cluster.run_all()
    cluster.terminate("math-worker-0", 0)
    for _ in range(3):
        cluster.reconcile()
        cluster.finish_deletions()
        cluster.reconcile_queue()
    # A worker may end before the head of a closed job. Kueue would delete a pod in its place.
    assert "WorkerSucceeded" not in {event.reason for event in cluster.events}
    assert ["math-head", "math-worker-0"] == sorted(cluster.pods)
    assert not cluster.pods["math-head"]["metadata"].get("deletionTimestamp")
    cluster.now += 1000
    for _ in range(4):
        cluster.reconcile()
        cluster.finish_deletions()
        cluster.reconcile_queue()
    assert "WorkerSucceeded" in {event.reason for event in cluster.events}
    assert {"Pending"} == {pod["status"]["phase"] for pod in cluster.pods.values()}
    assert 2 == len(cluster.pods)
    assert not any(pod["spec"].get("schedulingGates") for pod in cluster.pods.values())


def test_autoscaling_does_not_shrink_by_workers_that_kueue_has_admitted_as_a_group() -> None:
    workers = {"replicas": 3, "minReplicas": 3, "autoscale": True, "idleSeconds": 60}
    cluster = SimulatedCluster(spec(workers=workers), queued=True)
    cluster.reconcile()
    for _ in range(3):
        cluster.reconcile_queue()
    cluster.run_all()
    cluster.change(workers={"minReplicas": 1})
    cluster.head = head_status(cluster.workers(), assigned=0, idle=61.0)
    cluster.reconcile()
    assert "3/3" == cluster.status["workers"]["summary"]


def test_the_errors_of_engines_that_cannot_start_are_reported() -> None:
    cluster = running_job()
    for name in cluster.workers():
        cluster.pods[name]["status"]["conditions"] = []
    errors = {"engine-0": "no room for the KV cache", "engine-1": "no room for the KV cache"}
    cluster.head = HeadStatus(engine_errors=errors)
    cluster.reconcile()
    assert ("False", "EngineFailed") == cluster.condition("EngineReady")
    assert ("False", "EngineFailed") == cluster.condition("WorkersReady")
    assert "engine-1: no room for the KV cache" in [event.message for event in cluster.events][-1]
    assert "Starting" == cluster.status["state"]


def test_each_type_of_error_of_an_environment_is_reported_once() -> None:
    cluster = running_job()
    for count in (1, 5):
        error = {"count": count, "problem": "sum-3", "message": "the environment took more than 600 s"}
        status = cluster.head.model_dump() | {"environment_errors": {"timeout": error}}
        cluster.head = HeadStatus.model_validate(status)
        cluster.now += 60
        cluster.reconcile()
        (shown,) = cluster.status["environmentErrors"]
        assert {"type": "timeout", **error} == shown
    (event,) = [event for event in cluster.events if event.reason == "EnvironmentErrors"]
    assert "Warning" == event.type
    assert "problem sum-3" in event.message
    assert "(timeout): the environment took more than 600 s" in event.message


def test_a_head_with_thousands_of_types_of_errors_causes_one_event_and_a_small_status() -> None:
    cluster = running_job()
    error = {"count": 1, "problem": "p" * 5000, "message": "m" * 5000}
    errors = {f"type-{number}": error for number in range(25_000)}
    cluster.head = HeadStatus.model_validate(cluster.head.model_dump() | {"environment_errors": errors})
    cluster.reconcile()
    (event,) = [event for event in cluster.events if event.reason == "EnvironmentErrors"]
    assert len(event.message) <= 600
    assert 16 == len(cluster.status["environmentErrors"])
    assert len(json.dumps(cluster.status)) < 50_000


def test_final_figures_that_cannot_be_used_do_not_keep_a_job_from_succeeding() -> None:
    cluster = running_job()
    done = cluster.status["progress"]["done"]
    cluster.terminate("math-head", 0, message='{"done": 1e999}')
    cluster.reconcile()
    assert ("Succeeded", done) == (cluster.status["state"], cluster.status["progress"]["done"])
    (event,) = [event for event in cluster.events if event.reason == "HeadStatusInvalid"]
    assert "final figures" in event.message


def test_the_status_of_a_later_version_is_read_after_a_rollback() -> None:
    cluster = running_job()
    cluster.terminate("math-worker-0", 1)
    cluster.reconcile()
    written = copy.deepcopy(cluster.status)
    failure = written["failures"][0]
    cluster.status.update(state="Hibernating", later={"field": 1}, startTime=written["startTime"])
    cluster.status["progress"]["later"] = cluster.status["workers"]["later"] = cluster.status["revision"]["later"] = 1
    cluster.status["failures"] = [{**failure, "later": 1}, {**failure, "uid": "other", "component": "cache"}]
    cluster.status["conditions"].append({**written["conditions"][0], "type": "Later"})
    cluster.reconcile()
    assert written == cluster.status
    cluster.change(lifecycle={"suspend": True})
    cluster.reconcile()
    assert all("deletionTimestamp" in cluster.pods[name]["metadata"] for name in cluster.workers())


def test_a_job_whose_head_reports_the_largest_numbers_and_texts_can_be_suspended() -> None:
    cluster = running_job(workers={"autoscale": True, "replicas": 2, "maxReplicas": 16})
    text, most = "x" * 100_000, 2**53
    counts = ("weight_version", "waiting", "assigned", "done", "total", "epoch", "tokens", "decoding_steps", "canaries")
    seconds = ("tokens_per_second", "remaining_seconds", "work_seconds", "tail_seconds", "accepted_per_step")
    engine = {"worker": text, "max_running": most, "assigned": most, "idle_seconds": most}
    cluster.head = HeadStatus.model_validate(
        {
            **dict.fromkeys([*counts, *seconds], most),
            "saved": -most,
            "engines": [engine] * 3,
            "unverified": [text] * 3,
            "redis_error": text,
            "engine_errors": {text: text},
        }
    )
    cluster.reconcile()
    assert len(json.dumps(cluster.status)) < 20_000
    assert cluster.status["progress"]["open"] < 2**63
    cluster.change(lifecycle={"suspend": True})
    cluster.reconcile()
    assert all("deletionTimestamp" in cluster.pods[name]["metadata"] for name in cluster.workers())


def test_a_head_whose_status_cannot_be_used_is_reported_and_its_job_can_be_suspended() -> None:
    cluster = running_job()
    cluster.head, cluster.head_problem = None, "done: Input should be finite"
    cluster.reconcile()
    assert ("Unknown", "HeadStatusInvalid") == cluster.condition("EngineReady")
    (event,) = [event for event in cluster.events if event.reason == "HeadStatusInvalid"]
    assert "The operator cannot use the status of the head: done: Input should be finite" == event.message
    cluster.change(lifecycle={"suspend": True})
    cluster.reconcile()
    assert all("deletionTimestamp" in cluster.pods[name]["metadata"] for name in cluster.workers())


def test_autoscaling_adds_no_worker_for_a_short_queue() -> None:
    cluster = running_job(workers={"autoscale": True, "replicas": 2})
    status = head_status(cluster.workers(), waiting=60, assigned=16)
    cluster.head = status.model_copy(update={"remaining_seconds": 20.0})
    cluster.reconcile()
    assert 2 == len(cluster.workers())


def test_autoscaling_adds_no_worker_that_would_only_wait_for_the_longest_rollout() -> None:
    cluster = running_job(workers={"autoscale": True, "replicas": 2, "maxReplicas": 16})
    busy = head_status(cluster.workers(), waiting=400, assigned=16)
    # Two workers take 400 s, and the longest rollout takes 100 s on any number of workers.
    cluster.head = busy.model_copy(update={"work_seconds": 400.0, "tail_seconds": 100.0})
    cluster.reconcile()
    assert 8 == len(cluster.workers())


def test_the_disruption_budget_lets_one_of_the_desired_pods_go_at_a_time() -> None:
    cluster = running_job(workers={"autoscale": True, "replicas": 2})
    budget = cluster.objects["PodDisruptionBudget", "math-rollout"]["spec"]
    assert (2, "AlwaysAllow") == (budget["minAvailable"], budget["unhealthyPodEvictionPolicy"])  # of the head and two
    cluster.head = head_status(cluster.workers(), waiting=60, assigned=16)
    cluster.reconcile()
    assert 6 == len(cluster.workers())
    assert 6 == cluster.objects["PodDisruptionBudget", "math-rollout"]["spec"]["minAvailable"]


def test_changed_and_deleted_objects_are_restored() -> None:
    cluster = running_job()
    del cluster.objects["Service", "math-head"]
    cluster.objects["ConfigMap", "math-connection"]["data"]["uid"] = "other"
    cluster.reconcile()
    assert "job-uid" == cluster.objects["ConfigMap", "math-connection"]["data"]["uid"]
    assert ("Service", "math-head") in cluster.objects


def test_a_job_managed_by_another_controller_is_left_alone() -> None:
    cluster = SimulatedCluster(spec() | {"managedBy": "kueue.x-k8s.io/multikueue"})
    cluster.reconcile()
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
def test_a_manifest_that_cannot_run_in_pods_is_rejected_with_the_field(sections: dict[str, Any], field: str) -> None:
    cluster = SimulatedCluster(spec(**sections))
    cluster.reconcile()
    assert ("False", "Invalid") == cluster.condition("Accepted")
    assert any(field in event.message for event in cluster.events)
    assert "Pending" == cluster.status["state"]
    assert not cluster.pods


@pytest.mark.parametrize(
    "template",
    [
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": {"podSelector": {}}},
        {"kind": "PodTemplate"},
        {"metadata": {"$patch": "replace", "labels": None}, "status": {}},
    ],
)
@pytest.mark.parametrize("section", ["head", "workers"])
def test_a_pod_template_cannot_create_other_objects(section: str, template: dict[str, Any]) -> None:
    cluster = SimulatedCluster(spec(**{section: {"podTemplate": template}}))
    cluster.reconcile()
    assert ("False", "Invalid") == cluster.condition("Accepted")
    assert not cluster.pods
    assert not cluster.objects


def test_a_job_whose_pods_are_gated_by_a_queue_is_queued() -> None:
    cluster = SimulatedCluster(spec())
    cluster.job["metadata"]["labels"] = {names.QUEUE_LABEL: "team"}
    cluster.reconcile()
    for pod in cluster.pods.values():
        assert "team" == pod["metadata"]["labels"][names.QUEUE_LABEL]
        pod["spec"]["schedulingGates"] = [{"name": QUEUE_SCHEDULING_GATE}]
    grouped = [name for name, pod in cluster.pods.items() if names.POD_GROUP_LABEL in pod["metadata"]["labels"]]
    assert {"math-head", "math-worker-0"} == set(grouped)
    cluster.reconcile()
    assert "Queued" == cluster.status["state"]
    assert ("False", "Pending") == cluster.condition("QuotaReserved")


def test_scaling_a_job_with_autoscaling_sets_the_number_from_which_it_continues() -> None:
    cluster = running_job(workers={"replicas": 2, "autoscale": True, "minReplicas": 1, "maxReplicas": 6})
    cluster.change(workers={"replicas": 4})
    cluster.reconcile()
    assert 4 == len(cluster.workers()) == cluster.status["workers"]["desired"]
    cluster.run_all()
    idle = tuple(
        EngineStatus(worker=name, max_running=16, assigned=0, idle_seconds=1000.0) for name in cluster.workers()[2:]
    )
    cluster.head = HeadStatus(engines=idle)
    cluster.reconcile()
    assert 2 == cluster.status["workers"]["desired"]
    cluster.reconcile()
    assert 2 == cluster.status["workers"]["desired"]


@pytest.mark.parametrize("pod", ["math-worker-1", "math-head"])
def test_a_pod_that_is_not_ready_in_time_is_replaced_and_not_counted(pod: str) -> None:
    cluster = SimulatedCluster(spec(lifecycle={"readyTimeoutSeconds": 600}))
    cluster.reconcile()
    for name in list(cluster.pods):
        cluster.run(name, ready=name != pod)
    stuck = cluster.pods[pod]["metadata"]["uid"]
    cluster.now += 590
    cluster.reconcile()
    assert stuck == cluster.pods[pod]["metadata"]["uid"]
    cluster.now += 20
    cluster.reconcile()
    assert 0 == cluster.status["failedPods"]
    assert "NotReady" == cluster.status["failures"][0]["reason"]
    cluster.finish_deletion(pod)
    cluster.now += 10
    cluster.reconcile()
    assert stuck != cluster.pods[pod]["metadata"]["uid"]


def test_a_rule_may_fail_a_job_whose_pods_are_not_ready_in_time() -> None:
    rule = {"action": "FailJob", "onReasons": ["NotReady"]}
    cluster = SimulatedCluster(spec(lifecycle={"readyTimeoutSeconds": 600, "failurePolicy": {"rules": [rule]}}))
    cluster.reconcile()
    cluster.run("math-worker-0", ready=False)
    cluster.now += 601
    cluster.reconcile()
    assert ("True", "NotReady") == cluster.condition("Failed")


def test_a_pod_without_a_node_is_never_stuck() -> None:
    cluster = SimulatedCluster(spec())
    cluster.reconcile()
    cluster.now += 10_000
    cluster.reconcile()
    assert 0 == cluster.status["failedPods"]


def test_every_condition_has_a_message() -> None:
    def without_message(cluster: SimulatedCluster) -> list[str]:
        return [condition["type"] for condition in cluster.status["conditions"] if not condition["message"]]

    new, running, invalid = SimulatedCluster(spec()), running_job(), SimulatedCluster(spec(redis={"url": "unix:///a"}))
    new.reconcile()
    invalid.reconcile()
    assert [[], [], []] == [without_message(cluster) for cluster in (new, running, invalid)]

    running.change(lifecycle={"suspend": True})
    running.execute(running.plan())
    assert [] == without_message(running)
    for _ in range(2):
        running.finish_deletions()
        running.reconcile()
    assert "Suspended" == running.status["state"]
    assert [] == without_message(running)


def test_the_conditions_for_other_tools_summarize_the_job() -> None:
    cluster = SimulatedCluster(spec())
    cluster.reconcile()
    assert ("False", "Starting") == cluster.condition("Ready")
    assert ("False", "Starting") == cluster.condition("Stalled")

    cluster = running_job()
    assert ("True", "Running") == cluster.condition("Ready")
    cluster.change(lifecycle={"suspend": True})
    cluster.execute(cluster.plan())
    assert ("False", "Suspending") == cluster.condition("Ready")
    for _ in range(2):
        cluster.finish_deletions()
        cluster.reconcile()
    assert ("True", "Suspended") == cluster.condition("Ready")

    cluster = running_job(lifecycle={"backoffLimit": 0})
    cluster.terminate("math-worker-0", 1)
    cluster.reconcile()
    assert ("False", "BackoffLimitExceeded") == cluster.condition("Ready")
    assert ("True", "BackoffLimitExceeded") == cluster.condition("Stalled")

    cluster = SimulatedCluster(spec(redis={"url": "unix:///redis"}))
    cluster.reconcile()
    assert ("False", "Invalid") == cluster.condition("Ready")
    assert ("True", "Invalid") == cluster.condition("Stalled")


@pytest.mark.parametrize("end", ["delete", "fail"])
def test_a_pod_that_does_not_terminate_does_not_keep_a_job_from_ending(end: str) -> None:
    cluster = running_job(lifecycle={"backoffLimit": 0})
    if end == "delete":
        cluster.delete_job()
    else:
        cluster.terminate("math-worker-0", 1)
    cluster.reconcile()
    for name in set(cluster.pods) - {"math-worker-1"}:
        cluster.finish_deletion(name)
    cluster.reconcile()
    assert ["math-worker-1"] == list(cluster.pods)
    cluster.now += 45 + 31
    cluster.reconcile()
    assert ["math-cleanup", "math-worker-1"] == sorted(cluster.pods)
    assert "PodNotTerminating" in {event.reason for event in cluster.events}
    cluster.terminate("math-cleanup", 0)
    cluster.reconcile()
    assert (cluster.job is None) == (end == "delete")


def test_a_head_that_does_not_terminate_has_a_successor() -> None:
    cluster = running_job()
    cluster.delete_pod("math-head")
    cluster.reconcile()
    assert ["math-head"] == cluster.heads()
    cluster.head = None
    cluster.now += 45 + 31
    cluster.reconcile()
    assert ["math-head", "math-head-r2"] == cluster.heads()
    assert ("Unknown", "PodNotTerminating") == cluster.condition("EngineReady")
    cluster.run("math-head-r2")
    cluster.finish_deletion("math-head")
    cluster.reconcile()
    assert ["math-head-r2"] == cluster.heads()


def test_a_job_that_suspends_reports_a_pod_that_does_not_terminate() -> None:
    cluster = running_job()
    cluster.change(lifecycle={"suspend": True})
    cluster.reconcile()
    assert ("False", "Draining") == cluster.condition("Suspended")
    cluster.finish_deletion("math-worker-0")
    cluster.finish_deletion("math-worker-1")
    cluster.now += 45 + 31
    cluster.reconcile()
    assert ("False", "PodNotTerminating") == cluster.condition("Suspended")
    cluster.finish_deletion("math-head")
    assert ["math-worker-2"] == list(cluster.pods)


def test_a_job_that_has_succeeded_is_reconciled_while_its_workers_run() -> None:
    cluster = running_job()
    cluster.terminate("math-head", 0, message="{}")
    cluster.reconcile()
    assert cluster.plan().requeue_after is not None
    cluster.now += 45 + 31
    cluster.lost_nodes.add("node-of-math-worker-0")
    cluster.reconcile()
    assert "math-worker-0" not in cluster.pods


def test_a_job_whose_first_worker_is_ready_is_soon_reconciled_again() -> None:
    cluster = running_job()
    cluster.head = HeadStatus()  # read a moment before the engines registered
    planned = cluster.plan()
    assert planned.requeue_after is not None
    assert planned.requeue_after <= 2.0
    cluster.head = head_status(cluster.workers())
    assert (cluster.plan().requeue_after or 0.0) > 2.0
