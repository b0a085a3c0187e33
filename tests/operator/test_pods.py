"""The pods of a job: security, GPUs, secrets, and overrides by users."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from rollout_operator.__main__ import parse_arguments
from rollout_operator.objects import names
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.names import TRAINER_LABEL
from rollout_operator.objects.observed import ClusterInfo
from rollout_operator.objects.owned_objects import needs_apply, owned_objects
from rollout_operator.objects.pods import cleanup_pod, head_pod, prefetch_pod, worker_pod

from rollout_api import parse_job
from rollout_api.manifest.status import PodGroup
from rollout_api.status_token import HASH_VARIABLE, OPEN_PAGES
from tests.support.manifests import rollout_job


def job_context(**sections: Any) -> JobContext:
    return JobContext(parse_job(rollout_job(namespace="rl", **sections)), "the-uid", {}, "worker:1")


def config_map(context: JobContext, name: str) -> dict[str, str]:
    """Return the content of a ConfigMap that the operator creates for the job."""
    objects = owned_objects(context, ClusterInfo(), workers=1)
    found: dict[str, str] = next(made["data"] for made in objects if made["metadata"]["name"] == name)
    return found


def environment_of(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a pod's container by name."""
    return {variable["name"]: variable for variable in pod["spec"]["containers"][0]["env"]}


def all_pods(context: JobContext) -> list[dict[str, Any]]:
    cleanup = cleanup_pod(context, delete_messages=False, reason="why")
    return [head_pod(context), worker_pod(context, 0, replacement=False), prefetch_pod(context), cleanup]


def test_all_pods_satisfy_the_restricted_pod_security_standard() -> None:
    for pod in all_pods(job_context()):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert "RuntimeDefault" == security["seccompProfile"]["type"]
        assert "OnRootMismatch" == security["fsGroupChangePolicy"]
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


@pytest.mark.parametrize(
    ("resource", "tolerated"),
    [
        ("amd.com/gpu", ["amd.com/gpu"]),
        ("nvidia.com/mig-3g.40gb", ["nvidia.com/mig-3g.40gb", "nvidia.com/gpu"]),
    ],
)
def test_workers_request_the_named_gpu_resource_and_tolerate_its_taints(resource: str, tolerated: list[str]) -> None:
    context = job_context(workers={"gpuResource": resource, "gpusPerWorker": 2, "resources": {"cpu": 8}})
    pod = worker_pod(context, 0, replacement=False)
    (container,) = pod["spec"]["containers"]
    assert {"requests": {"cpu": "8"}, "limits": {"cpu": "8", resource: "2"}} == container["resources"]
    gpu_taints = [one["key"] for one in pod["spec"]["tolerations"] if one.get("effect") == "NoSchedule"]
    assert tolerated == gpu_taints
    assert 2 == context.job.spec.engines_per_worker


def test_workers_claim_devices_instead_of_an_extended_resource() -> None:
    context = job_context(workers={"deviceClaimTemplate": "two-gpus", "gpusPerWorker": 2, "resources": {"cpu": 8}})
    spec = worker_pod(context, 0, replacement=False)["spec"]
    (container,) = spec["containers"]
    assert [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}] == spec["resourceClaims"]
    expected = {"requests": {"cpu": "8"}, "limits": {"cpu": "8"}, "claims": [{"name": "gpus"}]}
    assert expected == container["resources"]
    assert 2 == context.job.spec.engines_per_worker
    assert "resourceClaims" not in head_pod(context)["spec"]


@pytest.mark.parametrize(("workers", "grace"), [({}, 45), ({"drainSeconds": 3}, 23), ({"drainSeconds": 0}, 20)])
def test_the_grace_period_of_workers_follows_from_the_time_to_drain(workers: dict[str, int], grace: int) -> None:
    context = job_context(workers=workers)
    assert grace == worker_pod(context, 0, replacement=False)["spec"]["terminationGracePeriodSeconds"]
    manifest = json.loads(config_map(context, "math-manifest")["job.yaml"])
    assert grace == parse_job(manifest).spec.workers.drain_seconds + 20


