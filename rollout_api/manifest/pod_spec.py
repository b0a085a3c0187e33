"""The sections of a RolloutJob's ``spec`` that describe its pods.

``rollout run`` has no pods. It uses only the number of engines and their resources from these sections. On Kubernetes,
a platform team describes the cluster by runtimes: the kinds ``ClusterRolloutRuntime`` and ``RolloutRuntime``, whose
``spec`` has those settings of a RolloutJob that depend on the cluster and not on the training. A job names a runtime in
``spec.runtimeRef``; what the job sets itself takes precedence.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rollout_api.manifest.field_types import DnsName, LabelKey, LabelValue, ManifestModel, Quantity, Text, cel_rules

DEFAULT_GPU_RESOURCE = "nvidia.com/gpu"
"""Extended resource of one GPU if a manifest names none."""

_AcceleratorName = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$")
]
_ExtendedResource = Annotated[
    str,
    StringConstraints(
        min_length=3,
        max_length=317,
        pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$",
    ),
]
"""Name of an extended resource, with the domain of its vendor."""
_ONE_KIND_OF_GPUS = (
    "deviceClaimTemplate and gpuResource both say how a worker gets its GPUs; remove gpuResource or deviceClaimTemplate"
)
_GPUS_ARE_REQUESTED = "gpusPerWorker already requests the GPUs; remove the GPU resource from resources.extended"

_TEMPLATE = (
    "Pod template for settings that have no field of their own. It is merged into the pod by strategic merge, as "
    "kubectl patch does. The container is called {container}."
)
CLUSTER_RUNTIME_KIND = "ClusterRolloutRuntime"
RUNTIME_KIND = "RolloutRuntime"
RUNTIME_PLURALS = {CLUSTER_RUNTIME_KIND: "clusterrolloutruntimes", RUNTIME_KIND: "rolloutruntimes"}
"""The kinds of runtimes, and their plurals in URLs of the API server."""

SCALING_FIELDS = frozenset(
    {"replicas", "min_replicas", "max_replicas", "autoscale", "idle_seconds", "max_pending_replacements"}
)
"""Fields of ``workers`` that concern the number of workers, not their pods. Each job sets them itself."""


RUNTIME_SECTIONS = ("image", "head", "priority_class_name")
"""Sections of a job that a runtime may set as a whole. Of ``workers`` and ``model``, it may set only a part."""


class Resources(ManifestModel):
    """Resources of one pod. Requests and limits are equal."""

    cpu: Quantity | None = None
    """Number of CPU cores."""
    memory: Quantity | None = None
    """Main memory, including /dev/shm."""


class WorkerResources(Resources):
    """Resources of one worker, in addition to its GPUs. Requests and limits are equal."""

    extended: dict[_ExtendedResource, Annotated[int, Field(ge=1, le=1024)]] = Field(default_factory=dict, max_length=16)
    """Extended resources other than GPUs and their number, for example rdma/hca: 1."""


class Toleration(ManifestModel):
    """A toleration: allows pods on nodes with a matching taint."""

    key: LabelKey | None = None
    """Key of the taint. Default: all taints (requires operator Exists)."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Exists matches any value, Equal only the given one."""
    value: LabelValue | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint. Default: all effects."""
    toleration_seconds: int | None = Field(default=None, ge=0)
    """Seconds that a pod stays on a node with a NoExecute taint. Default: no limit."""


class Workers(ManifestModel):
    """The worker pods, which run the engines. With ``rollout run``: engines on one machine."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            (
                "!has(self.minReplicas) || self.minReplicas <= self.replicas",
                "minReplicas must not be more than replicas",
            ),
            (
                "!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
                "replicas must not be more than maxReplicas",
            ),
            ("!has(self.gpuResource) || !has(self.deviceClaimTemplate)", _ONE_KIND_OF_GPUS),
            (
                "!has(self.resources) || !has(self.resources.extended) || "
                f"!((has(self.gpuResource) ? self.gpuResource : '{DEFAULT_GPU_RESOURCE}') in self.resources.extended)",
                _GPUS_ARE_REQUESTED,
            ),
        )
    )

    replicas: int = Field(default=1, ge=1, le=1024)
    """Number of workers. kubectl scale changes it."""
    min_replicas: int | None = Field(default=None, ge=1, le=1024)
    """Number of workers that autoscaling keeps, and with which a queue must admit the job. The job samples as soon as
    one engine is ready. Default: 1."""
    max_replicas: int | None = Field(default=None, ge=1, le=1024)
    """Maximum number of workers with autoscaling. Default: replicas."""
    autoscale: bool = False
    """Adapt the number of workers to the queued work, between minReplicas and maxReplicas, starting with replicas. Idle
    workers are removed in the tail of a step."""
    idle_seconds: int = Field(default=60, ge=1, le=86_400)
    """Autoscaling removes a worker that was idle for this many seconds."""
    pods_per_worker: int = Field(default=1, ge=1, le=64)
    """Number of pods of each worker. Several pods run one engine together, for a model that does not fit into one:
    tensorParallelSize × pipelineParallelSize must be gpusPerWorker, which are divided equally among the pods."""
    gpus_per_worker: int = Field(default=1, ge=0, le=1024)
    """GPUs of each worker: a multiple of the GPUs of one engine, which are tensorParallelSize × pipelineParallelSize.
    The quotient is the number of engines in the worker. 0 means a CPU worker with one engine, of which each pod runs
    one process."""
    gpu_resource: _ExtendedResource | None = Field(
        default=None,
        description="Extended resource of one GPU, for example amd.com/gpu or nvidia.com/mig-3g.40gb. Default: "
        f"{DEFAULT_GPU_RESOURCE}.",
    )
    device_claim_template: DnsName | None = None
    """ResourceClaimTemplate in the job's namespace from which each pod of a worker claims its share of gpusPerWorker,
    by dynamic resource allocation. The pod then requests no extended resource for its GPUs."""
    accelerator: _AcceleratorName | None = None
    """Required GPU model. Nodes of any model are recognized by the label das.rollout.dev/accelerator; those of
    nvidia-a100, nvidia-h100, nvidia-h200 and nvidia-b200 also by the labels of NVIDIA's GPU feature discovery, GKE and
    Karpenter. Default: any GPU."""
    runtime_class_name: DnsName | None = None
    """RuntimeClass of the workers, for example nvidia. Default: that of the cluster."""
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=64)
    """Labels that the node of a worker must have."""
    topology_key: _LabelKey | None = None
    """Label of nodes whose values are the racks, NVLink domains or blocks of the cluster. With podsPerWorker, the pods
    of each worker are placed on nodes with the same value; otherwise, the workers of the job preferably are."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=64)
    """Tolerations of the workers. GPU workers always tolerate the taint of their GPU resource, too, and that of its
    vendor, such as nvidia.com/gpu."""
    resources: WorkerResources = Field(default_factory=WorkerResources)
    shared_memory: Quantity = "8Gi"
    """Size limit of /dev/shm, which Ray and NCCL use."""
    drain_seconds: int = Field(default=25, ge=0, le=3600)
    """Seconds that running rollouts have to finish when a worker is told to terminate. Then the worker hands over the
    unfinished ones. The grace period of its pod is 20 s longer. rollout run does not wait."""
    max_pending_replacements: int = Field(default=4, ge=1, le=1024)
    """Maximum number of replacements of lost workers that may be pending at the same time."""
    pod_template: dict[str, JsonValue] = Field(default_factory=dict, description=_TEMPLATE.format(container="worker"))

    @property
    def effective_min(self) -> int:
        """Number of workers that autoscaling keeps, and that a queue must admit the job with."""
        return self.min_replicas if self.min_replicas is not None else 1

    @property
    def effective_max(self) -> int:
        """Maximum number of workers."""
        return self.max_replicas if self.max_replicas is not None and self.autoscale else self.replicas

    @field_validator("device_claim_template")
    @classmethod
    def _require_one_kind_of_gpus(cls, template: str | None, info: ValidationInfo) -> str | None:
        if template is not None and info.data.get("gpu_resource") is not None:
            raise PydanticCustomError("one_of", _ONE_KIND_OF_GPUS)
        return template

    @field_validator("resources")
    @classmethod
    def _reject_gpus(cls, resources: WorkerResources, info: ValidationInfo) -> WorkerResources:
        gpus = info.data.get("gpu_resource") or DEFAULT_GPU_RESOURCE
        if gpus in resources.extended:
            raise PydanticCustomError("gpus", _GPUS_ARE_REQUESTED)
        return resources

    @field_validator("min_replicas")
    @classmethod
    def _at_most_replicas(cls, value: int | None, info: ValidationInfo) -> int | None:
        replicas = info.data.get("replicas")
        if value is not None and replicas is not None and value > replicas:
            raise ValueError(f"{value} is more than replicas, {replicas}")
        return value

    @field_validator("max_replicas")
    @classmethod
    def _at_least_replicas(cls, value: int | None, info: ValidationInfo) -> int | None:
        replicas = info.data.get("replicas")
        if value is not None and replicas is not None and value < replicas:
            raise ValueError(f"{value} is less than replicas, {replicas}")
        return value


class Head(ManifestModel):
    """The head pod, which runs the coordinator. It needs no GPU."""

    resources: Resources = Field(default_factory=Resources)
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=64)
    """Labels that the node of the head must have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=64)
    """Tolerations of the head."""
    pod_template: dict[str, JsonValue] = Field(default_factory=dict, description=_TEMPLATE.format(container="head"))


