"""The observed state of one job: the facts that plans are made from, of Kubernetes objects and of the head's status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, Literal, Self

import pydantic.dataclasses
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rollout_api.manifest.status import ProgressStatus
from rollout_operator.objects import names

Manifest = Mapping[str, Any]
"""A Kubernetes object as the API server returns it."""
_TERMINATED_PHASES = ("Succeeded", "Failed")
_OVERDUE_AFTER_S = 30.0
"""Seconds after a pod's deletion deadline after which the operator asks whether its node is lost."""
_START_S = 600.0
"""Seconds for which a pod that is not ready is expected to become so."""


@dataclass(frozen=True)
class ClusterInfo:
    """API versions and fields found by discovery when the operator starts, and what its command line says."""

    disruption_budget_api: str | None = "policy/v1"
    """API version of PodDisruptionBudgets; None if the cluster serves none. Jobs then get none."""
    has_unhealthy_pod_eviction_policy: bool = True
    """Whether PodDisruptionBudgets have the field ``unhealthyPodEvictionPolicy`` (since Kubernetes 1.27)."""
    gang_api: str | None = None
    """API version of the PodGroups of a scheduler that does gang scheduling; None if there is none."""
    status_reader_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may read the heads' /status and /metrics; empty means all namespaces."""
    egress_rules: tuple[dict[str, Any], ...] | None = None
    """Rules of a NetworkPolicy for connections that all jobs need; None if connections of pods are not limited."""
    status_token_hash: str = ""
    """SHA-256 hash of the token that heads require for /status and /metrics; empty if they require none."""
    creates_redis_users: bool = False
    """Whether rollout-redis-users creates a Redis user for each job whose manifest names no Redis server."""


