"""A small scheduler for an API server without one: it binds pods to virtual nodes."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

from tests.support.cluster.controller import Controller

_GPU = "nvidia.com/gpu"


class Scheduler(Controller):
    """Binds each pod that is not gated to the first node with the right labels, enough GPUs and room for a pod."""

    def reconcile(self) -> None:
        """Bind the pods that can be bound, and report the others."""
        nodes = self.api.list_objects("/api/v1/nodes")
        pods = self.api.list_objects("/api/v1/pods")
        gpus: Counter[str] = Counter()
        count: Counter[str] = Counter()
        for pod in pods:
            if (node := pod["spec"].get("nodeName")) and pod["status"].get("phase") not in ("Succeeded", "Failed"):
                gpus[node] += _gpus(pod)
                count[node] += 1
        for pod in pods:
            spec = pod["spec"]
            if spec.get("nodeName") or spec.get("schedulingGates") or pod["metadata"].get("deletionTimestamp"):
                continue
            suitable = [node for node in nodes if _matches(pod, node["metadata"].get("labels", {}))]
            for node in suitable:
                name, capacity = node["metadata"]["name"], node["status"].get("allocatable", {})
                has_gpus = gpus[name] + _gpus(pod) <= int(capacity.get(_GPU, 0))
                if has_gpus and count[name] < int(capacity.get("pods", 0)):
                    self._bind(pod, name)
                    gpus[name] += _gpus(pod)
                    count[name] += 1
                    break
            else:
                self._report_unschedulable(pod, len(nodes), len(suitable))

    def _bind(self, pod: dict[str, Any], node: str) -> None:
        metadata = pod["metadata"]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "target": {"kind": "Node", "name": node},
        }
        self.api.request("POST", f"{_path(pod)}/binding", binding)

    def _report_unschedulable(self, pod: dict[str, Any], num_nodes: int, num_suitable: int) -> None:
        lacking = f"{num_suitable} Insufficient {_GPU}" if num_suitable else "none has the labels of the pod"
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": f"0/{num_nodes} nodes are available: {lacking}.",
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        reported = pod["status"].get("conditions") or ()
        if not any(known["type"] == "PodScheduled" and known["message"] == condition["message"] for known in reported):
            self.api.patch(f"{_path(pod)}/status", {"status": {"conditions": [condition]}})


def _path(pod: dict[str, Any]) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def _gpus(pod: dict[str, Any]) -> int:
    limits = (container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"])
    return sum(int(container_limits.get(_GPU, 0)) for container_limits in limits)


def _matches(pod: dict[str, Any], labels: dict[str, str]) -> bool:
    """Return whether a pod's node selector and required node affinity accept a node's labels."""
    spec = pod["spec"]
    if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
        return False
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", ())
    return not terms or any(
        all(_accepts(requirement, labels) for requirement in term.get("matchExpressions", ())) for term in terms
    )


def _accepts(requirement: dict[str, Any], labels: dict[str, str]) -> bool:
    value = labels.get(requirement["key"])
    match requirement["operator"]:
        case "In":
            return value in requirement["values"]
        case "Exists":
            return value is not None
        case other:
            raise NotImplementedError(f"Add the operator {other} to this stand-in for the scheduler.")
