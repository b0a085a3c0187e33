"""The ``RolloutJob`` resource, ``das.rollout.dev/v1beta1``, and the validation of manifests.

``rollout run`` runs a manifest on one machine, and the operator runs the same manifest on a cluster. The sections of
``spec`` are in :mod:`rollout_api.manifest.spec` and :mod:`rollout_api.manifest.pod_spec`; ``status`` is in
:mod:`rollout_api.manifest.status`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import Self

from rollout_api.manifest.field_types import (
    DnsLabel,
    DnsName,
    JobName,
    LabelKey,
    LabelValue,
    ManifestModel,
    Text,
    cel_rules,
    error_text,
    field_path,
    parse_quantity,
    unknown_field,
)
from rollout_api.manifest.pod_spec import Head, Image, Lifecycle, RuntimeRef, Server, Workers
from rollout_api.manifest.spec import (
    Engine,
    History,
    Model,
    Queue,
    Redis,
    Sampling,
    Source,
    Speculation,
    Weights,
)
from rollout_api.redis_client.address import without_password

GROUP = "das.rollout.dev"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "RolloutJob"
PLURAL = "rolloutjobs"
OPERATOR = f"{GROUP}/operator"
"""Value of ``spec.managedBy`` for jobs that the operator runs."""

_SectionT = TypeVar("_SectionT", bound=ManifestModel)

_NO_GPU_MEMORY = "a CPU worker (workers.gpusPerWorker: 0) has no GPU; set engine.kvCacheMemory instead"
_PREFETCH_NEEDS_CLAIM = (
    "prefetch fills a volume that all pods share; set persistentVolumeClaim to that of the model cache, or remove "
    "prefetch"
)
_GPUS_PER_WORKER = "(has(self.workers.gpusPerWorker) ? self.workers.gpusPerWorker : 1)"
_PODS_PER_WORKER = "(has(self.workers.podsPerWorker) ? self.workers.podsPerWorker : 1)"
"""In CEL, fields of ``workers``. They have no defaults in the CRD, because a runtime may set them."""
_IMMUTABLE = ("source", "model", "weights", "engine", "sampling", "speculation", "queue", "history", "redis")
"""Sections that cannot be changed, because the head, the engines and trainers read them when they start."""


class RolloutJobSpec(ManifestModel):
    """The desired state of a job."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            *(
                (f"self.{name} == oldSelf.{name}", f"{name} cannot be changed; create another job")
                for name in _IMMUTABLE
            ),
            (
                "has(self.managedBy) ? has(oldSelf.managedBy) && self.managedBy == oldSelf.managedBy "
                ": !has(oldSelf.managedBy)",
                "managedBy cannot be changed; create another job",
            ),
            (
                "has(self.runtimeRef) == has(oldSelf.runtimeRef)",
                "runtimeRef cannot be added or removed, only changed; create another job",
            ),
            (
                f"has(self.runtimeRef) || {_GPUS_PER_WORKER} != 0 || "
                f"self.engine.tensorParallelSize * self.engine.pipelineParallelSize == {_PODS_PER_WORKER}",
                "engine.tensorParallelSize × engine.pipelineParallelSize must be workers.podsPerWorker on a CPU worker "
                "(workers.gpusPerWorker: 0)",
            ),
            (
                f"has(self.runtimeRef) || {_GPUS_PER_WORKER} == 0 || {_PODS_PER_WORKER} == 1 || "
                f"({_GPUS_PER_WORKER} == self.engine.tensorParallelSize * self.engine.pipelineParallelSize && "
                f"{_GPUS_PER_WORKER} % {_PODS_PER_WORKER} == 0)",
                "with workers.podsPerWorker, workers.gpusPerWorker must be engine.tensorParallelSize × "
                "engine.pipelineParallelSize and a multiple of the pods",
            ),
            (
                f"has(self.runtimeRef) || {_GPUS_PER_WORKER} % (self.engine.tensorParallelSize * "
                "self.engine.pipelineParallelSize) == 0",
                "workers.gpusPerWorker must be a multiple of engine.tensorParallelSize × engine.pipelineParallelSize",
            ),
            (
                f"has(self.runtimeRef) || {_GPUS_PER_WORKER} != 0 || !has(self.engine.gpuMemoryUtilizationPercentage)",
                f"engine.gpuMemoryUtilizationPercentage: {_NO_GPU_MEMORY}",
            ),
            (
                "self.sampling.maxTokens < self.engine.maxModelLen",
                "sampling.maxTokens leaves no room for a prompt in engine.maxModelLen",
            ),
            (
                "self.speculation.policy == 'off' || self.sampling.minP == 0.0",
                "sampling.minP: rollouts with it are not drafted; let requests set it, or set speculation.policy: "
                '"off"',
            ),
            (
                "self.speculation.policy == 'off' || size(self.sampling.logitBias) == 0",
                "sampling.logitBias: rollouts with it are not drafted; let requests set it, or set speculation.policy: "
                '"off"',
            ),
            (
                f"has(self.runtimeRef) || {_GPUS_PER_WORKER} != 0 || !has(self.engine.kvCacheMemory) || "
                "!has(self.workers.resources) || !has(self.workers.resources.memory) || "
                "quantity(string(self.engine.kvCacheMemory))"
                ".isLessThan(quantity(string(self.workers.resources.memory)))",
                "engine.kvCacheMemory does not fit into a CPU worker's workers.resources.memory",
            ),
            (
                "has(self.runtimeRef) || !has(self.source.dataset) || !has(self.source.dataset.environment) || "
                "!has(self.head) || !has(self.head.resources) || !has(self.head.resources.memory) || "
                "quantity(string(self.source.dataset.environment.memoryLimit))"
                ".isLessThan(quantity(string(self.head.resources.memory)))",
                "source.dataset.environment.memoryLimit does not fit into head.resources.memory",
            ),
            (
                "has(self.runtimeRef) || !has(self.model.cache.prefetch) || !self.model.cache.prefetch || "
                "has(self.model.cache.persistentVolumeClaim)",
                f"model.cache.prefetch: {_PREFETCH_NEEDS_CLAIM}",
            ),
        )
    )

    source: Source
    model: Model
    runtime_ref: RuntimeRef | None = None
    weights: Weights = Field(default_factory=Weights)
    engine: Engine = Field(default_factory=Engine)
    sampling: Sampling = Field(default_factory=Sampling)
    workers: Workers = Field(default_factory=Workers)
    head: Head = Field(default_factory=Head)
    server: Server | None = None
    image: Image = Field(default_factory=Image)
    speculation: Speculation = Field(default_factory=Speculation)
    queue: Queue = Field(default_factory=Queue)
    history: History = Field(default_factory=History)
    redis: Redis = Field(default_factory=Redis)
    lifecycle: Lifecycle = Field(default_factory=Lifecycle)
    priority_class_name: DnsName | None = None
    """PriorityClass of the job's pods."""
    managed_by: Text | None = Field(
        default=None,
        description=f"Controller that runs the job, if it is another one, such as MultiKueue. Default: {OPERATOR}.",
    )

    @property
    def engines_per_worker(self) -> int:
        """Number of engines in each worker."""
        return self.workers.gpus_per_worker // self.engine.gpus or 1

    @model_validator(mode="after")
    def _validate_across_sections(self) -> Self:
        if self.runtime_ref is None:
            errors = _errors_across_sections(
                self.sampling, self.speculation, self.workers, self.engine, self.model, self.source, self.head
            )
        else:
            # The workers, the head and the model cache are complete only together with the runtime's settings.
            errors = _errors_across_sections(self.sampling, self.speculation, None, self.engine, None)
        if errors:
            raise PydanticCustomError("fields", "several fields are wrong", {"errors": errors})
        return self


