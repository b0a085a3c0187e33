"""The result of planning: a status, Events and actions.

Every action is idempotent: it may be executed twice, or by two operators at once, with the same effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Create:
    """Create an object. An existing object of the same name is left unchanged."""

    manifest: dict[str, Any]


@dataclass(frozen=True)
class Apply:
    """Set the fields of an object that belongs to the job, by server-side apply."""

    manifest: dict[str, Any]


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod if it still has this uid."""

    name: str
    uid: str
    force: bool = False
    """Whether to delete without a grace period, because the pod's node is lost and cannot confirm the deletion."""


@dataclass(frozen=True)
class DeleteObject:
    """Delete an object that belongs to the job and is no pod, if it still has this uid."""

    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True)
class DeleteWorkload:
    """Delete the Workload of Kueue for a group of pods, whereupon Kueue releases its quota and its finalizers."""

    name: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete the RolloutJob, because ``ttlSecondsAfterFinished`` has passed."""


@dataclass(frozen=True)
class SetFinalizer:
    """Add or remove the job's finalizer, which delays the deletion of the job and its objects."""

    present: bool


@dataclass(frozen=True)
class KeepBundle:
    """Keep the spec and the status of the job, its Events and the ends of its pods' logs in a ConfigMap.

    The ConfigMap does not belong to the job, and replaces that of an earlier job of the same name.
    """

    name: str
    pods: tuple[str, ...]
    """Names of the pods, the most important ones first."""


Action = Create | Apply | DeletePod | DeleteObject | DeleteWorkload | DeleteJob | SetFinalizer | KeepBundle


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event on the job."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What to do for one job: write the status first, then post the Events, then execute the actions in order."""

    status: dict[str, Any] | None = None
    """The complete status, or None if the current one is up to date."""
    events: tuple[Event, ...] = ()
    """Events to post once the status has been written."""
    actions: tuple[Action, ...] = ()
    requeue_after: float | None = None
    """Seconds until the next reconcile if no watch event comes first; None if only an event requires one."""


@dataclass
class PlanBuilder:
    """A plan under construction."""

    events: list[Event] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    requeue_after: float | None = None

    def requeue(self, seconds: float) -> None:
        """Request a reconcile within this time; the shortest requested time counts."""
        self.requeue_after = seconds if self.requeue_after is None else min(self.requeue_after, seconds)

    def warn(self, reason: str, message: str) -> None:
        """Add an Event of type Warning."""
        self.events.append(Event("Warning", reason, message))