def test_workers_may_need_further_resources_and_a_runtime_class() -> None:
    workers = {"runtimeClassName": "nvidia", "resources": {"extended": {"rdma/hca": 1}}}
    spec = worker_pod(job_context(workers=workers), 0, replacement=False)["spec"]
    (container,) = spec["containers"]
    assert {"rdma/hca": "1", "nvidia.com/gpu": "1"} == container["resources"]["limits"]
    assert "nvidia" == spec["runtimeClassName"]
    assert "runtimeClassName" not in head_pod(job_context(workers=workers))["spec"]


def test_any_accelerator_is_recognized_by_the_label_of_the_administrator() -> None:
    pod = worker_pod(job_context(workers={"accelerator": "amd-mi300x"}), 0, replacement=False)
    affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    label = {"key": "das.rollout.dev/accelerator", "operator": "In", "values": ["amd-mi300x"]}
    assert [{"matchExpressions": [label]}] == affinity["nodeSelectorTerms"]


@pytest.mark.parametrize("gpus", [{}, {"gpuResource": "amd.com/gpu"}, {"deviceClaimTemplate": "gpus"}])
def test_a_cpu_worker_requests_no_gpu(gpus: dict[str, str]) -> None:
    pod = worker_pod(
        job_context(workers={"gpusPerWorker": 0, "accelerator": "nvidia-h100", **gpus}), 0, replacement=False
    )
    assert "nvidia" not in json.dumps(pod)
    assert "gpu" not in json.dumps(pod)


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
        variables = environment_of(pod)
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
        variables = environment_of(pod)
        assert {"name": "ROLLOUT_HISTORY_REDIS_URL", **expected} == variables["ROLLOUT_HISTORY_REDIS_URL"]
        assert "rollout-redis" == variables["ROLLOUT_REDIS_URL"]["valueFrom"]["secretKeyRef"]["name"]
    manifest = json.loads(config_map(context, "math-manifest")["job.yaml"])
    assert {"name": "shared"} == manifest["spec"]["history"]
    assert parse_job(manifest).spec.history.redis.url is None


def test_a_history_in_the_message_store_needs_no_separate_url() -> None:
    for pod in all_pods(job_context()):
        assert "ROLLOUT_HISTORY_REDIS_URL" not in environment_of(pod)


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


def test_the_head_of_an_environment_requests_its_memory_too() -> None:
    source = {"dataset": {"environment": {"entryPoint": "a:b", "memoryLimit": "5Gi"}}}
    (container,) = head_pod(job_context(source=source))["spec"]["containers"]
    assert {"requests": {"cpu": "500m", "memory": "8192Mi"}} == container["resources"]
    (container,) = head_pod(job_context(source=source, head={"resources": {"memory": "6Gi"}}))["spec"]["containers"]
    assert {"requests": {"memory": "6Gi"}, "limits": {"memory": "6Gi"}} == container["resources"]


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


PREFETCH = {"uri": "Qwen/Qwen3-8B", "cache": {"persistentVolumeClaim": "models", "prefetch": True}}


def models_mount_of(pod: dict[str, Any]) -> dict[str, Any]:
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in pod["spec"]["volumes"]
    mounts = pod["spec"]["containers"][0]["volumeMounts"]
    return next(mount for mount in mounts if mount["name"] == "models")


def test_only_the_prefetch_pod_writes_to_the_model_cache() -> None:
    context = job_context(model=PREFETCH)
    writer = prefetch_pod(context)
    assert "readOnly" not in models_mount_of(writer)
    assert "/models/huggingface" == environment_of(writer)["HF_HOME"]["value"]
    assert "HF_HUB_OFFLINE" not in environment_of(writer)
    for pod in (head_pod(context), worker_pod(context, 0, replacement=False)):
        assert models_mount_of(pod)["readOnly"]
        variables = environment_of(pod)
        assert "/models/huggingface/hub" == variables["HF_HUB_CACHE"]["value"]
        assert "1" == variables["HF_HUB_OFFLINE"]["value"]
        # These directories are written to.
        assert "/tmp" == variables["HOME"]["value"]
        assert variables["HF_HOME"]["value"].startswith("/tmp/")


