"""The ``status`` of a RolloutJob. Conditions are authoritative; ``state`` is derived from them.

Fractional values are rounded or given as text, because the Kubernetes API conventions advise against floating-point
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError
from typing_extensions import Self

from rollout_api.manifest.field_types import ManifestModel
from rollout_api.str_enum import StrEnum


class ConditionType(StrEnum):
    """The conditions of a job, in the usual order of becoming True."""

    ACCEPTED = "Accepted"
    """The manifest is valid."""
    QUOTA_RESERVED = "QuotaReserved"
    """The queue has admitted the pods, or there is no queue."""
    WORKERS_READY = "WorkersReady"
    """All desired workers are ready."""
    ENGINE_READY = "EngineReady"
    """At least one engine is running."""
    PROGRESSING = "Progressing"
    """Engines are sampling rollouts."""
    DRAFTS_HEALTHY = "DraftsHealthy"
    """vLLM verifies the drafts, and canaries show no drift of the output distribution."""
    SUSPENDED = "Suspended"
    """The job is suspended and has no pods."""
    SUCCEEDED = "Succeeded"
    """The job was closed, or its dataset is finished, and all requests are answered."""
    FAILED = "Failed"
    """The job has ended without success."""
    UP_TO_DATE = "UpToDate"
    """All pods have the settings of the spec."""
    READY = "Ready"
    """The job is in the state that its spec asks for. Tools such as ``kubectl wait``, Argo CD and Flux read this."""
    STALLED = "Stalled"
    """The job will probably not become ready without a change of its spec or of the cluster. This follows kstatus."""


class State(StrEnum):
    """The state of a job in one word, derived from its conditions."""

    PENDING = "Pending"
    """The job is new or was not accepted."""
    QUEUED = "Queued"
    """Pods wait for admission by a queue."""
    STARTING = "Starting"
    """No engine is running yet."""
    RUNNING = "Running"
    """At least one engine is running."""
    SUSPENDING = "Suspending"
    """Pods are handing over their rollouts and terminating."""
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Condition(ManifestModel):
    """A condition in the form of Kubernetes' ``metav1.Condition``."""

    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: str
    """Reason of the last transition, in CamelCase, for programs."""
    message: str = ""
    """Explanation for people."""
    last_transition_time: str = Field(json_schema_extra={"format": "date-time"})
    observed_generation: int = Field(default=0, ge=0)


class WorkersStatus(ManifestModel):
    """The worker pods."""

    desired: int = Field(default=0, ge=0)
    """Number of workers that there should be."""
    requested: int | None = Field(default=None, ge=1)
    """Value of spec.workers.replicas from which desired was derived."""
    replicas: int = Field(default=0, ge=0)
    """Number of worker pods."""
    ready: int = Field(default=0, ge=0)
    """Number of ready worker pods."""
    gpus: int = Field(default=0, ge=0)
    """Number of GPUs of the worker pods."""
    slots_used: int = Field(default=0, ge=0)
    """Number of slots that ever had a worker; a new pod in such a slot is a replacement."""
    summary: str = ""
    """ready/desired, for kubectl get."""
    selector: str = ""
    """Label selector of the worker pods, for kubectl scale and autoscalers."""


class ProgressStatus(ManifestModel):
    """The progress of the job, as last reported by its head.

    While only these figures change, they are written once a minute.
    """

    done: int = Field(default=0, ge=0)
    """Number of finished rollouts."""
    total: int | None = Field(default=None, ge=0)
    """Number of rollouts of a dataset source in all epochs."""
    open: int = Field(default=0, ge=0)
    """Number of rollouts that were requested and have not finished."""
    epoch: int | None = Field(default=None, ge=0)
    """Current epoch of a dataset source, from 1."""
    weight_version: int = Field(default=0, ge=0)
    """Weight version that the engines should serve."""
    tokens: int = Field(default=0, ge=0)
    """Response tokens of finished rollouts."""
    tokens_per_second: int = Field(default=0, ge=0)
    """Response tokens per second over the last ten seconds."""
    accepted_per_step: str | None = None
    """Accepted draft tokens per decoding step."""
    seconds_left: int | None = Field(default=None, ge=0)
    """Estimated seconds until all open requests are answered."""
    summary: str = ""
    """done/total, or done without a total."""
    last_update_time: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """When these figures were written."""


class EnvironmentErrors(ManifestModel):
    """Rollouts that got no reward from the environment of a dataset source, for one type of reason."""

    type: str
    """exception, reward, timeout, memory, exit, sampling or unavailable."""
    count: int = Field(ge=0)
    """Number of rollouts."""
    problem: str = ""
    """Problem of the first of them."""
    message: str = ""
    """What has happened there."""


class PodGroup(ManifestModel):
    """The head and the workers that Kueue admits as a whole, until the job is suspended or ends."""

    name: str
    """Name of the group, and of its Workload."""
    queue: str
    """Name of the LocalQueue."""
    total_count: int = Field(ge=1)
    """Number of pods of the group."""


