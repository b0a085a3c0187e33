"""Builds the manifests of a job's pods; pure functions of the job."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from rollout_api.manifest.field_types import SecretKey
from rollout_api.manifest.pod_spec import Resources, Toleration
from rollout_operator import names
from rollout_operator.accelerators import GPU_RESOURCE, node_affinity
from rollout_operator.job_context import JobContext
from rollout_operator.strategic_merge import PatchError, strategic_merge

MANIFEST_FILE = "job.yaml"
WORKER_GRACE_S = 45
"""Termination grace period of a worker. Its rollouts have 25 s to finish; then the unfinished ones are handed over."""
HEAD_GRACE_S = 30
"""Termination grace period of the head."""
CLEANUP_DEADLINE_S = 60
"""Seconds that the cleanup pod may run, including its wait for Redis."""

_OWN_FIELDS = frozenset(
    {"args", "command", "lifecycle", "livenessProbe", "ports", "readinessProbe", "resources", "startupProbe"}
)
"""Fields of the head's container that the cleanup pod does not take over."""
_HEAD_REQUESTS = {"cpu": "500m", "memory": "1Gi"}
"""What the head requests if the manifest says nothing. Without a request it would be the first pod to be evicted, and
its start, for which rollouts may wait, would take many times as long beside busy pods."""
_CLEANUP_RESOURCES = {"cpu": "100m", "memory": "512Mi"}
"""What the cleanup pod requests and is limited to, so that a quota of the namespace admits it."""
_DO_NOT_DISRUPT = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""Annotations by which autoscalers of nodes leave a pod where it is, instead of moving it to save a node."""
_UNREACHABLE_TOLERATION_S = 30
_USER = 1000
_MANIFEST_MOUNT = "/etc/rollout"
_MODELS_MOUNT = "/models"
WEIGHTS_MOUNT = "/weights"


def head_pod(context: JobContext, *, taken: Collection[str] = ()) -> dict[str, Any]:
    """Return the head pod, which runs the coordinator and the relay; *taken* are names of other pods."""
    head = context.job.spec.head
    container = {
        "name": names.HEAD,
        "command": ["rollout", "head"],
        "args": [
            f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}",
            f"--uid={context.uid}",
            f"--http-port={names.HTTP_PORT}",
        ],
        "ports": [{"name": "http", "containerPort": names.HTTP_PORT}],
        "readinessProbe": _readiness_probe("/status"),
        "resources": _resources(head.resources, gpus=0) or {"requests": dict(_HEAD_REQUESTS)},
    }
    pod = _pod(
        context,
        names.pod_name(context.name, names.HEAD, taken=taken),
        names.HEAD,
        container,
        "1Gi",
        head.tolerations,
        head.node_selector,
    )
    pod["spec"]["terminationGracePeriodSeconds"] = HEAD_GRACE_S
    return _in_queue(context, _with_template(context, pod, head.pod_template), grouped=True)


def worker_pod(context: JobContext, slot: int, *, replacement: bool, taken: Collection[str] = ()) -> dict[str, Any]:
    """Return the worker pod of a slot, which runs engines; *taken* are names of other pods."""
    spec = context.job.spec
    workers = spec.workers
    gpus = workers.gpus_per_worker
    container = {
        "name": names.WORKER,
        "command": ["rollout", "worker"],
        "args": [
            f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}",
            f"--uid={context.uid}",
            f"--http-port={names.HTTP_PORT}",
        ],
        "ports": [{"name": "http", "containerPort": names.HTTP_PORT}],
        "readinessProbe": _readiness_probe("/readyz"),
        "resources": _resources(workers.resources, gpus=gpus),
    }
    tolerations = list(workers.tolerations)
    if gpus:
        tolerations.append(Toleration(key=GPU_RESOURCE, operator="Exists", effect="NoSchedule"))
    name = names.pod_name(context.name, names.WORKER, slot, taken=taken)
    pod = _pod(context, name, names.WORKER, container, workers.shared_memory, tolerations, workers.node_selector)
    pod["metadata"]["labels"][names.SLOT_LABEL] = str(slot)
    if replacement:
        pod["metadata"]["annotations"][names.REPLACEMENT_ANNOTATION] = "true"
    pod["spec"] |= {
        "terminationGracePeriodSeconds": WORKER_GRACE_S,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": names.selector(context.name, names.WORKER)},
            }
        ],
    }
    if workers.accelerator is not None and gpus:
        pod["spec"]["affinity"] = {"nodeAffinity": node_affinity(workers.accelerator)}
    return _in_queue(context, _with_template(context, pod, workers.pod_template), grouped=context.is_in_pod_group(slot))


def cleanup_pod(context: JobContext, *, delete_messages: bool, reason: str) -> dict[str, Any]:
    """Return the pod that marks the job as ended in Redis and moves finished rollouts to the history.

    It runs where the head may run, with what ``head.podTemplate`` adds to the head's container and pod, such as the
    certificates of an authority. Its commands and further containers of the template are left out.

    Args:
        context: the job.
        delete_messages: whether to delete the job's messages immediately.
        reason: the message for the job's clients.
    """
    container = {
        "name": names.CLEANUP,
        "command": ["rollout", "end"],
        "args": [
            f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}",
            f"--uid={context.uid}",
            f"--reason={reason}",
            *(["--delete"] if delete_messages else []),
        ],
        "resources": {"requests": dict(_CLEANUP_RESOURCES), "limits": dict(_CLEANUP_RESOURCES)},
    }
    head = context.job.spec.head
    name = names.cleanup_pod(context.name)
    pod = _pod(context, name, names.CLEANUP, container, "64Mi", head.tolerations, head.node_selector)
    # The template of a job that never ran may be invalid, and the job must nevertheless be deletable.
    with suppress(PatchError):
        pod = _with_template(context, pod, _cleanup_template(head.pod_template))
    pod["spec"] |= {"terminationGracePeriodSeconds": 5, "activeDeadlineSeconds": CLEANUP_DEADLINE_S}
    return pod


def _cleanup_template(head_template: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the head's template that also fits the cleanup pod."""
    spec = dict(head_template.get("spec") or {})
    spec.pop("initContainers", None)
    containers = [
        {**{name: value for name, value in container.items() if name not in _OWN_FIELDS}, "name": names.CLEANUP}
        for container in spec.get("containers") or ()
        if container.get("name") == names.HEAD
    ]
    return {**head_template, "spec": {**spec, "containers": containers}} if head_template else {}