def format_timestamp(now: float) -> str:
    """Return a Unix time in the format of the Kubernetes API."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(timestamp: str | None) -> float | None:
    """Return a timestamp of the Kubernetes API as Unix time."""
    return None if timestamp is None else datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


@dataclass(frozen=True)
class KeptBundle:
    """The ConfigMap with the name that the bundle of the job has."""

    job_uid: str
    """Uid of the job whose bundle it is, which may be an earlier job of the same name."""
    is_foreign: bool
    """Whether it is no bundle, so that it must not be replaced."""

    @classmethod
    def from_config_map(cls, config_map: Manifest) -> Self:
        """Extract the view from a ConfigMap; only its metadata is needed."""
        metadata = config_map["metadata"]
        is_foreign = names.BUNDLE_LABEL not in metadata.get("labels", {})
        return cls(metadata.get("annotations", {}).get(names.JOB_UID_ANNOTATION, ""), is_foreign)


@dataclass(frozen=True)
class PodView:
    """One pod of a job.

    A pod has ended when its main container has, which is named after the component. Containers that a user or a mesh
    has added may run longer, and how they end is irrelevant.
    """

    name: str
    uid: str
    component: str
    slot: int
    """Slot of a worker; -1 for other components."""
    rank: int
    """Number of the pod in its worker: 0 for the leader, which is also the only pod of most workers."""
    phase: str
    """The phase of the pod, as if it had only its main container."""
    has_running_containers: bool
    """Whether the pod has not released its resources yet."""
    retained: bool
    """Whether a finalizer keeps a pod that was deleted and has released its resources.

    Kueue retains a pod of a group in this way until the group has another pod in its place.
    """
    revision: str
    """Hash of the settings that the pod was created with."""
    pod_group: str
    """Name of the pod's group, which Kueue admits as a whole; empty if it is in none."""
    ready: bool
    unready_since: float | None
    """When a pod that has a node was last ready, or got its node; None if it is ready or has no node."""
    created: float
    deletion_deadline: float | None
    """When a pod that is being deleted should have terminated; None if it is not being deleted."""
    scheduled: bool
    gated: bool
    """Whether a scheduling gate holds the pod back, as Kueue does until it admits the pod."""
    unschedulable: str
    """The scheduler's message if the pod is unschedulable, else empty."""
    reason: str
    """Why the pod terminated or cannot start."""
    message: str
    exit_code: int | None
    disrupted: bool
    """Whether the cluster ended the pod, by its condition DisruptionTarget."""
    rejected: bool
    """Whether the kubelet refused to run the pod, for example with UnexpectedAdmissionError or OutOfcpu."""
    replacement: bool
    """Whether another worker occupied this pod's slot before."""
    avoided_nodes: frozenset[str]
    """Names of the nodes on which the pod must not be scheduled, because they rejected earlier pods in its place."""
    ip: str
    node: str

    @classmethod
    def from_pod(cls, pod: Manifest) -> Self:
        """Extract the view from a Pod object."""
        metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
        labels = metadata.get("labels", {})
        conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
        scheduled = conditions.get("PodScheduled", {})
        component = labels.get(names.COMPONENT_LABEL, "")
        phase = _phase(status, component)
        reason, message, exit_code = _outcome(status, phase, component)
        slot, rank = labels.get(names.SLOT_LABEL, ""), labels.get(names.RANK_LABEL, "")
        has_running_containers = status.get("phase") not in _TERMINATED_PHASES and not _is_removed(metadata, spec)
        annotations = metadata.get("annotations", {})
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            component=component,
            slot=int(slot) if slot.isdigit() else -1,
            rank=int(rank) if rank.isdigit() else 0,
            phase=phase,
            has_running_containers=has_running_containers,
            retained=bool(
                metadata.get("deletionTimestamp") and metadata.get("finalizers") and not has_running_containers
            ),
            revision=labels.get(names.REVISION_LABEL, ""),
            pod_group=labels.get(names.POD_GROUP_LABEL, ""),
            ready=conditions.get("Ready", {}).get("status") == "True",
            unready_since=_unready_since(metadata, spec, conditions),
            created=parse_timestamp(metadata.get("creationTimestamp")) or 0.0,
            deletion_deadline=parse_timestamp(metadata.get("deletionTimestamp")),
            scheduled=bool(spec.get("nodeName")),
            gated=bool(spec.get("schedulingGates")),
            unschedulable=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
            reason=reason,
            message=message,
            exit_code=exit_code,
            disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True",
            rejected=_is_rejected(status),
            replacement=names.REPLACEMENT_ANNOTATION in annotations,
            avoided_nodes=frozenset(annotations.get(names.AVOIDED_NODES_ANNOTATION, "").split(",")) - {""},
            ip=status.get("podIP", ""),
            node=spec.get("nodeName", ""),
        )

    @property
    def in_pod_group(self) -> bool:
        """Whether the pod belongs to a group that Kueue admits as a whole."""
        return bool(self.pod_group)

    @property
    def irreplaceable(self) -> bool:
        """Whether Kueue would delete a pod that takes this one's place.

        Pods of a group that have succeeded still count for Kueue, which replaces only those that have failed.
        """
        return self.in_pod_group and self.phase == "Succeeded"

    @property
    def deleting(self) -> bool:
        """Whether the pod's deletion was requested."""
        return self.deletion_deadline is not None

    @property
    def terminated(self) -> bool:
        """Whether the main container has terminated."""
        return self.phase in _TERMINATED_PHASES

    @property
    def live(self) -> bool:
        """Whether the pod runs or will run: it has not terminated, and its deletion was not requested."""
        return not self.deleting and not self.terminated

    def is_stuck(self, now: float, timeout: float) -> bool:
        """Return whether the pod has a node and should run, but has not been ready for more than *timeout* seconds."""
        if not self.live or self.unready_since is None:
            return False
        return now - self.unready_since > timeout

    def is_expected(self, now: float) -> bool:
        """Return whether the pod is ready or will be soon, or is handing over what it has begun."""
        if self.terminated or not self.has_running_containers or self.is_overdue(now):
            return False
        if self.deleting or self.ready:
            return True
        since = self.created if self.unready_since is None else self.unready_since
        return not self.gated and not self.unschedulable and now - since < _START_S

    def is_overdue(self, now: float) -> bool:
        """Return whether the pod should have been removed long ago, but its node has not done so."""
        return self.deletion_deadline is not None and now > self.deletion_deadline + _OVERDUE_AFTER_S


