"""The sections of a RolloutJob's ``spec`` that describe its pods.

``rollout run`` has no pods. It uses only the number of engines and their resources from these sections.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rollout_api.manifest.field_types import DnsName, ManifestModel, Quantity, Text, cel_rules

Accelerator = Literal["nvidia-a100", "nvidia-h100", "nvidia-h200", "nvidia-b200"]

_LabelKey = Annotated[
    str,
    StringConstraints(
        min_length=1,
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$",
    ),
]
_LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=r"^([A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$")]

_TEMPLATE = (
    "Pod template for settings that have no field of their own. It is merged into the pod by strategic merge, as "
    "kubectl patch does. The container is called {container}."
)


class Resources(ManifestModel):
    """Resources of one pod. Requests and limits are equal."""

    cpu: Quantity | None = Field(default=None, description="Number of CPU cores.")
    memory: Quantity | None = Field(default=None, description="Main memory, including /dev/shm.")


class Toleration(ManifestModel):
    """A toleration: allows pods on nodes with a matching taint."""

    key: _LabelKey | None = Field(
        default=None, description="Key of the taint. Default: all taints (requires operator Exists)."
    )
    operator: Literal["Exists", "Equal"] = Field(
        default="Equal", description="Exists matches any value, Equal only the given one."
    )
    value: _LabelValue | None = Field(default=None, description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint. Default: all effects."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, description="Seconds that a pod stays on a node with a NoExecute taint. Default: no limit."
    )


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
        )
    )

    replicas: int = Field(default=1, ge=1, le=1024, description="Number of workers. kubectl scale changes it.")
    min_replicas: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Number of workers that autoscaling keeps, and with which a queue must admit the job. The job "
        "samples as soon as one engine is ready. Default: 1.",
    )
    max_replicas: int | None = Field(
        default=None, ge=1, le=1024, description="Maximum number of workers with autoscaling. Default: replicas."
    )
    autoscale: bool = Field(
        default=False,
        description="Adapt the number of workers to the queued work, between minReplicas and maxReplicas, starting "
        "with replicas. Idle workers are removed in the tail of a step.",
    )
    idle_seconds: int = Field(
        default=60, ge=1, le=86_400, description="Autoscaling removes a worker that was idle for this many seconds."
    )
    gpus_per_worker: int = Field(
        default=1,
        ge=0,
        le=16,
        description="GPUs of each worker: a multiple of the GPUs of one engine, which are tensorParallelSize × "
        "pipelineParallelSize. The quotient is the number of engines in the worker. 0 means a CPU worker with one "
        "engine.",
    )
    accelerator: Accelerator | None = Field(
        default=None,
        description="Required GPU model. It is recognized by the node labels of NVIDIA's GPU feature discovery, GKE "
        "and Karpenter, and by the label das.rollout.dev/accelerator. Default: any GPU.",
    )
    node_selector: dict[_LabelKey, _LabelValue] = Field(
        default_factory=dict, max_length=64, description="Labels that the node of a worker must have."
    )
    tolerations: list[Toleration] = Field(
        default_factory=list,
        max_length=64,
        description="Tolerations of the workers. GPU workers always tolerate the taint nvidia.com/gpu, too.",
    )
    resources: Resources = Field(default_factory=Resources)
    shared_memory: Quantity = Field(default="8Gi", description="Size limit of /dev/shm, which Ray and NCCL use.")
    max_pending_replacements: int = Field(
        default=4,
        ge=1,
        le=1024,
        description="Maximum number of replacements of lost workers that may be pending at the same time.",
    )
    pod_template: dict[str, JsonValue] = Field(default_factory=dict, description=_TEMPLATE.format(container="worker"))

    @property
    def effective_min(self) -> int:
        """Number of workers that autoscaling keeps, and with which a queue must admit the job."""
        return self.min_replicas if self.min_replicas is not None else 1

    @property
    def effective_max(self) -> int:
        """Maximum number of workers."""
        return self.max_replicas if self.max_replicas is not None and self.autoscale else self.replicas

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
    node_selector: dict[_LabelKey, _LabelValue] = Field(
        default_factory=dict, max_length=64, description="Labels that the node of the head must have."
    )
    tolerations: list[Toleration] = Field(default_factory=list, max_length=64, description="Tolerations of the head.")
    pod_template: dict[str, JsonValue] = Field(default_factory=dict, description=_TEMPLATE.format(container="head"))


class PullSecret(ManifestModel):
    """A Secret with credentials for an image registry."""

    name: DnsName = Field(description="Name of the Secret.")


class Image(ManifestModel):
    """The image of the head and the workers."""

    name: Text | None = Field(
        default=None, description="Name of the image. Default: the operator's default worker image."
    )
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="Default: that of Kubernetes, which is Always for the tag latest, else IfNotPresent."
    )
    pull_secrets: list[PullSecret] = Field(
        default_factory=list,
        max_length=16,
        description="Secrets in the job's namespace, in addition to those of its service account.",
    )


class ExitCodes(ManifestModel):
    """A condition on the exit code of a container."""

    operator: Literal["In", "NotIn"] = Field(
        default="In", description="In: the exit code is one of values. NotIn: it is none of them and not 0."
    )
    values: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        min_length=1, max_length=64, description="Exit codes, for example 137."
    )


class FailureRule(ManifestModel):
    """What happens if a pod fails in a certain way. Exactly one of onExitCodes and onReasons is set."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            ("has(self.onExitCodes) != (size(self.onReasons) > 0)", "name either onExitCodes or onReasons")
        )
    )

    action: Literal["FailJob", "Replace", "Ignore"] = Field(
        description="FailJob: the job fails. Replace: the pod is replaced, and the failure counts towards "
        "backoffLimit. Ignore: the pod is replaced, and the failure does not count."
    )
    component: Literal["head", "worker"] | None = Field(
        default=None, description="Pods to which the rule applies. Default: both."
    )
    on_exit_codes: ExitCodes | None = Field(
        default=None, description="Exit codes of the container of the head or the worker."
    )
    on_reasons: list[Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z]+$")]] = Field(
        default_factory=list,
        max_length=20,
        description="Reasons of the pod or its container, for example OOMKilled or Evicted.",
    )

    @model_validator(mode="after")
    def _require_exactly_one(self) -> Self:
        if (self.on_exit_codes is None) == (not self.on_reasons):
            raise PydanticCustomError("one_of", "name either onExitCodes or onReasons")
        return self


