"""Judges whether a cluster has the nodes and volumes that a job needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_api.manifest.accelerators import accelerator_labels
from rollout_api.manifest.pod_spec import DEFAULT_GPU_RESOURCE, Workers
from rollout_tools.doctor.findings import Finding, error, ok, warning

_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def judge_nodes(nodes: Sequence[Mapping[str, Any]], workers: Workers | None) -> Finding:
    """Judge whether the workers fit onto the nodes. How much of them other pods use is not examined.

    Args:
        nodes: all nodes.
        workers: the section of the manifest; None if there is no manifest.
    """
    usable = [node for node in nodes if _is_usable(node)]
    resource = (workers.gpu_resource if workers is not None else None) or DEFAULT_GPU_RESOURCE
    with_gpus = [node for node in usable if _gpus(node, resource)]
    seen = (
        f"{len(usable)} of {len(nodes)} nodes are ready and schedulable; {sum(_gpus(one, resource) for one in usable)} "
        f"{resource} on {len(with_gpus)} of them"
    )
    if not usable:
        return error("nodes", seen, "pods stay pending; add nodes, or let an autoscaler do so")
    if workers is None or not workers.gpus_per_worker or workers.device_claim_template is not None:
        return ok("nodes", seen)
    if not with_gpus:
        return error(
            "nodes",
            seen,
            "worker pods stay pending; install the device plugin of the GPUs, add nodes with GPUs (an autoscaler may "
            "do so later), or set workers.gpuResource",
        )
    if workers.accelerator is not None:
        with_gpus = [node for node in with_gpus if _has_accelerator(node, workers.accelerator)]
        if not with_gpus:
            return error(
                "nodes",
                f"{seen}; none has a label of {workers.accelerator}",
                f"worker pods stay pending; label the nodes das.rollout.dev/accelerator={workers.accelerator}, or "
                "correct workers.accelerator",
            )
    each = workers.gpus_per_worker // workers.pods_per_worker
    room = sum(_gpus(node, resource) // each for node in with_gpus)
    if room < workers.pods_per_worker:
        return error(
            "nodes",
            seen,
            f"a worker needs {workers.pods_per_worker} × {each} GPUs of one node each; reduce workers.gpusPerWorker, "
            "or divide the worker with workers.podsPerWorker",
        )
    if room < workers.effective_max * workers.pods_per_worker:
        return warning(
            "nodes",
            seen,
            f"there is room for {room // workers.pods_per_worker} of {workers.effective_max} workers; the others wait "
            "for nodes",
        )
    return ok("nodes", f"{seen}; room for all {workers.effective_max} workers if other pods leave it")


def _is_usable(node: Mapping[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions", ())
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return is_ready and not node.get("spec", {}).get("unschedulable", False)


def _gpus(node: Mapping[str, Any], resource: str) -> int:
    return int(node.get("status", {}).get("allocatable", {}).get(resource, 0))


def _has_accelerator(node: Mapping[str, Any], kind: str) -> bool:
    labels = node["metadata"].get("labels") or {}
    return any(labels.get(name) in values for name, values in accelerator_labels(kind).items())


def judge_claim(name: str, claim: Mapping[str, Any] | None) -> Finding:
    """Judge a PersistentVolumeClaim that a manifest names; None if it does not exist."""
    check = f"claim {name}"
    if claim is None:
        return error(
            check, "does not exist", "pods stay pending; create the PersistentVolumeClaim, or correct the manifest"
        )
    phase = claim.get("status", {}).get("phase", "Pending")
    modes = claim["spec"].get("accessModes", [])
    seen = f"{phase}, {', '.join(modes)}"
    if phase == "Lost":
        return error(check, seen, "its volume is gone; create the claim again")
    if phase != "Bound":
        return warning(check, seen, "it is bound when its first pod is scheduled, or never; see kubectl describe pvc")
    if not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
        return warning(
            check, seen, "all pods of a job mount it, and must run on one node with this mode; use ReadWriteMany"
        )
    return ok(check, seen)


def judge_storage_classes(classes: Sequence[Mapping[str, Any]]) -> Finding:
    """Judge whether claims without a class, such as that of the chart's Redis, get volumes."""
    default = [one for one in classes if (one["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"]
    if not default:
        return warning(
            "storage class",
            f"{len(classes)} classes, none of which is the default",
            "the claim of the chart's Redis stays pending; set redis.storageClassName, or mark a class as the default",
        )
    return ok("storage class", f"the default is {default[0]['metadata']['name']}")
