"""A job's conditions and the one-word state derived from them; pure functions of the observed job."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from rollout_api.manifest.status import Condition, ConditionType, State

ConditionStatus = Literal["True", "False", "Unknown"]


def format_timestamp(now: float) -> str:
    """Return a Unix time in the format of the Kubernetes API."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Conditions:
    """The conditions of one reconcile, and those of the previous one. A condition that is not set is Unknown."""

    previous: Mapping[str, Mapping[str, Any]]
    now: float
    generation: int
    current: dict[ConditionType, Condition] = field(default_factory=dict)

    @classmethod
    def following(cls, previous: Iterable[Mapping[str, Any]], now: float, generation: int) -> Conditions:
        """Return conditions of which none is set yet. One that keeps its previous status keeps its transition time."""
        return cls({condition["type"]: condition for condition in previous}, now, generation)

    def set(self, kind: ConditionType, status: ConditionStatus, reason: str, message: str = "") -> None:
        """Set a condition."""
        previous = self.previous.get(kind)
        transition_time = format_timestamp(self.now)
        if previous is not None and previous.get("status") == status:
            transition_time = previous.get("lastTransitionTime", transition_time)
        self.current[kind] = Condition(
            type=kind,
            status=status,
            reason=reason,
            message=message,
            last_transition_time=transition_time,
            observed_generation=self.generation,
        )

    def carry_over(self, kind: ConditionType) -> None:
        """Set a condition to what it was in the previous reconcile."""
        previous = self.previous.get(kind)
        if previous is not None:
            self.set(kind, previous["status"], previous["reason"], previous.get("message", ""))

    def is_true(self, kind: ConditionType) -> bool:
        """Return whether a condition was set to True."""
        return kind in self.current and self.current[kind].status == "True"

    def is_false(self, kind: ConditionType) -> bool:
        """Return whether a condition was set to False."""
        return kind in self.current and self.current[kind].status == "False"

    def transition(self, kind: ConditionType) -> Condition | None:
        """Return a condition if its status or reason differs from the previous reconcile, else None."""
        condition, previous = self.current.get(kind), self.previous.get(kind)
        if condition is None or (
            previous is not None
            and previous.get("status") == condition.status
            and previous.get("reason") == condition.reason
        ):
            return None
        return condition

    def dump(self) -> list[dict[str, Any]]:
        """Return all conditions as a status contains them, in the order of :class:`ConditionType`."""
        for kind in ConditionType:
            if kind not in self.current:
                self.set(
                    kind, "Unknown", "NotEvaluated", "This is not known yet, or does not apply to the state of the job."
                )
        return [self.current[kind].model_dump(mode="json", by_alias=True) for kind in ConditionType]


def is_true(conditions: Iterable[Mapping[str, Any]], kind: ConditionType) -> bool:
    """Return whether a condition is True in the conditions of a status."""
    return any(condition["type"] == kind and condition["status"] == "True" for condition in conditions)


_READY_STATES = {
    State.RUNNING: "At least one engine is running.",
    State.SUSPENDED: "The job is suspended, as its spec asks for.",
    State.SUCCEEDED: "The job has succeeded.",
}
"""States in which a job is ready, with the message of the condition."""
_EXPLANATIONS = (
    ConditionType.ACCEPTED,
    ConditionType.QUOTA_RESERVED,
    ConditionType.WORKERS_READY,
    ConditionType.ENGINE_READY,
)
"""Conditions of which the first that is not True explains why a job is not ready."""


def set_summary(conditions: Conditions, state: State) -> None:
    """Set the conditions Ready and Stalled, which summarize the others.

    They follow kstatus (sigs.k8s.io/cli-utils): a job that has failed, or whose manifest is invalid, is stalled; one
    that has reached the state which its spec asks for is ready.
    """
    failed = conditions.current.get(ConditionType.FAILED)
    if state in _READY_STATES:
        conditions.set(ConditionType.READY, "True", state, _READY_STATES[state])
    elif failed is not None and failed.status == "True":
        conditions.set(ConditionType.READY, "False", failed.reason, failed.message)
    else:
        found = (conditions.current.get(kind) for kind in _EXPLANATIONS)
        cause = next((condition for condition in found if condition is not None and condition.status != "True"), None)
        if state is State.SUSPENDING or cause is None:
            conditions.set(ConditionType.READY, "False", state, f"The job is {state.lower()}.")
        else:
            conditions.set(ConditionType.READY, "False", cause.reason, cause.message)
    ready = conditions.current[ConditionType.READY]
    if state is State.FAILED or conditions.is_false(ConditionType.ACCEPTED):
        conditions.set(ConditionType.STALLED, "True", ready.reason, ready.message)
    else:
        conditions.set(ConditionType.STALLED, "False", state, "The manifest is valid, and the job has not failed.")


def derive_state(conditions: Conditions, *, suspending: bool) -> State:
    """Return the one-word state that summarizes the conditions."""
    for kind, state in (
        (ConditionType.FAILED, State.FAILED),
        (ConditionType.SUCCEEDED, State.SUCCEEDED),
        (ConditionType.SUSPENDED, State.SUSPENDED),
    ):
        if conditions.is_true(kind):
            return state
    if suspending:
        return State.SUSPENDING
    if not conditions.is_true(ConditionType.ACCEPTED):
        return State.PENDING
    if conditions.is_false(ConditionType.QUOTA_RESERVED):
        return State.QUEUED
    return State.RUNNING if conditions.is_true(ConditionType.ENGINE_READY) else State.STARTING
