"""The download of the model before other pods start."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_operator.objects import names
from rollout_operator.planning.actions import DeletePod

from rollout_api.protocol.status import EXIT_MODEL
from tests.support.planned_jobs import spec
from tests.support.simulated_cluster import SimulatedCluster


def prefetching_job(**sections: Any) -> SimulatedCluster:
    """Return a cluster with a new job whose model is downloaded into a claim first."""
    cache = {"persistentVolumeClaim": "models", "prefetch": True}
    queued = sections.pop("queued", False)
    cluster = SimulatedCluster(spec(model={"cache": cache}, **sections), queued=queued)
    cluster.reconcile()
    return cluster


def test_the_model_is_downloaded_once_before_the_head_and_the_workers_are_created() -> None:
    cluster = prefetching_job()
    assert ["math-prefetch"] == list(cluster.pods)
    cluster.run("math-prefetch")
    cluster.reconcile()
    assert "Starting" == cluster.status["state"]
    assert ("False", "PrefetchingModel") == cluster.condition("WorkersReady")
    assert ("False", "PrefetchingModel") == cluster.condition("Ready")
    cluster.terminate("math-prefetch", 0)
    cluster.reconcile()
    assert {"math-head", "math-worker-0", "math-worker-1", "math-worker-2"} == set(cluster.pods)
    cluster.delete_pod("math-head", immediately=True)
    cluster.reconcile()
    assert not cluster.prefetch_pods()


def test_the_pod_that_has_downloaded_the_model_is_deleted_only_after_the_status_says_so() -> None:
    cluster = prefetching_job()
    cluster.terminate("math-prefetch", 0)
    first = cluster.plan()
    assert "models" == first.status["modelPrefetch"]["persistentVolumeClaim"]
    assert not [action for action in first.actions if isinstance(action, DeletePod)]
    cluster.execute(first, 1)  # the operator is killed after it has written the status
    cluster.reconcile()
    assert ["math-head"] == cluster.heads()
    assert not cluster.prefetch_pods()


def test_a_failed_download_is_recorded_counted_and_repeated_after_a_backoff() -> None:
    cluster = prefetching_job(lifecycle={"backoffLimit": 1})
    cluster.terminate("math-prefetch", EXIT_MODEL, message="model 'Qwen/Qwen3-8B' is not available")
    cluster.reconcile()
    (failure,) = cluster.status["failures"]
    assert ("prefetch", "ModelNotFound", True) == (failure["component"], failure["reason"], failure["counted"])
    assert ("False", "PrefetchingModel") == cluster.condition("WorkersReady")
    messages = [one["message"] for one in cluster.status["conditions"] if one["type"] == "WorkersReady"]
    assert "The last attempt has failed: ModelNotFound." in messages[0]
    assert "ModelNotFound" in {event.reason for event in cluster.events}
    assert not cluster.pods
    cluster.now += 10
    cluster.reconcile()
    assert ["math-prefetch"] == list(cluster.pods)
    cluster.terminate("math-prefetch", EXIT_MODEL)
    cluster.reconcile()
    assert "Failed" == cluster.status["state"]
    assert ("True", "BackoffLimitExceeded") == cluster.condition("Failed")


def test_a_rule_may_fail_a_job_whose_model_cannot_be_downloaded() -> None:
    rule = {"action": "FailJob", "component": "prefetch", "onReasons": ["ModelNotFound"]}
    cluster = prefetching_job(lifecycle={"failurePolicy": {"rules": [rule]}})
    cluster.terminate("math-prefetch", EXIT_MODEL)
    cluster.reconcile()
    assert ("True", "ModelNotFound") == cluster.condition("Failed")


def test_a_download_that_cannot_start_is_reported_and_follows_changed_settings() -> None:
    cluster = prefetching_job(image={"name": "wrong:1"})
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    cluster.pods["math-prefetch"]["status"]["containerStatuses"] = [{"name": "prefetch", "state": {"waiting": waiting}}]
    cluster.reconcile()
    assert ("False", "ImagePullBackOff") == cluster.condition("WorkersReady")
    assert "ImagePullBackOff" in {event.reason for event in cluster.events}
    cluster.change(image={"name": "right:1"})
    cluster.reconcile()
    (container,) = cluster.pods["math-prefetch"]["spec"]["containers"]
    assert "right:1" == container["image"]


@pytest.mark.parametrize("resumes", [False, True])
def test_a_job_may_be_suspended_or_deleted_while_its_model_is_downloaded(resumes: bool) -> None:
    cluster = prefetching_job()
    cluster.run("math-prefetch")
    if resumes:
        cluster.change(lifecycle={"suspend": True})
    else:
        cluster.delete_job()
    cluster.reconcile()
    assert "deletionTimestamp" in cluster.pods["math-prefetch"]["metadata"]
    cluster.finish_deletion("math-prefetch")
    cluster.reconcile()
    assert not cluster.prefetch_pods()
    if not resumes:
        assert ["math-cleanup"] == list(cluster.pods)
        return
    assert "Suspended" == cluster.status["state"]
    cluster.change(lifecycle={"suspend": False})
    cluster.reconcile()
    assert ["math-prefetch"] == list(cluster.pods)


@pytest.fixture
def cluster() -> SimulatedCluster:
    """A job that downloads its model into a claim of its runtime."""
    cache = {"persistentVolumeClaim": "one", "prefetch": True}
    cluster = SimulatedCluster(
        spec(runtimeRef={"name": "h100"}), runtime={"model": {"cache": cache}, "workers": {"gpusPerWorker": 1}}
    )
    cluster.reconcile()
    cluster.run("math-prefetch")
    return cluster


def test_a_download_into_another_claim_does_not_count(cluster: SimulatedCluster) -> None:
    cluster.runtime["model"]["cache"]["persistentVolumeClaim"] = "two"
    cluster.reconcile()
    assert "deletionTimestamp" in cluster.pods["math-prefetch"]["metadata"]
    cluster.terminate("math-prefetch", 0)  # within its grace period
    cluster.reconcile()
    assert "modelPrefetch" not in cluster.status
    assert [] == cluster.heads()


def test_the_pod_of_a_download_is_removed_if_the_runtime_has_no_cache_any_more(cluster: SimulatedCluster) -> None:
    del cluster.runtime["model"]
    cluster.reconcile()
    cluster.finish_deletion("math-prefetch")
    cluster.reconcile()
    assert ["math-head"] == cluster.heads()
    assert [] == cluster.prefetch_pods()


def test_a_resumed_job_keeps_the_model_that_was_downloaded() -> None:
    cluster = prefetching_job()
    cluster.terminate("math-prefetch", 0)
    cluster.reconcile()
    cluster.change(lifecycle={"suspend": True})
    cluster.reconcile()
    assert "Suspended" == cluster.status["state"]
    cluster.change(lifecycle={"suspend": False})
    cluster.reconcile()
    assert ["math-head"] == cluster.heads()
    assert not cluster.prefetch_pods()


def test_the_group_of_a_queue_is_formed_after_the_model_was_downloaded() -> None:
    cluster = prefetching_job(queued=True)
    assert names.QUEUE_LABEL not in cluster.pods["math-prefetch"]["metadata"]["labels"]
    assert "podGroup" not in cluster.status
    assert ("Unknown", "PrefetchingModel") == cluster.condition("QuotaReserved")
    assert "Starting" == cluster.status["state"]
    cluster.terminate("math-prefetch", 0)
    cluster.reconcile()
    assert 2 == cluster.status["podGroup"]["totalCount"]
    assert ("False", "Pending") == cluster.condition("QuotaReserved")
