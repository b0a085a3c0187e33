"""``kubectl rollouts drain``: workers leave a job without losing tokens, one worker or all workers of a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_api.kubectl_plugin.kubectl import Kubectl, PluginError
from rollout_api.kubectl_plugin.pods import WORKER, leaders, list_pods, selector, slot_of

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
