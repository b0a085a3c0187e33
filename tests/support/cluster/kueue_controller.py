"""Runs the stand-in for Kueue's controller, tests/support/kueue.py, on an API server.

An admission policy adds Kueue's scheduling gate, finalizer and label to pods, as Kueue's webhook does.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from kubernetes import client
from rollout_operator.objects import names

from tests.support import kueue
from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.controller import Controller
from tests.support.waiting import wait_for

_VERSION = "v1beta2"
_TIMEOUT_S = 30.0
_WORKLOAD_FINALIZER = "kueue.x-k8s.io/resource-in-use"
_MANAGED = f'''Object{{
  metadata: Object.metadata{{
    labels: {{"{kueue.FINALIZER}": "true"}},
    finalizers: ["{kueue.FINALIZER}"]
  }},
  spec: Object.spec{{schedulingGates: [Object.spec.schedulingGates{{name: "{kueue.GATE}"}}]}}
}}'''
_OBJECTS: list[dict[str, Any]] = [
    {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.WORKLOAD_PLURAL}.{names.KUEUE_GROUP}"},
        "spec": {
            "group": names.KUEUE_GROUP,
            "scope": "Namespaced",
            "names": {"kind": names.WORKLOAD_KIND, "plural": names.WORKLOAD_PLURAL, "singular": "workload"},
            "versions": [
                {
                    "name": _VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                    },
                }
            ],
        },
    },
    {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": "kueue"},
        "spec": {
            "reinvocationPolicy": "Never",
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ]
            },
            "matchConditions": [{"name": "queued", "expression": f'"{names.QUEUE_LABEL}" in object.metadata.labels'}],
            "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": _MANAGED}}],
        },
    },
    {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": "kueue"},
        "spec": {"policyName": "kueue"},
    },
]


def install_kueue(cluster: ControlPlane) -> None:
    """Install the CRD of Workloads and the admission policies of the stand-in."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": _OBJECTS})
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=text)
    wait_for(lambda: cluster.kubectl("get", names.WORKLOAD_PLURAL, check=False).returncode == 0, _TIMEOUT_S)
    # A new policy takes effect after a moment.
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "queued", "namespace": "default", "labels": {names.QUEUE_LABEL: "queue"}},
        "spec": {"containers": [{"name": "container", "image": "image"}]},
    }
    command = ("create", "--dry-run=server", "-o", "json", "-f", "-")
    wait_for(lambda: kueue.GATE in cluster.kubectl(*command, stdin=json.dumps(pod)).stdout, _TIMEOUT_S)


class KueueController(Controller):
    """The stand-in's controller for one namespace."""

    period_s = 0.05

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        super().__init__(api)
        self.quota = 1000
        """Number of pods that may be admitted."""
        self.errors: dict[str, str] = {}
        """Why groups have no Workload."""
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._objects = f"/apis/{names.KUEUE_GROUP}/{_VERSION}/namespaces/{namespace}/{names.WORKLOAD_PLURAL}"
        self._namespace = namespace
        self._workloads: dict[str, kueue.Workload] = {}

    def workloads(self) -> set[str]:
        """Return the names of the Workloads of groups in the API server."""
        return {item["metadata"]["name"] for item in self.api.list_objects(self._objects)}

    def pods(self) -> list[kueue.Pod]:
        """Return the pods that Kueue manages."""
        return [
            pod for pod in self.api.list_objects(self._pods) if kueue.FINALIZER in pod["metadata"].get("labels", {})
        ]

    def remove_finalizers(self) -> None:
        """Remove the finalizers of everything that is left at the end of a test."""
        for pod in self.pods():
            self.api.patch(f"{self._pods}/{pod['metadata']['name']}", {"metadata": {"finalizers": None}})
        for name in self.workloads():
            self._remove_object(name)

    def preempt(self) -> None:
        """Evict everything that is admitted."""
        for workload in self._workloads.values():
            workload.evicted = workload.evicted or workload.admitted

    def reconcile(self) -> None:
        """Make Kueue's decisions about all pods and groups, and execute them."""
        deleted = {
            item["metadata"]["name"]
            for item in self.api.list_objects(self._objects)
            if item["metadata"].get("deletionTimestamp")
        }
        members: defaultdict[str, list[kueue.Pod]] = defaultdict(list)
        singles: dict[str, kueue.Pod] = {}
        for pod in self.pods():
            if group := pod["metadata"]["labels"].get(names.POD_GROUP_LABEL):
                members[group].append(pod)
            else:
                singles[f"pod/{pod['metadata']['uid']}"] = pod
        for name in [known for known in self._workloads if known not in members and known not in singles]:
            del self._workloads[name]
            self._remove_object(name)
        for name, pod in singles.items():
            decision = kueue.reconcile_single(pod, self._workloads.get(name), self._may_admit)
            self._execute(name, decision)
        for name, pods in members.items():
            workload = self._workloads.get(name)
            if workload is not None and name in deleted:
                workload.deleted = True
            decision = kueue.reconcile_group(pods, workload, self._may_admit)
            self.errors[name] = decision.error
            if workload is None and decision.workload is not None:
                self._create_object(name)
            self._execute(name, decision)
            if workload is not None and decision.workload is None:
                self._remove_object(name)

    def _may_admit(self, count: int) -> bool:
        used = sum(
            sum(workload.counts.values())
            for workload in self._workloads.values()
            if workload.admitted and not workload.finished
        )
        return used + count <= self.quota

    def _execute(self, name: str, decision: kueue.Decision) -> None:
        for pod in decision.ungate:
            self.api.patch(f"{self._pods}/{pod}", {"spec": {"schedulingGates": None}})
        for pod in decision.delete:
            self.api.request("DELETE", f"{self._pods}/{pod}")
        for pod in decision.finalize:
            self.api.patch(f"{self._pods}/{pod}", {"metadata": {"finalizers": None}})
        if decision.workload is None:
            self._workloads.pop(name, None)
        else:
            self._workloads[name] = decision.workload

    def _create_object(self, name: str) -> None:
        body = {
            "apiVersion": f"{names.KUEUE_GROUP}/{_VERSION}",
            "kind": names.WORKLOAD_KIND,
            "metadata": {"name": name, "namespace": self._namespace, "finalizers": [_WORKLOAD_FINALIZER]},
        }
        self.api.request("POST", self._objects, body)

    def _remove_object(self, name: str) -> None:
        if name.startswith("pod/"):
            return
        self.api.patch(f"{self._objects}/{name}", {"metadata": {"finalizers": None}})
        if name in self.workloads():
            self.api.request("DELETE", f"{self._objects}/{name}")
