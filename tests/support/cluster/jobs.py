"""RolloutJobs and their pods, as a test's user sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from kubernetes import client
from rollout_operator import names

from rollout_api.manifest.rollout_job import API_VERSION, GROUP, KIND, PLURAL, VERSION
from tests.support.cluster.control_plane import ControlPlane, wait_for

SPEC: dict[str, Any] = {
    "source": {"trainer": {}},
    "model": {"uri": "Qwen/Qwen3-8B"},
    "workers": {"replicas": 2, "gpusPerWorker": 1, "accelerator": "nvidia-h100"},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in changes.items():
        there = result.get(name)
        result[name] = merged(there, value) if isinstance(there, dict) and isinstance(value, dict) else value
    return result


class Jobs:
    """Those of one namespace."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        api = cluster.client()
        self.cluster, self.namespace = cluster, namespace
        self.core, self._custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.core.create_namespace({"metadata": {"name": namespace}})

    def manifest(self, name: str, **sections: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": self.namespace}
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": merged(SPEC, sections)}

    def make(self, name: str, **sections: Any) -> dict[str, Any]:
        body = self.manifest(name, **sections)
        made: dict[str, Any] = self._custom.create_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, body
        )
        return made

    def get(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._custom.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, name
            )
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise
        return found

    def status(self, name: str) -> dict[str, Any]:
        return (self.get(name) or {}).get("status") or {}

    def state(self, name: str) -> str:
        return str(self.status(name).get("state", ""))

    def finalizers(self, name: str) -> list[str]:
        """What holds a job that is there."""
        job = self.get(name)
        assert job is not None
        return list(job["metadata"].get("finalizers", ()))

    def condition(self, name: str, kind: str) -> tuple[str, str]:
        conditions = self.status(name).get("conditions", ())
        return next(((one["status"], one["reason"]) for one in conditions if one["type"] == kind), ("", ""))

    def patch(self, name: str, **sections: Any) -> None:
        self._custom.patch_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name, {"spec": sections})

    def delete(self, name: str) -> None:
        self._custom.delete_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name)

    def pods(self, name: str, component: str | None = None) -> dict[str, Any]:
        """Pods of a job by name, but those that are being deleted."""
        selector = ",".join(f"{key}={value}" for key, value in names.selector(name, component).items())
        found = self.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return {pod.metadata.name: pod for pod in found if pod.metadata.deletion_timestamp is None}

    def running(self, name: str) -> set[str]:
        return {pod for pod, one in self.pods(name).items() if one.status.phase == "Running"}

    def events(self, name: str) -> dict[str, str]:
        found = self.core.list_namespaced_event(self.namespace, field_selector=f"involvedObject.name={name}").items
        return {event.reason: event.message for event in found}

    def wait(self, condition: Callable[[], Any], seconds: float = 30) -> Any:
        return wait_for(condition, seconds)

    def wait_for_state(self, name: str, state: str, seconds: float = 30) -> None:
        wait_for(lambda: self.state(name) == state, seconds, f"{name} is {self.status(name)}, not {state}")

    def apply(self, manifest: dict[str, Any]) -> str:
        """What kubectl says to a manifest that it cannot apply; empty if it can."""
        done = self.cluster.kubectl("create", "--validate=false", "-f", "-", stdin=json.dumps(manifest), check=False)
        return done.stderr if done.returncode else ""

    def clear(self) -> None:
        """Delete everything, with no operator's help."""
        found = self._custom.list_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL)
        for job in found["items"]:
            name = job["metadata"]["name"]
            body = {"metadata": {"finalizers": []}}
            self._custom.patch_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL, name, body)
            if not job["metadata"].get("deletionTimestamp"):
                self.delete(name)
        self.core.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)
        self.core.delete_namespace(self.namespace)