def test_gpu_workers_keep_compiled_code_in_the_claim_of_the_model_cache() -> None:
    cache = {"persistentVolumeClaim": "models"}
    pod = worker_pod(job_context(model={"uri": "a/b", "cache": cache}), 0, replacement=True)
    assert "/models/compiled" == environment_of(pod)["VLLM_CACHE_ROOT"]["value"]

    # The rest of the claim is mounted read-only. The prefetch pod creates the directory, so that its owner is right.
    context = job_context(model=PREFETCH)
    pod = worker_pod(context, 0, replacement=True)
    mount = {"name": "models", "mountPath": "/compiled", "subPath": "compiled"}
    assert mount in pod["spec"]["containers"][0]["volumeMounts"]
    assert "/compiled" == environment_of(pod)["VLLM_CACHE_ROOT"]["value"]
    assert "/models/compiled" == environment_of(prefetch_pod(context))["VLLM_CACHE_ROOT"]["value"]

    without_gpus = job_context(model=PREFETCH, workers={"gpusPerWorker": 0})
    without_claim = job_context(model={"uri": "a/b"})
    for pod in (
        head_pod(context),
        worker_pod(without_gpus, 0, replacement=True),
        worker_pod(without_claim, 0, replacement=True),
    ):
        assert "VLLM_CACHE_ROOT" not in environment_of(pod)


def test_without_prefetch_all_pods_may_download_the_model() -> None:
    context = job_context(model={"uri": "a/b", "cache": {"persistentVolumeClaim": "models"}})
    for pod in (head_pod(context), worker_pod(context, 0, replacement=False)):
        assert "readOnly" not in models_mount_of(pod)
        assert "/models/huggingface" == environment_of(pod)["HF_HOME"]["value"]
        assert "HF_HUB_OFFLINE" not in environment_of(pod)


HOSTNAME = "kubernetes.io/hostname"
RACK = "topology.example.com/rack"
TWO_PODS = {"podsPerWorker": 2, "gpusPerWorker": 4}
"""Workers of two pods, for an engine with four GPUs."""


def pod_affinity(pod: dict[str, Any], kind: str, affinity: str = "podAffinity") -> list[dict[str, Any]]:
    """Return the terms of a pod's affinity to other pods, ``preferred`` or ``required``, without their weights."""
    fields = pod["spec"].get("affinity", {}).get(affinity, {})
    terms: list[dict[str, Any]] = fields.get(f"{kind}DuringSchedulingIgnoredDuringExecution", [])
    return [term.get("podAffinityTerm", term) for term in terms]


