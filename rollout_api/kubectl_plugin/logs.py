"""``kubectl rollouts logs``: the logs of a job's pods, and what is left of those that have failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_api.kubectl_plugin.jobs import summary
from rollout_api.kubectl_plugin.kubectl import Kubectl, PluginError
from rollout_api.kubectl_plugin.pods import HEAD, WORKER, list_pods, selector

_SPARE_STREAMS = 5


def logs_arguments(labels: str, num_pods: int, *, follow: bool, tail: int) -> list[str]:
    """Return the arguments of ``kubectl`` that print the logs of pods.

    Args:
        labels: label selector of the pods.
        num_pods: number of these pods.
        follow: whether to continue with new lines.
        tail: number of last lines of each pod to begin with; -1 for all.
    """
    arguments = ["logs", f"--selector={labels}", "--prefix", f"--tail={tail}", "--ignore-errors"]
    # kubectl refuses to follow more than five logs otherwise.
    return [*arguments, *(["--follow", f"--max-log-requests={num_pods + _SPARE_STREAMS}"] if follow else [])]


def show_logs(
    kubectl: Kubectl, job: Mapping[str, Any], *, follow: bool, tail: int, head: bool, worker: int | None
) -> int:
    """Show the logs of the pods of a job, each line with its pod, and return the exit code.

    Args:
        kubectl: access to the cluster.
        job: the job.
        follow: whether to continue with new lines until Ctrl-C.
        tail: number of last lines of each pod to begin with; -1 for all.
        head: whether to show the head alone.
        worker: number of the worker to show alone; None for all pods.

    Raises:
        PluginError: if there are no such pods, or kubectl fails.
    """
    component = HEAD if head else None if worker is None else WORKER
    labels = selector(job["metadata"]["name"], component, worker)
    pods = list_pods(kubectl, labels)
    if not pods:
        raise PluginError(f"there are no such pods. {summary(job)}")
    return kubectl.show(*logs_arguments(labels, len(pods), follow=follow, tail=tail))


def failure_lines(job: Mapping[str, Any]) -> list[str]:
    """Return what the status of a job has kept of its failed pods, which are deleted: reasons and ends of logs."""
    failures: Sequence[Mapping[str, Any]] = job.get("status", {}).get("failures", ())
    lines = []
    for failure in failures:
        code = failure.get("exitCode")
        lines.append(
            f"{failure['time']} {failure['pod']}: {failure['reason']}{'' if code is None else f', exit code {code}'}"
        )
        lines += [f"  {line}" for line in failure.get("message", "").splitlines()]
    return lines or ["No pod of this job has failed."]
