"""The sections of a RolloutJob's ``spec`` that say what its pods are like. ``rollout run`` has no pods and takes from
them the number of engines and what one may use.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, StringConstraints, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from rollout_api.manifest.field_types import DnsName, Part, Quantity, Text, rules

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
    "Merged into the pod by strategic merge, as kubectl patch does it: for what has no field of its own. The "
    "container is called {container}."
)


class Resources(Part):
    """What one pod may use: its request and its limit."""

    cpu: Quantity | None = Field(default=None, description="CPU cores; a CPU worker decodes with them.")
    memory: Quantity | None = Field(default=None, description="Main memory.")


class Toleration(Part):
    """Lets pods onto nodes that are tainted so."""

    key: _LabelKey | None = Field(default=None, description="Of the taint; default: every taint (operator Exists).")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="Exists needs no value.")
    value: _LabelValue | None = Field(default=None, description="Of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Of the taint; default: every effect."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, description="How long a pod stays under a NoExecute taint; default: for ever."
    )


class Workers(Part):
    """The pods that decode; with ``rollout run``, engines side by side."""

    model_config = ConfigDict(
        json_schema_extra=rules(
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

    replicas: int = Field(default=1, ge=1, le=1024, description="Their number; what kubectl scale sets.")
    min_replicas: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="The job begins when so many are ready, and autoscale keeps as many. Default: 1.",
    )
    max_replicas: int | None = Field(
        default=None, ge=1, le=1024, description="Most that autoscale asks for. Default: replicas."
    )
    autoscale: bool = Field(
        default=False,
        description="Follow the work that is queued, between minReplicas and maxReplicas, beginning with replicas; "
        "idle workers are given back in the tail of a step.",
    )
    idle_seconds: int = Field(
        default=60, ge=1, le=86_400, description="Autoscale gives a worker back that has had nothing to do for so long."
    )
    gpus_per_worker: int = Field(
        default=1,
        ge=0,
        le=16,
        description="A multiple of the GPUs of one engine, tensorParallelSize × pipelineParallelSize; so many engines "
        "share the worker. 0 is a CPU worker: one engine, no GPU.",
    )
    accelerator: Accelerator | None = Field(
        default=None,
        description="Kind of GPU, found by the labels that NVIDIA's GPU feature discovery, GKE and Karpenter give to "
        "nodes, or by das.rollout.dev/accelerator. Default: any.",
    )
    node_selector: dict[_LabelKey, _LabelValue] = Field(
        default_factory=dict, max_length=64, description="Labels that a worker's node must have."
    )
    tolerations: list[Toleration] = Field(
        default_factory=list,
        max_length=64,
        description="Besides that of the taint nvidia.com/gpu, which GPU workers have anyway.",
    )
    resources: Resources = Field(default_factory=Resources)
    shared_memory: Quantity = Field(default="8Gi", description="Size of /dev/shm, which Ray and NCCL use.")
    max_pending_replacements: int = Field(
        default=4, ge=1, le=1024, description="Most replacements of lost workers that may wait for a place at once."
    )
    pod_template: dict[str, JsonValue] = Field(default_factory=dict, description=_TEMPLATE.format(container="worker"))

    @property
    def least(self) -> int:
        """Workers with which the job begins, and that autoscale keeps."""
        return self.min_replicas if self.min_replicas is not None else 1

    @property
    def most(self) -> int:
        """Workers that there may be."""
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


class Head(Part):
    """The pod that coordinates; it needs no GPU."""

    resources: Resources = Field(default_factory=Resources)
    node_selector: dict[_LabelKey, _LabelValue] = Field(
        default_factory=dict, max_length=64, description="Labels that the head's node must have."
    )
    tolerations: list[Toleration] = Field(
        default_factory=list, max_length=64, description="Let the head onto tainted nodes."
    )
    pod_template: dict[str, JsonValue] = Field(default_factory=dict, description=_TEMPLATE.format(container="head"))


class PullSecret(Part):
    """A Secret with which images are pulled."""

    name: DnsName = Field(description="Name of the Secret.")


class Image(Part):
    """What head and workers run: the same, since Ray refuses other versions of itself."""

    name: Text | None = Field(default=None, description="Default: the worker image that the operator was given.")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="Default: Kubernetes' own, IfNotPresent but for the tag latest."
    )
    pull_secrets: list[PullSecret] = Field(
        default_factory=list, max_length=16, description="In the job's namespace, besides its service account's."
    )


class ExitCodes(Part):
    """Ends of a container, by its exit code."""

    operator: Literal["In", "NotIn"] = Field(default="In", description="NotIn never matches a code of 0.")
    values: list[Annotated[int, Field(ge=1, le=255)]] = Field(
        min_length=1, max_length=64, description="Exit codes, as in 137."
    )


class FailureRule(Part):
    """What is done about a pod that ended so; exactly one of onExitCodes and onReasons."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.onExitCodes) != (size(self.onReasons) > 0)", "name either onExitCodes or onReasons")
        )
    )

    action: Literal["FailJob", "Replace", "Ignore"] = Field(
        description="FailJob: the job fails. Replace: the pod is replaced and counts towards backoffLimit. Ignore: it "
        "is replaced and does not count."
    )
    component: Literal["head", "worker"] | None = Field(default=None, description="Default: both.")
    on_exit_codes: ExitCodes | None = Field(default=None, description="Exit codes of the head's or worker's container.")
    on_reasons: list[Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z]+$")]] = Field(
        default_factory=list,
        max_length=20,
        description="Reasons of the pod or its container, as in OOMKilled or Evicted.",
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.on_exit_codes is None) == (not self.on_reasons):
            raise PydanticCustomError("one_of", "name either onExitCodes or onReasons")
        return self


class FailurePolicy(Part):
    """What is done about pods that fail: the first rule that matches counts; without any, they are replaced."""

    rules: list[FailureRule] = Field(default_factory=list, max_length=20, description="The first that matches counts.")


class Lifecycle(Part):
    """When a job runs, and for how long."""

    suspend: bool = Field(
        default=False,
        description="No pods; what is begun is kept in Redis, and the job goes on from there when this is false again.",
    )
    backoff_limit: int = Field(
        default=6, ge=0, le=10_000, description="Pods that may fail before the job does. Lost nodes do not count."
    )
    failure_policy: FailurePolicy = Field(default_factory=FailurePolicy)
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="The job fails when it has run for so long, suspended times apart; what is finished is kept.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="The job is deleted so long after its end. Default: never."
    )
