"""Invalid manifests: the API server rejects most of them, and the operator reports the others.

Both name the field, and ``rollout check`` rejects the same manifests.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.client import ApiException
from rollout_operator.objects import names
from rollout_operator.objects.owned_objects import needs_apply

from rollout_api import ManifestError, parse_job
from rollout_api.manifest.rollout_job import KIND
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.jobs import Jobs

EXAMPLES = Path(__file__).parents[3] / "examples"
TOO_LONG = "a" * 46
"""A name that leaves no room for the suffixes of pod names."""

REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"source": None}, "spec.source"),
    ({"source": {"dataset": {"tasks": [{"name": "a", "generator": "chain_sum"}]}}}, "dataset or trainer"),
    ({"source": {"trainer": None, "dataset": {"tasks": []}}}, "spec.source.dataset.tasks"),
    ({"source": {"trainer": None, "dataset": {"tasks": [{"name": "A!", "generator": "x"}]}}}, "tasks[0].name"),
    (
        {"source": {"trainer": None, "dataset": {"tasks": [{"name": "a", "generator": "x"}] * 2}}},
        "spec.source.dataset.tasks",
    ),
    (
        {"source": {"trainer": None, "dataset": {"tasks": [{"name": "a", "generator": "x", "config": {"seed": 1}}]}}},
        "spec.source.dataset.tasks[0].config",
    ),
    (
        {
            "source": {
                "trainer": None,
                "dataset": {"tasks": [{"name": "a", "generator": "x"}], "epochs": 2, "checkpoints": ["a"]},
            }
        },
        "checkpoints",
    ),
    ({"source": {"trainer": None, "dataset": {}}}, "tasks or environment"),
    (
        {
            "source": {
                "trainer": None,
                "dataset": {"tasks": [{"name": "a", "generator": "x"}], "environment": {"entryPoint": "a:b"}},
            }
        },
        "tasks or environment",
    ),
    ({"source": {"trainer": None, "dataset": {"environment": {}}}}, "verifiers or entryPoint"),
    (
        {"source": {"trainer": None, "dataset": {"environment": {"verifiers": "a", "entryPoint": "a:b"}}}},
        "verifiers or entryPoint",
    ),
    (
        {"source": {"trainer": None, "dataset": {"environment": {"entryPoint": "a.b"}}}},
        "spec.source.dataset.environment.entryPoint",
    ),
    (
        {"source": {"trainer": None, "dataset": {"environment": {"entryPoint": "a:b", "python": "python3"}}}},
        "spec.source.dataset.environment.python",
    ),
    (
        {"source": {"trainer": None, "dataset": {"environment": {"entryPoint": "a:b", "memoryLimit": "4GB"}}}},
        "spec.source.dataset.environment.memoryLimit",
    ),
    (
        {
            "source": {"trainer": None, "dataset": {"environment": {"entryPoint": "a:b", "memoryLimit": "4Gi"}}},
            "head": {"resources": {"memory": "4096Mi"}},
        },
        "does not fit into head.resources.memory",
    ),
    (
        {"source": {"trainer": None, "dataset": {"environment": {"entryPoint": "a:b"}, "seed": 3}}},
        "pass it to an environment",
    ),
    ({"model": {"uri": ""}}, "spec.model.uri"),
    ({"model": {"uri": 7}}, "spec.model.uri"),
    ({"model": {"cache": {"prefetch": True}}}, "set persistentVolumeClaim"),
    ({"model": {"tokenSecretRef": {"name": "hf"}}}, "spec.model.tokenSecretRef.key"),
    ({"engine": {"dtype": "int8"}}, "spec.engine.dtype"),
    ({"engine": {"maxModelLen": 8}}, "spec.engine.maxModelLen"),
    ({"engine": {"kvCacheMemory": "4Zi"}}, "spec.engine.kvCacheMemory"),
    ({"engine": {"kvCacheMemory": "0"}}, "spec.engine.kvCacheMemory"),
    ({"engine": {"tensorParallelSize": 2}}, "gpusPerWorker"),
    ({"engine": {"tensorParallelSize": 2}, "workers": {"gpusPerWorker": 3}}, "gpusPerWorker"),
    ({"engine": {"pipelineParallelSize": 2}, "workers": {"gpusPerWorker": 0}}, "pipelineParallelSize"),
    (
        {
            "engine": {"kvCacheMemory": "8Gi"},
            "workers": {"gpusPerWorker": 0, "accelerator": None, "resources": {"memory": "4Gi"}},
        },
        "kvCacheMemory",
    ),
    ({"engine": {"enableExpertParallel": True}}, "set that to at least 2"),
    ({"engine": {"quantization": "FP8 please"}}, "spec.engine.quantization"),
    ({"engine": {"gpuMemoryUtilizationPercentage": 101}}, "spec.engine.gpuMemoryUtilizationPercentage"),
    ({"engine": {"gpuMemoryUtilizationPercentage": 80, "kvCacheMemory": "8Gi"}}, "remove one"),
    (
        {
            "engine": {"gpuMemoryUtilizationPercentage": 80},
            "workers": {"gpusPerWorker": 0, "accelerator": None},
        },
        "set engine.kvCacheMemory instead",
    ),
    ({"engine": {"extraArgs": {f"a{number}": 0 for number in range(65)}}}, "spec.engine.extraArgs"),
    ({"sampling": {"topP": 1.5}}, "spec.sampling.topP"),
    ({"sampling": {"topP": 0}}, "spec.sampling.topP"),
    ({"sampling": {"temperature": -1}}, "spec.sampling.temperature"),
    ({"sampling": {"rolloutsPerPrompt": 0}}, "spec.sampling.rolloutsPerPrompt"),
    ({"sampling": {"minTokens": 5000}}, "minTokens"),
    ({"sampling": {"maxTokens": 4096}}, "maxTokens"),
    ({"sampling": {"minP": 0.1}}, "minP"),
    ({"sampling": {"logitBias": {"3": 1.0}}}, "logitBias"),
    ({"workers": {"replicas": 0}}, "spec.workers.replicas"),
    ({"workers": {"minReplicas": 3}}, "minReplicas"),
    ({"workers": {"maxReplicas": 1}}, "maxReplicas"),
    ({"workers": {"gpusPerWorker": -1}}, "spec.workers.gpusPerWorker"),
    ({"workers": {"accelerator": "MI300 X"}}, "spec.workers.accelerator"),
    ({"workers": {"gpuResource": "gpu"}}, "spec.workers.gpuResource"),
    ({"workers": {"gpuResource": "amd.com/gpu", "deviceClaimTemplate": "gpus"}}, "remove gpuResource or"),
    ({"workers": {"resources": {"extended": {"nvidia.com/gpu": 1}}}}, "gpusPerWorker already requests the GPUs"),
    ({"workers": {"resources": {"extended": {"rdma/hca": 0}}}}, "spec.workers.resources.extended"),
    ({"workers": {"tolerations": [{"operator": "Maybe"}]}}, "spec.workers.tolerations[0].operator"),
    ({"speculation": {"policy": "magic"}}, "spec.speculation.policy"),
    ({"speculation": {"maxDraftTokens": 65}}, "spec.speculation.maxDraftTokens"),
    ({"speculation": {"minSurvival": 1.5}}, "spec.speculation.minSurvival"),
    ({"history": {"name": "UPPER"}}, "spec.history.name"),
    ({"history": {"maxBytes": "1000k"}}, "at least 1Mi"),
    ({"history": {"maxBytes": "64GB"}}, "spec.history.maxBytes"),
    ({"history": {"redis": {"url": "http://redis"}}}, "spec.history.redis.url"),
    ({"history": {"redis": {"url": "redis+cluster://:secret@redis"}}}, "spec.history.redis.url"),
    (
        {"history": {"redis": {"url": "redis+sentinel://redis/mymaster?sentinel_password=secret"}}},
        "spec.history.redis.url",
    ),
    (
        {"history": {"redis": {"url": "redis://a", "urlFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}}},
        "url or urlFrom",
    ),
    (
        {"history": {"redis": {"urlFrom": {"secretKeyRef": {"name": "a"}}}}},
        "spec.history.redis.urlFrom.secretKeyRef.key",
    ),
    ({"redis": {"url": "redis+cluster://redis"}}, "spec.redis.url"),
    ({"redis": {"url": "http://redis"}}, "spec.redis.url"),
    ({"redis": {"url": "redis://:secret@redis"}}, "spec.redis.url"),
    ({"redis": {"url": "redis://redis/0?password=secret"}}, "spec.redis.url"),
    ({"redis": {"url": "redis://a", "urlFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}}, "url or urlFrom"),
    ({"weights": {"allowedRoots": ["models"]}}, "spec.weights.allowedRoots"),
    ({"lifecycle": {"activeDeadlineSeconds": 0}}, "spec.lifecycle.activeDeadlineSeconds"),
    ({"lifecycle": {"failurePolicy": {"rules": [{"action": "Ignore"}]}}}, "onExitCodes or onReasons"),
    (
        {"lifecycle": {"failurePolicy": {"rules": [{"action": "Panic", "onReasons": ["A"]}]}}},
        "spec.lifecycle.failurePolicy.rules[0].action",
    ),
    ({"priorityClassName": "High!"}, "spec.priorityClassName"),
    ({"runtimeRef": {"name": "h100", "kind": "Runtime"}}, "spec.runtimeRef.kind"),
    ({"workers": {"drainSeconds": -1}}, "spec.workers.drainSeconds"),
    ({"speculation": {"indexBytes": "1000k"}}, "at least 1Mi"),
]

REPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("redis-url", {"redis": {"url": "unix:///run/redis.sock"}}, "spec.redis.url"),
    ("history-url", {"history": {"redis": {"url": "unix:///run/redis.sock"}}}, "spec.history.redis.url"),
    (
        "worker-template",
        {"workers": {"podTemplate": {"spec": {"containers": [{"image": "x"}]}}}},
        "spec.workers.podTemplate",
    ),
    (
        "extra-args",
        {"engine": {"extraArgs": {"dtype": "half", "block_size": 32}}},
        "dtype: set spec.engine.dtype instead",
    ),
    ("head-template", {"head": {"podTemplate": {"spec": {"volumes": ["x"]}}}}, "spec.head.podTemplate"),
]


@pytest.fixture(scope="module")
def unwatched_jobs(cluster: ControlPlane) -> Iterator[Jobs]:
    """A namespace without an operator."""
    jobs = Jobs(cluster, "validation")
    yield jobs
    jobs.close()


@pytest.fixture(scope="module")
def existing(unwatched_jobs: Jobs) -> str:
    """The name of a valid job."""
    unwatched_jobs.create("existing")
    return "existing"


@pytest.mark.parametrize(("sections", "message"), REJECTED, ids=[str(sections)[:80] for sections, _ in REJECTED])
def test_the_api_server_rejects_what_rollout_check_rejects(
    unwatched_jobs: Jobs, sections: dict[str, Any], message: str
) -> None:
    manifest = unwatched_jobs.manifest("invalid", **sections)
    assert message in unwatched_jobs.rejection(manifest)
    assert unwatched_jobs.get("invalid") is None
    with pytest.raises(ManifestError):
        parse_job(manifest)


@pytest.mark.parametrize("name", ["1st", "Upper", TOO_LONG])
def test_names_from_which_no_pod_names_can_be_formed_are_rejected(unwatched_jobs: Jobs, name: str) -> None:
    manifest = unwatched_jobs.manifest(name)
    assert "metadata.name" in unwatched_jobs.rejection(manifest)
    with pytest.raises(ManifestError):
        parse_job(manifest)


@pytest.mark.parametrize(("name", "sections", "field"), REPORTED)
def test_the_operator_reports_what_the_api_server_cannot_check(
    operated_jobs: Jobs, name: str, sections: dict[str, Any], field: str
) -> None:
    operated_jobs.create(name, **sections)
    operated_jobs.wait(lambda: operated_jobs.condition(name, "Accepted") == ("False", "Invalid"))
    assert field in operated_jobs.wait_for_event(name, "Invalid")
    assert not operated_jobs.pods(name)


@pytest.mark.current_cluster
def test_a_misspelt_field_of_a_pod_template_is_reported(operated_jobs: Jobs) -> None:
    operated_jobs.create("misspelt", head={"podTemplate": {"spec": {"hostAliasses": []}}})
    assert 'unknown field "spec.hostAliasses"' in operated_jobs.wait_for_event("misspelt", "BadRequest")
    operated_jobs.wait(lambda: operated_jobs.condition("misspelt", "WorkersReady") == ("False", "BadRequest"))
    assert not operated_jobs.pods("misspelt", names.HEAD)


@pytest.mark.current_cluster
def test_the_api_server_accepts_workers_that_claim_devices(operated_jobs: Jobs) -> None:
    operated_jobs.create("claims", workers={"replicas": 1, "deviceClaimTemplate": "two-gpus", "gpusPerWorker": 2})
    operated_jobs.wait(lambda: operated_jobs.pods("claims", names.WORKER))
    (pod,) = operated_jobs.pods("claims", names.WORKER).values()
    assert "two-gpus" == pod.spec.resource_claims[0].resource_claim_template_name
    assert ["gpus"] == [claim.name for claim in pod.spec.containers[0].resources.claims]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"uri": "other"}}, "model cannot be changed"),
        ({"source": {"dataset": {"tasks": [{"name": "a", "generator": "b"}]}, "trainer": None}}, "source cannot be"),
        ({"engine": {"maxModelLen": 100_000}}, "engine cannot be changed"),
        ({"sampling": {"rolloutsPerPrompt": 2}}, "sampling cannot be changed"),
        ({"history": {"name": "other"}}, "history cannot be changed"),
        ({"redis": {"url": "redis://other"}}, "redis cannot be changed"),
        ({"managedBy": "someone"}, "managedBy cannot be changed"),
        ({"runtimeRef": {"name": "h100"}}, "runtimeRef cannot be added or removed"),
    ],
)
def test_immutable_fields_cannot_be_changed(
    unwatched_jobs: Jobs, existing: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiException, match=message):
        unwatched_jobs.patch(existing, **sections)


def test_the_shortest_manifest_gets_all_defaults(unwatched_jobs: Jobs) -> None:
    manifest = unwatched_jobs.manifest("short")
    manifest["spec"] = {"source": {"trainer": {}}, "model": {"uri": "Qwen/Qwen3-8B"}}
    assert "" == unwatched_jobs.rejection(manifest)
    job = unwatched_jobs.get("short")
    assert job is not None
    assert parse_job(manifest).spec == parse_job({**manifest, "spec": job["spec"]}).spec
    assert (1, 4096, "marginal") == (
        job["spec"]["workers"]["replicas"],
        job["spec"]["engine"]["maxModelLen"],
        job["spec"]["speculation"]["policy"],
    )


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("**/*.yaml")), ids=lambda file: file.name)
def test_kubectl_stores_the_examples_as_they_are_written(unwatched_jobs: Jobs, file: Path) -> None:
    kubectl, namespace = unwatched_jobs.cluster.kubectl, f"--namespace={unwatched_jobs.namespace}"
    stored_objects = list(yaml.safe_load_all(kubectl(namespace, "create", "-o", "yaml", "-f", str(file)).stdout))
    kubectl(namespace, "delete", "-f", str(file))
    written_objects = list(yaml.safe_load_all(file.read_text()))
    for written, read in zip(written_objects, stored_objects, strict=True):
        # Kubernetes encodes it. The stand-in for a current API server does not.
        if "stringData" not in read and (texts := written.pop("stringData", None)) is not None:
            written["data"] = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
        assert not needs_apply(written, read)
        if written["kind"] == KIND:
            assert parse_job(written) == parse_job(
                {name: read[name] for name in written} | {"metadata": written["metadata"]}
            )


def test_jobs_have_a_scale_subresource_and_printed_columns(unwatched_jobs: Jobs, existing: str) -> None:
    kubectl = unwatched_jobs.cluster.kubectl
    kubectl("-n", unwatched_jobs.namespace, "scale", f"rj/{existing}", "--replicas=5")
    job = unwatched_jobs.get(existing)
    assert job is not None
    assert 5 == job["spec"]["workers"]["replicas"]
    header = kubectl("-n", unwatched_jobs.namespace, "get", "rj").stdout.splitlines()[0].split()
    assert ["NAME", "STATE", "WORKERS", "PROGRESS", "TOK/S", "ACCEPTED", "SAVED", "AGE"] == header
