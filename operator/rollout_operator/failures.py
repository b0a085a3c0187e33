"""Pods that ended badly: why, whose fault it was, and what is done about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from rollout_api.manifest.pod_spec import FailurePolicy, FailureRule
from rollout_api.protocol.exit_codes import EXIT_MANIFEST, EXIT_MODEL, EXIT_REDIS
from rollout_operator.observed import PodView

_CLUSTERS_DOING = frozenset(
    {
        "Evicted",
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
"""Reasons of a pod's end that say nothing about the job (kubelet, node lifecycle, scheduler; Kubernetes 1.20–1.36)."""

_SAID_BY_EXIT_CODE = {
    EXIT_MANIFEST: "ManifestRefused",
    EXIT_MODEL: "ModelNotFound",
    EXIT_REDIS: "RedisUnreachable",
}
"""What ``rollout`` says by its exit code."""

_FIRST_DELAY_S = 5.0
_LONGEST_DELAY_S = 300.0
_FORGOTTEN_AFTER_S = 600.0


class Answer(Enum):
    """What is done about a pod that failed."""

    FAIL_JOB = "FailJob"
    REPLACE = "Replace"
    IGNORE = "Ignore"


@dataclass(frozen=True)
class Verdict:
    """Judgement of one failed pod."""

    reason: str
    answer: Answer


def judge(pod: PodView, policy: FailurePolicy) -> Verdict:
    """What to do about a failed pod: the user's first rule that matches, else what is sensible."""
    reason = reason_of(pod)
    for rule in policy.rules:
        if _matches(rule, pod, reason):
            return Verdict(reason, Answer(rule.action))
    if pod.disrupted or reason in _CLUSTERS_DOING:
        return Verdict(reason, Answer.IGNORE)
    # the next pod would read the same manifest
    return Verdict(reason, Answer.FAIL_JOB if reason == "ManifestRefused" else Answer.REPLACE)


def reason_of(pod: PodView) -> str:
    """Why a pod ended, in one word."""
    if pod.reason in ("", "Error") and pod.exit_code in _SAID_BY_EXIT_CODE:
        return _SAID_BY_EXIT_CODE[pod.exit_code]
    return pod.reason or "Error"


def _matches(rule: FailureRule, pod: PodView, reason: str) -> bool:
    if rule.component is not None and rule.component != pod.component:
        return False
    if rule.on_exit_codes is None:
        return bool({reason, pod.reason} & set(rule.on_reasons))
    if not pod.exit_code:
        return False
    return (pod.exit_code in rule.on_exit_codes.values) == (rule.on_exit_codes.operator == "In")


def delay(times: Iterable[float], now: float) -> float:
    """Seconds until another pod may be made, after pods that failed and count at *times*: 5, 10, 20 … 300."""
    recent = [time for time in times if now - time < _FORGOTTEN_AFTER_S]
    if not recent:
        return 0.0
    pause = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (len(recent) - 1))
    return max(0.0, max(recent) + pause - now)
