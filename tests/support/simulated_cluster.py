"""A cluster as the planner's tests need it: objects in dicts, and somebody who plays kubelet, scheduler and user."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

from rollout_operator import names
from rollout_operator.actions import Action, Apply, Create, DeleteJob, DeletePod, Plan, SetFinalizer
from rollout_operator.cluster import Cluster
from rollout_operator.conditions import timestamp
from rollout_operator.head_status import HeadStatus
from rollout_operator.observed import Observed, Obstacle, PodView
from rollout_operator.plan import plan

from rollout_api.manifest.rollout_job import API_VERSION, KIND

JOB = "math"
GRACE_S = 45.0


@dataclass
class ModelCluster:
    """One job and what it owns, and one pod of the same name pattern that somebody else owns."""

    spec: dict[str, Any]
    now: float = 1_700_000_000.0
    head: HeadStatus | None = None
    job: dict[str, Any] | None = None
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)
    obstacles: tuple[Obstacle, ...] = ()
    failed: set[str] = field(default_factory=set)
    """Pods that failed by their own fault."""
    _uids: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.job = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": JOB, "namespace": "rl", "uid": "job-uid", "generation": 1, "finalizers": []},
            "spec": self.spec,
        }

    # what the operator does

    def seen(self) -> Observed:
        assert self.job is not None
        return Observed(
            job=copy.deepcopy(self.job),
            pods=tuple(PodView.of(pod) for pod in self.pods.values()),
            objects=copy.deepcopy(self.objects),
            now=self.now,
            cluster=Cluster(),
            default_image="worker:1",
            said=self.head,
            obstacles=self.obstacles,
        )

    def look(self) -> Plan:
        return Plan() if self.job is None else plan(self.seen())

    def carry_out(self, what: Plan, steps: int | None = None) -> int:
        """Status first, then actions, of which only so many are reached; how many steps there were."""
        if steps != 0:
            self.notes += what.notes
        everything: list[Action | dict[str, Any]] = [*([what.status] if what.status is not None else []), *what.actions]
        for step in everything[:steps]:
            if self.job is None:
                break
            if isinstance(step, dict):
                self.job["status"] = copy.deepcopy(step)
            else:
                self._act(step)
        return len(everything)

    def settle(self, passes: int = 12) -> None:
        """Look and act until there is nothing to do."""
        for _ in range(passes):
            what = self.look()
            if what.status is None and not what.actions:
                return
            self.carry_out(what)
        raise AssertionError(f"not settled after {passes} passes: {what}")

    def _act(self, action: Action) -> None:
        assert self.job is not None
        match action:
            case Create(manifest) if manifest["kind"] == "Pod":
                self._create_pod(manifest)
            case Create(manifest) | Apply(manifest):
                self.objects[manifest["kind"], manifest["metadata"]["name"]] = copy.deepcopy(manifest)
            case DeletePod(name, uid, force):
                pod = self.pods.get(name)
                if pod is not None and pod["metadata"]["uid"] == uid:
                    assert names.owner(self.job["metadata"], API_VERSION, KIND) in pod["metadata"]["ownerReferences"]
                    if pod["status"]["phase"] == "Failed" and self._running_job():
                        known = pod["metadata"].get("deletionTimestamp") or uid in self._recorded()
                        assert known, f"{name} failed, and nobody would ever know"
                    self.delete_pod(name, at_once=force)
            case DeleteJob():
                self.delete_job()
            case SetFinalizer(present):
                self.job["metadata"]["finalizers"] = [names.FINALIZER] if present else []
                if not present and self.job["metadata"].get("deletionTimestamp"):
                    self._collect()

    def _create_pod(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if name in self.pods:  # 409 AlreadyExists
            return
        pod = copy.deepcopy(manifest)
        pod["metadata"] |= {"uid": f"pod-{next(self._uids)}", "creationTimestamp": timestamp(self.now)}
        pod["status"] = {"phase": "Pending"}
        self.pods[name] = pod

    # what Kubernetes does

    def _collect(self) -> None:
        self.job = None
        self.pods.clear()
        self.objects.clear()

    def delete_pod(self, name: str, *, at_once: bool = False) -> None:
        pod = self.pods[name]
        if at_once or pod["status"]["phase"] in ("Succeeded", "Failed") or not pod["spec"].get("nodeName"):
            del self.pods[name]
        else:
            pod["metadata"].setdefault("deletionTimestamp", timestamp(self.now + GRACE_S))

    def vanish(self, name: str) -> None:
        """A pod that was told to end has."""
        if self.pods[name]["metadata"].get("deletionTimestamp"):
            del self.pods[name]

    def bind(self, name: str) -> None:
        self.pods[name]["spec"]["nodeName"] = "node-0"

    def run(self, name: str, *, ready: bool = True) -> None:
        pod = self.pods[name]
        if pod["status"]["phase"] == "Pending":
            self.bind(name)
            truth = "True" if ready else "False"
            pod["status"] = {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "Ready", "status": truth}],
            }

    def end(self, name: str, code: int, reason: str = "", message: str = "", pod_reason: str = "") -> None:
        pod = self.pods[name]
        if pod["status"]["phase"] not in ("Pending", "Running"):
            return
        self.bind(name)
        if code and not pod_reason and not pod["metadata"].get("deletionTimestamp"):
            self.failed.add(pod["metadata"]["uid"])
        ended = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "message": message}
        pod["status"] = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{"name": "c", "state": {"terminated": ended}}],
        }
        if pod_reason:
            pod["status"]["reason"] = pod_reason

    def _recorded(self) -> set[str]:
        return {failure["uid"] for failure in self.status.get("failures", ())}

    def _running_job(self) -> bool:
        assert self.job is not None
        over = self.status.get("state") in ("Succeeded", "Failed") or self.job["metadata"].get("deletionTimestamp")
        return not over and not self.job["spec"].get("lifecycle", {}).get("suspend")

    # what a user does

    def change(self, **sections: dict[str, Any]) -> None:
        assert self.job is not None
        for name, changes in sections.items():
            self.job["spec"][name] = {**self.job["spec"].get(name, {}), **changes}
        self.job["metadata"]["generation"] += 1

    def delete_job(self) -> None:
        assert self.job is not None
        if self.job["metadata"]["finalizers"]:
            self.job["metadata"]["deletionTimestamp"] = timestamp(self.now)
        else:
            self._collect()

    # what is asked in tests

    @property
    def status(self) -> dict[str, Any]:
        assert self.job is not None
        found: dict[str, Any] = self.job.get("status", {})
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        one = next(one for one in self.status["conditions"] if one["type"] == kind)
        return one["status"], one["reason"]

    def workers(self) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if self._component(pod) == names.WORKER)

    def heads(self) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if self._component(pod) == names.HEAD)

    def _component(self, pod: dict[str, Any]) -> str:
        component: str = pod["metadata"]["labels"][names.COMPONENT_LABEL]
        return component

    def gpus(self) -> int:
        """GPUs that are taken: by pods that have not ended, those on lost nodes apart."""
        taken = 0
        for pod in self.pods.values():
            if pod["status"]["phase"] in ("Succeeded", "Failed") or PodView.of(pod).lost(self.now):
                continue
            for container in pod["spec"]["containers"]:
                taken += int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        return taken
