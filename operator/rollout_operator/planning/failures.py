"""Failed pods: the reason of a failure, the action it requires, and its record in the status. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from rollout_api.manifest.pod_spec import FailurePolicy, FailureRule, Lifecycle
from rollout_api.manifest.status import Failure, RolloutJobStatus
from rollout_api.protocol.exit_codes import EXIT_INTERRUPTED, EXIT_MANIFEST, EXIT_MODEL, EXIT_REDIS
from rollout_operator.objects import names
from rollout_operator.objects.observed import Observed, PodView, format_timestamp
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
_DISRUPTION_REASONS = frozenset(
    {
        "Evicted",
        _INTERRUPTED,
        "NodeAffinity",
        "NodeLost",
        "NodeShutdown",
        "Preempted",
        "Preempting",
        "Shutdown",
        "Terminated",
        "UnexpectedAdmissionError",
    }
)
"""Reasons of the kubelet, the node lifecycle controller or the scheduler for ending a pod, independently of the job
(Kubernetes 1.29 to 1.37), and that of a pod that was told to terminate."""

_EXIT_CODE_REASONS = {
    EXIT_MANIFEST: _MANIFEST_INVALID,
    EXIT_MODEL: "ModelNotFound",
    EXIT_REDIS: "RedisUnreachable",
    EXIT_INTERRUPTED: _INTERRUPTED,
}
"""Reasons that the ``rollout`` command reports by its exit code."""

_FIRST_BACKOFF_S = 5.0
_MAX_BACKOFF_S = 300.0
_BACKOFF_WINDOW_S = 600.0
"""Failures older than this no longer lengthen the backoff."""


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

    The first matching rule of the job's failure policy decides. Without one, a pod that the cluster disrupted or that
    was not ready in time is replaced and not counted, an invalid manifest fails the job, and any other failure is
    counted and the pod replaced.
    """
    reason = failure_reason(pod)
    for rule in policy.rules:
        if _matches(rule, pod, reason):
            return FailureDecision(reason, FailureAction(rule.action))
    if pod.disrupted or reason in _DISRUPTION_REASONS or reason == _NOT_READY:
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
    builder: PlanBuilder, observed: Observed, status: RolloutJobStatus, lifecycle: Lifecycle, recorded: set[str]
) -> tuple[RolloutJobStatus, tuple[str, str] | None]:
    """Add newly failed pods to the status of a job, a limited number at a time.

    Args:
        builder: the plan, to which Events about the failures are added.
        observed: the observed job.
        status: its status.
        lifecycle: the manifest's section.
        recorded: uids of the failed pods that the status already lists.

    Returns:
        The status, and reason and message if the job has to fail.
    """
    failures = list(status.failures)
    now = format_timestamp(observed.now)
    oldest = format_timestamp(observed.now - lifecycle.backoff_window_seconds)
    times = [time for time in status.failure_times if time > oldest]
    fatal: tuple[str, str] | None = None
    new = [
        pod
        for pod in observed.pods
        if pod.component in JOB_COMPONENTS
        and (pod.phase == "Failed" or pod.is_stuck(observed.now, lifecycle.ready_timeout_seconds))
        and not pod.deleting
        and pod.uid not in recorded
    ]
    if len(new) > _MAX_NEW_FAILURES:
        builder.requeue(0.0)
    for index, pod in enumerate(new[:_MAX_NEW_FAILURES]):
        decision = classify_failure(pod, lifecycle.failure_policy)
        counted = decision.action is FailureAction.REPLACE
        if counted:
            times.append(now)
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
    return status.model_copy(update={"failures": kept, "failed_pods": len(times), "failure_times": times}), fatal


def _describe(pod: PodView, reason: str) -> str:
    node = f"node {pod.node}" if pod.node else "no node"
    exit_code = f", exit code {pod.exit_code}" if pod.exit_code is not None else ""
    message = f"Pod {pod.name} on {node} failed: {reason}{exit_code}."
    if output := pod.message.strip()[-700:]:
        message += f" Its last output: {output}"
    return message


def backoff_delay(times: Iterable[float], now: float) -> float:
    """Return the seconds until another pod may be created, given when the counted failures happened.

    The backoff after the last failure is 5, 10, 20 … 300 seconds, by the number of recent failures.
    """
    recent = [time for time in times if now - time < _BACKOFF_WINDOW_S]
    if not recent:
        return 0.0
    backoff = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (len(recent) - 1))
    return max(0.0, max(recent) + backoff - now)
