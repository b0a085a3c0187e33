"""The watches deliver the objects of jobs, and the namespaces that are selected."""

from __future__ import annotations

from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiClient
from rollout_operator.__main__ import parse_arguments
from rollout_operator.cluster.http_server import MetricsCollector
from rollout_operator.cluster.kubernetes_api import KubernetesApi
from rollout_operator.cluster.object_cache import ObjectCache, SelectedNamespaces, job_key
from rollout_operator.cluster.reconciler import Reconciler
from rollout_operator.objects import names

from rollout_api.manifest.rollout_job import API_VERSION, KIND


def owned(name: str, uid: str, owner: str = "job-uid", **more: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "rl",
            "uid": uid,
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {names.COMPONENT_LABEL: names.WORKER, names.SLOT_LABEL: "0"},
            "ownerReferences": [names.owner_reference({"name": "math", "uid": owner}, API_VERSION, KIND)],
            "managedFields": [{"manager": "kubectl"}],
        },
        **more,
    }


KEY = ("rl", "math")


def test_pods_belong_to_the_job_with_the_owner_uid_not_to_another_of_the_same_name() -> None:
    cache = ObjectCache()
    assert KEY == cache.update(owned("w", "1"), "Pod")
    assert KEY == cache.update(owned("v", "2", owner="uid-of-an-earlier-job"), "Pod")
    assert ["w"] == [pod.name for pod in cache.pods(KEY, "job-uid")]


def test_an_unchanged_object_causes_no_reconcile() -> None:
    cache = ObjectCache()
    assert KEY == cache.update(owned("c", "1", data={"a": "1"}), "ConfigMap")
    assert cache.update(owned("c", "1", data={"a": "1"}), "ConfigMap") is None
    assert KEY == cache.update(owned("c", "1", data={"a": "2"}), "ConfigMap")


def test_objects_of_other_owners_are_ignored() -> None:
    cache = ObjectCache()
    other = owned("c", "1")
    other["metadata"]["ownerReferences"][0]["kind"] = "Deployment"
    assert cache.update(other, "ConfigMap") is None
    assert {} == cache.objects(KEY, "job-uid")


def test_a_late_deletion_event_does_not_remove_a_newer_pod_of_the_same_name() -> None:
    cache = ObjectCache()
    cache.update(owned("w", "1"), "Pod")
    cache.update(owned("w", "2"), "Pod")
    cache.remove("1")
    assert ["2"] == [pod.uid for pod in cache.pods(KEY, "job-uid")]
    cache.remove("2")
    assert () == cache.pods(KEY, "job-uid")


def test_uids_by_namespace_and_removal() -> None:
    cache = ObjectCache()
    cache.update(owned("w", "1"), "Pod")
    cache.update(owned("c", "2"), "ConfigMap")
    assert ({"1"}, {"2"}) == (cache.uids("Pod", ""), cache.uids("ConfigMap", "rl"))
    assert set() == cache.uids("Pod", "other")
    assert KEY == cache.remove("2")
    assert set() == cache.uids("ConfigMap", "")


def versioned(name: str, uid: str, version: int, **more: Any) -> dict[str, Any]:
    body = owned(name, uid, **more)
    body["metadata"]["resourceVersion"] = str(version)
    return body


def test_a_response_older_than_the_watch_changes_nothing() -> None:
    cache = ObjectCache()
    running = versioned("w", "1", 7, status={"phase": "Running"})
    cache.update(running, "Pod")
    cache.update_from_response(versioned("w", "1", 5), "Pod")
    assert ["Running"] == [pod.phase for pod in cache.pods(KEY, "job-uid")]
    cache.remove("1")
    cache.update_from_response(versioned("w", "1", 6), "Pod")
    assert () == cache.pods(KEY, "job-uid")
    cache.update_from_response(versioned("w", "2", 8), "Pod")
    assert ["2"] == [pod.uid for pod in cache.pods(KEY, "job-uid")]


def test_a_response_about_a_job_is_used_if_it_is_newer() -> None:
    cache = ObjectCache()

    def job(version: int, state: str) -> dict[str, Any]:
        metadata = {"namespace": "rl", "name": "math", "uid": "job-uid", "resourceVersion": str(version)}
        return {"metadata": metadata, "status": {"state": state}}

    cache.update_job(job(5, "Running"))
    cache.update_job_from_response(job(4, "Starting"))
    assert {KEY: {"state": "Running"}} == cache.statuses()
    cache.update_job_from_response(job(9, "Suspended"))
    assert {KEY: {"state": "Suspended"}} == cache.statuses()
    cache.remove_job(job_key(job(9, "Suspended")))
    cache.update_job_from_response(job(10, "Failed"))
    assert {} == cache.statuses()


def namespace(name: str, uid: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": uid}}


def test_the_selected_namespaces_follow_the_watch() -> None:
    changes: list[str] = []
    selected = SelectedNamespaces(changes.append)
    for _ in range(2):
        selected.update(namespace("a", "1"), "Namespace")
    selected.update(namespace("b", "2"), "Namespace")
    assert "a" in selected
    assert "c" not in selected
    # The namespace was deleted and created again, and the deletion is reported late.
    selected.update(namespace("b", "3"), "Namespace")
    selected.remove("2")
    assert "b" in selected
    assert {"1", "3"} == selected.uids("Namespace", "")
    selected.remove("1")
    selected.remove("1")
    assert "a" not in selected
    assert ["a", "b", "b", "a"] == changes


async def test_the_jobs_of_a_namespace_that_is_selected_are_reconciled_and_counted() -> None:
    api, cache = KubernetesApi(cast(ApiClient, None)), ObjectCache()
    reconciler = Reconciler(api, cache, "image")
    selected = SelectedNamespaces(reconciler.reconcile_namespace)
    reconciler.namespaces = selected
    for name in ("a", "b"):
        metadata = {"namespace": name, "name": "math", "uid": name, "resourceVersion": "1"}
        status = {"state": "Starting", "workers": {"gpus": 16}} if name == "b" else None
        cache.update_job({"metadata": metadata, "spec": {}, "status": status})

    def samples(metric: str) -> list[tuple[dict[str, str], float]]:
        families = MetricsCollector(api, cache, reconciler, None).collect()
        return [(sample.labels, sample.value) for one in families if one.name == metric for sample in one.samples]

    assert 0 == len(reconciler.queue)
    assert [] == samples("rollout_operator_jobs") == samples("rollout_operator_job_state")
    selected.update(namespace("b", "1"), "Namespace")
    assert ("b", "math") == await reconciler.queue.get()
    assert 0 == len(reconciler.queue)
    assert [({"state": "Starting"}, 1)] == samples("rollout_operator_jobs")
    job = {"namespace": "b", "job": "b/math"}
    assert [(job | {"state": "Starting"}, 1)] == samples("rollout_operator_job_state")
    assert [(job, 16)] == samples("rollout_operator_job_gpus")


def test_namespaces_are_named_or_selected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--worker-image=w", "--namespace=a", "--namespace-selector=b=c"])
    assert "exclude each other" in capsys.readouterr().err
