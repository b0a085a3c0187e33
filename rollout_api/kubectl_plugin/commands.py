"""The commands ``report``, ``logs`` and ``drain``, and commands of ``rollout`` that run in the pod of a job's head."""

from __future__ import annotations

import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout_api.kubectl_plugin.kubectl import (
    HEAD,
    WORKER,
    Kubectl,
    PluginError,
    full_name,
    leaders,
    list_pods,
    running_head,
    selector,
    slot_of,
    summary,
)


def exec_arguments(pod: str, job: Mapping[str, Any], command: Sequence[str], *, columns: int, tty: bool) -> list[str]:
    """Return the arguments of ``kubectl`` that run a command of ``rollout`` for a job in its head.

    Args:
        pod: the head's pod.
        job: the job.
        command: name of the command and its further arguments.
        columns: width of the user's terminal.
        tty: whether the command gets the user's terminal.
    """
    name, *arguments = command
    rollout = ["rollout", name, full_name(job), *arguments, f"--uid={job['metadata']['uid']}"]
    # Without a terminal of its own, the command does not know how wide the user's is.
    environment = [] if tty else ["env", f"COLUMNS={columns}"]
    return ["exec", *(["-it"] if tty else []), pod, "-c", HEAD, "--", *environment, *rollout]


def run_in_head(kubectl: Kubectl, job: Mapping[str, Any], *command: str, tty: bool = False) -> int:
    """Run a command of ``rollout`` in the head, and return its exit code.

    Raises:
        PluginError: if no head runs, or kubectl fails.
    """
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    columns = shutil.get_terminal_size((100, 24)).columns
    pod = running_head(kubectl, job)
    return kubectl.show(*exec_arguments(pod, job, command, columns=columns, tty=tty and has_terminal))


def save_report(kubectl: Kubectl, job: Mapping[str, Any], target: Path) -> int:
    """Let the head write the job's report, copy it to *target*, and return the exit code.

    Raises:
        PluginError: if no head runs, or the report cannot be copied.
    """
    pod = running_head(kubectl, job)
    remote = f"/tmp/report-{secrets.token_hex(8)}.html"  # noqa: S108 - a volume of the pod
    code = kubectl.show(*exec_arguments(pod, job, ("report", f"--html={remote}"), columns=100, tty=False))
    if code:
        return code
    try:
        with target.open("wb") as file:
            return kubectl.save(file, "exec", pod, "-c", HEAD, "--", "cat", remote)
    except OSError as error:
        raise PluginError(f"cannot write {target}: {error.strerror}") from None
    finally:
        kubectl.show("exec", pod, "-c", HEAD, "--", "rm", "-f", remote)


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


_HANDOVER_GRACE_S = 20
"""Part of a worker's termination grace period in which it hands over the rollouts that have not finished."""
_EXTRA_WAIT_S = 60
"""Seconds for which the command waits longer than the grace period of a pod."""


def choose_worker(job: str, pods: Sequence[dict[str, Any]], worker: str) -> dict[str, Any]:
    """Return the pod of a worker that is named by its number or by its pod.

    Raises:
        PluginError: if the job has no such worker.
    """
    for pod in leaders(pods):
        if worker in (str(slot_of(pod)), pod["metadata"]["name"]):
            return pod
    known = ", ".join(pod["metadata"]["name"] for pod in leaders(pods)) or "none"
    raise PluginError(f"job {job} has no worker {worker}; its workers are: {known}")


def plan_text(pods: Sequence[Mapping[str, Any]], num_workers: int) -> str:
    """Return what happens when these workers of a job with *num_workers* workers are drained."""
    names = ", ".join(pod["metadata"]["name"] for pod in pods)
    seconds = max(pod["spec"]["terminationGracePeriodSeconds"] for pod in pods) - _HANDOVER_GRACE_S
    elsewhere = (
        "wait for the replacements" if len(pods) == num_workers else "continue on other workers from where they are"
    )
    return (
        f"Draining {names}. Running rollouts have {seconds} s to finish; the others {elsewhere}. The operator creates "
        "a replacement of each worker."
    )


def drain(
    kubectl: Kubectl, job: Mapping[str, Any], *, worker: str | None, node: str | None, say: Callable[[str], None]
) -> int:
    """Drain one worker of a job, or all of its workers on a node, and wait until their pods are gone.

    Args:
        kubectl: access to the cluster.
        job: the job.
        worker: number or pod of the worker; None with a node.
        node: name of the node, which is cordoned first, so that no replacement is created there.
        say: shows a line to the user.

    Returns:
        The exit code of kubectl.

    Raises:
        PluginError: if the job has no such worker, or kubectl fails.
    """
    name = job["metadata"]["name"]
    pods = list_pods(kubectl, selector(name, WORKER))
    if worker is not None:
        chosen = [choose_worker(name, pods, worker)]
    else:
        chosen = [pod for pod in leaders(pods) if pod["spec"].get("nodeName") == node]
        if not chosen:
            raise PluginError(f"job {name} has no worker on node {node}")
        say(kubectl.output("cordon", str(node)).strip())
    say(plan_text(chosen, len(leaders(pods))))
    grace = max(pod["spec"]["terminationGracePeriodSeconds"] for pod in chosen)
    names = [pod["metadata"]["name"] for pod in chosen]
    code = kubectl.show("delete", "pod", *names, "--wait=true", f"--timeout={grace + _EXTRA_WAIT_S}s")
    if code:
        return code
    say("The workers have left the job.")
    if node is not None:
        say(f"Node {node} stays cordoned until you run: kubectl uncordon {node}")
    return 0