def _unready_since(metadata: Manifest, spec: Manifest, conditions: Mapping[str, Manifest]) -> float | None:
    ready = conditions.get("Ready", {})
    if not spec.get("nodeName") or ready.get("status") == "True":
        return None
    scheduled = conditions.get("PodScheduled", {}).get("lastTransitionTime")
    return parse_timestamp(ready.get("lastTransitionTime") or scheduled or metadata.get("creationTimestamp"))


def _is_removed(metadata: Manifest, spec: Manifest) -> bool:
    """Return whether a pod would no longer exist if it had no finalizers.

    That is a deleted pod which never had a node, or which was deleted without a grace period.
    """
    return bool(metadata.get("deletionTimestamp")) and (
        not spec.get("nodeName") or metadata.get("deletionGracePeriodSeconds") == 0
    )


def _is_rejected(status: Manifest) -> bool:
    """Return whether the kubelet refused to run a pod.

    It then sets the pod's phase and a reason before it has run any container. An exceeded ``activeDeadlineSeconds``
    looks alike, and so does an eviction by older kubelets, whose message says whether the node lacks something or the
    pod has exceeded its own limit.
    """
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    reason = status.get("reason", "") if status.get("phase") == "Failed" else ""
    if reason == "Evicted":
        return "The node " in status.get("message", "")
    return reason not in ("", "DeadlineExceeded") and all(_exit_code(container) is None for container in containers)


def _main_container(status: Manifest, component: str) -> Manifest:
    """Return the status of the container that is named after the component; empty if there is none yet."""
    containers = status.get("containerStatuses") or ()
    return next((container for container in containers if container["name"] == component), {})


def _exit_code(container: Manifest) -> int | None:
    """Return the exit code of a container; None if it has not terminated."""
    exit_code: int | None = container.get("state", {}).get("terminated", {}).get("exitCode")
    return exit_code


def _phase(status: Manifest, component: str) -> str:
    """Return the phase of a pod as if it had only its main container."""
    phase: str = status.get("phase", "Pending")
    exit_code = _exit_code(_main_container(status, component))
    if exit_code is None or phase not in ("Running", "Failed"):
        return phase
    return "Failed" if exit_code or status.get("reason") else "Succeeded"


def _outcome(status: Manifest, phase: str, component: str) -> tuple[str, str, int | None]:
    """Return reason, message and exit code of a pod that terminated or cannot start, from the pod or its containers."""
    main = _main_container(status, component)
    if main and (phase == "Running" or _exit_code(main) is not None):
        containers = [main]
    else:
        containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for container in containers:
        if exit_code := _exit_code(container):
            terminated = container["state"]["terminated"]
            return (
                status.get("reason") or terminated.get("reason") or "Error",
                status.get("message") or terminated.get("message", ""),
                exit_code,
            )
    if status.get("reason"):
        return status["reason"], status.get("message", ""), None
    if phase == "Succeeded":
        messages = [container.get("state", {}).get("terminated", {}).get("message", "") for container in containers]
        return "", "".join(messages), 0
    for container in containers:
        waiting = container.get("state", {}).get("waiting")
        if waiting is not None and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return waiting["reason"], waiting.get("message", ""), None
    return "", "", None


STATUS_PERIOD_S = 10.0
"""Seconds between two reads of the status of a running job's head."""
STARTING_PERIOD_S = 2.0
"""The same for a head that reports no engine yet, although a worker is ready."""


