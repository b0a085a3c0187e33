"""Jobs that take settings from a runtime."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.support.planned_jobs import container_of, run_all, spec, suspend_and_resume
from tests.support.simulated_cluster import SimulatedCluster

RUNTIME: dict[str, Any] = {
    "image": {"name": "platform:1"},
    "workers": {"gpuResource": "amd.com/gpu", "gpusPerWorker": 8, "resources": {"cpu": "64"}},
}


def job_with_runtime(runtime: dict[str, Any] | None = RUNTIME, **sections: Any) -> SimulatedCluster:
    """Return a cluster with a new job that names a runtime."""
    reference = {"runtimeRef": {"name": "mi300x"}, "engine": {"tensorParallelSize": 8}}
    cluster = SimulatedCluster(spec(**{**reference, **sections}), runtime=copy.deepcopy(runtime))
    cluster.reconcile()
    return cluster


def test_a_job_takes_from_its_runtime_what_it_does_not_set_itself() -> None:
    cluster = job_with_runtime(workers={"resources": {"memory": "1Ti"}})
    container = container_of(cluster, "math-worker-0")
    assert {"amd.com/gpu": "8", "cpu": "64", "memory": "1Ti"} == container["resources"]["limits"]
    assert "platform:1" == container["image"]
    assert "platform:1" == container_of(cluster, "math-head")["image"]
    own = job_with_runtime(image={"name": "mine:1"}, workers={"gpusPerWorker": 16, "deviceClaimTemplate": "gpus"})
    assert "mine:1" == container_of(own, "math-worker-0")["image"]
    assert [{"name": "gpus"}] == container_of(own, "math-worker-0")["resources"]["claims"]
    assert ("True", "UpToDate") == own.condition("UpToDate")


def test_the_pods_read_a_manifest_with_the_settings_of_the_runtime() -> None:
    cluster = job_with_runtime()
    manifest = json.loads(cluster.objects["ConfigMap", "math-manifest"]["data"]["job.yaml"])
    assert "runtimeRef" not in manifest["spec"]
    assert 8 == manifest["spec"]["workers"]["gpusPerWorker"]


def test_a_job_waits_until_its_runtime_exists() -> None:
    cluster = job_with_runtime(None)
    assert ("False", "RuntimeNotFound") == cluster.condition("Accepted")
    assert ("False", "RuntimeNotFound") == cluster.condition("Ready")
    (event,) = cluster.events
    assert "RuntimeNotFound" == event.reason
    assert "spec.runtimeRef: ClusterRolloutRuntime mi300x does not exist" in event.message
    assert not cluster.pods
    cluster.runtime = copy.deepcopy(RUNTIME)
    cluster.reconcile()
    assert ("True", "Valid") == cluster.condition("Accepted")
    assert ["math-head"] == cluster.heads()


def test_an_error_says_that_the_runtime_has_the_field() -> None:
    cluster = job_with_runtime({"workers": {"gpusPerWorker": 6}})
    assert ("False", "Invalid") == cluster.condition("Accepted")
    assert "6 is not a multiple" in cluster.events[0].message
    assert "(set by ClusterRolloutRuntime mi300x)" in cluster.events[0].message
    assert "RolloutRuntime" not in job_with_runtime(workers={"gpusPerWorker": 6}).events[0].message


def test_a_changed_runtime_reaches_the_pods_when_the_job_is_resumed() -> None:
    cluster = job_with_runtime()
    run_all(cluster)
    cluster.runtime["image"]["name"] = "platform:2"
    cluster.delete_pod("math-worker-0", immediately=True)
    cluster.reconcile()
    assert "platform:1" == container_of(cluster, "math-worker-0")["image"]
    assert ("False", "ChangesPending") == cluster.condition("UpToDate")
    suspend_and_resume(cluster)
    assert "platform:2" == container_of(cluster, "math-worker-0")["image"]


def test_a_changed_runtime_is_rolled_out_if_the_job_wants_it() -> None:
    cluster = job_with_runtime(lifecycle={"updateStrategy": "RollingUpdate"})
    run_all(cluster)
    cluster.runtime["image"]["name"] = "platform:2"
    cluster.reconcile()
    assert ("False", "Updating") == cluster.condition("UpToDate")
    assert 1 == sum("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())


@pytest.mark.parametrize(
    ("runtime", "reason"), [(None, "RuntimeNotFound"), ({"workers": {"gpusPerWorker": 6}}, "InvalidUpdate")]
)
def test_a_running_job_keeps_its_settings_if_its_runtime_is_gone_or_does_not_fit(
    runtime: dict[str, Any] | None, reason: str
) -> None:
    cluster = job_with_runtime()
    run_all(cluster)
    cluster.runtime = runtime
    cluster.delete_pod("math-worker-0", immediately=True)
    cluster.reconcile()
    container = container_of(cluster, "math-worker-0")
    assert ("platform:1", "8") == (container["image"], container["resources"]["limits"]["amd.com/gpu"])
    assert ("True", "Valid") == cluster.condition("Accepted")
    assert ("False", reason) == cluster.condition("UpToDate")


def test_an_invalid_edit_of_a_running_job_with_a_runtime_is_reported_and_the_job_continues() -> None:
    cluster = job_with_runtime()
    run_all(cluster)
    cluster.change(workers={"gpusPerWorker": 12})  # which the API server cannot check without the runtime
    cluster.delete_pod("math-worker-0", immediately=True)
    cluster.reconcile()
    assert "8" == container_of(cluster, "math-worker-0")["resources"]["limits"]["amd.com/gpu"]
    assert ("False", "InvalidUpdate") == cluster.condition("UpToDate")
    cluster.change(lifecycle={"suspend": True})
    cluster.reconcile()
    assert "deletionTimestamp" in cluster.pods["math-worker-1"]["metadata"]


def test_a_job_that_has_ended_remains_so_when_its_manifest_becomes_invalid() -> None:
    cluster = job_with_runtime(lifecycle={"backoffLimit": 0})
    run_all(cluster)
    cluster.terminate("math-worker-0", 1)
    cluster.reconcile()
    assert "Failed" == cluster.status["state"]
    cluster.runtime = None
    cluster.change(workers={"gpusPerWorker": 12})
    del cluster.job["status"]["revision"]
    cluster.reconcile()
    assert ("False", "RuntimeNotFound") == cluster.condition("Accepted")
    assert "Failed" == cluster.status["state"]


def test_a_suspended_job_remains_so_without_its_runtime() -> None:
    cluster = job_with_runtime(lifecycle={"suspend": True})
    assert "Suspended" == cluster.status["state"]
    cluster.runtime = None
    cluster.reconcile()
    assert "Suspended" == cluster.status["state"]
    assert ("True", "Suspended") == cluster.condition("Suspended")


@pytest.mark.parametrize("suspended", [False, True])
def test_a_job_whose_runtime_is_gone_is_cleaned_up_when_it_is_deleted(suspended: bool) -> None:
    cluster = job_with_runtime()
    if suspended:
        cluster.change(lifecycle={"suspend": True})
        cluster.reconcile()
        assert "revision" not in cluster.status
    cluster.runtime = None
    cluster.delete_job()
    cluster.reconcile()
    assert ["math-cleanup"] == list(cluster.pods)


def test_another_model_cache_of_the_runtime_is_filled_and_used_when_the_job_is_resumed() -> None:
    cache = {"persistentVolumeClaim": "one", "prefetch": True}
    cluster = job_with_runtime({**RUNTIME, "model": {"cache": cache}}, lifecycle={"updateStrategy": "RollingUpdate"})
    cluster.terminate("math-prefetch", 0)
    cluster.reconcile()
    run_all(cluster)
    cluster.runtime["model"]["cache"]["persistentVolumeClaim"] = "two"
    cluster.reconcile()
    assert ("False", "ChangesPending") == cluster.condition("UpToDate")
    assert not any("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())
    suspend_and_resume(cluster)
    assert ["math-prefetch"] == list(cluster.pods)
    volumes = cluster.pods["math-prefetch"]["spec"]["volumes"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "two"}} in volumes
