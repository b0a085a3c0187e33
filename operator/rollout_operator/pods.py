"""Pods of a job, as dicts: pure functions of the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout_api.manifest.field_types import SecretKey
from rollout_api.manifest.pod_spec import Resources, Toleration
from rollout_api.manifest.rollout_job import API_VERSION, KIND, RolloutJob
from rollout_operator import names
from rollout_operator.accelerators import GPU_RESOURCE, node_affinity
from rollout_operator.strategic_merge import merged

MANIFEST_FILE = "job.yaml"
WORKER_GRACE_S = 45
"""A worker lets its rollouts end for 25 s, then hands over what is left."""
HEAD_GRACE_S = 30
END_DEADLINE_S = 60
"""How long a job's end may wait for its Redis."""

_UNREACHABLE_S = 30
_USER = 1000
_MANIFEST_MOUNT = "/etc/rollout"
_MODELS_MOUNT = "/models"
WEIGHTS_MOUNT = "/weights"

DEFAULT_REDIS_SECRET = SecretKey(name="rollout-redis", key="url")


@dataclass(frozen=True)
class JobIdentity:
    """What names a job's objects, besides its manifest."""

    job: RolloutJob
    uid: str
    labels: dict[str, str]
    """Of the RolloutJob itself."""
    default_image: str

    @property
    def name(self) -> str:
        """The job's name."""
        return self.job.metadata.name

    @property
    def owner(self) -> dict[str, Any]:
        """Reference to the job."""
        return names.owner({"name": self.name, "uid": self.uid}, API_VERSION, KIND)

    @property
    def queue(self) -> str | None:
        """Kueue's queue, where the job is in one."""
        return self.labels.get(names.QUEUE_LABEL)


def redis_secret(job: RolloutJob) -> SecretKey | None:
    """The Secret with the URL of the job's Redis; None where the manifest has the URL."""
    redis = job.spec.redis
    if redis.managed:
        return SecretKey(name=names.redis_secret(job.metadata.name), key="url")
    if redis.url_from is not None:
        return redis.url_from.secret_key_ref
    return None if redis.url is not None else DEFAULT_REDIS_SECRET


def head_pod(identity: JobIdentity) -> dict[str, Any]:
    """The pod that coordinates."""
    head = identity.job.spec.head
    container = {
        "name": names.HEAD,
        "command": ["rollout", "head"],
        "args": [
            f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}",
            f"--uid={identity.uid}",
            f"--port={names.RAY_PORT}",
            f"--http-port={names.HTTP_PORT}",
        ],
        "ports": [
            {"name": "http", "containerPort": names.HTTP_PORT},
            {"name": "ray", "containerPort": names.RAY_PORT},
        ],
        "readinessProbe": _ready_when("/status"),
        "resources": _resources(head.resources, gpus=0),
    }
    pod = _pod(
        identity, names.head_pod(identity.name), names.HEAD, container, "1Gi", head.tolerations, head.node_selector
    )
    pod["spec"]["terminationGracePeriodSeconds"] = HEAD_GRACE_S
    return _in_queue(identity, _overridden(identity, pod, head.pod_template), grouped=True)


def worker_pod(identity: JobIdentity, slot: int, *, replacement: bool) -> dict[str, Any]:
    """A pod with engines."""
    spec = identity.job.spec
    workers = spec.workers
    gpus = workers.gpus_per_worker
    container = {
        "name": names.WORKER,
        "command": ["rollout", "worker"],
        "args": [
            f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}",
            f"--uid={identity.uid}",
            f"--http-port={names.HTTP_PORT}",
        ],
        "ports": [{"name": "http", "containerPort": names.HTTP_PORT}],
        "readinessProbe": _ready_when("/readyz"),
        "resources": _resources(workers.resources, gpus=gpus),
    }
    tolerations = list(workers.tolerations)
    if gpus:
        tolerations.append(Toleration(key=GPU_RESOURCE, operator="Exists", effect="NoSchedule"))
    name = names.worker_pod(identity.name, slot)
    pod = _pod(identity, name, names.WORKER, container, workers.shared_memory, tolerations, workers.node_selector)
    pod["metadata"]["labels"][names.SLOT_LABEL] = str(slot)
    if replacement:
        pod["metadata"]["annotations"] = {names.REPLACEMENT: "true"}
    pod["spec"] |= {
        "terminationGracePeriodSeconds": WORKER_GRACE_S,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": names.selector(identity.name, names.WORKER)},
            }
        ],
    }
    if workers.accelerator is not None and gpus:
        pod["spec"]["affinity"] = {"nodeAffinity": node_affinity(workers.accelerator)}
    return _in_queue(identity, _overridden(identity, pod, workers.pod_template), grouped=slot < workers.least)