_MAX_NUMBER = 2**53
"""Limit of all numbers of a head. Sums of a few of them fit into 64 bits, as the API server requires."""
_MAX_TEXT = 1000
_MAX_ENGINES = 10_000
_MAX_ERROR_TYPES = 16

_Count = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
_Fraction = Annotated[float, Field(ge=-_MAX_NUMBER, le=_MAX_NUMBER, allow_inf_nan=False)]
_Number = Annotated[float, Field(ge=0, le=_MAX_NUMBER, allow_inf_nan=False)]
_Text = Annotated[str, AfterValidator(lambda text: text[:_MAX_TEXT])]
"""A text whose end is cut if it is long."""


class _Reported(BaseModel):
    """A part of a head's status.

    A running job keeps its image when the operator is upgraded, so unknown fields are ignored, and all have defaults.
    A head runs code of its tenant, so what it reports is bounded.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)


@pydantic.dataclasses.dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore"))
class EngineStatus:
    """Fields of :class:`rollout_api.protocol.status.EngineEntry` that the operator uses.

    The operator keeps these of all engines of all jobs. A model would take five times the memory of a dataclass.
    """

    worker: _Text = ""
    max_running: _Count = 0
    assigned: _Count = 0
    idle_seconds: _Number = 0.0


class EnvironmentErrorStatus(_Reported):
    """See :class:`rollout_api.protocol.status.EnvironmentErrors`."""

    count: _Count = 0
    problem: _Text = ""
    message: _Text = ""


class HeadStatus(_Reported):
    """Fields of :class:`rollout_api.protocol.status.ServedStatus`, the status of a job, that the operator uses."""

    weight_version: _Count = 0
    waiting: _Count = 0
    assigned: _Count = 0
    done: _Count = 0
    total: _Count | None = None
    epoch: _Count | None = None
    tokens: _Count = 0
    accepted_per_step: _Number = 0.0
    decoding_steps: _Count = 0
    canaries: _Count = 0
    distribution_drift: bool = False
    unverified: Annotated[tuple[_Text, ...], Field(max_length=_MAX_ENGINES)] = ()
    saved: _Fraction | None = None
    tokens_per_second: _Number = 0.0
    remaining_seconds: _Number | None = None
    work_seconds: _Number | None = None
    tail_seconds: _Number | None = None
    redis_error: _Text | None = None
    engine_errors: dict[_Text, _Text] = Field(default_factory=dict)
    environment_errors: Annotated[
        dict[Annotated[str, Field(max_length=100)], EnvironmentErrorStatus],
        AfterValidator(lambda errors: dict(islice(errors.items(), _MAX_ERROR_TYPES))),
    ] = Field(default_factory=dict)
    """Errors by type; of the types of a head with too many of them, the first ones."""
    engines: Annotated[tuple[EngineStatus, ...], Field(max_length=_MAX_ENGINES)] = ()

    @property
    def progress(self) -> ProgressStatus:
        """The progress for the status of the job."""
        return ProgressStatus(
            done=self.done,
            total=self.total,
            open=self.waiting + self.assigned,
            epoch=self.epoch,
            weight_version=self.weight_version,
            tokens=self.tokens,
            tokens_per_second=round(self.tokens_per_second),
            accepted_per_step=f"{self.accepted_per_step:.2f}" if self.decoding_steps else None,
            seconds_left=None if self.remaining_seconds is None else round(self.remaining_seconds),
            summary=str(self.done) if self.total is None else f"{self.done}/{self.total}",
        )

    @property
    def time_saved(self) -> str | None:
        """The share of decoding time that drafting has saved, for the status of the job."""
        return None if self.saved is None else f"{round(100 * self.saved)}%"

    @classmethod
    def from_termination_message(cls, message: str) -> Self | None:
        """Parse the last status of a head that succeeded, which is its container's termination message.

        Returns None if the message is not a status.
        """
        try:
            status = cls.model_validate_json(message)
        except ValidationError:
            return None
        return status if "done" in status.model_fields_set else None


@dataclass(frozen=True)
class Target:
    """What an action writes."""

    kind: str
    """Kind of the object."""
    name: str
    """Name of the object."""
    operation: Literal["content", "deletion", "finalizer"] = "content"
    """Whether the action writes the object's content, deletes it, or adds or removes its finalizer."""

    def __str__(self) -> str:
        """Return the object of "The API server rejected …"."""
        name = f"{self.kind} {self.name}"
        return name if self.operation == "content" else f"the {self.operation} of {name}"


