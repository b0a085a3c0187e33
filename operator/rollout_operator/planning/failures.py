"""Failed pods: the reason of a failure, the action it requires, and its record in the status. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from rollout_api.manifest.pod_spec import FailurePolicy, FailureRule, Lifecycle
from rollout_api.manifest.status import Backoff, Failure, RolloutJobStatus
from rollout_api.protocol.status import EXIT_INTERRUPTED, EXIT_MANIFEST, EXIT_MODEL, EXIT_REDIS
from rollout_operator.objects import names
from rollout_operator.objects.observed import Observed, PodView, format_timestamp, parse_timestamp
from rollout_operator.planning.actions import PlanBuilder

JOB_COMPONENTS: dict[str, Literal["head", "worker", "prefetch"]] = {
    names.HEAD: "head",
    names.WORKER: "worker",
    names.PREFETCH: "prefetch",
}
"""The components whose pods run the job, and whose failures are therefore recorded."""
_MAX_RECORDED_FAILURES = 10
_MAX_NEW_FAILURES = 64
"""Number of failed pods that one reconcile records, because the status has a limited size; the next one continues."""
_MAX_FAILURE_EVENTS = 8
"""Number of Events that one reconcile posts about failed pods one by one."""
_MANIFEST_INVALID = "ManifestInvalid"
_INTERRUPTED = "Interrupted"
_NOT_READY = "NotReady"
_REBOOT_REASONS = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of containers whose end nobody has observed: those of the kubelet and of containerd after a reboot."""

_EXIT_CODE_REASONS = {
    EXIT_MANIFEST: _MANIFEST_INVALID,
    EXIT_MODEL: "ModelNotFound",
    EXIT_REDIS: "RedisUnreachable",
    EXIT_INTERRUPTED: _INTERRUPTED,
}
"""Reasons that the ``rollout`` command reports by its exit code."""

_FIRST_BACKOFF_S = 5
_MAX_BACKOFF_S = 300
_REPEATED_BACKOFF_S = 20
"""The backoff from which on repeated failures, rather than the last one, explain why a pod is missing."""
_BACKOFF_WINDOW_S = 600.0
"""A pod that fails later than this after it was allowed to start begins with the shortest backoff again."""
_MAX_REJECTING_NODES = 8
"""Number of rejections whose nodes are remembered for each pod."""


class FailureAction(Enum):
    """What the operator does about a failed pod."""

    FAIL_JOB = "FailJob"
    REPLACE = "Replace"
    IGNORE = "Ignore"


@dataclass(frozen=True)
class FailureDecision:
    """The reason of a pod's failure and what to do about it."""

    reason: str
    action: FailureAction


def classify_failure(pod: PodView, policy: FailurePolicy) -> FailureDecision:
    """Decide what to do about a failed pod.

    The first matching rule of the job's failure policy decides. Without one, a pod is replaced and not counted if the
    cluster disrupted it, if its kubelet rejected it, if its node was restarted, or if it was not ready in time; an
    invalid manifest fails the job; and any other failure is counted and the pod replaced. A pod that the kubelet has
    evicted because it exceeded its own limits is not disrupted: it lacks the condition DisruptionTarget, with which
    the kubelet marks evictions for the benefit of the node (KEP-3329).
    """
    reason = failure_reason(pod)
    for rule in policy.rules:
        if _matches(rule, pod, reason):
            return FailureDecision(reason, FailureAction(rule.action))
    if pod.disrupted or pod.rejected or reason in _REBOOT_REASONS or reason in (_INTERRUPTED, _NOT_READY):
        return FailureDecision(reason, FailureAction.IGNORE)
    # A replacement would read the same manifest and fail in the same way.
    return FailureDecision(reason, FailureAction.FAIL_JOB if reason == _MANIFEST_INVALID else FailureAction.REPLACE)