class ModelPrefetch(ManifestModel):
    """A download of the model before the other pods were created."""

    persistent_volume_claim: str
    """The claim that has the model."""
    completion_time: str = Field(json_schema_extra={"format": "date-time"})


class Revision(ManifestModel):
    """The settings of new pods, while the spec may have changed."""

    hash: str
    """Hash of the settings; each pod has it as a label."""
    image: str
    """Image of the pods."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """The sections of the spec that determine the pods, without default values."""


class Failure(ManifestModel):
    """A failed pod. The latest are kept in the status, because the pods themselves are deleted."""

    pod: str
    uid: str
    component: Literal["head", "worker", "prefetch"]
    reason: str
    """For example OOMKilled, Error, Evicted or NodeLost."""
    exit_code: int | None = None
    message: str = ""
    """End of the container's log, or the message of the kubelet."""
    time: str = Field(json_schema_extra={"format": "date-time"})
    counted: bool = True
    """Whether the failure counts towards backoffLimit."""


class Backoff(ManifestModel):
    """Failures of pods and their replacements, which delay the next replacements."""

    pods: list[str]
    """Names of the head, the prefetch pod or workers, for all of which the following holds."""
    reason: str
    """Reason of the last failure."""
    time: str = Field(json_schema_extra={"format": "date-time"})
    """Time of the last failure."""
    seconds: int = Field(ge=0)
    """Seconds after that time when they may be replaced."""
    nodes: list[str] = Field(default_factory=list)
    """The nodes that rejected them last. A node that is listed twice is avoided."""


class Connection(ManifestModel):
    """What a trainer needs to connect to the job. The ConfigMap ``<job>-connection`` has the same data."""

    uid: str
    key_prefix: str
    """Prefix of the Redis keys of the job's messages."""
    secret_name: str | None = None
    """Secret with the URL of the job's Redis server."""
    secret_key: str | None = None
    """Key within the Secret."""
    url: str | None = None
    """URL of the job's Redis server, if it needs no credentials."""
    history_secret_name: str | None = None
    """Secret with the URL of the history's Redis server, if that is a separate one."""
    history_secret_key: str | None = None
    """Key within the Secret."""
    history_url: str | None = None
    """URL of the history's Redis server, if that is a separate one and needs no credentials."""
    server_url: str | None = None
    """URL of the job's HTTP server within the cluster."""


class ServerStatus(ManifestModel):
    """The pods of the HTTP server."""

    replicas: int = Field(default=0, ge=0)
    """Number of pods that there should be."""
    ready: int = Field(default=0, ge=0)
    """Number of ready pods."""


class RolloutJobStatus(ManifestModel):
    """The observed state of a job."""

    state: State = State.PENDING
    observed_generation: int = Field(default=0, ge=0)
    """metadata.generation of the spec that was observed."""
    conditions: Annotated[
        list[Condition],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = Field(default_factory=list)
    workers: WorkersStatus = Field(default_factory=WorkersStatus)
    server: ServerStatus | None = None
    progress: ProgressStatus = Field(default_factory=ProgressStatus)
    environment_errors: Annotated[
        list[EnvironmentErrors],
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = Field(default_factory=list)
    """Rollouts that got no reward from the environment, by type of error."""
    time_saved: str | None = None
    """Share of decoding time that drafting has saved, for example 38%. It is negative if drafting cost time."""
    failed_pods: int = Field(default=0, ge=0)
    """Number of failed pods that count towards backoffLimit, within its window."""
    failure_times: Annotated[
        list[str], Field(json_schema_extra={"items": {"type": "string", "format": "date-time"}})
    ] = Field(default_factory=list)
    """When the pods that failedPods counts have failed."""
    failures: list[Failure] = Field(default_factory=list)
    """The latest failures."""
    backoffs: list[Backoff] = Field(default_factory=list)
    """Which pods have failed lately, and when they are replaced."""
    revision: Revision | None = None
    """The settings with which new pods are created; none while the job is suspended."""
    model_prefetch: ModelPrefetch | None = None
    """The last download of the model into a claim, if model.cache.prefetch is true."""
    pod_group: PodGroup | None = None
    """The pods that Kueue admits as a whole."""
    connection: Connection | None = None
    start_time: str | None = Field(default=None, json_schema_extra={"format": "date-time"})
    """When the job started or was last resumed."""
    active_seconds: int = Field(default=0, ge=0)
    """Seconds that the job was active before startTime."""
    completion_time: str | None = Field(default=None, json_schema_extra={"format": "date-time"})

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Self:
        """Read a status that a later version of the operator may have written.

        Unknown fields are ignored, and so are fields and list items with values that this version does not know.
        """
        try:
            return cls.model_validate(written, extra="ignore")
        except ValidationError as error:
            locations = [one["loc"] for one in error.errors()]
        unknown = {where[:2] if isinstance(written[str(where[0])], list) else where[:1] for where in locations}
        known = {
            name: [item for index, item in enumerate(value) if (name, index) not in unknown]
            if isinstance(value, list)
            else value
            for name, value in written.items()
            if (name,) not in unknown
        }
        return cls.model_validate(known, extra="ignore")