def _readiness_probe(path: str) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": 5,
        "timeoutSeconds": 3,
        "failureThreshold": 3,
    }


def _resources(resources: Resources, *, gpus: int) -> dict[str, Any]:
    amounts = {name: amount for name, amount in (("cpu", resources.cpu), ("memory", resources.memory)) if amount}
    limits: dict[str, Any] = dict(amounts)
    if gpus:
        limits[GPU_RESOURCE] = str(gpus)
    return {"requests": amounts, "limits": limits} if limits else {}


def _pod(
    context: JobContext,
    name: str,
    component: str,
    container: dict[str, Any],
    shared_memory: str,
    tolerations: list[Toleration],
    node_selector: dict[str, str],
) -> dict[str, Any]:
    spec = context.job.spec
    container |= {
        "image": spec.image.name or context.default_image,
        # Copies the end of the log into the pod's status, which can be read without the permission to read logs.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "env": _environment(context),
    }
    if spec.image.pull_policy is not None:
        container["imagePullPolicy"] = spec.image.pull_policy
    container["volumeMounts"], volumes = _volumes(context, shared_memory)
    pod_spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": names.service_account(context.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [
            *(toleration.model_dump(by_alias=True, exclude_none=True) for toleration in tolerations),
            # The pods of a lost node are replaced sooner than after Kubernetes' default of five minutes.
            *(
                {
                    "key": f"node.kubernetes.io/{taint}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": _UNREACHABLE_TOLERATION_S,
                }
                for taint in ("not-ready", "unreachable")
            ),
        ],
        "containers": [container],
        "volumes": volumes,
    }
    labels = names.labels(context.name, component)
    if context.revision is not None:
        labels[names.REVISION_LABEL] = context.revision.hash
    if node_selector:
        pod_spec["nodeSelector"] = dict(node_selector)
    if spec.image.pull_secrets:
        pod_spec["imagePullSecrets"] = [{"name": secret.name} for secret in spec.image.pull_secrets]
    if spec.priority_class_name is not None:
        pod_spec["priorityClassName"] = spec.priority_class_name
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": context.job.metadata.namespace,
            "labels": labels,
            "annotations": dict(_DO_NOT_DISRUPT),
            "ownerReferences": [context.owner_reference],
        },
        "spec": pod_spec,
    }


