"""The pods of a job: security, GPUs, secrets, and overrides by users."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rollout_operator.cluster_info import ClusterInfo
from rollout_operator.job_context import JobContext
from rollout_operator.owned_objects import owned_objects
from rollout_operator.pods import cleanup_pod, head_pod, worker_pod

from rollout_api import parse_job


def job_context(**sections: Any) -> JobContext:
    spec = {"source": {"trainer": {}}, "model": {"uri": "Qwen/Qwen3-8B"}, **sections}
    manifest = {
        "apiVersion": "das.rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "math", "namespace": "rl"},
        "spec": spec,
    }
    return JobContext(parse_job(manifest), "the-uid", {}, "worker:1")


def all_pods(context: JobContext) -> list[dict[str, Any]]:
    cleanup = cleanup_pod(context, delete_messages=False, reason="why")
    return [head_pod(context), worker_pod(context, 0, replacement=False), cleanup]


def test_all_pods_satisfy_the_restricted_pod_security_standard() -> None:
    for pod in all_pods(job_context()):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert "RuntimeDefault" == security["seccompProfile"]["type"]
        assert not pod["spec"]["automountServiceAccountToken"]
        for container in pod["spec"]["containers"]:
            restrictions = container["securityContext"]
            assert not restrictions["allowPrivilegeEscalation"]
            assert restrictions["readOnlyRootFilesystem"]
            assert {"drop": ["ALL"]} == restrictions["capabilities"]
        assert {"configMap", "emptyDir", "persistentVolumeClaim"} >= {
            kind for volume in pod["spec"]["volumes"] for kind in volume if kind != "name"
        }


def test_gpu_workers_request_gpus_and_match_the_labels_of_any_cloud() -> None:
    context = job_context(
        engine={"tensorParallelSize": 2},
        workers={"gpusPerWorker": 8, "accelerator": "nvidia-h100", "sharedMemory": "32Gi"},
    )
    pod = worker_pod(context, 0, replacement=False)
    (container,) = pod["spec"]["containers"]
    assert "8" == container["resources"]["limits"]["nvidia.com/gpu"]
    assert 4 == context.job.spec.engines_per_worker
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["spec"]["tolerations"]
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = {term["matchExpressions"][0]["key"] for term in affinity["nodeSelectorTerms"]}
    assert {"nvidia.com/gpu.product", "cloud.google.com/gke-accelerator"} <= keys
    shm = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm")
    assert {"medium": "Memory", "sizeLimit": "32Gi"} == shm["emptyDir"]
    assert "nvidia.com/gpu" not in json.dumps(head_pod(context)["spec"]["containers"])


def test_a_cpu_worker_requests_no_gpu() -> None:
    pod = worker_pod(job_context(workers={"gpusPerWorker": 0}), 0, replacement=False)
    assert "nvidia" not in json.dumps(pod)


@pytest.mark.parametrize(
    ("redis", "expected"),
    [
        ({}, {"secretKeyRef": {"name": "rollout-redis", "key": "url"}}),
        ({"urlFrom": {"secretKeyRef": {"name": "mine", "key": "u"}}}, {"secretKeyRef": {"name": "mine", "key": "u"}}),
    ],
)
def test_credentials_are_passed_by_reference_only(redis: dict[str, Any], expected: dict[str, Any]) -> None:
    context = job_context(redis=redis, model={"uri": "a/b", "tokenSecretRef": {"name": "hf", "key": "token"}})
    for pod in all_pods(context):
        variables = {variable["name"]: variable for variable in pod["spec"]["containers"][0]["env"]}
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
def test_the_url_of_a_separate_history_store_reaches_all_pods_outside_the_manifest(
    redis: dict[str, Any], expected: dict[str, Any]
) -> None:
    context = job_context(history={"name": "shared", "redis": redis})
    for pod in all_pods(context):
        variables = {variable["name"]: variable for variable in pod["spec"]["containers"][0]["env"]}
        assert {"name": "ROLLOUT_HISTORY_REDIS_URL", **expected} == variables["ROLLOUT_HISTORY_REDIS_URL"]
        assert "rollout-redis" == variables["ROLLOUT_REDIS_URL"]["valueFrom"]["secretKeyRef"]["name"]
    config_map = next(
        resource
        for resource in owned_objects(context, ClusterInfo(), workers=1)
        if resource["metadata"]["name"] == "math-manifest"
    )
    manifest = json.loads(config_map["data"]["job.yaml"])
    assert {"name": "shared"} == manifest["spec"]["history"]
    assert parse_job(manifest).spec.history.redis.url is None


def test_a_history_in_the_message_store_needs_no_separate_url() -> None:
    for pod in all_pods(job_context()):
        assert "ROLLOUT_HISTORY_REDIS_URL" not in {variable["name"] for variable in pod["spec"]["containers"][0]["env"]}


def test_a_pod_template_adds_fields_but_cannot_change_the_identifying_labels() -> None:
    template = {
        "metadata": {
            "labels": {"team": "rl", "app.kubernetes.io/managed-by": "me"},
            "annotations": {"note": "x", "karpenter.sh/do-not-disrupt": "false"},
        },
        "spec": {
            "hostIPC": False,
            "containers": [{"name": "worker", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
        },
    }
    pod = worker_pod(job_context(workers={"podTemplate": template}), 3, replacement=True)
    assert "rl" == pod["metadata"]["labels"]["team"]
    assert "das-rollout" == pod["metadata"]["labels"]["app.kubernetes.io/managed-by"]
    assert {
        "note": "x",
        "karpenter.sh/do-not-disrupt": "false",
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        "das.rollout.dev/replacement": "true",
    } == pod["metadata"]["annotations"]
    assert "math-worker-3" == pod["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert "INFO" == next(variable["value"] for variable in container["env"] if variable["name"] == "NCCL_DEBUG")
    assert "worker:1" == container["image"]


def test_the_head_has_requests_and_is_not_moved_by_autoscalers_of_nodes() -> None:
    head = head_pod(job_context())
    (container,) = head["spec"]["containers"]
    assert {"requests": {"cpu": "500m", "memory": "1Gi"}} == container["resources"]
    assert "true" == head["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"]
    (container,) = head_pod(job_context(head={"resources": {"cpu": "2"}}))["spec"]["containers"]
    assert {"requests": {"cpu": "2"}, "limits": {"cpu": "2"}} == container["resources"]


def test_the_cleanup_pod_takes_over_what_the_head_needs() -> None:
    template = {
        "spec": {
            "activeDeadlineSeconds": 86400,
            "initContainers": [{"name": "download", "image": "downloader"}],
            "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "containers": [
                {
                    "name": "head",
                    "command": ["debug"],
                    "args": ["--verbose"],
                    "resources": {"limits": {"memory": "8Gi"}},
                    "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
                },
                {"name": "sidecar", "image": "mesh"},
            ],
        }
    }
    toleration = {"key": "dedicated", "operator": "Exists"}
    head = {"podTemplate": template, "tolerations": [toleration], "nodeSelector": {"pool": "cpu"}}
    spec = cleanup_pod(job_context(head=head), delete_messages=False, reason="x")["spec"]
    (container,) = spec["containers"]
    assert "cleanup" == container["name"]
    assert {"name": "ca", "mountPath": "/ca"} in container["volumeMounts"]
    assert {"name": "ca", "configMap": {"name": "ca"}} in spec["volumes"]
    assert {"cpu": "100m", "memory": "512Mi"} == container["resources"]["limits"]
    assert ["rollout", "end"] == container["command"]
    assert "--uid=" in container["args"][1]
    assert "initContainers" not in spec
    assert 60 == spec["activeDeadlineSeconds"]
    assert toleration in spec["tolerations"]
    assert {"pool": "cpu"} == spec["nodeSelector"]


def test_the_manifest_in_the_pods_is_accepted_by_rollout_head() -> None:
    context = job_context(
        workers={"replicas": 4, "maxReplicas": 8, "minReplicas": 2, "autoscale": True, "podTemplate": {"spec": {}}},
        weights={"persistentVolumeClaim": "policy"},
        lifecycle={"ttlSecondsAfterFinished": 5},
        redis={"urlFrom": {"secretKeyRef": {"name": "mine", "key": "u"}}},
    )
    objects = {
        resource["kind"] + resource["metadata"]["name"]: resource
        for resource in owned_objects(context, ClusterInfo(), workers=1)
    }
    manifest = json.loads(objects["ConfigMapmath-manifest"]["data"]["job.yaml"])
    job = parse_job(manifest)
    assert ["/weights"] == job.spec.weights.allowed_roots
    assert "podTemplate" not in json.dumps(manifest)
    # Scaling does not change the manifest, because no pod would read it again.
    scaled = job_context(
        workers={"replicas": 5, "maxReplicas": 8, "minReplicas": 2, "autoscale": True},
        weights={"persistentVolumeClaim": "policy"},
    )
    rescaled = {
        resource["kind"] + resource["metadata"]["name"]: resource
        for resource in owned_objects(scaled, ClusterInfo(), workers=1)
    }
    assert objects["ConfigMapmath-manifest"]["data"] == rescaled["ConfigMapmath-manifest"]["data"]


def test_a_url_without_credentials_is_published_unchanged() -> None:
    context = job_context(redis={"url": "redis://redis.example:6379/0"})
    connection = next(
        resource
        for resource in owned_objects(context, ClusterInfo(), workers=1)
        if resource["metadata"]["name"] == "math-connection"
    )
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
def test_the_location_of_a_separate_history_store_is_published_to_trainers(
    history: dict[str, Any], published: dict[str, str]
) -> None:
    context = job_context(history={"redis": history})
    config_map = next(
        resource
        for resource in owned_objects(context, ClusterInfo(), workers=1)
        if resource["metadata"]["name"] == "math-connection"
    )
    assert published == {name: value for name, value in config_map["data"].items() if name.startswith("history")}
