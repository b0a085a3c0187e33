"""What pods are like: security, GPUs, secrets, and what users override."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rollout_operator.cluster import Cluster
from rollout_operator.objects import objects
from rollout_operator.pods import JobIdentity, end_pod, head_pod, worker_pod

from rollout_api import parse_job


def identity(**sections: Any) -> JobIdentity:
    spec = {"source": {"trainer": {}}, "model": {"uri": "Qwen/Qwen3-8B"}, **sections}
    manifest = {
        "apiVersion": "das.rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "math", "namespace": "rl"},
        "spec": spec,
    }
    return JobIdentity(parse_job(manifest), "the-uid", {}, "worker:1")


def all_pods(about: JobIdentity) -> list[dict[str, Any]]:
    end = end_pod(about, delete=False, reason="why")
    return [head_pod(about), worker_pod(about, 0, replacement=False), end]


def test_all_pods_pass_the_restricted_profile() -> None:
    """Kubernetes' Pod Security Standards, restricted."""
    for pod in all_pods(identity()):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert "RuntimeDefault" == security["seccompProfile"]["type"]
        assert not pod["spec"]["automountServiceAccountToken"]
        for container in pod["spec"]["containers"]:
            limits = container["securityContext"]
            assert not limits["allowPrivilegeEscalation"]
            assert limits["readOnlyRootFilesystem"]
            assert {"drop": ["ALL"]} == limits["capabilities"]
        assert {"configMap", "emptyDir", "persistentVolumeClaim"} >= {
            kind for volume in pod["spec"]["volumes"] for kind in volume if kind != "name"
        }


def test_gpus_are_asked_for_and_found_by_any_clouds_labels() -> None:
    about = identity(
        engine={"tensorParallelSize": 2},
        workers={"gpusPerWorker": 8, "accelerator": "nvidia-h100", "sharedMemory": "32Gi"},
    )
    pod = worker_pod(about, 0, replacement=False)
    (container,) = pod["spec"]["containers"]
    assert "8" == container["resources"]["limits"]["nvidia.com/gpu"]
    assert 4 == about.job.spec.engines_per_worker
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["spec"]["tolerations"]
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = {term["matchExpressions"][0]["key"] for term in affinity["nodeSelectorTerms"]}
    assert {"nvidia.com/gpu.product", "cloud.google.com/gke-accelerator"} <= keys
    shm = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")
    assert {"medium": "Memory", "sizeLimit": "32Gi"} == shm["emptyDir"]
    assert "nvidia.com/gpu" not in json.dumps(head_pod(about)["spec"]["containers"])


def test_a_cpu_worker_asks_for_no_gpu() -> None:
    pod = worker_pod(identity(workers={"gpusPerWorker": 0}), 0, replacement=False)
    assert "nvidia" not in json.dumps(pod)


@pytest.mark.parametrize(
    ("redis", "expected"),
    [
        ({}, {"secretKeyRef": {"name": "rollout-redis", "key": "url"}}),
        ({"urlFrom": {"secretKeyRef": {"name": "mine", "key": "u"}}}, {"secretKeyRef": {"name": "mine", "key": "u"}}),
    ],
)
def test_credentials_come_by_reference_only(redis: dict[str, Any], expected: dict[str, Any]) -> None:
    about = identity(redis=redis, model={"uri": "a/b", "tokenSecretRef": {"name": "hf", "key": "token"}})
    for pod in all_pods(about):
        variables = {one["name"]: one for one in pod["spec"]["containers"][0]["env"]}
        assert expected == variables["ROLLOUT_REDIS_URL"]["valueFrom"]
        assert {"secretKeyRef": {"name": "hf", "key": "token"}} == variables["HF_TOKEN"]["valueFrom"]


