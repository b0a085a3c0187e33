"""Kueue's handling of plain pods and groups of pods, as pure functions; a stand-in for its controller.

The rules are those of Kueue 0.19 (``pkg/controller/jobs/pod`` and ``pkg/controller/jobframework``) and of its page "Run
Plain Pods". Among them:

- Kueue adds a scheduling gate and a finalizer to each pod, and removes the gate once the pod's Workload is admitted.
- The Workload of a group is created when the group has as many pods as its annotation says, and all pods agree on it.
- The finalizer stays on a pod that has failed or was deleted until another pod of the same role exists in its place.
- Pods that have succeeded still count, so a pod that is created in their place is excess and is deleted.
- An evicted group loses its quota and all its pods; it waits for others that can be admitted again.
- A group that has as many succeeded pods as it needs is finished. Deleting its Workload deletes all its pods.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_operator.objects import names

FINALIZER = "kueue.x-k8s.io/managed"
GATE = "kueue.x-k8s.io/admission"

Pod = dict[str, Any]
"""A Pod object as the API server returns it."""


@dataclass
class Workload:
    """The Workload of a pod or of a group of pods."""

    counts: Counter[str]
    """Number of pods by role."""
    admitted: bool = False
    evicted: bool = False
    finished: bool = False
    deleted: bool = False
    """Whether its deletion was requested."""


@dataclass
class Decision:
    """What Kueue does next, by names of pods."""

    workload: Workload | None = None
    ungate: list[str] = field(default_factory=list)
    delete: list[str] = field(default_factory=list)
    finalize: list[str] = field(default_factory=list)
    """Pods that lose the finalizer."""
    error: str = ""
    """Why no Workload can be created."""


def reconcile_single(pod: Pod, workload: Workload | None, may_admit: Callable[[int], bool]) -> Decision:
    """Decide about a pod that belongs to no group."""
    if pod["metadata"].get("deletionTimestamp"):
        return Decision(None, finalize=[_name(pod)])
    workload = workload or Workload(Counter({role(pod): 1}))
    if _terminated(pod):
        workload.finished = True
        return Decision(workload, finalize=[_name(pod)])
    if workload.evicted or workload.deleted:
        return Decision(None, delete=[_name(pod)])
    return _admit([pod], workload, may_admit)


def reconcile_group(pods: Sequence[Pod], workload: Workload | None, may_admit: Callable[[int], bool]) -> Decision:
    """Decide about a group of pods.

    Args:
        pods: all existing pods of the group.
        workload: its Workload, if there is one.
        may_admit: returns whether there is quota for a number of pods.
    """
    everyone = [_name(pod) for pod in pods]
    if not pods:
        return Decision(None)
    total = int(pods[0]["metadata"]["annotations"][names.POD_GROUP_TOTAL_ANNOTATION])
    if workload is None:
        return _form(pods, total)
    if workload.deleted:
        return Decision(None, delete=_not_deleting(pods), finalize=everyone)
    decision = _match(pods, workload)
    if workload.deleted:
        return decision
    if workload.finished or sum(pod["status"].get("phase") == "Succeeded" for pod in pods) == total:
        workload.finished = True
        decision.finalize = everyone
    elif workload.evicted:
        decision.delete += _not_deleting([pod for pod in pods if not _suspended(pod)])
        if not any(pod["status"].get("phase") == "Running" for pod in pods):
            workload.admitted = workload.evicted = False
    elif any(_suspended(pod) for pod in pods):
        admitted = _admit([pod for pod in pods if not pod["metadata"].get("deletionTimestamp")], workload, may_admit)
        decision.ungate = admitted.ungate
    elif not workload.admitted:
        decision.delete += _not_deleting(pods)
    return decision


def _form(pods: Sequence[Pod], total: int) -> Decision:
    """Create the Workload of a group, if it is complete."""
    active = [pod for pod in pods if _runnable_or_succeeded(pod)]
    decision = Decision(finalize=[_name(pod) for pod in pods if not _runnable_or_succeeded(pod)])
    totals = {pod["metadata"]["annotations"][names.POD_GROUP_TOTAL_ANNOTATION] for pod in active}
    queues = {pod["metadata"]["labels"][names.QUEUE_LABEL] for pod in active}
    if len(totals) > 1 or len(queues) > 1:
        decision.error = f"the pods have different total counts or queues: {sorted(totals)}, {sorted(queues)}"
    elif len(active) < total:
        decision.error = "the group has fewer runnable pods than expected"
    else:
        ordered = sorted(active, key=_keep_first)
        decision.delete = _not_deleting(ordered[total:])
        decision.finalize += [_name(pod) for pod in ordered[total:]]
        decision.workload = Workload(Counter(role(pod) for pod in ordered[:total]))
    return decision


def _match(pods: Sequence[Pod], workload: Workload) -> Decision:
    """Compare a group with its Workload: remove excess pods, and release those that have been replaced."""
    decision = Decision(workload)
    roles = {role(pod) for pod in pods if _runnable_or_succeeded(pod)}
    if roles - set(workload.counts):
        workload.deleted = True
        return decision
    for name, count in workload.counts.items():
        active = sorted((pod for pod in pods if role(pod) == name and _runnable_or_succeeded(pod)), key=_keep_first)
        inactive = [pod for pod in pods if role(pod) == name and not _runnable_or_succeeded(pod)]
        excess = active[count:]
        decision.delete += _not_deleting(excess)
        decision.finalize += [_name(pod) for pod in excess]
        replaced = max(0, min(len(inactive), len(inactive) + len(active) - count))
        oldest_last = sorted(inactive, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)
        decision.finalize += [_name(pod) for pod in oldest_last[len(oldest_last) - replaced :]]
    return decision


def _admit(pods: Sequence[Pod], workload: Workload, may_admit: Callable[[int], bool]) -> Decision:
    if not workload.admitted and may_admit(sum(workload.counts.values())):
        workload.admitted = True
    ungate = [_name(pod) for pod in pods if _gated(pod)] if workload.admitted else []
    return Decision(workload, ungate=ungate)


def role(pod: Pod) -> str:
    """Return what Kueue hashes of a pod's spec to find pods of the same role."""
    spec = pod["spec"]
    containers = [
        (container.get("resources", {}).get("requests"), container.get("ports")) for container in spec["containers"]
    ]
    fields = ("nodeSelector", "affinity", "tolerations", "runtimeClassName", "topologySpreadConstraints")
    shape = [containers, *(spec.get(name) for name in fields)]
    return json.dumps(shape, sort_keys=True)


def _name(pod: Pod) -> str:
    name: str = pod["metadata"]["name"]
    return name


def _gated(pod: Pod) -> bool:
    return any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates") or ())


def _terminated(pod: Pod) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _suspended(pod: Pod) -> bool:
    return _terminated(pod) or _gated(pod)


def _runnable_or_succeeded(pod: Pod) -> bool:
    if pod["metadata"].get("deletionTimestamp") and not pod["spec"].get("nodeName"):
        return False
    return bool(pod["status"].get("phase") != "Failed")


def _not_deleting(pods: Sequence[Pod]) -> list[str]:
    return [_name(pod) for pod in pods if not pod["metadata"].get("deletionTimestamp")]


def _keep_first(pod: Pod) -> tuple[bool, bool, str]:
    """Order active pods by what Kueue prefers to keep: with finalizer, not gated, older."""
    metadata = pod["metadata"]
    return FINALIZER not in metadata.get("finalizers", ()), _gated(pod), str(metadata["creationTimestamp"])
