"""What the operator sees of a job: the little that plans are made from, taken from whole Kubernetes objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from rollout_operator import names
from rollout_operator.cluster import Cluster
from rollout_operator.head_status import HeadStatus

Manifest = Mapping[str, Any]
"""A Kubernetes object as the API server gives it."""

_LOST_AFTER_S = 30.0
"""Beyond its grace: so long a pod that should have ended may be there before its node is taken to be lost."""


def seconds(time: str | None) -> float | None:
    """A Kubernetes time as Unix time."""
    return None if time is None else datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


@dataclass(frozen=True)
class PodView:
    """One pod of a job."""

    name: str
    uid: str
    component: str
    slot: int
    """Of a worker; -1 for others."""
    phase: str
    ready: bool
    created: float
    deleting: float | None
    """When it should have ended, if it was told to."""
    scheduled: bool
    gated: bool
    """A queue holds it back."""
    unschedulable: str
    """The scheduler's words."""
    reason: str
    """Why it ended, or why it does not start."""
    message: str
    exit_code: int | None
    disrupted: bool
    """Its end was the cluster's doing, by its condition DisruptionTarget."""
    replacement: bool
    ip: str
    node: str

    @classmethod
    def of(cls, pod: Manifest) -> Self:
        """Read a pod."""
        metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
        labels = metadata.get("labels", {})
        conditions = {one["type"]: one for one in status.get("conditions") or ()}
        scheduled = conditions.get("PodScheduled", {})
        reason, message, code = _end(status)
        slot = labels.get(names.SLOT_LABEL, "")
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            component=labels.get(names.COMPONENT_LABEL, ""),
            slot=int(slot) if slot.isdigit() else -1,
            phase=status.get("phase", "Pending"),
            ready=conditions.get("Ready", {}).get("status") == "True",
            created=seconds(metadata.get("creationTimestamp")) or 0.0,
            deleting=seconds(metadata.get("deletionTimestamp")),
            scheduled=bool(spec.get("nodeName")),
            gated=bool(spec.get("schedulingGates")),
            unschedulable=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
            reason=reason,
            message=message,
            exit_code=code,
            disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True",
            replacement=names.REPLACEMENT in metadata.get("annotations", {}),
            ip=status.get("podIP", ""),
            node=spec.get("nodeName", ""),
        )

    @property
    def ended(self) -> bool:
        """Nothing of it runs any more."""
        return self.phase in ("Succeeded", "Failed")

    def lost(self, now: float) -> bool:
        """It was told to end and nobody carries that out, or removes what has ended: its node is gone."""
        return self.deleting is not None and now > self.deleting + _LOST_AFTER_S


def _end(status: Manifest) -> tuple[str, str, int | None]:
    """Reason, message and exit code of a pod that ended or does not start, as the pod or its containers have it."""
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for container in containers:
        ended = container.get("state", {}).get("terminated")
        if ended is not None and ended.get("exitCode"):
            return (
                status.get("reason") or ended.get("reason") or "Error",
                status.get("message") or ended.get("message", ""),
                ended["exitCode"],
            )
    if status.get("reason"):
        return status["reason"], status.get("message", ""), None
    if status.get("phase") == "Succeeded":
        said = [one.get("state", {}).get("terminated", {}).get("message", "") for one in containers]
        return "", "".join(said), 0
    for container in containers:
        waiting = container.get("state", {}).get("waiting")
        if waiting is not None and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return waiting["reason"], waiting.get("message", ""), None
    return "", "", None


@dataclass(frozen=True)
class Obstacle:
    """Something that the API server refused lately."""

    what: str
    """As in ``Pod math-worker-3``."""
    reason: str
    """As in Forbidden."""
    message: str
    time: float

    def __str__(self) -> str:
        """For people."""
        return f"{self.what}: {self.message}"


@dataclass(frozen=True)
class Observed:
    """All that a plan is made from."""

    job: Manifest
    """The RolloutJob."""
    pods: tuple[PodView, ...]
    """Those that the job owns."""
    objects: Mapping[tuple[str, str], Manifest]
    """What else it owns, by kind and name."""
    now: float
    """Unix time."""
    cluster: Cluster
    default_image: str
    said: HeadStatus | None = None
    """What the head said last; None if it does not answer."""
    obstacles: tuple[Obstacle, ...] = field(default=())

    @property
    def metadata(self) -> Manifest:
        """The job's."""
        found: Manifest = self.job["metadata"]
        return found

    @property
    def status(self) -> Manifest:
        """The job's, as the API server has it."""
        found: Manifest = self.job.get("status") or {}
        return found

    @property
    def head(self) -> HeadStatus | None:
        """What the head says, if it runs: what another said before it is no news."""
        there = any(pod.deleting is None and pod.phase == "Running" for pod in self.of(names.HEAD))
        return self.said if there else None

    def of(self, component: str) -> list[PodView]:
        """Pods of a component, oldest first."""
        return sorted((pod for pod in self.pods if pod.component == component), key=lambda pod: (pod.created, pod.uid))
