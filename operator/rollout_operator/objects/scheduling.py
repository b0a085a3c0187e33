"""Scheduling of pods: node affinity for a kind of GPU, and gangs. Pure.

If a scheduler has PodGroups, the pods of each worker form a gang. Otherwise it may start some pods of several workers,
all of which then wait for the rest. Kueue avoids this by itself, so that jobs in a queue need no PodGroups.
"""

from __future__ import annotations

from typing import Any

from rollout_api.manifest.accelerators import accelerator_labels
from rollout_operator.objects import names

COSCHEDULING_API = "scheduling.x-k8s.io/v1alpha1"
"""API of the coscheduling plugin (kubernetes-sigs/scheduler-plugins)."""
VOLCANO_API = "scheduling.volcano.sh/v1beta1"
GANG_APIS = (COSCHEDULING_API, VOLCANO_API)
GANG_KIND, GANG_PLURAL = "PodGroup", "podgroups"
_COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
_VOLCANO_ANNOTATION = "scheduling.k8s.io/group-name"


def gang(api_version: str, job: str, namespace: str, owner: dict[str, Any], *, slot: int, size: int) -> dict[str, Any]:
    """Return the PodGroup of the worker in a slot, which has *size* pods."""
    return {
        "apiVersion": api_version,
        "kind": GANG_KIND,
        "metadata": {
            "name": names.worker(job, slot),
            "namespace": namespace,
            "labels": names.labels(job, "pods"),
            "ownerReferences": [owner],
        },
        "spec": {"minMember": size},
    }


def join_gang(api_version: str, metadata: dict[str, Any], name: str) -> None:
    """Add to a pod's metadata that it belongs to the PodGroup *name*."""
    if api_version == COSCHEDULING_API:
        metadata["labels"][_COSCHEDULING_LABEL] = name
    else:
        metadata["annotations"][_VOLCANO_ANNOTATION] = name


def node_affinity(kind: str) -> dict[str, Any]:
    """Return a ``nodeAffinity`` that accepts nodes on which any label names this kind of GPU.

    See :func:`rollout_api.manifest.accelerators.accelerator_labels`.
    """
    labels = accelerator_labels(kind)
    terms = [{"matchExpressions": [{"key": key, "operator": "In", "values": values}]} for key, values in labels.items()]
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
