"""The pods of a job, which the operator labels. The operator's ``names`` module defines these labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_api.kubectl_plugin.jobs import summary
from rollout_api.kubectl_plugin.kubectl import Kubectl, PluginError
from rollout_api.manifest.rollout_job import GROUP

HEAD, WORKER = "head", "worker"
"""Components, which are also the names of their containers."""
_COMPONENT_LABEL = "app.kubernetes.io/component"
_SLOT_LABEL, _RANK_LABEL = f"{GROUP}/slot", f"{GROUP}/rank"


def selector(job: str, component: str | None = None, slot: int | None = None) -> str:
    """Return the label selector of a job's pods.

    Args:
        job: name of the job.
        component: the component; None for all pods.
        slot: number of the worker; None for all workers.
    """
    labels = {"app.kubernetes.io/managed-by": "das-rollout", f"{GROUP}/job": job}
    if component is not None:
        labels[_COMPONENT_LABEL] = component
    if slot is not None:
        labels[_SLOT_LABEL] = str(slot)
    return ",".join(f"{name}={value}" for name, value in labels.items())


def list_pods(kubectl: Kubectl, labels: str, *, node: str | None = None) -> list[dict[str, Any]]:
    """Return the pods with these labels, or those of them on one node.

    Raises:
        PluginError: if kubectl fails.
    """
    on_node = [] if node is None else [f"--field-selector=spec.nodeName={node}"]
    pods: list[dict[str, Any]] = kubectl.get("pods", "-l", labels, *on_node)["items"]
    return pods


def running_head(kubectl: Kubectl, job: Mapping[str, Any]) -> str:
    """Return the name of the head's pod.

    Raises:
        PluginError: if no head runs, with the state of the job and the reason.
    """
    for pod in list_pods(kubectl, selector(job["metadata"]["name"], HEAD)):
        if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
            return str(pod["metadata"]["name"])
    raise PluginError(f"the head of the job does not run. {summary(job)}")


def leaders(pods: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the worker pods that are not terminating and have an engine's core, by slot."""
    found = [
        pod
        for pod in pods
        if pod["metadata"]["labels"].get(_RANK_LABEL, "0") == "0" and "deletionTimestamp" not in pod["metadata"]
    ]
    return sorted(found, key=slot_of)


def slot_of(pod: Mapping[str, Any]) -> int:
    """Return the number of the worker to which a pod belongs."""
    return int(pod["metadata"]["labels"][_SLOT_LABEL])
