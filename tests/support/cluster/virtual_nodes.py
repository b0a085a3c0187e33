"""Nodes without machines on a real API server: pods that are bound to them come up, run and end as a test says.

They have GPUs, by capacity, and so show what the scheduler makes of jobs that ask for some.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kubernetes import client, watch

CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "500", "nvidia.com/gpu": "8"}
_LEASES = "kube-node-lease"


def _now(fraction: bool = False) -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ" if fraction else "%Y-%m-%dT%H:%M:%SZ")


class VirtualNodes:
    """A few nodes, and the one kubelet of all of them."""

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
        self.names = [f"{prefix}-{number}" for number in range(count)]
        self.ready_after_s = 0.1
        self.hold: Callable[[dict[str, Any]], bool] = lambda pod: False
        """Pods for which this is true do not come up."""
        self._api, self._labels, self._capacity = api, labels or {}, capacity or CAPACITY
        self._core, self._leases = client.CoreV1Api(api), client.CoordinationV1Api(api)
        self._stopping = threading.Event()
        self._dead: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._addresses = itertools.count()
        self._address = address

    def start(self) -> None:
        for name in self.names:
            self._register(name)
        self._run(self._heartbeat)
        self._run(self._follow)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(5)
        for name in self.names:
            try:
                self._core.delete_node(name)
            except client.ApiException as error:
                if error.status != 404:
                    raise

    def lose(self, name: str) -> None:
        """A node says nothing any more, and carries nothing out."""
        self._dead.add(name)

    def end(self, namespace: str, name: str, code: int = 0, reason: str = "", message: str = "") -> None:
        """A pod's containers end."""
        pod = self._core.read_namespaced_pod(name, namespace)
        ended = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "message": message}
        status = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [
                self._container(one.name, one.image, {"terminated": ended | {"finishedAt": _now()}}, ready=False)
                for one in pod.spec.containers
            ],
            "conditions": [_condition("Ready", "False", "PodCompleted")],
        }
        self._core.patch_namespaced_pod_status(name, namespace, {"status": status})

    def _run(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

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

    def _heartbeat(self) -> None:
        while not self._stopping.wait(3):
            for name in self.names:
                if name in self._dead:
                    continue
                spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now(fraction=True)}
                lease = {"metadata": {"name": name}, "spec": spec}
                try:
                    self._leases.patch_namespaced_lease(name, _LEASES, lease)
                except client.ApiException as error:
                    if error.status == 404:
                        self._leases.create_namespaced_lease(_LEASES, lease)
                except Exception:
                    continue

    def _follow(self) -> None:
        started: set[str] = set()
        while not self._stopping.is_set():
            try:
                watching = watch.Watch()
                for event in watching.stream(self._core.list_pod_for_all_namespaces, timeout_seconds=5):
                    if self._stopping.is_set():
                        return
                    if event["type"] != "DELETED":
                        self._see(event["raw_object"], started)
            except Exception:
                time.sleep(0.2)

    def _see(self, pod: dict[str, Any], started: set[str]) -> None:
        metadata = pod["metadata"]
        node = pod["spec"].get("nodeName")
        if node not in self.names or node in self._dead:
            return
        name, namespace = metadata["name"], metadata["namespace"]
        if metadata.get("deletionTimestamp"):
            try:
                self._core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
            except client.ApiException as error:
                if error.status not in (404, 409):
                    raise
        elif metadata["uid"] not in started and pod["status"]["phase"] == "Pending" and not self.hold(pod):
            started.add(metadata["uid"])
            time.sleep(self.ready_after_s)
            running = {"running": {"startedAt": _now()}}
            status = {
                "phase": "Running",
                "startTime": _now(),
                "podIP": self._address(next(self._addresses)),
                "containerStatuses": [
                    self._container(one["name"], one["image"], running, ready=True) for one in pod["spec"]["containers"]
                ],
                "conditions": [
                    _condition(kind, "True") for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
                ],
            }
            try:
                self._core.patch_namespaced_pod_status(name, namespace, {"status": status})
            except client.ApiException as error:
                if error.status != 404:
                    raise

    @staticmethod
    def _container(name: str, image: str, state: dict[str, Any], *, ready: bool) -> dict[str, Any]:
        return {"name": name, "image": image, "imageID": "", "restartCount": 0, "ready": ready, "state": state}


def _condition(kind: str, status: str, reason: str = "Virtual") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": _now()}