class Server(ManifestModel):
    """The HTTP server, which offers the job under the APIs of OpenAI and vLLM. Without this section, there is none."""

    replicas: int = Field(default=1, ge=1, le=64)
    """Number of server pods. Requests may go to any of them, and be repeated."""
    tokens_secret_name: DnsName | None = None
    """Secret with one bearer token per key, of at least 16 characters. Default: no token is required, and only pods of
    the job's namespace may connect."""
    max_requests_per_token: int = Field(default=0, ge=0, le=1_000_000)
    """Requests that a token may have in progress at each pod; 0: any."""
    max_model_tokens_per_token: int = Field(default=0, ge=0, le=2**53)
    """Tokens of prompts and responses that a token's requests in progress may have at each pod; 0: any."""
    tls_secret_name: DnsName | None = None
    """Secret of the type kubernetes.io/tls. Default: the server speaks plain HTTP."""
    args: list[Text] = Field(default_factory=list, max_length=64)
    """Further arguments of vLLM's API server, for example --enable-auto-tool-choice and --tool-call-parser=hermes."""
    resources: Resources = Field(default_factory=Resources)
    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=64)
    """Labels that the nodes of the server must have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=64)
    """Tolerations of the server."""
    pod_template: dict[str, JsonValue] = Field(default_factory=dict, description=_TEMPLATE.format(container="server"))


class PullSecret(ManifestModel):
    """A Secret with credentials for an image registry."""

    name: DnsName
    """Name of the Secret."""


class Image(ManifestModel):
    """The image of all pods."""

    name: Text | None = None
    """Name of the image. Default: the operator's default worker image."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Default: that of Kubernetes, which is Always for the tag latest, else IfNotPresent."""
    pull_secrets: list[PullSecret] = Field(default_factory=list, max_length=16)
    """Secrets in the job's namespace, in addition to those of its service account."""


