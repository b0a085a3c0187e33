"""Failed pods: the reason of a failure and the action it requires. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from rollout_api.manifest.pod_spec import FailurePolicy, FailureRule
from rollout_api.protocol.exit_codes import EXIT_INTERRUPTED, EXIT_MANIFEST, EXIT_MODEL, EXIT_REDIS
from rollout_operator.observed import PodView

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
"""Reasons with which the kubelet, the node lifecycle controller or the scheduler ends a pod, independently of the job
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


def backoff_delay(times: Iterable[float], now: float) -> float:
    """Return the seconds until another pod may be created, given when the counted failures happened.

    The backoff after the last failure is 5, 10, 20 … 300 seconds, by the number of recent failures.
    """
    recent = [time for time in times if now - time < _BACKOFF_WINDOW_S]
    if not recent:
        return 0.0
    backoff = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (len(recent) - 1))
    return max(0.0, max(recent) + backoff - now)
