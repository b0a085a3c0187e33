"""What a plan asks for. Each is idempotent: carried out twice, or by two operators at once, it has one effect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Create:
    """Make an object that is not there; one that is there by this name stays as it is."""

    manifest: dict[str, Any]


@dataclass(frozen=True)
class Apply:
    """Give an object of the job's the fields that it should have (server-side apply)."""

    manifest: dict[str, Any]


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod, if it is still that one."""

    name: str
    uid: str
    force: bool = False
    """At once: its node is lost, and will not confirm that it has ended."""


@dataclass(frozen=True)
class DeleteJob:
    """Delete the RolloutJob, if it is still that one: its time after the end is over."""


@dataclass(frozen=True)
class SetFinalizer:
    """Have Kubernetes wait, or wait no more, before the job's objects are deleted."""

    present: bool


Action = Create | Apply | DeletePod | DeleteJob | SetFinalizer


@dataclass(frozen=True)
class Note:
    """An Event on the job."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """What to do about one job. First the status is written, then notes, then actions in their order."""

    status: dict[str, Any] | None = None
    """The whole status; None if it is as it should be."""
    notes: tuple[Note, ...] = ()
    """Said if the status could be written."""
    actions: tuple[Action, ...] = ()
    again: float | None = None
    """Seconds until the job is to be looked at even if nothing happens; None: only if something does."""


@dataclass
class Steps:
    """A plan in the making."""

    notes: list[Note] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    again: float | None = None

    def look_again(self, seconds: float) -> None:
        """Look at the job in so many seconds, or sooner."""
        self.again = seconds if self.again is None else min(self.again, seconds)