class Metadata(ManifestModel):
    """Name and namespace. All other fields of Kubernetes' metadata are accepted."""

    model_config = ConfigDict(extra="allow")

    name: JobName
    namespace: DnsLabel = "default"
    labels: dict[LabelKey, LabelValue] | None = None
    annotations: dict[str, str] | None = None


class RolloutJob(ManifestModel):
    """A complete manifest."""

    api_version: Literal["das.rollout.dev/v1beta1"]
    kind: Literal["RolloutJob"]
    metadata: Metadata
    spec: RolloutJobSpec

    def without_runtime(self) -> RolloutJob:
        """Return this job with its own settings only.

        Raises:
            ManifestError: if they are incomplete without those of its runtime.
        """
        if self.spec.runtime_ref is None:
            return self
        manifest = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        del manifest["spec"]["runtimeRef"]
        return parse_job(manifest)

    @property
    def history_name(self) -> str:
        """Name of the history that this job uses, within its namespace."""
        return self.spec.history.name or self.metadata.name


@dataclass(frozen=True)
class FieldError:
    """One error in a manifest."""

    path: str
    """Path of the field, for example ``spec.sampling.topP`` or ``spec.source.dataset.tasks[1].name``."""
    message: str


class ManifestError(ValueError):
    """A manifest is invalid. ``errors`` lists every error in it."""

    def __init__(self, errors: list[FieldError]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"{error.path}: {error.message}" for error in errors))