_FIRST_RETRY_S, _MAX_RETRY_S = 10.0, 160.0


@dataclass(frozen=True)
class Rejection:
    """An action that the API server rejected recently."""

    target: Target
    """What the action would have written."""
    reason: str
    """The reason that the API server gave, such as ``Forbidden``."""
    message: str
    time: float
    scope: tuple[str, ...] = ()
    """The actions that would be rejected alike."""
    generation: int = 0
    """``metadata.generation`` of the job that the action was planned for."""
    count: int = 1
    """How often in a row such actions were rejected."""

    @property
    def retry_time(self) -> float:
        """When one of these actions is tried again: after 10, 20, 40 … 160 s."""
        return self.time + min(_MAX_RETRY_S, _FIRST_RETRY_S * 2.0 ** (self.count - 1))

    def __str__(self) -> str:
        """Return a message for conditions and Events."""
        return f"The API server rejected {self.target}: {self.message}"


@dataclass(frozen=True)
class Observed:
    """Everything that a plan is made from."""

    job: Manifest
    """The RolloutJob."""
    pods: tuple[PodView, ...]
    """The pods that the job owns."""
    objects: Mapping[tuple[str, str], Manifest]
    """The other objects that the job owns, by kind and name."""
    now: float
    """Current Unix time."""
    cluster: ClusterInfo
    default_image: str
    last_head_status: HeadStatus | None = None
    """The last status of the head; None if the head does not answer, or if its status cannot be used."""
    head_problem: str = ""
    """Why the status of the head cannot be used; empty if it can, or if the head does not answer."""
    lost_nodes: frozenset[str] = frozenset()
    """Nodes of overdue pods that do not exist any more, or are not ready."""
    rejections: tuple[Rejection, ...] = field(default=())
    kept_bundle: KeptBundle | None = None
    """The bundle that was kept of a job of this name; None if there is none, or if the job has not failed."""
    runtime: Mapping[str, Any] | None = None
    """The ``spec`` of the runtime that the job names; None if it names none, or if there is no such runtime."""

    @property
    def metadata(self) -> Manifest:
        """The job's metadata."""
        metadata: Manifest = self.job["metadata"]
        return metadata

    @property
    def status(self) -> Manifest:
        """The job's status in the API server."""
        status: Manifest = self.job.get("status") or {}
        return status

    @property
    def head(self) -> HeadStatus | None:
        """The status of the head that is running now, if it answers; the status of an earlier head is outdated."""
        running = any(not pod.deleting and pod.phase == "Running" for pod in self.component(names.HEAD))
        return self.last_head_status if running else None

    @property
    def has_pods(self) -> bool:
        """Whether a head or a worker exists."""
        return any(pod.component in (names.HEAD, names.WORKER) for pod in self.pods)

    @property
    def leaders(self) -> list[PodView]:
        """The first pods of all workers, oldest first."""
        return [pod for pod in self.component(names.WORKER) if not pod.rank]

    @property
    def followers(self) -> list[PodView]:
        """The further pods of workers that have several, oldest first."""
        return [pod for pod in self.component(names.WORKER) if pod.rank]

    def component(self, component: str) -> list[PodView]:
        """Return the pods of a component, oldest first."""
        return sorted((pod for pod in self.pods if pod.component == component), key=lambda pod: (pod.created, pod.uid))
