"""Every manifest that the chart renders and the operator creates fits the API schemas of all supported releases."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml
from rollout_operator.objects import names
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.observed import ClusterInfo
from rollout_operator.objects.owned_objects import owned_objects, server_objects
from rollout_operator.objects.pods import cleanup_pod, head_pod, prefetch_pod, worker_pod

from rollout_api import parse_job
from rollout_api.manifest.status import PodGroup
from tests.support.cluster.chart import VALUE_SETS, render_chart
from tests.support.cluster.schemas import RELEASES, check_schemas
from tests.support.documentation import ROOT, blocks
from tests.support.manifests import rollout_job

SPEC: dict[str, Any] = {
    "model": {
        "uri": "Qwen/Qwen3-32B",
        "tokenSecretRef": {"name": "hf", "key": "token"},
        "cache": {"persistentVolumeClaim": "models", "prefetch": True},
    },
    "engine": {"tensorParallelSize": 4},
    "workers": {
        "replicas": 4,
        "gpusPerWorker": 8,
        "accelerator": "nvidia-h100",
        "resources": {"cpu": "32", "memory": "512Gi"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "nodeSelector": {"pool": "gpu"},
    },
    "weights": {"persistentVolumeClaim": "weights"},
    "server": {"replicas": 2, "tokensSecretName": "clients", "tlsSecretName": "certificate"},
    "image": {"pullPolicy": "Always", "pullSecrets": [{"name": "registry"}]},
    "priorityClassName": "high",
}
DEVICE_CLAIM: dict[str, Any] = {
    "gpusPerWorker": 8,
    "deviceClaimTemplate": "eight-gpus",
    "runtimeClassName": "nvidia",
    "resources": {"cpu": "32", "memory": "512Gi", "extended": {"rdma/hca": 1}},
}
"""Workers that get their GPUs by dynamic resource allocation."""
DEVICE_CLAIM_RELEASES = RELEASES[RELEASES.index("1.31") :]
"""The releases that know the current form of a pod's claims. Before 1.34, they have to be enabled in the cluster."""


def created_objects(**sections: Any) -> list[dict[str, Any]]:
    """Return everything that the operator creates for a job in a queue, with these sections of its spec replaced."""
    manifest = rollout_job(namespace="rl", **{**SPEC, **sections})
    group = PodGroup(name="math-1", queue="research", total_count=2)
    context = JobContext(parse_job(manifest), "uid", {names.QUEUE_LABEL: "research"}, "worker:1", pod_group=group)
    return [
        head_pod(context),
        worker_pod(context, 0, replacement=True),
        worker_pod(context, 3, replacement=False),
        prefetch_pod(context),
        cleanup_pod(context, delete_messages=True, reason="deleted"),
        *owned_objects(context, ClusterInfo(), workers=4),
        *server_objects(context),
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_the_objects_of_a_job_fit_the_schemas(release: str) -> None:
    check_schemas(created_objects(), release)


@pytest.mark.parametrize("release", DEVICE_CLAIM_RELEASES)
def test_workers_that_claim_devices_fit_the_schemas(release: str) -> None:
    check_schemas(created_objects(workers=DEVICE_CLAIM), release)


def objects_of_several_pods(gang_api: str | None) -> list[dict[str, Any]]:
    """Return what the operator creates for a worker of several pods in one rack, if the job is in no queue."""
    workers = {**SPEC["workers"], "podsPerWorker": 2, "gpusPerWorker": 16, "topologyKey": "example.com/rack"}
    sections = {**SPEC, "workers": workers, "engine": {"tensorParallelSize": 16}}
    job = parse_job(rollout_job(namespace="rl", **sections))
    context = JobContext(job, "uid", {}, "worker:1", cluster_gang_api=gang_api)
    pods = [worker_pod(context, 0, rank=rank, replacement=False) for rank in range(2)]
    cluster = ClusterInfo(gang_api=gang_api)
    groups = [made for made in owned_objects(context, cluster, workers=1) if made["kind"] == names.GANG_KIND]
    return pods + groups


@pytest.mark.parametrize("release", RELEASES)
def test_workers_of_several_pods_fit_the_schemas(release: str) -> None:
    check_schemas(objects_of_several_pods(None), release)


def test_the_examples_of_pod_templates_give_valid_workers() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    examples = [yaml.safe_load(content) for _, content in blocks(page, "yaml") if "podTemplate" in content]
    sections = [example.get("workers", example) for example in examples if "spec" not in example]
    spread, rdma = [
        worker_pod(JobContext(parse_job(rollout_job(workers=workers)), "uid", {}, "worker:1"), 0, replacement=False)
        for workers in sections
    ]
    check_schemas([spread, rdma], RELEASES[-1])
    assert not spread["spec"]["affinity"]
    assert "topologySpreadConstraints" in spread["spec"]
    assert "NCCL_IB_HCA" in [variable["name"] for variable in rdma["spec"]["containers"][0]["env"]]


def test_native_pod_groups_fit_the_schemas() -> None:
    leader, follower, group = objects_of_several_pods(names.NATIVE_GANG_API)
    assert (names.NATIVE_GANG_API, names.GANG_KIND) == (group["apiVersion"], group["kind"])
    check_schemas([leader, follower, group], RELEASES[-1])
    group["spec"]["minMember"] = 2
    with pytest.raises(kubernetes_validate.ValidationError, match="minMember"):
        check_schemas([group], RELEASES[-1])


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_the_chart_fits_the_schemas(values: dict[str, Any]) -> None:
    manifests = render_chart("rl", **values)
    for release in RELEASES:
        check_schemas(manifests, release)


def test_a_misspelt_field_does_not_fit() -> None:
    pod, *_ = created_objects()
    pod["spec"]["restartPolicies"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolicies"):
        check_schemas([pod], RELEASES[-1])
