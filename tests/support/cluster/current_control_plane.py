"""A stand-in for the API server of a current Kubernetes, with etcd; see current_apiserver/main.go for what it lacks.

It has no controllers; small stand-ins schedule pods and delete the dependents of deleted jobs.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client
from rollout_operator.objects import names

from rollout_api.manifest.rollout_job import GROUP, KIND, PLURAL, VERSION
from tests.support.cluster.control_plane import CRDS, START_TIMEOUT_S, ControlPlane
from tests.support.cluster.raw_api import RawApi
from tests.support.waiting import wait_for

_RETRY_DELAY_S = 0.2
_GPU = "nvidia.com/gpu"
_COLLECTIONS = (
    "/api/v1/pods",
    "/api/v1/configmaps",
    "/api/v1/secrets",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
    "/apis/networking.k8s.io/v1/networkpolicies",
    "/apis/policy/v1/poddisruptionbudgets",
)


class Controller(ABC):
    """Compares the cluster with what it should be, again and again, in a thread."""

    period_s = 0.1
    """Seconds between two passes."""

    def __init__(self, api: client.ApiClient) -> None:
        self.api = RawApi(api)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @abstractmethod
    def reconcile(self) -> None:
        """Make one pass. A pass that the API server rejects is repeated."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self.period_s):
            try:
                self.reconcile()
            except (client.ApiException, urllib3.exceptions.HTTPError):
                # An object has changed or gone meanwhile, or a test has killed the API server.
                self._stopping.wait(_RETRY_DELAY_S)


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
        case "NotIn":
            return value not in requirement["values"]
        case "Exists":
            return value is not None
        case other:
            raise NotImplementedError(f"Add the operator {other} to this stand-in for the scheduler.")


class GarbageCollector(Controller):
    """Deletes the dependents of deleted RolloutJobs, and those of RolloutJobs that are deleted in the foreground."""

    period_s = 0.5

    def reconcile(self) -> None:
        """Delete what has to be deleted, and let go of the jobs in the foreground whose dependents are gone."""
        # Those in the foreground are listed before their dependents, so that one without dependents has had none.
        foreground = {
            job["metadata"]["uid"]: job
            for job in self._jobs()
            if names.FOREGROUND_FINALIZER in job["metadata"].get("finalizers", ())
        }
        dependents = [(path, item) for path in _COLLECTIONS for item in self.api.list_objects(path)]
        # Listed after the dependents, so that the owner of each one that is not listed here was deleted.
        existing = {job["metadata"]["uid"] for job in self._jobs()}
        blocked = set()
        for path, item in dependents:
            metadata = item["metadata"]
            owners = {owner["uid"] for owner in metadata.get("ownerReferences", ()) if owner["kind"] == KIND}
            blocked |= owners
            is_unowned = owners and not owners & (existing - foreground.keys())
            if is_unowned and not metadata.get("deletionTimestamp"):
                root, plural = path.rsplit("/", 1)
                self.api.request("DELETE", f"{root}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}")
        for uid, job in foreground.items():
            if uid not in blocked:
                self._let_go(job)

    def _jobs(self) -> list[dict[str, Any]]:
        return self.api.list_objects(f"/apis/{GROUP}/{VERSION}/{PLURAL}")

    def _let_go(self, job: dict[str, Any]) -> None:
        metadata = job["metadata"]
        finalizers = [name for name in metadata["finalizers"] if name != names.FOREGROUND_FINALIZER]
        patch = {"metadata": {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}}
        path = f"/apis/{GROUP}/{VERSION}/namespaces/{metadata['namespace']}/{PLURAL}/{metadata['name']}"
        self.api.patch(path, patch)


class CurrentControlPlane(ControlPlane):
    """The types of Kubernetes 1.36, among them scheduling gates, policies and dynamic resource allocation."""

    kubectl_name = "current-kubectl"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._controllers: list[Controller] = []

    def start(self) -> None:
        """Start everything, and wait until RolloutJobs can be created."""
        self.create_certificates()
        self.start_process(
            "apiserver",
            str(self.binaries / "bin/current-apiserver"),
            f"--etcd-servers={self.start_etcd()}",
            f"--bind-address={self.host}",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self.pki_file('apiserver.crt')}",
            f"--tls-private-key-file={self.pki_file('apiserver.key')}",
            f"--client-ca-file={self.pki_file('ca.crt')}",
        )
        self.wait_until_ready()
        self.kubectl("apply", "--server-side", "-f", str(CRDS))
        self.wait_until_jobs_are_served()
        namespace = "/api/v1/namespaces/kube-node-lease"
        wait_for(lambda: self.kubectl("get", "--raw", namespace, check=False).returncode == 0, START_TIMEOUT_S)
        self._controllers = [Scheduler(self.client()), GarbageCollector(self.client())]
        for controller in self._controllers:
            controller.start()

    def stop(self) -> None:
        """Kill all processes."""
        for controller in self._controllers:
            controller.stop()
        super().stop()
