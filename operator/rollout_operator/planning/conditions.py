"""A job's conditions, the Events about them, and the one-word state derived from them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout_api.manifest.status import Backoff, Condition, ConditionType, State
from rollout_operator.objects import names
from rollout_operator.objects.job_context import JobContext
from rollout_operator.objects.observed import HeadStatus, Observed, PodView, format_timestamp
from rollout_operator.planning.actions import PlanBuilder
from rollout_operator.planning.failures import repeated_failure
from rollout_operator.planning.teardown import POD_NOT_TERMINATING, describe_overdue

ConditionStatus = Literal["True", "False", "Unknown"]
_READY_STATES = {
    State.RUNNING: "At least one engine is running.",
    State.SUSPENDED: "The job is suspended, as its spec asks for.",
    State.SUCCEEDED: "The job has succeeded.",
}
"""States of a job that is ready, with the message of the condition."""
_EXPLANATIONS = (
    ConditionType.ACCEPTED,
    ConditionType.QUOTA_RESERVED,
    ConditionType.WORKERS_READY,
    ConditionType.ENGINE_READY,
)
"""Conditions in order: the first that is not True explains why a job is not ready."""
PREFETCHING_MODEL = "PrefetchingModel"
"""Reason of the conditions of a job that waits for the download of its model."""
_MAX_MESSAGE = 1000
_MIN_CANARIES = 20
"""Number of compared canaries that are needed before DraftsHealthy can become True."""


@dataclass
class Conditions:
    """The conditions of one reconcile, and those of the previous one. A condition that is not set is Unknown."""

    previous: Mapping[str, Mapping[str, Any]]
    now: float
    generation: int
    current: dict[ConditionType, Condition] = field(default_factory=dict)

    @classmethod
    def following(cls, previous: Iterable[Mapping[str, Any]], now: float, generation: int) -> Conditions:
        """Return conditions, none of them set. One that keeps its previous status keeps its transition time."""
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


def set_summary(conditions: Conditions, state: State, failing: tuple[str, str] | None = None) -> None:
    """Set the conditions Ready and Stalled, which summarize the others.

    They follow kstatus (sigs.k8s.io/cli-utils): a job that has failed, or whose manifest is invalid, is stalled; one
    that has reached the state which its spec asks for is ready. A job that is not ready is also stalled if a pod and
    its replacements keep failing; *failing* is reason and message about these.
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
    elif failing is not None and state in (State.QUEUED, State.STARTING):
        conditions.set(ConditionType.STALLED, "True", *failing)
    else:
        conditions.set(
            ConditionType.STALLED, "False", state, "The manifest is valid, and no failure keeps the job back."
        )


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


