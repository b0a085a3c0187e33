"""A job's conditions, and the one word that is derived from them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from rollout_api.manifest.status import Condition, ConditionType, State

Truth = Literal["True", "False", "Unknown"]


def timestamp(now: float) -> str:
    """Unix time as Kubernetes writes it."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Conditions:
    """Conditions in the making; what is not said is Unknown."""

    before: Mapping[str, Mapping[str, Any]]
    now: float
    generation: int
    said: dict[ConditionType, Condition] = field(default_factory=dict)

    @classmethod
    def after(cls, conditions: Iterable[Mapping[str, Any]], now: float, generation: int) -> Conditions:
        """Begin with none said; times of change are taken from *conditions* where nothing changes."""
        return cls({one["type"]: one for one in conditions}, now, generation)

    def say(self, kind: ConditionType, truth: Truth, reason: str, message: str = "") -> None:
        """Say how it stands."""
        before = self.before.get(kind)
        changed = timestamp(self.now)
        if before is not None and before.get("status") == truth:
            changed = before.get("lastTransitionTime", changed)
        self.said[kind] = Condition(
            type=kind,
            status=truth,
            reason=reason,
            message=message,
            last_transition_time=changed,
            observed_generation=self.generation,
        )

    def keep(self, kind: ConditionType) -> None:
        """Say what was said before."""
        before = self.before.get(kind)
        if before is not None:
            self.say(kind, before["status"], before["reason"], before.get("message", ""))

    def is_true(self, kind: ConditionType) -> bool:
        """Whether it was said to be true."""
        return kind in self.said and self.said[kind].status == "True"

    def is_false(self, kind: ConditionType) -> bool:
        """Whether it was said to be false."""
        return kind in self.said and self.said[kind].status == "False"

    def news(self, kind: ConditionType) -> Condition | None:
        """The condition, if its status or reason differs from what was said before."""
        condition, before = self.said.get(kind), self.before.get(kind)
        if condition is None or (
            before is not None and before.get("status") == condition.status and before.get("reason") == condition.reason
        ):
            return None
        return condition

    def all(self) -> list[Condition]:
        """All of them, in the order in which they come true."""
        for kind in ConditionType:
            if kind not in self.said:
                self.say(kind, "Unknown", "NotKnown")
        return [self.said[kind] for kind in ConditionType]


def is_true(conditions: Iterable[Mapping[str, Any]], kind: ConditionType) -> bool:
    """Whether such a condition is true in a status."""
    return any(one["type"] == kind and one["status"] == "True" for one in conditions)


def state(conditions: Conditions, *, suspending: bool) -> State:
    """The one word."""
    for kind, word in (
        (ConditionType.FAILED, State.FAILED),
        (ConditionType.SUCCEEDED, State.SUCCEEDED),
        (ConditionType.SUSPENDED, State.SUSPENDED),
    ):
        if conditions.is_true(kind):
            return word
    if suspending:
        return State.SUSPENDING
    if not conditions.is_true(ConditionType.ACCEPTED):
        return State.PENDING
    if conditions.is_false(ConditionType.QUOTA_RESERVED):
        return State.QUEUED
    return State.RUNNING if conditions.is_true(ConditionType.ENGINE_READY) else State.STARTING