@pytest.mark.parametrize(
    ("redis", "expected"),
    [
        (
            {"urlFrom": {"secretKeyRef": {"name": "large", "key": "u"}}},
            {"valueFrom": {"secretKeyRef": {"name": "large", "key": "u"}}},
        ),
        ({"url": "redis+cluster://a:6379,b:6379"}, {"value": "redis+cluster://a:6379,b:6379"}),
    ],
)
def test_a_history_elsewhere_is_made_known_to_all_pods_and_not_by_the_manifest(
    redis: dict[str, Any], expected: dict[str, Any]
) -> None:
    about = identity(history={"name": "shared", "redis": redis})
    for pod in all_pods(about):
        variables = {one["name"]: one for one in pod["spec"]["containers"][0]["env"]}
        assert {"name": "ROLLOUT_HISTORY_REDIS_URL", **expected} == variables["ROLLOUT_HISTORY_REDIS_URL"]
        assert "rollout-redis" == variables["ROLLOUT_REDIS_URL"]["valueFrom"]["secretKeyRef"]["name"]
    made = next(one for one in objects(about, Cluster()) if one["metadata"]["name"] == "math-manifest")
    manifest = json.loads(made["data"]["job.yaml"])
    assert {"name": "shared"} == manifest["spec"]["history"]
    assert parse_job(manifest).spec.history.redis.url is None


def test_a_history_beside_the_messages_needs_no_url_of_its_own() -> None:
    for pod in all_pods(identity()):
        assert "ROLLOUT_HISTORY_REDIS_URL" not in {one["name"] for one in pod["spec"]["containers"][0]["env"]}


def test_a_template_adds_what_there_is_no_field_for_and_takes_nothing_that_pods_are_found_by() -> None:
    template = {
        "metadata": {"labels": {"team": "rl", "app.kubernetes.io/managed-by": "me"}, "annotations": {"note": "x"}},
        "spec": {
            "hostIPC": False,
            "containers": [{"name": "worker", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
        },
    }
    pod = worker_pod(identity(workers={"podTemplate": template}), 3, replacement=True)
    assert "rl" == pod["metadata"]["labels"]["team"]
    assert "das-rollout" == pod["metadata"]["labels"]["app.kubernetes.io/managed-by"]
    assert {"note": "x", "das.rollout.dev/replacement": "true"} == pod["metadata"]["annotations"]
    assert "math-worker-3" == pod["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert "INFO" == next(one["value"] for one in container["env"] if one["name"] == "NCCL_DEBUG")
    assert "worker:1" == container["image"]


def test_the_manifest_in_the_pods_is_one_that_rollout_head_accepts() -> None:
    about = identity(
        workers={"replicas": 4, "maxReplicas": 8, "minReplicas": 2, "autoscale": True, "podTemplate": {"spec": {}}},
        weights={"persistentVolumeClaim": "policy"},
        lifecycle={"ttlSecondsAfterFinished": 5},
        redis={"urlFrom": {"secretKeyRef": {"name": "mine", "key": "u"}}},
    )
    made = {one["kind"] + one["metadata"]["name"]: one for one in objects(about, Cluster())}
    manifest = json.loads(made["ConfigMapmath-manifest"]["data"]["job.yaml"])
    job = parse_job(manifest)
    assert ["/weights"] == job.spec.weights.allowed_roots
    assert "podTemplate" not in json.dumps(manifest)
    # scaling does not change it: no pod would read it again
    scaled = identity(
        workers={"replicas": 5, "maxReplicas": 8, "minReplicas": 2, "autoscale": True},
        weights={"persistentVolumeClaim": "policy"},
    )
    again = {one["kind"] + one["metadata"]["name"]: one for one in objects(scaled, Cluster())}
    assert made["ConfigMapmath-manifest"]["data"] == again["ConfigMapmath-manifest"]["data"]


def test_a_url_without_credentials_is_published_as_it_is() -> None:
    about = identity(redis={"url": "redis://redis.example:6379/0"})
    connection = next(one for one in objects(about, Cluster()) if one["metadata"]["name"] == "math-connection")
    assert "redis://redis.example:6379/0" == connection["data"]["url"]
    assert "secretName" not in connection["data"]


@pytest.mark.parametrize(
    ("history", "published"),
    [
        ({}, {}),
        ({"url": "redis+cluster://n1.example"}, {"historyUrl": "redis+cluster://n1.example"}),
        (
            {"urlFrom": {"secretKeyRef": {"name": "history-redis", "key": "uri"}}},
            {"historySecretName": "history-redis", "historySecretKey": "uri"},
        ),
    ],
)
def test_trainers_learn_where_the_history_is_if_not_with_the_messages(
    history: dict[str, Any], published: dict[str, str]
) -> None:
    about = identity(history={"redis": history})
    made = next(one for one in objects(about, Cluster()) if one["metadata"]["name"] == "math-connection")
    assert published == {name: value for name, value in made["data"].items() if name.startswith("history")}