def _errors_across_sections(
    sampling: Sampling | None,
    speculation: Speculation | None,
    workers: Workers | None,
    engine: Engine | None,
    model: Model | None,
    source: Source | None = None,
    head: Head | None = None,
) -> list[FieldError]:
    """Check the rules that involve several sections. A section that is itself invalid is passed as None."""
    errors: list[FieldError] = []
    if model and model.cache.prefetch and model.cache.persistent_volume_claim is None:
        errors.append(FieldError("model.cache.prefetch", _PREFETCH_NEEDS_CLAIM))
    if sampling and speculation and speculation.policy != "off":
        errors += [
            FieldError(
                f"sampling.{name}",
                "rollouts with it are not drafted; let requests set it, or set speculation.policy: off",
            )
            for name in sampling.unsupported_with_drafts()
        ]
    if workers and engine:
        gpus_per_worker, gpus_per_engine = workers.gpus_per_worker, engine.gpus
        pods = workers.pods_per_worker
        if gpus_per_worker == 0:
            if pods == 1:
                sizes = {
                    "tensorParallelSize": engine.tensor_parallel_size,
                    "pipelineParallelSize": engine.pipeline_parallel_size,
                }
                message = "must be 1 on a CPU worker of one pod (workers.gpusPerWorker: 0, workers.podsPerWorker: 1)"
                errors += [FieldError(f"engine.{name}", message) for name, size in sizes.items() if size != 1]
            elif gpus_per_engine != pods:
                message = (
                    f"{pods} must equal tensorParallelSize × pipelineParallelSize ({gpus_per_engine}), because each "
                    "pod of a CPU worker runs one process of the engine"
                )
                errors.append(FieldError("workers.podsPerWorker", message))
            if engine.gpu_memory_utilization_percentage is not None:
                errors.append(FieldError("engine.gpuMemoryUtilizationPercentage", _NO_GPU_MEMORY))
        elif gpus_per_worker % gpus_per_engine:
            message = (
                f"{gpus_per_worker} is not a multiple of the {gpus_per_engine} GPUs of one engine "
                "(tensorParallelSize × pipelineParallelSize)"
            )
            errors.append(FieldError("workers.gpusPerWorker", message))
        elif pods > 1 and (gpus_per_worker != gpus_per_engine or gpus_per_worker % pods):
            message = (
                f"{gpus_per_worker} must equal tensorParallelSize × pipelineParallelSize ({gpus_per_engine}), because "
                f"the pods of a worker run one engine together, and must be divisible by workers.podsPerWorker ({pods})"
            )
            errors.append(FieldError("workers.gpusPerWorker", message))
    if workers and engine and workers.resources.memory and engine.kv_cache_memory:
        memory, cache = workers.resources.memory, engine.kv_cache_memory
        if workers.gpus_per_worker == 0 and parse_quantity(cache) >= parse_quantity(memory):
            message = f"{cache} does not fit into a CPU worker's workers.resources.memory, {memory}"
            errors.append(FieldError("engine.kvCacheMemory", message))
    environment = source.dataset.environment if source and source.dataset else None
    if environment and head and head.resources.memory:
        limit, available = environment.memory_limit, head.resources.memory
        if parse_quantity(limit) >= parse_quantity(available):
            message = f"{limit} does not fit into head.resources.memory, {available}"
            errors.append(FieldError("source.dataset.environment.memoryLimit", message))
    if sampling and engine and sampling.max_tokens >= engine.max_model_len:
        message = f"{sampling.max_tokens} leaves no room for a prompt in engine.maxModelLen, {engine.max_model_len}"
        errors.append(FieldError("sampling.maxTokens", message))
    return errors


def _section(spec: Mapping[str, object], name: str, model: type[_SectionT]) -> _SectionT | None:
    try:
        return model.model_validate(spec.get(name, {}), by_alias=True, by_name=False)
    except ValidationError:
        return None


_ADVICE = {
    "missing": "missing; it has no default",
}


def parse_job(manifest: object) -> RolloutJob:
    """Validate a manifest (a mapping, as read from YAML) and return it as a model.

    Raises:
        ManifestError: with **every** error in the manifest, each with the path of its field.
    """
    if not isinstance(manifest, Mapping):
        raise ManifestError([FieldError("(manifest)", f"must be a mapping, is {type(manifest).__name__}")])
    try:
        return RolloutJob.model_validate(manifest, by_alias=True, by_name=False)
    except ValidationError as invalid:
        errors = []
        for error in invalid.errors(include_url=False):
            errors += _field_errors(error)
        # pydantic skips rules across sections once a section is invalid; check them among the valid sections.
        if not any(error.path.startswith("spec.") for error in errors) or not isinstance(manifest.get("spec"), Mapping):
            raise ManifestError(errors) from None
        spec = manifest["spec"]
        has_runtime = spec.get("runtimeRef") is not None
        across = _errors_across_sections(
            _section(spec, "sampling", Sampling),
            _section(spec, "speculation", Speculation),
            None if has_runtime else _section(spec, "workers", Workers),
            _section(spec, "engine", Engine),
            None if has_runtime else _section(spec, "model", Model),
            _section(spec, "source", Source),
            None if has_runtime else _section(spec, "head", Head),
        )
        known = {error.path for error in errors}
        errors += [FieldError(f"spec.{e.path}", e.message) for e in across if f"spec.{e.path}" not in known]
        raise ManifestError(errors) from None


def _field_errors(error: ErrorDetails) -> list[FieldError]:
    path = field_path(error["loc"])
    if error["type"] == "fields":
        return [FieldError(f"{path}.{sub.path}", sub.message) for sub in error["ctx"]["errors"]]
    if error["type"] == "extra_forbidden":
        return [FieldError(path, unknown_field(RolloutJob, error["loc"], by_alias=True))]
    message = _ADVICE.get(error["type"]) or error_text(error)
    shown = error.get("input")
    if isinstance(shown, str) and "://" in shown:
        shown = without_password(shown)
    if error["type"] not in _ADVICE and isinstance(shown, str | int | float) and str(shown) not in message:
        message += f" (is {shown!r})"
    return [FieldError(path, message)]
