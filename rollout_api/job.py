"""The ``RolloutJob`` resource, ``das.rollout.dev/v1alpha1``.

The same manifest is run by ``rollout run`` on one machine and by the operator on a cluster. The models here
are the source of truth for its fields, defaults and rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from rollout_api.quantity import parse_quantity

API_VERSION = "das.rollout.dev/v1alpha1"
KIND = "RolloutJob"

DnsLabel = Annotated[
    str,
    StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"),
]
"""A name of at most 63 lower-case letters, digits and dashes (RFC 1123)."""


def _checked_quantity(text: str) -> str:
    if parse_quantity(text) <= 0:
        raise ValueError(f"{text!r} must be more than 0")
    return text


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Quantity = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_checked_quantity)]
"""A Kubernetes resource quantity above 0, as text; a YAML number is taken as one."""


class _Part(BaseModel):
    """A piece of a manifest: camelCase outside, snake_case here; an unknown field is an error."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        strict=False,
    )


_PartT = TypeVar("_PartT", bound=_Part)


class Task(_Part):
    """One family of problems in a dataset source."""

    name: DnsLabel = Field(description="Names the entry within the list.")
    generator: str = Field(
        min_length=1,
        description="Name of the reasoning-gym dataset that makes the problems, as in chain_sum.",
    )
    problems: int = Field(default=8, ge=1, le=100_000, description="How many problems to draw.")
    config: dict[str, JsonValue] = Field(
        default_factory=dict, description="Settings of the generator, passed on as they are."
    )

    @field_validator("config")
    @classmethod
    def _no_reserved(cls, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if reserved := sorted({"seed", "size"} & config.keys()):
            raise ValueError(
                f"{', '.join(reserved)}: set by the source's seed and the task's problems; remove it from here"
            )
        return config


class DatasetSource(_Part):
    """The job draws prompts from a problem set and scores the answers by itself."""

    tasks: list[Task] = Field(min_length=1, max_length=64, description="What problems to draw; names differ.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the problems that are drawn.")
    epochs: int = Field(default=1, ge=1, le=10_000, description="How often to go over all problems.")
    checkpoints: list[str] = Field(
        default_factory=list,
        description="Model directory for each epoch, in order, read as model.uri is; empty: model.uri for all.",
    )

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: list[Task]) -> list[Task]:
        names = [task.name for task in tasks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"names must differ; used more than once: {', '.join(twice)}")
        return tasks

    @field_validator("checkpoints")
    @classmethod
    def _one_for_each_epoch(cls, checkpoints: list[str], info: ValidationInfo) -> list[str]:
        epochs = info.data.get("epochs")
        if epochs is not None and checkpoints and len(checkpoints) != epochs:
            raise ValueError(f"{len(checkpoints)} checkpoints for {epochs} epochs; name one for each epoch, or none")
        return checkpoints


class TrainerSource(_Part):
    """The job serves trainers that connect to it, until one of them closes it."""