def failure_reason(pod: PodView) -> str:
    """Return in one word why a pod failed. A pod that has not terminated was not ready in time."""
    if not pod.terminated:
        return _NOT_READY
    if pod.reason in ("", "Error") and pod.exit_code in _EXIT_CODE_REASONS:
        return _EXIT_CODE_REASONS[pod.exit_code]
    return pod.reason or "Error"


def _matches(rule: FailureRule, pod: PodView, reason: str) -> bool:
    if rule.component is not None and rule.component != pod.component:
        return False
    if rule.on_exit_codes is None:
        return bool({reason, pod.reason} & set(rule.on_reasons))
    if not pod.exit_code:
        return False
    return (pod.exit_code in rule.on_exit_codes.values) == (rule.on_exit_codes.operator == "In")


def record_failures(
    builder: PlanBuilder, observed: Observed, status: RolloutJobStatus, lifecycle: Lifecycle, listed: set[str]
) -> tuple[RolloutJobStatus, tuple[str, str] | None]:
    """Add newly failed pods and their backoffs to the status of a job, a limited number at a time.

    *listed* are the uids of the failed pods that the status already lists.

    Returns:
        The status, and reason and message if the job has to fail.
    """
    failures = list(status.failures)
    now = format_timestamp(observed.now)
    oldest = format_timestamp(observed.now - lifecycle.backoff_window_seconds)
    times = [time for time in status.failure_times if time > oldest]
    fatal: tuple[str, str] | None = None
    backoffs = {pod: one for pod, one in backoffs_by_place(status).items() if not _is_over(one, observed.now)}
    new = [
        pod
        for pod in observed.pods
        if pod.component in JOB_COMPONENTS
        and (pod.phase == "Failed" or pod.is_stuck(observed.now, lifecycle.ready_timeout_seconds))
        and not pod.deleting
        and pod.uid not in listed
    ]
    if len(new) > _MAX_NEW_FAILURES:
        builder.requeue(0.0)
    for index, pod in enumerate(new[:_MAX_NEW_FAILURES]):
        decision = classify_failure(pod, lifecycle.failure_policy)
        counted = decision.action is FailureAction.REPLACE
        if counted:
            times.append(now)
        place = place_of(observed.metadata["name"], pod)
        backoffs[place] = _next_backoff(backoffs.get(place), place, pod, decision, now)
        failures.append(
            Failure(
                pod=pod.name,
                uid=pod.uid,
                component=JOB_COMPONENTS[pod.component],
                reason=decision.reason,
                exit_code=pod.exit_code,
                message=pod.message[-1000:],
                time=now,
                counted=counted,
            )
        )
        message = _describe(pod, decision.reason)
        if index < _MAX_FAILURE_EVENTS:
            builder.warn("PodFailed" if decision.reason == "Error" else decision.reason, message)
        if decision.action is FailureAction.FAIL_JOB:
            fatal = (decision.reason, message)
    if (unreported := min(len(new), _MAX_NEW_FAILURES) - _MAX_FAILURE_EVENTS) > 0:
        builder.warn("PodsFailed", f"{unreported} more pods have failed; status.failures lists the latest.")
    existing = {pod.uid for pod in observed.pods if not pod.deleting}
    newest = {failure.uid for failure in failures[-_MAX_RECORDED_FAILURES:]}
    kept = [failure for failure in failures if failure.uid in existing or failure.uid in newest]
    limit = lifecycle.backoff_limit
    times = times[-(limit + 1) :]
    if fatal is None and len(times) > limit:
        message = (
            f"More than {limit} pods, which is lifecycle.backoffLimit, have failed within "
            f"{lifecycle.backoff_window_seconds} s."
        )
        last = next((failure for failure in reversed(kept) if failure.counted), None)
        if last is not None:
            message += f" The last one was {last.pod}: {last.reason}: {last.message.strip()[-500:]}"
        fatal = ("BackoffLimitExceeded", message)
    changes = {"failures": kept, "failed_pods": len(times), "failure_times": times, "backoffs": _grouped(backoffs)}
    return status.model_copy(update=changes), fatal