@dataclass(frozen=True)
class RunningConditions:
    """Sets the conditions that describe how a running job is doing."""

    observed: Observed
    context: JobContext
    builder: PlanBuilder
    conditions: Conditions
    backoffs: Mapping[str, Backoff]
    """The backoffs of pods that have failed, by place."""

    def update(self, desired: int, workers: list[PodView]) -> None:
        """Set the conditions of a job that should have *desired* workers and has *workers*."""
        self._set_quota_reserved()
        self._set_workers_ready(desired, workers)
        head = self.observed.head
        if head is None:
            reason, message = self._why_no_head()
            self.conditions.set(ConditionType.ENGINE_READY, "Unknown", reason, message)
            if reason == "HeadStatusInvalid":
                self._warn_on_transition(ConditionType.ENGINE_READY)
            self.conditions.set(
                ConditionType.PROGRESSING, "Unknown", "HeadNotReady", "Progress is unknown until the head answers."
            )
            return
        self._set_engine_ready(head)
        self._set_drafts_healthy(head)
        self._set_progressing(head)

    def update_before_prefetch_ends(self) -> None:
        """Set the conditions of a job whose head and workers are created once its model has been downloaded."""
        pods = [pod for pod in self.observed.component(names.PREFETCH) if pod.live]
        reason, message = self._problem(pods, names.PREFETCH) or (PREFETCHING_MODEL, self._describe_prefetch())
        if self.context.queue is None:
            self._set_quota_reserved()
        else:
            self.conditions.set(ConditionType.QUOTA_RESERVED, "Unknown", reason, message)
        for kind in (ConditionType.WORKERS_READY, ConditionType.ENGINE_READY):
            self.conditions.set(kind, "False", reason, message)
        self.conditions.set(ConditionType.PROGRESSING, "Unknown", reason, message)
        if reason != PREFETCHING_MODEL:
            self._warn_on_transition(ConditionType.WORKERS_READY)

    def _set_quota_reserved(self) -> None:
        kind, queue = ConditionType.QUOTA_RESERVED, self.context.queue
        gated = [pod for pod in self.observed.pods if pod.gated and not pod.deleting]
        if queue is None:
            self.conditions.set(kind, "True", "NoQueue", "The job is in no queue.")
        elif gated:
            self.conditions.set(
                kind, "False", "Pending", f"Queue {queue} has not admitted all pods yet; {len(gated)} still wait."
            )
        else:
            self.conditions.set(kind, "True", "Admitted", f"Queue {queue} has admitted all pods.")

    def _set_workers_ready(self, desired: int, workers: list[PodView]) -> None:
        kind = ConditionType.WORKERS_READY
        if sum(pod.ready for pod in workers) >= desired:
            self.conditions.set(kind, "True", "AllReady", "All desired workers are ready.")
            return
        reason, message = self._why_not_ready()
        self.conditions.set(kind, "False", reason, message)
        if reason not in ("Starting", "Queued"):
            self._warn_on_transition(kind)

    def _set_engine_ready(self, head: HeadStatus) -> None:
        kind = ConditionType.ENGINE_READY
        errors = "; ".join(f"{engine}: {error}" for engine, error in sorted(head.engine_errors.items()))[:_MAX_MESSAGE]
        if head.engines:
            message = f"Some engines cannot start. {errors}" if errors else "At least one engine is ready."
            self.conditions.set(kind, "True", "EngineRunning", message)
        elif errors:
            self.conditions.set(kind, "False", "EngineFailed", f"No engine can start. {errors}")
            self._warn_on_transition(kind)
        else:
            self.conditions.set(kind, "False", "LoadingModel", "No engine has finished loading the model yet.")

    def _set_drafts_healthy(self, head: HeadStatus) -> None:
        kind = ConditionType.DRAFTS_HEALTHY
        if self.context.job.spec.speculation.policy == "off":
            self.conditions.set(kind, "Unknown", "SpeculationOff", "spec.speculation.policy is off.")
        elif head.distribution_drift:
            self.conditions.set(
                kind,
                "False",
                "DistributionDrift",
                "Canaries, for whose first tokens nothing is drafted, differ from their siblings. Drafting changes the "
                'output distribution, which it must never do. Set spec.speculation.policy to "off" in a new job, and '
                "report this problem with the versions of vLLM and of das-rollout.",
            )
        elif head.unverified:
            self.conditions.set(
                kind,
                "False",
                "DraftsNotVerified",
                "vLLM does not verify the drafts that are proposed, so drafting costs time and saves none. Look for "
                f"warnings about speculation in the logs of these engines: {', '.join(head.unverified)[:_MAX_MESSAGE]}",
            )
        elif head.canaries < _MIN_CANARIES:
            self.conditions.set(
                kind,
                "Unknown",
                "TooFewCanaries",
                f"Fewer than {_MIN_CANARIES} canaries have been compared with their siblings so far.",
            )
        else:
            self.conditions.set(kind, "True", "NoDriftDetected", "Canaries do not differ from their siblings.")
        if self.conditions.is_false(kind):
            self._warn_on_transition(kind)

    def _set_progressing(self, head: HeadStatus) -> None:
        kind = ConditionType.PROGRESSING
        if head.redis_error:
            self.conditions.set(kind, "False", "RedisUnreachable", f"The job waits for Redis. {head.redis_error}")
            self._warn_on_transition(kind)
        elif head.assigned:
            self.conditions.set(kind, "True", "Sampling", "Engines are sampling rollouts.")
        elif head.waiting:
            self.conditions.set(kind, "False", "NoEngine", "Rollouts wait for an engine that can take them.")
        else:
            self.conditions.set(kind, "False", "Idle", "No request is open.")

    def _warn_on_transition(self, kind: ConditionType) -> None:
        """Report the condition as an Event, but only when its status or reason has changed."""
        condition = self.conditions.transition(kind)
        if condition is not None:
            self.builder.warn(condition.reason, condition.message)

    def _why_not_ready(self) -> tuple[str, str]:
        """Return reason and message of the most severe problem that keeps workers from being ready."""
        pods = [pod for pod in self.observed.component(names.WORKER) if pod.live]
        if (problem := self._problem(pods, names.WORKER)) is not None:
            return problem
        if any(pod.gated for pod in pods):
            return "Queued", "Workers wait until their queue admits them."
        if self.observed.head is not None and self.observed.head.engine_errors:
            engine, error = min(self.observed.head.engine_errors.items())
            return "EngineFailed", f"Engine {engine} cannot start: {error}"[:_MAX_MESSAGE]
        return "Starting", "Workers are starting."

    def _describe_prefetch(self) -> str:
        claim = self.context.job.spec.model.cache.persistent_volume_claim
        message = f"The model is being downloaded into the PersistentVolumeClaim {claim} before other pods are created."
        failures = self.observed.status.get("failures") or [{}]
        if failures[-1].get("component") == names.PREFETCH:
            message += f" The last attempt has failed: {failures[-1]['reason']}."
        return message

    def _problem(self, pods: list[PodView], component: str) -> tuple[str, str] | None:
        """Return reason and message if something is wrong that pods of a component do not overcome by themselves."""
        if self.observed.rejections:
            rejection = self.observed.rejections[0]
            return rejection.reason, str(rejection)
        return _pod_problem(pods) or self._overdue(component) or self._repeated_failure(component)

    def _why_no_head(self) -> tuple[str, str]:
        """Return reason and message of what keeps the head from answering."""
        for pod in self.observed.component(names.HEAD):
            if pod.live and (problem := _pod_problem([pod])) is not None:
                return problem
        if self.observed.head_problem:
            return "HeadStatusInvalid", f"The operator cannot use the status of the head: {self.observed.head_problem}"
        problem = self._overdue(names.HEAD) or self._repeated_failure(names.HEAD)
        return problem or ("HeadNotReady", "The head does not answer yet.")

    def _repeated_failure(self, component: str) -> tuple[str, str] | None:
        prefix = names.pod_name(self.context.name, component)
        return repeated_failure({place: one for place, one in self.backoffs.items() if place.startswith(prefix)})

    def _overdue(self, component: str) -> tuple[str, str] | None:
        """Return reason and message if a pod of a component should have terminated long ago."""
        for pod in self.observed.component(component):
            if pod.is_overdue(self.observed.now) and not pod.retained:
                return POD_NOT_TERMINATING, describe_overdue(pod)
        return None


def _pod_problem(pods: list[PodView]) -> tuple[str, str] | None:
    """Return reason and message of the first pod that cannot start, else of the first that cannot be scheduled."""
    for pod in pods:
        if pod.reason:
            return pod.reason, f"Pod {pod.name} cannot start: {pod.message or pod.reason}"
    for pod in pods:
        if pod.unschedulable:
            return "Unschedulable", f"Pod {pod.name} cannot be scheduled: {pod.unschedulable}"
    return None
