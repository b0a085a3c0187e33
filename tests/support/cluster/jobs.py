"""The RolloutJobs of one namespace, and their pods, as a user of the API server sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kubernetes import client
from rollout_operator.objects import names

from rollout_api.manifest.rollout_job import API_VERSION, GROUP, KIND, PLURAL, VERSION
from tests.support.cluster.control_plane import ControlPlane
from tests.support.waiting import wait_for

TIMEOUT_S = 30.0
"""Seconds within which the operator, the scheduler and the kubelet react to a change, unless a test says otherwise."""
SPEC: dict[str, Any] = {
    "source": {"trainer": {}},
    "model": {"uri": "Qwen/Qwen3-8B"},
    "workers": {"replicas": 2, "gpusPerWorker": 1, "accelerator": "nvidia-h100"},
}


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return *base* with *changes*, which are merged recursively; a change to None removes a field."""
    result = dict(base)
    for name, value in changes.items():
        old = result.get(name)
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(old if isinstance(old, dict) else {}, value) if isinstance(value, dict) else value
    return result


class Jobs:
    """The RolloutJobs of a new namespace."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        api = cluster.client()
        self.cluster, self.namespace = cluster, namespace
        self.core, self._custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.core.create_namespace({"metadata": {"name": namespace}})

    def manifest(self, name: str, **sections: Any) -> dict[str, Any]:
        """Return the manifest of a job whose spec is a default spec with changed sections."""
        metadata = {"name": name, "namespace": self.namespace}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": merge(SPEC, sections)}

    def create(self, name: str, **sections: Any) -> dict[str, Any]:
        """Create a job; see :meth:`manifest`."""
        return self.create_from(self.manifest(name, **sections))

    def create_from(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create a job from a manifest."""
        job: dict[str, Any] = self._custom.create_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, manifest
        )
        return job

    def rejection(self, manifest: dict[str, Any]) -> str:
        """Create a job, and return the API server's message if it rejects the manifest, else an empty string."""
        try:
            self.create_from(manifest)
        except client.ApiException as error:
            return str(json.loads(error.body)["message"])
        return ""

    def get(self, name: str) -> dict[str, Any] | None:
        """Return a job, or None if it does not exist."""
        try:
            job: dict[str, Any] = self._custom.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, name
            )
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise
        return job

    def status(self, name: str) -> dict[str, Any]:
        """Return a job's status, which may be empty."""
        return (self.get(name) or {}).get("status") or {}

    def state(self, name: str) -> str:
        """Return a job's one-word state, or an empty string."""
        return str(self.status(name).get("state", ""))

    def finalizers(self, name: str) -> list[str]:
        """Return the finalizers of an existing job."""
        job = self.get(name)
        assert job is not None
        return list(job["metadata"].get("finalizers", ()))

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        """Return status and reason of a job's condition; both are empty if it is not set."""
        conditions = self.status(name).get("conditions", ())
        return next(((found["status"], found["reason"]) for found in conditions if found["type"] == kind), ("", ""))

    def patch(self, name: str, **sections: Any) -> None:
        """Change sections of a job's spec by a merge patch."""
        self._custom.patch_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name, {"spec": sections})

    def delete(self, name: str) -> None:
        """Request the deletion of a job."""
        self._custom.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name)

    def pods(self, name: str, component: str | None = None) -> dict[str, Any]:
        """Return a job's pods by name, without those that are being deleted."""
        selector = ",".join(f"{key}={value}" for key, value in names.selector(name, component).items())
        pods = self.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return {pod.metadata.name: pod for pod in pods if pod.metadata.deletion_timestamp is None}

    def running(self, name: str) -> set[str]:
        """Return the names of a job's running pods."""
        return {pod_name for pod_name, pod in self.pods(name).items() if pod.status.phase == "Running"}

    def wait_for_running(self, name: str, count: int, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until a job has exactly *count* running pods."""
        wait_for(
            lambda: len(self.running(name)) == count, timeout_s, lambda: f"{name}: {self.running(name)}, not {count}"
        )

    def events(self, name: str) -> dict[str, str]:
        """Return the messages of a job's Events by reason."""
        events = self.core.list_namespaced_event(self.namespace, field_selector=f"involvedObject.name={name}").items
        return {event.reason: event.message for event in events}

    def wait_for_event(self, name: str, reason: str) -> str:
        """Wait for an Event about a job, and return its message."""
        message: str = self.wait(lambda: self.events(name).get(reason))
        return message

    def wait(self, condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
        """Wait until a condition returns something true, and return that."""
        return wait_for(condition, timeout_s)

    def wait_for_state(self, name: str, state: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until a job is in a state."""
        wait_for(lambda: self.state(name) == state, timeout_s, lambda: f"{name} is not {state}: {self.status(name)}")

    def clear(self) -> None:
        """Delete all jobs and pods without waiting for an operator."""
        jobs = self._custom.list_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL)["items"]
        for job in jobs:
            name = job["metadata"]["name"]
            try:
                # An operator would add its finalizer again if the job were not being deleted yet.
                if not job["metadata"].get("deletionTimestamp"):
                    self.delete(name)
                self._custom.patch_namespaced_custom_object(
                    GROUP, VERSION, self.namespace, PLURAL, name, {"metadata": {"finalizers": []}}
                )
            except client.ApiException as error:
                if error.status != 404:
                    raise
        self.core.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)

    def close(self) -> None:
        """Delete all jobs and pods, and the namespace."""
        self.clear()
        self.core.delete_namespace(self.namespace)
