"""Names and labels of a job's objects. All are told apart by them, so they never change."""

from __future__ import annotations

from typing import Any

from rollout_api.manifest.rollout_job import GROUP

APP = "das-rollout"
MANAGED_BY = "app.kubernetes.io/managed-by"
JOB_LABEL = f"{GROUP}/job"
COMPONENT_LABEL = "app.kubernetes.io/component"
SLOT_LABEL = f"{GROUP}/slot"
REPLACEMENT = f"{GROUP}/replacement"
"""Annotation of a worker whose slot another worker had before."""
FINALIZER = f"{GROUP}/end"
FIELD_MANAGER = "das-rollout-operator"

HEAD, WORKER, END = "head", "worker", "end"
"""Components. ``end`` is the pod that tells a job's Redis that the job has ended before its work was done."""

HTTP_PORT = 8080
RAY_PORT = 6380

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
POD_GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
POD_GROUP_TOTAL = "kueue.x-k8s.io/pod-group-total-count"
QUEUE_GATE = "kueue.x-k8s.io/admission"


def selector(job: str, component: str | None = None) -> dict[str, str]:
    """Labels by which a job's pods are found."""
    labels = {MANAGED_BY: APP, JOB_LABEL: job}
    return labels if component is None else {**labels, COMPONENT_LABEL: component}


def labels(job: str, component: str) -> dict[str, str]:
    """Labels of an object of a job."""
    return {
        "app.kubernetes.io/name": APP,
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/part-of": APP,
        **selector(job, component),
    }


def head_pod(job: str) -> str:
    """Name of the head."""
    return f"{job}-head"


def worker_pod(job: str, slot: int) -> str:
    """Name of the worker in a slot."""
    return f"{job}-worker-{slot}"


def end_pod(job: str) -> str:
    """Name of the pod that tells Redis of the job's end."""
    return f"{job}-end"


def service(job: str) -> str:
    """Name of the head's Service."""
    return f"{job}-head"


def service_account(job: str) -> str:
    """Name of the service account of all pods."""
    return f"{job}-rollout"


def manifest_map(job: str) -> str:
    """Name of the ConfigMap from which pods read the job's manifest."""
    return f"{job}-manifest"


def connection_map(job: str) -> str:
    """Name of the ConfigMap from which trainers read how to connect."""
    return f"{job}-connection"


def redis_secret(job: str) -> str:
    """Name of the Secret with the URL of the job's own Redis user, where that is managed."""
    return f"{job}-redis"


def disruption_budget(job: str) -> str:
    """Name of the workers' PodDisruptionBudget."""
    return f"{job}-workers"


def network_policy(job: str) -> str:
    """Name of the NetworkPolicy."""
    return f"{job}-rollout"


def owner(metadata: dict[str, Any], api_version: str, kind: str) -> dict[str, Any]:
    """The reference by which Kubernetes deletes an object with its job."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
