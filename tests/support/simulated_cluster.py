"""A simulated cluster for tests of the planner: objects are dicts, and methods act as kubelet, scheduler and user."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

from rollout_operator import names
from rollout_operator.actions import Action, Apply, Create, DeleteJob, DeletePod, Event, Plan, SetFinalizer
from rollout_operator.cluster_info import ClusterInfo
from rollout_operator.conditions import format_timestamp
from rollout_operator.head_status import HeadStatus
from rollout_operator.observed import Observed, PodView, Rejection
from rollout_operator.plan import plan

from rollout_api.manifest.rollout_job import API_VERSION, KIND

JOB = "math"
GRACE_S = 45.0


@dataclass
class SimulatedCluster:
    """One job and the objects that it owns."""

    spec: dict[str, Any]
    now: float = 1_700_000_000.0
    head: HeadStatus | None = None
    job: dict[str, Any] | None = None
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    rejections: tuple[Rejection, ...] = ()
    failed: set[str] = field(default_factory=set)
    """Uids of pods whose failure was not caused by the cluster."""
    _uids: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.job = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": JOB, "namespace": "rl", "uid": "job-uid", "generation": 1, "finalizers": []},
            "spec": self.spec,
        }

    # The operator

    def observe(self) -> Observed:
        assert self.job is not None
        return Observed(
            job=copy.deepcopy(self.job),
            pods=tuple(PodView.from_pod(pod) for pod in self.pods.values()),
            objects=copy.deepcopy(self.objects),
            now=self.now,
            cluster=ClusterInfo(),
            default_image="worker:1",
            last_head_status=self.head,
            rejections=self.rejections,
        )

    def plan(self) -> Plan:
        return Plan() if self.job is None else plan(self.observe())

    def execute(self, planned: Plan, max_steps: int | None = None) -> None:
        """Write the status, then execute the actions, and stop after *max_steps* as an operator that is killed."""
        if max_steps != 0:
            self.events += planned.events
        status = [planned.status] if planned.status is not None else []
        steps: list[Action | dict[str, Any]] = [*status, *planned.actions]
        for step in steps[:max_steps]:
            if self.job is None:
                break
            if isinstance(step, dict):
                self.job["status"] = copy.deepcopy(step)
            else:
                self._execute_action(step)

    def reconcile(self, max_passes: int = 12) -> None:
        """Reconcile until there is nothing left to do."""
        for _ in range(max_passes):
            planned = self.plan()
            if planned.status is None and not planned.actions:
                return
            self.execute(planned)
        raise AssertionError(f"not converged after {max_passes} passes: {planned}")

    def _execute_action(self, action: Action) -> None:
        assert self.job is not None
        match action:
            case Create(manifest) if manifest["kind"] == "Pod":
                self._create_pod(manifest)
            case Create(manifest) | Apply(manifest):
                self.objects[manifest["kind"], manifest["metadata"]["name"]] = copy.deepcopy(manifest)
            case DeletePod(name, uid, force):
                pod = self.pods.get(name)
                if pod is not None and pod["metadata"]["uid"] == uid:
                    assert (
                        names.owner_reference(self.job["metadata"], API_VERSION, KIND)
                        in pod["metadata"]["ownerReferences"]
                    )
                    if pod["status"]["phase"] == "Failed" and self._is_active():
                        recorded = pod["metadata"].get("deletionTimestamp") or uid in self._recorded_failures()
                        assert recorded, f"the failure of {name} would be lost"
                    self.delete_pod(name, immediately=force)
            case DeleteJob():
                self.delete_job()
            case SetFinalizer(present):
                self.job["metadata"]["finalizers"] = [names.FINALIZER] if present else []
                if not present and self.job["metadata"].get("deletionTimestamp"):
                    self._garbage_collect()

    def _create_pod(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if name in self.pods:  # 409 AlreadyExists
            return
        pod = copy.deepcopy(manifest)
        pod["metadata"] |= {"uid": f"pod-{next(self._uids)}", "creationTimestamp": format_timestamp(self.now)}
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod

    # Kubernetes

    def _garbage_collect(self) -> None:
        self.job = None
        self.pods.clear()
        self.objects.clear()

    def delete_pod(self, name: str, *, immediately: bool = False) -> None:
        pod = self.pods[name]
        if immediately or pod["status"]["phase"] in ("Succeeded", "Failed") or not pod["spec"].get("nodeName"):
            del self.pods[name]
        else:
            pod["metadata"].setdefault("deletionTimestamp", format_timestamp(self.now + GRACE_S))

    def finish_deletion(self, name: str) -> None:
        """Remove a pod that is being deleted, as the kubelet does once its containers have terminated."""
        if self.pods[name]["metadata"].get("deletionTimestamp"):
            del self.pods[name]

    def bind(self, name: str) -> None:
        self.pods[name]["spec"]["nodeName"] = "node-0"

    def run(self, name: str, *, ready: bool = True) -> None:
        pod = self.pods[name]
        if pod["status"]["phase"] == "Pending":
            self.bind(name)
            pod["status"] = {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": str(ready)}],
            }

    def terminate(self, name: str, code: int, reason: str = "", message: str = "", pod_reason: str = "") -> None:
        pod = self.pods[name]
        if pod["status"]["phase"] not in ("Pending", "Running"):
            return
        self.bind(name)
        if code and not pod_reason and not pod["metadata"].get("deletionTimestamp"):
            self.failed.add(pod["metadata"]["uid"])
        terminated = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "message": message}
        pod["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": self._component(pod), "state": {"terminated": terminated}}],
        }
        if pod_reason:
            pod["status"]["reason"] = pod_reason

    def _recorded_failures(self) -> set[str]:
        return {failure["uid"] for failure in self.status.get("failures", ())}

    def _is_active(self) -> bool:
        assert self.job is not None
        finished = self.status.get("state") in ("Succeeded", "Failed") or self.job["metadata"].get("deletionTimestamp")
        return not finished and not self.job["spec"].get("lifecycle", {}).get("suspend")

    # The user

    def change(self, **sections: dict[str, Any]) -> None:
        assert self.job is not None
        for name, changes in sections.items():
            self.job["spec"][name] = {**self.job["spec"].get(name, {}), **changes}
        self.job["metadata"]["generation"] += 1

    def delete_job(self) -> None:
        assert self.job is not None
        if self.job["metadata"]["finalizers"]:
            self.job["metadata"]["deletionTimestamp"] = format_timestamp(self.now)
        else:
            self._garbage_collect()

    # Queries for assertions

    @property
    def status(self) -> dict[str, Any]:
        assert self.job is not None
        found: dict[str, Any] = self.job.get("status", {})
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        """Return status and reason of a condition."""
        condition = next(condition for condition in self.status["conditions"] if condition["type"] == kind)
        return condition["status"], condition["reason"]

    def workers(self) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if self._component(pod) == names.WORKER)

    def heads(self) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if self._component(pod) == names.HEAD)

    def _component(self, pod: dict[str, Any]) -> str:
        component: str = pod["metadata"]["labels"][names.COMPONENT_LABEL]
        return component

    def gpus(self) -> int:
        """Return how many GPUs pods occupy that have not terminated and are not on lost nodes."""
        count = 0
        for pod in self.pods.values():
            if pod["status"]["phase"] in ("Succeeded", "Failed") or PodView.from_pod(pod).is_lost(self.now):
                continue
            for container in pod["spec"]["containers"]:
                count += int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        return count