class ExitCodes(ManifestModel):
    """A condition on the exit code of a container."""

    operator: Literal["In", "NotIn"] = "In"
    """In: the exit code is one of values. NotIn: it is none of them and not 0."""
    values: list[Annotated[int, Field(ge=1, le=255)]] = Field(min_length=1, max_length=64)
    """Exit codes, for example 137."""


class FailureRule(ManifestModel):
    """What happens if a pod fails in a certain way. Exactly one of onExitCodes and onReasons is set."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            ("has(self.onExitCodes) != (size(self.onReasons) > 0)", "name either onExitCodes or onReasons")
        )
    )

    action: Literal["FailJob", "Replace", "Ignore"]
    """FailJob: the job fails. Replace: the pod is replaced, and the failure counts towards backoffLimit. Ignore: the
    pod is replaced, and the failure does not count."""
    component: Literal["head", "worker", "prefetch"] | None = None
    """Pods to which the rule applies. Default: all."""
    on_exit_codes: ExitCodes | None = None
    """Exit codes of the container that has the component's name."""
    on_reasons: list[Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z]+$")]] = Field(
        default_factory=list, max_length=20
    )
    """Reasons of the pod or its container, for example OOMKilled or Evicted."""

    @model_validator(mode="after")
    def _require_exactly_one(self) -> Self:
        if (self.on_exit_codes is None) == (not self.on_reasons):
            raise PydanticCustomError("one_of", "name either onExitCodes or onReasons")
        return self


class FailurePolicy(ManifestModel):
    """Rules for failed pods. Without a matching rule, a failed pod is replaced."""

    rules: list[FailureRule] = Field(default_factory=list, max_length=20)
    """Rules in order; the first one that matches applies."""


class Lifecycle(ManifestModel):
    """When a job runs, and for how long."""

    suspend: bool = False
    """Remove all pods. Unfinished rollouts are kept in Redis, and the job continues from there when this is false
    again."""
    backoff_limit: int = Field(default=6, ge=0, le=10_000)
    """Number of pods that may fail within backoffWindowSeconds before the job fails. Pods lost with their nodes do not
    count."""
    backoff_window_seconds: int = Field(default=3600, ge=1, le=2**31 - 1)
    """Seconds after which a failed pod no longer counts towards backoffLimit, so that rare failures do not end a job
    that runs for weeks."""
    ready_timeout_seconds: int = Field(default=3600, ge=60, le=2**31 - 1)
    """Seconds for which a pod with a node may not be ready, while its image is pulled, the model is downloaded and
    loaded, or later. Then it is replaced. This does not count towards backoffLimit, but a rule of failurePolicy may
    match its reason, NotReady. The time must be longer than the model's download takes."""
    update_strategy: Literal["OnResume", "RollingUpdate"] = "OnResume"
    """When changes of image, head, workers and priorityClassName reach the pods, except for the number of workers: when
    the job is resumed after a suspension, or at once, one worker after the other and then the head. The same holds for
    another default image of the operator."""
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    active_deadline_seconds: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """The job fails after running for this many seconds, not counting the time during which it was suspended. Finished
    rollouts are kept."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Seconds after its end when the job is deleted. Default: never."""


class RuntimeRef(ManifestModel):
    """The runtime from which a job takes what it does not set itself. ``rollout run`` ignores it."""

    name: DnsName
    """Name of the runtime."""
    kind: Literal["ClusterRolloutRuntime", "RolloutRuntime"] = "ClusterRolloutRuntime"
    """Kind of the runtime; a RolloutRuntime is in the namespace of the job."""
