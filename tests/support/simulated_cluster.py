"""A simulated cluster for tests of the planner: objects are dicts, and methods act as kubelet, scheduler and user."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rollout_operator.objects import names
from rollout_operator.objects.observed import (
    ClusterInfo,
    HeadStatus,
    KeptBundle,
    Observed,
    PodView,
    Rejection,
    format_timestamp,
)
from rollout_operator.planning.actions import (
    Action,
    Apply,
    Create,
    DeleteJob,
    DeleteObject,
    DeletePod,
    DeleteWorkload,
    Event,
    KeepBundle,
    Plan,
    SetFinalizer,
)
from rollout_operator.planning.plan import plan

from rollout_api.manifest.rollout_job import API_VERSION, KIND
from rollout_api.protocol.status import EXIT_INTERRUPTED
from tests.support import kueue

JOB = "math"
GRACE_S = 45.0


@dataclass
class SimulatedCluster:
    """One job and the objects that it owns."""

    spec: dict[str, Any]
    now: float = 1_700_000_000.0
    head: HeadStatus | None = None
    head_problem: str = ""
    job: dict[str, Any] | None = None
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    rejections: tuple[Rejection, ...] = ()
    runtime: dict[str, Any] | None = None
    """The ``spec`` of the runtime that the job names, if it names one that exists."""
    bundle: KeptBundle | None = None
    """The bundle that was kept of a job of this name."""
    bundled_pods: tuple[str, ...] = ()
    """The pods that existed when their logs were kept in it."""
    default_image: str = "worker:1"
    lost_nodes: set[str] = field(default_factory=set)
    gang_api: str | None = None
    """API version of the PodGroups that the cluster's scheduler has."""
    queued: bool = False
    """Whether the job is in a queue of Kueue."""
    has_quota: bool = True
    """Whether the queue admits pods."""
    workloads: dict[str, kueue.Workload] = field(default_factory=dict)
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
        if self.queued:
            self.job["metadata"]["labels"] = {names.QUEUE_LABEL: "research"}

    # The operator

    def observe(self) -> Observed:
        assert self.job is not None
        return Observed(
            job=copy.deepcopy(self.job),
            pods=tuple(PodView.from_pod(pod) for pod in self.pods.values()),
            objects=copy.deepcopy(self.objects),
            now=self.now,
            cluster=ClusterInfo(gang_api=self.gang_api),
            default_image=self.default_image,
            last_head_status=self.head,
            head_problem=self.head_problem,
            lost_nodes=frozenset(self.lost_nodes),
            rejections=self.rejections,
            kept_bundle=self.bundle,
            runtime=copy.deepcopy(self.runtime),
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
            self.execute(planned)
            # The deletion of a Workload is requested until Kueue has executed it.
            if planned.status is None and all(isinstance(action, DeleteWorkload) for action in planned.actions):
                return
        raise AssertionError(f"not converged after {max_passes} passes: {planned}")

    def _execute_action(self, action: Action) -> None:
        assert self.job is not None
        match action:
            case Create(manifest) if manifest["kind"] == "Pod":
                self._create_pod(manifest)
            case Create(manifest) | Apply(manifest):
                key = manifest["kind"], manifest["metadata"]["name"]
                uid = self.objects[key]["metadata"]["uid"] if key in self.objects else f"object-{next(self._uids)}"
                self.objects[key] = copy.deepcopy(manifest)
                self.objects[key]["metadata"]["uid"] = uid
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
                    if force:
                        pod["status"]["phase"] = "Failed"
                    self.delete_pod(name, immediately=force)
            case DeleteObject(_, kind, name, uid):
                if self.objects.get((kind, name), {}).get("metadata", {}).get("uid") == uid:
                    del self.objects[kind, name]
            case DeleteWorkload(name):
                if name in self.workloads:
                    self.workloads[name].deleted = True
            case DeleteJob():
                self.delete_job()
            case KeepBundle(_, pods):
                self.bundle = KeptBundle(self.job["metadata"]["uid"], is_foreign=False)
                self.bundled_pods = tuple(name for name in pods if name in self.pods)
            case SetFinalizer(present):
                self.set_finalizer(names.FINALIZER, present=present)

    def _create_pod(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if name in self.pods:  # 409 AlreadyExists
            return
        pod = copy.deepcopy(manifest)
        pod["metadata"] |= {"uid": f"pod-{next(self._uids)}", "creationTimestamp": format_timestamp(self.now)}
        pod["status"] = {"phase": "Pending"}
        if names.QUEUE_LABEL in pod["metadata"]["labels"]:
            pod["metadata"]["finalizers"] = [kueue.FINALIZER]
            pod["spec"]["schedulingGates"] = [{"name": kueue.GATE}]
        self.pods[name] = pod

    # Kubernetes

    def set_finalizer(self, finalizer: str, *, present: bool) -> None:
        assert self.job is not None
        metadata = self.job["metadata"]
        others = [name for name in metadata["finalizers"] if name != finalizer]
        metadata["finalizers"] = [*others, finalizer] if present else others
        if not metadata["finalizers"] and metadata.get("deletionTimestamp"):
            self._garbage_collect()

    def delete_dependents(self) -> None:
        """Delete the objects of a job that is deleted in the foreground; the last pod must have terminated before."""
        for name in list(self.pods):
            self.delete_pod(name)
        self.objects.clear()
        if not self.pods:
            self.set_finalizer(names.FOREGROUND_FINALIZER, present=False)

    def _garbage_collect(self) -> None:
        self.job = None
        for name in list(self.pods):
            self.delete_pod(name, immediately=True)
        self.objects.clear()

    def delete_pod(self, name: str, *, immediately: bool = False) -> None:
        pod = self.pods[name]
        if immediately:
            pod["metadata"]["deletionGracePeriodSeconds"] = 0
        pod["metadata"].setdefault("deletionTimestamp", format_timestamp(self.now + GRACE_S))
        if immediately or pod["status"]["phase"] in ("Succeeded", "Failed") or not pod["spec"].get("nodeName"):
            self._remove(name)

    def finish_deletion(self, name: str) -> None:
        """Remove a pod that is being deleted, as the kubelet does once its containers have terminated."""
        pod = self.pods[name]
        if pod["metadata"].get("deletionTimestamp") and pod["spec"].get("nodeName") not in self.lost_nodes:
            if pod["status"]["phase"] == "Running":
                self.terminate(name, EXIT_INTERRUPTED)
            self._remove(name)

    def finish_deletions(self, pods: Iterable[str] | None = None) -> None:
        """Remove the pods that are being deleted, all or some; see :meth:`finish_deletion`."""
        for name in list(self.pods if pods is None else pods):
            self.finish_deletion(name)

    def _remove(self, name: str) -> None:
        if not self.pods[name]["metadata"].get("finalizers"):
            del self.pods[name]

    def reconcile_queue(self) -> None:
        """Let Kueue reconcile every pod and every group of pods."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for name, pod in self.pods.items():
            labels = pod["metadata"]["labels"]
            if names.QUEUE_LABEL in labels:
                groups.setdefault(labels.get(names.POD_GROUP_LABEL, name), []).append(pod)
        for name in [known for known in self.workloads if known not in groups]:
            del self.workloads[name]
        for name, pods in groups.items():
            decide = kueue.reconcile_single if name in self.pods else kueue.reconcile_group
            target: Any = pods[0] if name in self.pods else pods
            decision = decide(target, self.workloads.get(name), lambda _: self.has_quota)
            for pod_name in decision.ungate:
                del self.pods[pod_name]["spec"]["schedulingGates"]
            for pod_name in decision.finalize:
                pod = self.pods[pod_name]
                pod["metadata"].pop("finalizers", None)
                gone = pod["status"]["phase"] in ("Succeeded", "Failed") or not pod["spec"].get("nodeName")
                if pod["metadata"].get("deletionTimestamp") and gone:
                    del self.pods[pod_name]
            for pod_name in decision.delete:
                if pod_name in self.pods:
                    self.delete_pod(pod_name)
            if decision.workload is None:
                self.workloads.pop(name, None)
            else:
                self.workloads[name] = decision.workload

    def preempt(self) -> None:
        """Let Kueue evict everything that it has admitted."""
        for workload in self.workloads.values():
            workload.evicted = workload.evicted or workload.admitted

    def can_bind(self, name: str) -> bool:
        """Return whether the scheduler may find a node for a pod."""
        pod = self.pods[name]
        is_held_back = pod["spec"].get("schedulingGates") or pod["metadata"].get("deletionTimestamp")
        return not is_held_back and not pod["spec"].get("nodeName") and pod["status"]["phase"] == "Pending"

    def bind(self, name: str, node: str = "") -> None:
        self.pods[name]["spec"].setdefault("nodeName", node or f"node-of-{name}")

    def reject(self, name: str, reason: str, node: str = "") -> None:
        """Bind a pod to a node whose kubelet refuses to run it."""
        self.bind(name, node)
        message = "Pod was rejected: The node had condition: [DiskPressure]. "
        self.pods[name]["status"] = {"phase": "Failed", "reason": reason, "message": message}

    def lose_node(self, name: str) -> None:
        """Lose the node of a pod, whose kubelet then neither starts nor ends any pod, and delete the pod."""
        if node := self.pods[name]["spec"].get("nodeName"):
            self.lost_nodes.add(node)
            self.delete_pod(name)

    def run(self, name: str, *, ready: bool = True) -> None:
        pod = self.pods[name]
        metadata, spec = pod["metadata"], pod["spec"]
        is_held_back = spec.get("schedulingGates") or metadata.get("deletionTimestamp")
        if pod["status"]["phase"] == "Pending" and not is_held_back:
            self.bind(name)
            pod["status"] = {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": str(ready)}],
            }

    def run_all(self) -> None:
        """Run all pods that can run."""
        for name in list(self.pods):
            self.run(name)

    def terminate(
        self,
        name: str,
        code: int,
        reason: str = "",
        message: str = "",
        pod_reason: str = "",
        *,
        disrupted: bool = False,
    ) -> None:
        """End a pod; *disrupted* says that the cluster has ended it, and says so by the condition DisruptionTarget."""
        pod = self.pods[name]
        metadata, spec = pod["metadata"], pod["spec"]
        is_removed = metadata.get("deletionTimestamp") and not spec.get("nodeName")
        if pod["status"]["phase"] not in ("Pending", "Running") or spec.get("schedulingGates") or is_removed:
            return
        self.bind(name)
        if code and not disrupted and not pod["metadata"].get("deletionTimestamp"):
            self.failed.add(pod["metadata"]["uid"])
        terminated = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "message": message}
        pod["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": self._component(pod), "state": {"terminated": terminated}}],
        }
        if pod_reason:
            pod["status"]["reason"] = pod_reason
        if disrupted:
            pod["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]

    def _recorded_failures(self) -> set[str]:
        return {failure["uid"] for failure in self.status.get("failures", ())}

    def _is_active(self) -> bool:
        assert self.job is not None
        finished = self.status.get("state") in ("Succeeded", "Failed") or self.job["metadata"].get("deletionTimestamp")
        return not finished and not self.job["spec"].get("lifecycle", {}).get("suspend")

    # The user

    def change(self, **sections: dict[str, Any] | None) -> None:
        """Change some fields of sections of the spec, or remove sections."""
        assert self.job is not None
        for name, changes in sections.items():
            if changes is None:
                del self.job["spec"][name]
            else:
                self.job["spec"][name] = {**self.job["spec"].get(name, {}), **changes}
        self.job["metadata"]["generation"] += 1

    def delete_job(self, *, foreground: bool = False) -> None:
        assert self.job is not None
        if foreground:
            self.set_finalizer(names.FOREGROUND_FINALIZER, present=True)
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

    def prefetch_pods(self) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if self._component(pod) == names.PREFETCH)

    def _component(self, pod: dict[str, Any]) -> str:
        component: str = pod["metadata"]["labels"][names.COMPONENT_LABEL]
        return component

    def gpus(self) -> int:
        """Return how many GPUs pods occupy that have not terminated and are not on lost nodes."""
        count = 0
        for pod in self.pods.values():
            view = PodView.from_pod(pod)
            if not view.has_running_containers or view.node in self.lost_nodes:
                continue
            for container in pod["spec"]["containers"]:
                count += int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        return count