class FailurePolicy(ManifestModel):
    """Rules for failed pods. Without a matching rule, a failed pod is replaced."""

    rules: list[FailureRule] = Field(
        default_factory=list, max_length=20, description="Rules in order; the first one that matches applies."
    )


class Lifecycle(ManifestModel):
    """When a job runs, and for how long."""

    suspend: bool = Field(
        default=False,
        description="Remove all pods. Unfinished rollouts are kept in Redis, and the job continues from there when "
        "this is false again.",
    )
    backoff_limit: int = Field(
        default=6,
        ge=0,
        le=10_000,
        description="Number of pods that may fail within backoffWindowSeconds before the job fails. Pods lost with "
        "their nodes do not count.",
    )
    backoff_window_seconds: int = Field(
        default=3600,
        ge=1,
        le=2**31 - 1,
        description="Seconds after which a failed pod no longer counts towards backoffLimit, so that rare failures do "
        "not end a job that runs for weeks.",
    )
    ready_timeout_seconds: int = Field(
        default=3600,
        ge=60,
        le=2**31 - 1,
        description="Seconds for which a pod with a node may not be ready, while its image is pulled, the model is "
        "downloaded and loaded, or later. Then it is replaced. This does not count towards backoffLimit, but a rule of "
        "failurePolicy may match its reason, NotReady. The time must be longer than the model's download takes.",
    )
    update_strategy: Literal["OnResume", "RollingUpdate"] = Field(
        default="OnResume",
        description="When changes of image, head, workers and priorityClassName reach the pods, except for the number "
        "of workers: when the job is resumed after a suspension, or at once, one worker after the other and then the "
        "head. The same holds for another default image of the operator.",
    )
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="The job fails after running for this many seconds, not counting the time during which it was "
        "suspended. Finished rollouts are kept.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        le=2**31 - 1,
        description="Seconds after its end when the job is deleted. Default: never.",
    )
