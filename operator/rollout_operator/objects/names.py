"""Names and labels of the objects that belong to a job.

The operator finds the objects of existing jobs by these names, so changing one orphans what is already running.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterator
from typing import Any

from rollout_api.manifest.rollout_job import GROUP

APP = "das-rollout"
MANAGED_BY = "app.kubernetes.io/managed-by"
JOB_LABEL = f"{GROUP}/job"
COMPONENT_LABEL = "app.kubernetes.io/component"
TRAINER_LABEL = f"{GROUP}/trainer"
"""By default, the label of a trainer's pods, with the name of the job that they send weights to."""
SLOT_LABEL = f"{GROUP}/slot"
RANK_LABEL = f"{GROUP}/rank"
"""Label of a worker's pods: 0 for its first one, the leader, and 1, 2, … for the followers."""
REVISION_LABEL = f"{GROUP}/revision"
CONTENT_HASH_ANNOTATION = f"{GROUP}/content-hash"
"""Annotation with the hash of the manifest that the operator has applied last."""
REPLACEMENT_ANNOTATION = f"{GROUP}/replacement"
"""Annotation of a worker pod whose slot was occupied by another worker before."""
AVOIDED_NODES_ANNOTATION = f"{GROUP}/avoided-nodes"
"""Annotation of a pod with the names of the nodes that it must not be scheduled on, separated by commas."""
BUNDLE_LABEL = f"{GROUP}/bundle-of"
"""Label of a ConfigMap with the bundle of a failed job: the name of the job."""
JOB_UID_ANNOTATION = f"{GROUP}/job-uid"
"""Annotation of such a ConfigMap with the uid of the job."""
FINALIZER = f"{GROUP}/cleanup"
FOREGROUND_FINALIZER = "foregroundDeletion"
"""Finalizer of an object whose dependents Kubernetes deletes first (``kubectl delete --cascade=foreground``)."""
FIELD_MANAGER = "das-rollout-operator"

HEAD, WORKER, SERVER, PREFETCH, CLEANUP = "head", "worker", "server", "prefetch", "cleanup"
"""Components. The server offers the job over HTTP. The prefetch pod downloads the model before the head and the workers
start. The cleanup pod tells a job's Redis that the job failed or was deleted."""

HTTP_PORT = 8080
"""Port of a head or a worker for its status, metrics and readiness."""
SERVER_PORT = 8000
"""Port of the HTTP server."""

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
POD_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
POD_GROUP_TOTAL_ANNOTATION = "kueue.x-k8s.io/pod-group-total-count"
POD_GROUP_INDEX_LABEL = "kueue.x-k8s.io/pod-group-pod-index"
"""Label with the number of a pod among those of its group that have the same role; Kueue assigns topology domains in
this order."""
PODSET_ANNOTATIONS = "kueue.x-k8s.io/podset-"
"""Prefix of the annotations that tell Kueue how to place pods in a topology."""
KUEUE_GROUP = "kueue.x-k8s.io"
WORKLOAD_KIND, WORKLOAD_PLURAL = "Workload", "workloads"

COSCHEDULING_API = "scheduling.x-k8s.io/v1alpha1"
"""API of the coscheduling plugin (kubernetes-sigs/scheduler-plugins)."""
VOLCANO_API = "scheduling.volcano.sh/v1beta1"
NATIVE_GANG_API = "scheduling.k8s.io/v1beta1"
"""API of Kubernetes' own PodGroups (since 1.37, if it is enabled)."""
GANG_APIS = (COSCHEDULING_API, VOLCANO_API, NATIVE_GANG_API)
"""APIs of schedulers with PodGroups, those that somebody has installed first. With one, the pods of each worker form a
gang. Otherwise, the scheduler may start some pods of several workers, all of which then wait for the rest. Kueue avoids
this by itself."""
GANG_KIND, GANG_PLURAL = "PodGroup", "podgroups"
COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
VOLCANO_ANNOTATION = "scheduling.k8s.io/group-name"


def selector(job: str, component: str | None = None) -> dict[str, str]:
    """Return the labels that select a job's pods, or only those of one component."""
    labels = {MANAGED_BY: APP, JOB_LABEL: job}
    return labels if component is None else {**labels, COMPONENT_LABEL: component}


def labels(job: str, component: str) -> dict[str, str]:
    """Return all labels of an object that belongs to a job."""
    return {
        "app.kubernetes.io/name": APP,
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/part-of": APP,
        **selector(job, component),
    }


def worker(job: str, slot: int) -> str:
    """Return the name of the worker in a slot. Its pods find each other by this name."""
    return f"{job}-{WORKER}-{slot}"


def labels_outside_release(component: str) -> dict[str, str]:
    """Return the labels of an object that is not the chart's own but serves its release.

    They lack ``app.kubernetes.io/instance``. With it, Argo CD would take the object for a part of the release that is
    no longer in Git, and delete it.
    """
    return {"app.kubernetes.io/part-of": APP, COMPONENT_LABEL: component}


def pod_name(job: str, component: str, slot: int | None = None, *, rank: int = 0, taken: Collection[str] = ()) -> str:
    """Return the name of a new head, worker or prefetch pod.

    The same name is used again as soon as it is free, so that two operators at once cannot create two pods for one
    slot. Only a pod that a finalizer retains makes its successor have a suffix. *rank* is the number of the pod in its
    worker, and *taken* are the names of existing pods.
    """
    name = f"{job}-{component}" if slot is None else f"{job}-{component}-{slot}"
    if rank:
        name += f"-{rank}"
    return next(candidate for candidate in _with_suffixes(name) if candidate not in taken)


def _with_suffixes(name: str) -> Iterator[str]:
    yield name
    for number in itertools.count(2):
        yield f"{name}-r{number}"


def pod_group(job: str, uid: str, started: str) -> str:
    """Return the name of the group of pods that Kueue admits when a job starts or resumes."""
    digest = hashlib.sha256(f"{uid}/{started}".encode()).hexdigest()[:8]
    return f"{job}-{digest}"


def cleanup_pod(job: str) -> str:
    """Return the name of the cleanup pod."""
    return f"{job}-cleanup"


def service(job: str) -> str:
    """Return the name of the head's Service."""
    return f"{job}-head"


def server(job: str) -> str:
    """Return the name of the Deployment, the Service and the NetworkPolicy of the HTTP server."""
    return f"{job}-{SERVER}"


def service_account(job: str) -> str:
    """Return the name of the ServiceAccount of the job's pods."""
    return f"{job}-rollout"


def manifest_config_map(job: str) -> str:
    """Return the name of the ConfigMap with the job's manifest for its pods."""
    return f"{job}-manifest"


def connection_config_map(job: str) -> str:
    """Return the name of the ConfigMap that tells trainers how to connect."""
    return f"{job}-connection"


def bundle_config_map(job: str) -> str:
    """Return the name of the ConfigMap with what is kept of a failed job. It outlives the job."""
    return f"{job}-bundle"


def redis_secret(job: str) -> str:
    """Return the name of the Secret with the URL of the job's own Redis user, for a job with a managed user."""
    return f"{job}-redis"


def disruption_budget(job: str) -> str:
    """Return the name of the PodDisruptionBudget of the head and the workers."""
    return f"{job}-rollout"


def network_policy(job: str) -> str:
    """Return the name of the job's NetworkPolicy."""
    return f"{job}-rollout"


def owner_reference(metadata: dict[str, Any], api_version: str, kind: str) -> dict[str, Any]:
    """Return the owner reference that makes Kubernetes delete an object together with its job."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