class Source(_Part):
    """Where prompts come from: exactly one of the two."""

    dataset: DatasetSource | None = Field(default=None, description="Draw problems and run them for some epochs.")
    trainer: TrainerSource | None = Field(default=None, description="Serve external trainers until they close the job.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.dataset is None) == (self.trainer is None):
            raise ValueError("name either dataset or trainer")
        return self


class Model(_Part):
    """The policy that is sampled."""

    uri: str = Field(
        min_length=1,
        description="An absolute directory or file:// URI, a directory of the model cache (das/tiny-qwen3), or a "
        "Hugging Face model id (Qwen/Qwen3-8B).",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hugging Face model.")


class Weights(_Part):
    """Where weights may be loaded from while the job runs."""

    allowed_roots: list[str] = Field(
        default_factory=list,
        description="Absolute directories below which an epoch's checkpoint, or weights that a trainer publishes, must "
        "lie, besides the model cache and the directory of model.uri.",
    )

    broadcast: bool = Field(
        default=False,
        description="Let engines connect to the trainer and take weights that it broadcasts from its memory (by NCCL; "
        "by gloo into CPU workers).",
    )

    @field_validator("allowed_roots")
    @classmethod
    def _absolute(cls, roots: list[str]) -> list[str]:
        for root in roots:
            if not root.startswith("/"):
                raise ValueError(f"{root!r} is not an absolute directory")
        return roots


class Engine(_Part):
    """How vLLM is started."""

    max_model_len: int = Field(
        default=4096, ge=16, le=10_000_000, description="Most tokens of a prompt and its response together."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of weights and activations; auto takes the checkpoint's."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, le=64, description="GPUs that share each layer.")
    max_num_seqs: int = Field(default=128, ge=1, le=4096, description="Most rollouts decoded at the same time.")
    max_lora_rank: int = Field(
        default=0, ge=0, le=512, description="Largest rank of LoRA adapters that may be published as weights; 0: none."
    )
    kv_cache_memory: Quantity | None = Field(
        default=None,
        description="Memory for the KV cache; default: what vLLM finds free (1Gi on a CPU worker).",
    )
    checkpoint_tokens: int = Field(
        default=256,
        ge=32,
        le=65_536,
        description="Most tokens of a rollout that are sampled again after its engine was lost.",
    )
    enforce_eager: bool = Field(default=False, description="Skip compilation and CUDA graphs: quicker to start.")


_REFUSED_WITH_DRAFTS = ("min_p", "logit_bias")


class Sampling(_Part):
    """How responses are sampled. The names and ranges are vLLM's."""

    n: int = Field(default=8, ge=1, le=4096, description="Rollouts for each prompt (the group).")
    temperature: float = Field(default=1.0, ge=0.0, le=10.0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus; 1 keeps all tokens.")
    top_k: int = Field(default=0, ge=0, description="Most likely tokens kept; 0 keeps all.")
    min_p: float = Field(default=0.0, ge=0.0, le=1.0, description="Served without drafts only; see speculation.")
    max_tokens: int = Field(default=1024, ge=1, description="Most tokens of one response.")
    min_tokens: int = Field(default=0, ge=0, description="No end of sequence before so many tokens.")
    stop: list[Annotated[str, StringConstraints(min_length=1)]] = Field(
        default_factory=list, max_length=64, description="Strings that end a response."
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list, description="Tokens that end a response, besides the model's own."
    )
    allowed_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list, description="If not empty, only these tokens are sampled."
    )
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, description="Added for tokens already used.")
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, description="Added for each use of a token.")
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0, description="Divides logits of used tokens.")
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict, description="Added to logits. Served without drafts only; see speculation."
    )
    logprobs: bool = Field(default=False, description="Return the log-probability of each sampled token.")
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="Makes a job's random streams repeatable. Speculation changes the stream, not its law.",
    )

    @field_validator("min_tokens")
    @classmethod
    def _min_within_max(cls, min_tokens: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens")
        if max_tokens is not None and min_tokens > max_tokens:
            raise ValueError(f"{min_tokens} is more than maxTokens, {max_tokens}")
        return min_tokens

    def outside(self, vocabulary: int) -> dict[str, int]:
        """Settings in which there is a token that a model of so many tokens has not, each with one such token."""
        settings = {name: getattr(self, name) for name in ("stop_token_ids", "allowed_token_ids", "logit_bias")}
        return {name: token for name, ids in settings.items() for token in ids if not 0 <= token < vocabulary}

    def refused_with_drafts(self) -> list[str]:
        """Names (as in a manifest) of the settings in use that vLLM refuses under speculation."""
        return [to_camel(name) for name in _REFUSED_WITH_DRAFTS if getattr(self, name)]


class Resources(_Part):
    """What one worker may use."""

    cpu: Quantity | None = Field(default=None, description="CPU cores of a worker; a CPU worker decodes with them.")
    memory: Quantity | None = Field(default=None, description="Main memory of a worker.")


class Workers(_Part):
    """The machines that decode."""

    replicas: int = Field(default=1, ge=1, le=1024, description="Their number; with rollout run, engines side by side.")
    gpus_per_worker: int = Field(default=1, ge=0, le=16, description="0 is a CPU worker: one engine, no GPU.")
    resources: Resources = Field(default_factory=Resources)


class Queue(_Part):
    """How much may be waiting."""

    max_rollouts: int = Field(default=100_000, ge=1, description="Most rollouts asked for and not ended.")
    max_request_bytes: Quantity = Field(default="512Ki", description="Largest request, as encoded.")
    max_unread_results: Quantity = Field(
        default="256Mi",
        description="Results that a client has not read yet; beyond it none of its rollouts is started.",
    )


def _off_in_yaml(value: object) -> object:
    """``off`` without quotes is false in YAML 1.1, as PyYAML and Kubernetes read it."""
    return "off" if value is False else value


class Speculation(_Part):
    """How drafts are made."""

    policy: Annotated[Literal["fixed", "off"], BeforeValidator(_off_in_yaml)] = Field(
        default="fixed",
        description="fixed: up to maxDraftTokens for every rollout, fewer where acceptance is unlikely. off: none.",
    )
    max_draft_tokens: int = Field(default=16, ge=1, le=64, description="Most tokens drafted in one step.")
    window: int = Field(
        default=16, ge=1, le=1024, description="Newest weight versions whose rollouts are drafted from."
    )


class History(_Part):
    """The rollouts that drafts come from. A history outlives jobs and may be shared by them."""

    name: DnsLabel | None = Field(default=None, description="Default: the job's name.")


class Redis(_Part):
    """The server that keeps rollouts."""

    url: str | None = Field(
        default=None,
        description="redis://, rediss:// or unix:// without credentials; default: a server of its own.",
    )

    @field_validator("url")
    @classmethod
    def _scheme_and_no_password(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        query = parse_qs(parts.query)
        if parts.password is not None or parts.username is not None or query.keys() & {"password", "username"}:
            raise ValueError(
                "must not hold credentials, since a manifest is no place for secrets; give the whole URL with "
                "--redis or in ROLLOUT_REDIS_URL"
            )
        return url


class Lifecycle(_Part):
    """How long a job may run."""

    active_deadline_seconds: int | None = Field(
        default=None, ge=1, description="The job fails when it has run for so long; what is finished is kept."
    )


class RolloutJobSpec(_Part):
    """What a user asks for."""

    source: Source
    model: Model
    weights: Weights = Field(default_factory=Weights)
    engine: Engine = Field(default_factory=Engine)
    sampling: Sampling = Field(default_factory=Sampling)
    workers: Workers = Field(default_factory=Workers)
    speculation: Speculation = Field(default_factory=Speculation)
    queue: Queue = Field(default_factory=Queue)
    history: History = Field(default_factory=History)
    redis: Redis = Field(default_factory=Redis)
    lifecycle: Lifecycle = Field(default_factory=Lifecycle)

    @model_validator(mode="after")
    def _rules_across_sections(self) -> Self:
        if errors := _errors_across_sections(self.sampling, self.speculation, self.workers, self.engine):
            raise PydanticCustomError("fields", "several fields are wrong", {"errors": errors})
        return self


class Metadata(_Part):
    """Name, labels and the like; Kubernetes' own further fields are let through."""

    model_config = ConfigDict(extra="allow")

    name: DnsLabel
    namespace: DnsLabel = "default"


class RolloutJob(_Part):
    """A whole manifest."""

    api_version: Literal["das.rollout.dev/v1alpha1"]
    kind: Literal["RolloutJob"]
    metadata: Metadata
    spec: RolloutJobSpec

    @property
    def history_name(self) -> str:
        """Name of the history this job reads and writes, within its namespace."""
        return self.spec.history.name or self.metadata.name


@dataclass(frozen=True)
class FieldError:
    """One thing that is wrong with a manifest."""

    path: str
    """Where, as written in the manifest: ``spec.sampling.topP`` or ``spec.source.dataset.tasks[1].name``."""
    message: str


class ManifestError(ValueError):
    """A manifest that cannot be accepted, with everything that is wrong with it."""

    def __init__(self, errors: list[FieldError]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"{error.path}: {error.message}" for error in errors))


def _errors_across_sections(
    sampling: Sampling | None, speculation: Speculation | None, workers: Workers | None, engine: Engine | None
) -> list[FieldError]:
    """Rules that tie sections together; a section that is wrong in itself is given as None."""
    errors: list[FieldError] = []
    if sampling and speculation and speculation.policy != "off":
        errors += [
            FieldError(
                f"sampling.{name}",
                "vLLM does not support it with speculation; remove it, or set speculation.policy: off",
            )
            for name in sampling.refused_with_drafts()
        ]
    if workers and engine:
        gpus, parallel = workers.gpus_per_worker, engine.tensor_parallel_size
        if gpus == 0 and parallel != 1:
            errors.append(FieldError("engine.tensorParallelSize", "must be 1 on a CPU worker (gpusPerWorker: 0)"))
        if gpus and gpus != parallel:
            message = f"{gpus} must equal engine.tensorParallelSize, {parallel}: a worker runs one engine"
            errors.append(FieldError("workers.gpusPerWorker", message))
    if workers and engine and workers.resources.memory and engine.kv_cache_memory:
        memory, cache = workers.resources.memory, engine.kv_cache_memory
        if workers.gpus_per_worker == 0 and parse_quantity(cache) >= parse_quantity(memory):
            message = f"{cache} does not fit into a CPU worker's workers.resources.memory, {memory}"
            errors.append(FieldError("engine.kvCacheMemory", message))
    if sampling and engine and sampling.max_tokens >= engine.max_model_len:
        message = f"{sampling.max_tokens} leaves no room for a prompt in engine.maxModelLen, {engine.max_model_len}"
        errors.append(FieldError("sampling.maxTokens", message))
    return errors


def _section(spec: Mapping[str, object], name: str, model: type[_PartT]) -> _PartT | None:
    try:
        return model.model_validate(spec.get(name, {}))
    except ValidationError:
        return None


def _path(parts: tuple[int | str, ...]) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


_ADVICE = {
    "extra_forbidden": "unknown field; remove it or correct its name",
    "missing": "missing; it has no default",
}


def parse_job(manifest: object) -> RolloutJob:
    """Check a manifest (a mapping, as read from YAML) and return it as a model.

    Raises:
        ManifestError: listing **every** error found, each by the path of its field.
    """
    if not isinstance(manifest, Mapping):
        raise ManifestError([FieldError("(manifest)", f"must be a mapping, is {type(manifest).__name__}")])
    try:
        return RolloutJob.model_validate(manifest)
    except ValidationError as invalid:
        errors = []
        for error in invalid.errors(include_url=False):
            errors += _field_errors(error)
        # pydantic skips rules across sections once a section is wrong; those between sound sections still count
        if not any(error.path.startswith("spec.") for error in errors) or not isinstance(manifest.get("spec"), Mapping):
            raise ManifestError(errors) from None
        spec = manifest["spec"]
        across = _errors_across_sections(
            _section(spec, "sampling", Sampling),
            _section(spec, "speculation", Speculation),
            _section(spec, "workers", Workers),
            _section(spec, "engine", Engine),
        )
        known = {error.path for error in errors}
        errors += [FieldError(f"spec.{e.path}", e.message) for e in across if f"spec.{e.path}" not in known]
        raise ManifestError(errors) from None


def _field_errors(error: Any) -> list[FieldError]:
    path = _path(error["loc"])
    if error["type"] == "fields":
        return [FieldError(f"{path}.{sub.path}", sub.message) for sub in error["ctx"]["errors"]]
    message = _ADVICE.get(error["type"]) or re.sub(r"^(Value error, |Input )", "", error["msg"])
    shown = error.get("input")
    if error["type"] not in _ADVICE and isinstance(shown, str | int | float) and str(shown) not in message:
        message += f" (is {shown!r})"
    return [FieldError(path, message)]