def _describe(pod: PodView, reason: str) -> str:
    node = f"node {pod.node}" if pod.node else "no node"
    exit_code = f", exit code {pod.exit_code}" if pod.exit_code is not None else ""
    message = f"Pod {pod.name} on {node} failed: {reason}{exit_code}."
    if output := pod.message.strip()[-700:]:
        message += f" Its last output: {output}"
    return message


def place_of(job: str, pod: PodView) -> str:
    """Return the name that a pod and its replacements have in common. All pods of a worker have one."""
    return names.worker(job, pod.slot) if pod.component == names.WORKER else names.pod_name(job, pod.component)


def _next_backoff(previous: Backoff | None, place: str, pod: PodView, decision: FailureDecision, now: str) -> Backoff:
    """Return the backoff after another failure: 5, 10, 20 … 300 s, whatever the class of the failures.

    A first failure that does not count causes no delay.
    """
    nodes = [] if previous is None else previous.nodes
    if previous is None:
        seconds = _FIRST_BACKOFF_S if decision.action is FailureAction.REPLACE else 0
    elif pod.created < (parse_timestamp(previous.time) or 0.0):
        seconds = previous.seconds  # another pod of the same worker, which has failed together with the first one
    else:
        seconds = min(_MAX_BACKOFF_S, max(_FIRST_BACKOFF_S, 2 * previous.seconds))
    if pod.rejected and pod.node:
        nodes = [*nodes, pod.node][-_MAX_REJECTING_NODES:]
    return Backoff(pods=[place], reason=decision.reason, time=now, seconds=seconds, nodes=nodes)


def backoffs_by_place(status: RolloutJobStatus) -> dict[str, Backoff]:
    """Return the backoffs of pods that have failed, by place."""
    return {pod: backoff for backoff in status.backoffs for pod in backoff.pods}


def _grouped(backoffs: Mapping[str, Backoff]) -> list[Backoff]:
    """Return the backoffs for the status, whose size is limited: pods with the same backoff share an entry."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for place, one in sorted(backoffs.items()):
        groups.setdefault((one.time, str(one.seconds), one.reason, *one.nodes), []).append(place)
    return [backoffs[places[0]].model_copy(update={"pods": places}) for places in groups.values()]


def remaining_backoff(backoff: Backoff | None, now: float) -> float:
    """Return the seconds until another pod may be created."""
    return 0.0 if backoff is None else max(0.0, (parse_timestamp(backoff.time) or 0.0) + backoff.seconds - now)


def _is_over(backoff: Backoff, now: float) -> bool:
    return remaining_backoff(backoff, now - _BACKOFF_WINDOW_S) == 0.0


def avoided_nodes(backoff: Backoff | None) -> frozenset[str]:
    """Return the nodes that rejected the pods in a place repeatedly."""
    nodes = [] if backoff is None else backoff.nodes
    return frozenset(node for node in nodes if nodes.count(node) > 1)


def repeated_failure(backoffs: Mapping[str, Backoff], *, at_limit: bool = False) -> tuple[str, str] | None:
    """Return reason and message about a pod that fails again and again; None if there is none.

    *at_limit* selects pods that have failed so often that their backoff grows no longer.
    """
    shortest = _MAX_BACKOFF_S if at_limit else _REPEATED_BACKOFF_S
    place, worst = max(backoffs.items(), key=lambda item: item[1].seconds, default=("", None))
    if worst is None or worst.seconds < shortest:
        return None
    message = f"Pod {place} fails repeatedly, last with {worst.reason}, and is replaced after {worst.seconds} s."
    if worst.nodes:
        message += f" It was rejected by {', '.join(sorted(set(worst.nodes)))}."
    return re.sub(r"\W", "_", worst.reason), message  # OutOfnvidia.com/gpu is no valid reason of a condition