def _environment(context: JobContext) -> list[dict[str, Any]]:
    job = context.job
    variables: list[dict[str, Any]] = [
        {"name": "HOME", "value": "/tmp"},
        {"name": "USER", "value": "rollout"},
        {"name": "ROLLOUT_MODEL_CACHE", "value": _MODELS_MOUNT},
        {"name": "HF_HOME", "value": f"{_MODELS_MOUNT}/huggingface"},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    secret = context.redis_secret
    if secret is not None:
        variables.append(_from_secret("ROLLOUT_REDIS_URL", secret))
    else:
        variables.append({"name": "ROLLOUT_REDIS_URL", "value": job.spec.redis.url})
    history = job.spec.history.redis
    if history.url_from is not None:
        variables.append(_from_secret("ROLLOUT_HISTORY_REDIS_URL", history.url_from.secret_key_ref))
    elif history.url is not None:
        variables.append({"name": "ROLLOUT_HISTORY_REDIS_URL", "value": history.url})
    if job.spec.model.token_secret_ref is not None:
        variables.append(_from_secret("HF_TOKEN", job.spec.model.token_secret_ref))
    return variables


def _from_secret(name: str, secret: SecretKey) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}


def _volumes(context: JobContext, shared_memory: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volume mounts of the container and the volumes of the pod."""
    spec = context.job.spec
    cache = spec.model.cache
    private_cache = {} if cache.size_limit is None else {"sizeLimit": cache.size_limit}
    sources: dict[str, tuple[str, dict[str, Any]]] = {
        "manifest": (_MANIFEST_MOUNT, {"configMap": {"name": names.manifest_config_map(context.name)}}),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}}),
        "tmp": ("/tmp", {"emptyDir": {}}),
        "models": (_MODELS_MOUNT, _claim(cache.persistent_volume_claim) or {"emptyDir": private_cache}),
    }
    if (weights := _claim(spec.weights.persistent_volume_claim)) is not None:
        sources["weights"] = (WEIGHTS_MOUNT, weights)
    mounts = [
        {"name": name, "mountPath": path, **({"readOnly": True} if name == "manifest" else {})}
        for name, (path, _) in sources.items()
    ]
    return mounts, [{"name": name, **source} for name, (_, source) in sources.items()]


def _claim(name: str | None) -> dict[str, Any] | None:
    return None if name is None else {"persistentVolumeClaim": {"claimName": name}}


def _with_template(context: JobContext, pod: dict[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the user's template into the pod, but keep the metadata by which the operator finds the pod."""
    result = strategic_merge(pod, template)
    required, metadata = pod["metadata"], result["metadata"]
    labels = {**metadata.get("labels", {}), **required["labels"]}
    own = {name: value for name, value in required["annotations"].items() if name == names.REPLACEMENT_ANNOTATION}
    annotations = {**metadata.get("annotations", {}), **own}
    result["metadata"] = {**metadata, **required, "labels": labels, "annotations": annotations}
    return result


def _in_queue(context: JobContext, pod: dict[str, Any], *, grouped: bool) -> dict[str, Any]:
    """Add Kueue's labels: it admits the head and the minimum of workers as one group, and other workers singly."""
    if context.queue is None:
        return pod
    metadata = pod["metadata"]
    metadata["labels"][names.QUEUE_LABEL] = context.queue
    if grouped and context.pod_group is not None:
        metadata["labels"][names.POD_GROUP_LABEL] = context.pod_group.name
        total = str(context.pod_group.total_count)
        metadata["annotations"] = {**metadata.get("annotations", {}), names.POD_GROUP_TOTAL_ANNOTATION: total}
    return pod