def matches(term: dict[str, Any], pod: dict[str, Any]) -> bool:
    """Return whether the selector of a term of an affinity selects a pod."""
    (kind,) = term["labelSelector"]
    assert "matchLabels" == kind
    return term["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_workers_with_gpus_are_packed_onto_nodes_and_others_are_spread() -> None:
    # Nodes that are partly occupied have no room for workers that need all of a node's GPUs.
    context = job_context()
    worker = worker_pod(context, 0, replacement=False)
    (term,) = pod_affinity(worker, "preferred")
    other_job = JobContext(parse_job(rollout_job(name="code", namespace="rl")), "other", {}, "worker:1")
    assert HOSTNAME == term["topologyKey"]
    assert matches(term, worker_pod(other_job, 1, replacement=False))
    assert not matches(term, head_pod(context))
    assert "topologySpreadConstraints" not in worker["spec"]
    cpu_worker = worker_pod(job_context(workers={"gpusPerWorker": 0}), 0, replacement=False)
    assert not pod_affinity(cpu_worker, "preferred")
    (constraint,) = cpu_worker["spec"]["topologySpreadConstraints"]
    assert (HOSTNAME, "ScheduleAnyway") == (constraint["topologyKey"], constraint["whenUnsatisfiable"])


def test_a_topology_key_keeps_the_pods_of_a_worker_together() -> None:
    workers = {**TWO_PODS, "topologyKey": RACK, "accelerator": "nvidia-h100"}
    context = job_context(engine={"tensorParallelSize": 4}, workers=workers)
    leader = worker_pod(context, 1, replacement=False)
    follower = worker_pod(context, 1, rank=1, replacement=False)
    other = worker_pod(context, 0, replacement=False)
    for pod in (leader, follower):
        (required,) = pod_affinity(pod, "required")
        assert RACK == required["topologyKey"]
        # A pod whose term matches no existing pod may go anywhere only if the term matches the pod itself.
        assert [True, True, False] == [matches(required, one) for one in (leader, follower, other)]
        # A leader in the rack of another one could take the place of its follower.
        (apart,) = pod_affinity(pod, "preferred", "podAntiAffinity")
        assert RACK == apart["topologyKey"]
        assert matches(apart, other)
        assert not pod_affinity(pod, "preferred")
        assert "nodeAffinity" in pod["spec"]["affinity"]


def test_a_topology_key_keeps_workers_of_one_pod_close() -> None:
    context = job_context(workers={"topologyKey": RACK})
    pod, other = (worker_pod(context, slot, replacement=False) for slot in range(2))
    preferred = {term["topologyKey"]: term for term in pod_affinity(pod, "preferred")}
    assert {HOSTNAME, RACK} == set(preferred)
    assert matches(preferred[RACK], other)
    assert not pod_affinity(pod, "required")
    assert "podAntiAffinity" not in pod["spec"]["affinity"]


def queued(context: JobContext, *, total_count: int = 5, annotations: dict[str, str] | None = None) -> JobContext:
    """Return the context of a job whose first pods Kueue admits as a group."""
    labels = {names.QUEUE_LABEL: "research", "kueue.x-k8s.io/priority-class": "nightly", "team": "rl"}
    group = PodGroup(name="math-1", queue="research", total_count=total_count)
    return replace(context, labels=labels, annotations=annotations or {}, pod_group=group)


def test_kueue_finds_its_labels_and_annotations_of_the_job_on_the_pods() -> None:
    required = "kueue.x-k8s.io/podset-required-topology"
    context = queued(job_context(), total_count=3, annotations={required: RACK, "example.com/owner": "me"})
    head = head_pod(context)
    pods = [head, *(worker_pod(context, slot, replacement=False) for slot in range(4))]
    for pod in pods:
        labels = pod["metadata"]["labels"]
        assert ("research", "nightly") == (labels[names.QUEUE_LABEL], labels["kueue.x-k8s.io/priority-class"])
        assert "team" not in labels
        assert "example.com/owner" not in pod["metadata"]["annotations"]
    # The head needs no GPU, so its node may be in no topology.
    assert [None, *[RACK] * 4] == [pod["metadata"]["annotations"].get(required) for pod in pods]
    unqueued = worker_pod(replace(context, labels={}, pod_group=None), 0, replacement=False)
    assert not any(key.startswith("kueue.x-k8s.io/") for key in unqueued["metadata"]["annotations"])


def test_kueue_can_order_the_pods_of_a_group_by_their_index() -> None:
    context = queued(job_context(engine={"tensorParallelSize": 4}, workers={**TWO_PODS, "replicas": 2}))
    pods = [worker_pod(context, slot, rank=rank, replacement=False) for slot in range(2) for rank in range(2)]
    label = "kueue.x-k8s.io/pod-group-pod-index"
    # Kueue counts the pods of each role, and the head has a role of its own.
    assert ["0", "0", "1", "2", "3"] == [pod["metadata"]["labels"][label] for pod in (head_pod(context), *pods)]
    assert label not in worker_pod(context, 2, replacement=False)["metadata"]["labels"]


def test_in_a_queue_kueue_places_the_workers_by_the_topology_key() -> None:
    prefix = "kueue.x-k8s.io/podset-"

    def request(context: JobContext, slot: int = 0) -> dict[str, str]:
        """Return what Kueue is told about the placement of a worker."""
        pod = worker_pod(context, slot, replacement=False)
        assert not pod_affinity(pod, "required")  # a term for each worker would make each of them a role in Kueue
        assert RACK not in json.dumps(pod["spec"])
        return {
            key.removeprefix(prefix): value
            for key, value in pod["metadata"]["annotations"].items()
            if key.startswith(prefix)
        }

    single = queued(job_context(workers={"topologyKey": RACK, "replicas": 2}), total_count=3)
    assert {"preferred-topology": RACK} == request(single) == request(single, slot=2)
    workers = {**TWO_PODS, "topologyKey": RACK, "replicas": 2}
    several = queued(job_context(engine={"tensorParallelSize": 4}, workers=workers))
    together = {"preferred-topology": RACK, "slice-required-topology": RACK, "slice-size": "2"}
    assert together == request(several)
    own = replace(several, annotations={f"{prefix}unconstrained-topology": "true"})
    assert {"unconstrained-topology": "true"} == request(own)


def test_workers_request_the_disk_space_of_their_own_model_cache() -> None:
    def requested(pod: dict[str, Any]) -> Any:
        return pod["spec"]["containers"][0]["resources"].get("requests", {}).get("ephemeral-storage")

    model = {"uri": "Qwen/Qwen3-8B", "cache": {"sizeLimit": "80Gi"}}
    for workers in ({}, {"deviceClaimTemplate": "one-gpu", "resources": {"memory": "64Gi"}}):
        context = job_context(model=model, workers=workers)
        pod = worker_pod(context, 0, replacement=False)
        assert "80Gi" == requested(pod)
        # A pod that needs more, for its log for example, is not evicted for it.
        assert "ephemeral-storage" not in pod["spec"]["containers"][0]["resources"].get("limits", {})
        assert requested(head_pod(context)) is None  # it loads the tokenizer only
    claim = {"uri": "Qwen/Qwen3-8B", "cache": {"persistentVolumeClaim": "models", "sizeLimit": "80Gi"}}
    for other in (claim, {"uri": "Qwen/Qwen3-8B"}):
        assert requested(worker_pod(job_context(model=other), 0, replacement=False)) is None


def test_the_prefetch_pod_runs_where_the_head_may_run_and_needs_no_gpu() -> None:
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy"}
    toleration = {"key": "dedicated", "operator": "Exists"}
    head = {
        "podTemplate": {"spec": {"containers": [{"name": "head", "env": [proxy], "command": ["debug"]}]}},
        "tolerations": [toleration],
        "nodeSelector": {"pool": "cpu"},
    }
    model = {**PREFETCH, "tokenSecretRef": {"name": "hf", "key": "token"}}
    context = job_context(model=model, head=head, lifecycle={"readyTimeoutSeconds": 7200})
    pod = prefetch_pod(replace(context, labels={"kueue.x-k8s.io/queue-name": "research"}))
    spec = pod["spec"]
    (container,) = spec["containers"]
    assert "math-prefetch" == pod["metadata"]["name"]
    assert "kueue.x-k8s.io/queue-name" not in pod["metadata"]["labels"]
    assert ["rollout", "prefetch"] == container["command"]
    assert proxy in container["env"]
    assert "HF_TOKEN" in environment_of(pod)
    assert {"requests": {"cpu": "500m", "memory": "1Gi"}} == container["resources"]
    assert toleration in spec["tolerations"]
    assert {"pool": "cpu"} == spec["nodeSelector"]
    assert 7200 == spec["activeDeadlineSeconds"]


def test_the_manifest_in_the_pods_is_accepted_by_rollout_head() -> None:
    context = job_context(
        workers={"replicas": 4, "maxReplicas": 8, "minReplicas": 2, "autoscale": True, "podTemplate": {"spec": {}}},
        weights={"persistentVolumeClaim": "policy"},
        lifecycle={"ttlSecondsAfterFinished": 5},
        redis={"urlFrom": {"secretKeyRef": {"name": "mine", "key": "u"}}},
    )
    data = config_map(context, "math-manifest")
    manifest = json.loads(data["job.yaml"])
    job = parse_job(manifest)
    assert ["/weights"] == job.spec.weights.allowed_roots
    assert "podTemplate" not in json.dumps(manifest)
    # Scaling does not change the manifest, because no pod would read it again.
    scaled = job_context(
        workers={"replicas": 5, "maxReplicas": 8, "minReplicas": 2, "autoscale": True},
        weights={"persistentVolumeClaim": "policy"},
    )
    assert data == config_map(scaled, "math-manifest")


def test_the_head_knows_the_hash_of_the_token_but_no_secret() -> None:
    context = replace(job_context(), status_token_hash="ab" * 32)

    assert {"name": HASH_VARIABLE, "value": "ab" * 32} == environment_of(head_pod(context))[HASH_VARIABLE]
    for pod in (worker_pod(context, 0, replacement=False), cleanup_pod(context, delete_messages=True, reason="")):
        assert HASH_VARIABLE not in environment_of(pod)
    assert HASH_VARIABLE not in environment_of(head_pod(job_context()))
    # Kubelets have no token.
    (container,) = head_pod(context)["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] in OPEN_PAGES


def admitted_pods(policy: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the peers that a policy admits on all ports, besides the job's own pods."""
    [rule] = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    return [peer for peer in rule["from"] if peer != {"podSelector": policy["spec"]["podSelector"]}]


@pytest.mark.parametrize(
    ("weights", "admitted"),
    [
        ({}, [{"podSelector": {"matchLabels": {TRAINER_LABEL: "math"}}}]),
        ({"transfer": "none"}, []),
        (
            {"trainerPods": {"app": "trl"}, "trainerNamespace": "training"},
            [
                {
                    "podSelector": {"matchLabels": {"app": "trl"}},
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "training"}},
                }
            ],
        ),
    ],
)
def test_a_trainer_that_sends_weights_from_memory_may_connect_to_the_engines(
    weights: dict[str, Any], admitted: list[dict[str, Any]]
) -> None:
    assert admitted == admitted_pods(network_policy(ClusterInfo(), weights=weights))
    limited = network_policy(ClusterInfo(egress_rules=()), weights=weights)
    assert admitted == limited["spec"]["egress"][0]["to"][1:]


def network_policy(cluster: ClusterInfo, **sections: Any) -> dict[str, Any]:
    made = owned_objects(job_context(**sections), cluster, workers=1)
    return next(resource for resource in made if resource["kind"] == "NetworkPolicy")


def test_connections_of_pods_are_limited_if_the_operator_knows_where_redis_is() -> None:
    assert ["Ingress"] == network_policy(ClusterInfo())["spec"]["policyTypes"]
    rules = ({"to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}], "ports": [{"port": 6379}]},)
    limited = network_policy(ClusterInfo(egress_rules=rules))
    assert ["Ingress", "Egress"] == limited["spec"]["policyTypes"]
    # The trainer and the job's other pods, in the same namespace.
    same_namespace = {"to": [{"podSelector": {}}, {"podSelector": {"matchLabels": {TRAINER_LABEL: "math"}}}]}
    assert [same_namespace, *rules] == limited["spec"]["egress"]
    assert [same_namespace] == network_policy(ClusterInfo(egress_rules=()))["spec"]["egress"]
    # The policies of existing jobs are changed when the operator's options change.
    unlimited = network_policy(ClusterInfo())
    assert needs_apply(limited, unlimited)
    assert needs_apply(unlimited, limited)


def test_rules_for_connections_are_a_json_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert ({"ports": [{"port": 443}]},) == parse_arguments(
        ["--worker-image=w", '--egress-rules=[{"ports": [{"port": 443}]}]']
    ).egress_rules
    assert parse_arguments(["--worker-image=w"]).egress_rules is None
    for text, message in (("[", "not JSON"), ("{}", "a JSON list"), ("[1]", "a JSON list")):
        with pytest.raises(SystemExit):
            parse_arguments(["--worker-image=w", f"--egress-rules={text}"])
        assert message in capsys.readouterr().err


def test_a_url_without_credentials_is_published_unchanged() -> None:
    context = job_context(redis={"url": "redis://redis.example:6379/0"})
    connection = config_map(context, "math-connection")
    assert "redis://redis.example:6379/0" == connection["url"]
    assert "secretName" not in connection


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
    connection = config_map(context, "math-connection")
    assert published == {name: value for name, value in connection.items() if name.startswith("history")}
