"""``status`` of a RolloutJob: what the operator says of it. Conditions are the truth; ``state`` is derived from them.

Speeds are whole numbers or text, since Kubernetes' conventions know no floating-point numbers in an API.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from rollout_api.manifest.field_types import Part


class ConditionType(StrEnum):
    """What is said about every job, in the order in which it comes true."""

    ACCEPTED = "Accepted"
    """The manifest can be run."""
    QUOTA_RESERVED = "QuotaReserved"
    """The queue, if there is one, lets the pods in."""
    WORKERS_READY = "WorkersReady"
    """All the workers that are wanted are ready."""
    ENGINE_READY = "EngineReady"
    """At least one engine samples."""
    PROGRESSING = "Progressing"
    """Rollouts are being made."""
    DRAFTS_HEALTHY = "DraftsHealthy"
    """Drafts reach the model, and change nothing of what it samples."""
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class State(StrEnum):
    """One word for people."""

    PENDING = "Pending"
    """Not looked at yet, or not accepted."""
    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Condition(Part):
    """A condition as Kubernetes has it (``metav1.Condition``)."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: str = Field(description="One word, CamelCase, for programs.")
    message: str = Field(default="", description="For people.")
    last_transition_time: str = Field(json_schema_extra={"format": "date-time"})
    observed_generation: int = Field(default=0, ge=0)


class WorkersStatus(Part):
    """The worker pods."""

    desired: int = Field(default=0, ge=0, description="As many as there should be now.")
    replicas: int = Field(default=0, ge=0, description="As many as there are.")
    ready: int = Field(default=0, ge=0, description="Whose engines sample, or are being loaded.")
    used: int = Field(default=0, ge=0, description="Slots that ever had a worker: who comes into one is a replacement.")
    summary: str = Field(default="", description="ready/desired.")
    selector: str = Field(
        default="", description="Label selector of the worker pods, for kubectl scale and autoscalers."
    )


class ProgressStatus(Part):
    """How far the job is, as its head said last."""

    done: int = Field(default=0, ge=0, description="Rollouts that ended.")
    total: int | None = Field(default=None, ge=0, description="Rollouts of a dataset source in all its epochs.")
    open: int = Field(default=0, ge=0, description="Rollouts asked for and not ended.")
    epoch: int | None = Field(default=None, ge=0, description="Of a dataset source, from 1.")
    weight_version: int = Field(default=0, ge=0, description="The version that is to be served.")
    tokens: int = Field(default=0, ge=0, description="Response tokens of ended rollouts.")
    tokens_per_second: int = Field(default=0, ge=0, description="Of the last seconds.")
    accepted_per_step: str | None = Field(default=None, description="Draft tokens accepted in a decoding step.")
    seconds_left: int | None = Field(
        default=None, ge=0, description="Until all that is asked for is answered, at the speed of the last seconds."
    )
    summary: str = Field(default="", description="done/total, or done.")


class Failure(Part):
    """A pod that ended badly. The newest are kept, for whoever comes when the pods are gone."""

    pod: str
    uid: str
    component: Literal["head", "worker"]
    reason: str = Field(description="As in OOMKilled, Error, Evicted or NodeLost.")
    exit_code: int | None = None
    message: str = Field(default="", description="Its last words.")
    time: str = Field(json_schema_extra={"format": "date-time"})
    counted: bool = Field(default=True, description="Whether it counts towards backoffLimit.")


class Connection(Part):
    """How a trainer finds the job; also in the ConfigMap ``<job>-connection``."""

    uid: str
    key_prefix: str = Field(description="What the keys of the job's messages begin with.")
    secret_name: str | None = Field(default=None, description="Secret that holds the URL of the job's Redis.")
    secret_key: str | None = Field(default=None, description="Key within it.")
    url: str | None = Field(default=None, description="URL of the job's Redis, where it needs no credentials.")
    history_secret_name: str | None = Field(
        default=None, description="Secret that holds the URL of the history's Redis, where that is another."
    )
    history_secret_key: str | None = Field(default=None, description="Key within it.")
    history_url: str | None = Field(
        default=None,
        description="URL of the history's Redis, where that is another and needs no credentials.",
    )


class RolloutJobStatus(Part):
    """What the operator says of a job."""

    state: State = State.PENDING
    observed_generation: int = Field(default=0, ge=0, description="Generation of the spec that this is about.")
    conditions: Annotated[
        list[Condition],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = Field(default_factory=list)
    workers: WorkersStatus = Field(default_factory=WorkersStatus)
    progress: ProgressStatus = Field(default_factory=ProgressStatus)
    saved: str | None = Field(
        default=None, description="Share of decoding time that drafts saved, against none: 38%; -1% if they cost time."
    )
    failed_pods: int = Field(default=0, ge=0, description="Pods that failed and count towards backoffLimit.")
    failures: list[Failure] = Field(default_factory=list, description="The newest.")
    connection: Connection | None = None
    start_time: str | None = Field(
        default=None, description="When it began to run, last.", json_schema_extra={"format": "date-time"}
    )
    active_seconds: int = Field(default=0, ge=0, description="Spent running before startTime, suspended times apart.")
    completion_time: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
