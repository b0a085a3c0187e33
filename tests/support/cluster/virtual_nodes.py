"""Virtual nodes on a real API server.

A virtual node has a capacity, with GPUs, but no machine. Its pods run no containers; they become ready after a moment,
and terminate when a test requires it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kubernetes import client, watch

from rollout_api.protocol.status import EXIT_INTERRUPTED

CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "500", "nvidia.com/gpu": "8"}
_LEASES = "kube-node-lease"


def _now(fraction: bool = False) -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ" if fraction else "%Y-%m-%dT%H:%M:%SZ")


class VirtualNodes:
    """Several virtual nodes and their common kubelet."""

    def __init__(
        self,
        api: client.ApiClient,
        count: int = 2,
        *,
        labels: dict[str, str] | None = None,
        capacity: dict[str, str] | None = None,
        prefix: str = "virtual",
        address: Callable[[int], str] = lambda number: f"10.99.{number // 250}.{number % 250 + 1}",
    ) -> None:
        """Prepare virtual nodes.

        Args:
            api: a client with an administrator's rights.
            count: number of nodes.
            labels: labels of the nodes.
            capacity: resources of each node.
            prefix: the nodes are called ``<prefix>-<number>``.
            address: returns the IP address of a pod, by the number of pods that were started before.
        """
        self.names = [f"{prefix}-{number}" for number in range(count)]
        self.ready_after_s = 0.1
        """Seconds from the binding of a pod until it is ready."""
        self.rejects_with = ""
        """The reason with which the kubelet rejects all pods; empty if it admits them."""
        self._api, self._labels, self._capacity = api, labels or {}, capacity or CAPACITY
        self._core, self._leases = client.CoreV1Api(api), client.CoordinationV1Api(api)
        self._stopping = threading.Event()
        self._lost: set[str] = set()
        self._addresses = itertools.count()
        self._address = address

    def start(self) -> None:
        """Register the nodes and start the kubelet."""
        for name in self.names:
            self._register(name)
        self._start_thread(self._renew_leases)
        self._start_thread(self._watch_pods)

    def stop(self) -> None:
        """Let the kubelet's threads end within a few seconds, and delete the nodes."""
        self._stopping.set()
        for name in self.names:
            try:
                self._core.delete_node(name)
            except client.ApiException as error:
                if error.status != 404:
                    raise

    def lose(self, name: str) -> None:
        """Let a node stop responding: it renews no lease, and neither starts nor deletes pods."""
        self._lost.add(name)

    def terminate_pod(self, namespace: str, name: str, exit_code: int = 0, reason: str = "", message: str = "") -> None:
        """Let the containers of a pod terminate.

        Args:
            namespace: the pod's namespace.
            name: the pod's name.
            exit_code: exit code of all containers.
            reason: reason that the kubelet gives; default: ``Error`` or ``Completed``, by the exit code.
            message: the termination message.
        """
        pod = self._core.read_namespaced_pod(name, namespace)
        terminated = {
            "exitCode": exit_code,
            "reason": reason or ("Error" if exit_code else "Completed"),
            "message": message,
            "finishedAt": _now(),
        }
        status = {
            "phase": "Failed" if exit_code else "Succeeded",
            "containerStatuses": [
                _container_status(container.name, container.image, {"terminated": terminated}, ready=False)
                for container in pod.spec.containers
            ],
            "conditions": [_condition("Ready", "False", "PodCompleted")],
        }
        self._core.patch_namespaced_pod_status(name, namespace, {"status": status})

    def _start_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def _register(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, **self._labels}
        try:
            self._core.create_node({"metadata": {"name": name, "labels": labels}})
        except client.ApiException as error:
            if error.status != 409:
                raise
        conditions = [_condition(kind, "False") for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")]
        conditions.append(_condition("Ready", "True"))
        status = {"capacity": self._capacity, "allocatable": self._capacity, "conditions": conditions}
        self._core.patch_node_status(name, {"status": status})

    def _renew_leases(self) -> None:
        while not self._stopping.wait(3):
            for name in self.names:
                if name in self._lost:
                    continue
                spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now(fraction=True)}
                lease = {"metadata": {"name": name}, "spec": spec}
                try:
                    self._leases.patch_namespaced_lease(name, _LEASES, lease)
                except client.ApiException as error:
                    if error.status == 404:
                        self._leases.create_namespaced_lease(_LEASES, lease)
                except Exception:  # A test may have killed the API server.
                    continue

    def _watch_pods(self) -> None:
        started: set[str] = set()
        while not self._stopping.is_set():
            try:
                watching = watch.Watch()
                for event in watching.stream(self._core.list_pod_for_all_namespaces, timeout_seconds=5):
                    if self._stopping.is_set():
                        return
                    if event["type"] != "DELETED":
                        self._handle_pod(event["raw_object"], started)
            except Exception:  # A test may have killed the API server.
                time.sleep(0.2)

    def _handle_pod(self, pod: dict[str, Any], started: set[str]) -> None:
        """Start a new pod, or delete one whose deletion was requested; *started* are the uids of started pods."""
        metadata = pod["metadata"]
        node = pod["spec"].get("nodeName")
        if node not in self.names or node in self._lost:
            return
        name, namespace = metadata["name"], metadata["namespace"]
        if metadata.get("deletionTimestamp"):
            try:
                if pod["status"].get("phase") == "Running":
                    self.terminate_pod(namespace, name, EXIT_INTERRUPTED)
                self._core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
            except client.ApiException as error:
                if error.status not in (404, 409):
                    raise
        elif metadata["uid"] not in started and pod["status"]["phase"] == "Pending":
            started.add(metadata["uid"])
            time.sleep(self.ready_after_s)
            running = {"running": {"startedAt": _now()}}
            status: dict[str, Any] = {
                "phase": "Running",
                "startTime": _now(),
                "podIP": self._address(next(self._addresses)),
                "containerStatuses": [
                    _container_status(container["name"], container["image"], running, ready=True)
                    for container in pod["spec"]["containers"]
                ],
                "conditions": [
                    _condition(kind, "True") for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
                ],
            }
            if self.rejects_with:
                status = {"phase": "Failed", "reason": self.rejects_with, "message": "Pod was rejected: no"}
            try:
                self._core.patch_namespaced_pod_status(name, namespace, {"status": status})
            except client.ApiException as error:
                if error.status != 404:
                    raise


def _container_status(name: str, image: str, state: dict[str, Any], *, ready: bool) -> dict[str, Any]:
    return {"name": name, "image": image, "imageID": "", "restartCount": 0, "ready": ready, "state": state}


def _condition(kind: str, status: str, reason: str = "Virtual") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": _now()}