def end_pod(identity: JobIdentity, *, delete: bool, reason: str) -> dict[str, Any]:
    """The pod that tells Redis that the job has ended, and brings what was finished into the history.

    Args:
        identity: of the job.
        delete: whether its messages are removed at once.
        reason: what clients are told.
    """
    container = {
        "name": names.END,
        "command": ["rollout", "end"],
        "args": [
            f"--file={_MANIFEST_MOUNT}/{MANIFEST_FILE}",
            f"--uid={identity.uid}",
            f"--reason={reason}",
            *(["--delete"] if delete else []),
        ],
        "resources": {},
    }
    pod = _pod(identity, names.end_pod(identity.name), names.END, container, "64Mi", [], {})
    pod["spec"] |= {"terminationGracePeriodSeconds": 5, "activeDeadlineSeconds": END_DEADLINE_S}
    return pod


def _ready_when(path: str) -> dict[str, Any]:
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
    identity: JobIdentity,
    name: str,
    component: str,
    container: dict[str, Any],
    shared_memory: str,
    tolerations: list[Toleration],
    node_selector: dict[str, str],
) -> dict[str, Any]:
    spec = identity.job.spec
    container |= {
        "image": spec.image.name or identity.default_image,
        # the end of the log becomes the status' message: it outlives the log, and needs no right to read logs
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "env": _environment(identity),
    }
    if spec.image.pull_policy is not None:
        container["imagePullPolicy"] = spec.image.pull_policy
    container["volumeMounts"], volumes = _volumes(identity, shared_memory)
    pod_spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": names.service_account(identity.name),
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
            *(one.model_dump(by_alias=True, exclude_none=True) for one in tolerations),
            # what a lost node had is replaced sooner than Kubernetes' five minutes: other workers go on meanwhile
            *(
                {
                    "key": f"node.kubernetes.io/{what}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": _UNREACHABLE_S,
                }
                for what in ("not-ready", "unreachable")
            ),
        ],
        "containers": [container],
        "volumes": volumes,
    }
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
            "namespace": identity.job.metadata.namespace,
            "labels": names.labels(identity.name, component),
            "ownerReferences": [identity.owner],
        },
        "spec": pod_spec,
    }


def _environment(identity: JobIdentity) -> list[dict[str, Any]]:
    job = identity.job
    variables: list[dict[str, Any]] = [
        {"name": "HOME", "value": "/tmp"},  # noqa: S108 – a volume of the pod's own
        {"name": "USER", "value": "rollout"},
        {"name": "ROLLOUT_MODEL_CACHE", "value": _MODELS_MOUNT},
        {"name": "HF_HOME", "value": f"{_MODELS_MOUNT}/huggingface"},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    secret = redis_secret(job)
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


def _volumes(identity: JobIdentity, shared_memory: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Mounts and what they are of."""
    spec = identity.job.spec
    cache = spec.model.cache
    own_cache = {} if cache.size_limit is None else {"sizeLimit": cache.size_limit}
    sources: dict[str, tuple[str, dict[str, Any]]] = {
        "manifest": (_MANIFEST_MOUNT, {"configMap": {"name": names.manifest_map(identity.name)}}),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}}),  # noqa: S108
        "tmp": ("/tmp", {"emptyDir": {}}),  # noqa: S108
        "models": (_MODELS_MOUNT, _claim(cache.persistent_volume_claim) or {"emptyDir": own_cache}),
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


def _overridden(identity: JobIdentity, pod: dict[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """The pod with the user's template merged in; what it is found and owned by stays."""
    result = merged(pod, template)
    ours = pod["metadata"]
    labels = {**result["metadata"].get("labels", {}), **ours["labels"]}
    annotations = {**result["metadata"].get("annotations", {}), **ours.get("annotations", {})}
    result["metadata"] = {**result["metadata"], **ours, "labels": labels}
    if annotations:
        result["metadata"]["annotations"] = annotations
    return result


def _in_queue(identity: JobIdentity, pod: dict[str, Any], *, grouped: bool) -> dict[str, Any]:
    """Labels by which Kueue lets the head and the least workers in together, and each further worker alone."""
    if identity.queue is None:
        return pod
    metadata = pod["metadata"]
    metadata["labels"][names.QUEUE_LABEL] = identity.queue
    if grouped:
        metadata["labels"][names.POD_GROUP_LABEL] = identity.name
        total = str(identity.job.spec.workers.least + 1)
        metadata["annotations"] = {**metadata.get("annotations", {}), names.POD_GROUP_TOTAL: total}
    return pod
