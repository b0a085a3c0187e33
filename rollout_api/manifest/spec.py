"""The ``spec`` of a RolloutJob, except for the sections about pods (:mod:`rollout_api.manifest.pod_spec`).

The models define fields, defaults and rules; the CRD's schema and ``docs/manifest.md`` are generated from them. Every
CEL rule has a validator that checks the same.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from rollout_api.manifest.engine_args import extra_arg_error
from rollout_api.manifest.field_types import (
    DnsLabel,
    DnsName,
    LabelKey,
    LabelValue,
    ManifestModel,
    Quantity,
    SecretKey,
    Size,
    Text,
    cel_rules,
)
from rollout_api.manifest.structured_outputs import check_structured_outputs
from rollout_api.redis_client.address import SCHEMES, SERVER_SCHEMES

_RESERVED_SETTINGS = ("seed", "size")


class Task(ManifestModel):
    """One family of problems in a dataset source."""

    name: DnsLabel
    """Name of the entry, unique within the list."""
    generator: Annotated[str, StringConstraints(min_length=1, max_length=253)]
    """Name of the reasoning-gym dataset that generates the problems, for example chain_sum."""
    problems: int = Field(default=8, ge=1, le=100_000)
    """Number of problems to generate."""
    config: dict[str, JsonValue] = Field(
        default_factory=dict,
        json_schema_extra={"not": {"anyOf": [{"required": [name]} for name in _RESERVED_SETTINGS]}},
    )
    """Settings of the generator, passed on unchanged."""

    @field_validator("config")
    @classmethod
    def _reject_reserved(cls, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if reserved := sorted(set(_RESERVED_SETTINGS) & config.keys()):
            raise ValueError(
                f"{', '.join(reserved)}: determined by the source's seed and the task's problems; remove it"
            )
        return config


_ONE_ENVIRONMENT = "name either verifiers or entryPoint"
_MAX_ENVIRONMENT_ARGS_BYTES = 16_384


class Environment(ManifestModel):
    """An environment, which provides problems and rewards. It runs in a process of its own beside the head."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(("has(self.verifiers) != has(self.entryPoint)", _ONE_ENVIRONMENT))
    )

    verifiers: Text | None = None
    """Id of a taskset of Prime Intellect's verifiers 0.4; args is the configuration of its environment. The package
    verifiers and the taskset have to be installed in the image."""
    entry_point: (
        Annotated[
            str,
            StringConstraints(
                max_length=1024,
                pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
            ),
        ]
        | None
    ) = None
    """A function that returns an environment (rollout_api.environment), as MODULE:FUNCTION, for example
    my_package.my_module:make_environment. The module is imported from the packages of the image, from PYTHONPATH, or
    from the working directory."""
    args: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """Keyword arguments with which the environment is created; at most 16Ki as JSON."""
    python: Annotated[str, StringConstraints(max_length=1024, pattern=r"^/")] | None = None
    """Python interpreter of the environment's process, for example that of a virtual environment in the image, if the
    environment needs other versions of packages than the worker. Default: the worker's."""
    max_problems: int | None = Field(default=None, ge=1, le=1_000_000)
    """Use only this many problems, the first ones. Default: all."""
    timeout_seconds: int = Field(default=600, ge=1, le=86_400)
    """Time limit for loading the environment, and for what the environment itself computes for one rollout. The time in
    which the model samples does not count."""
    memory_limit: Size = "4Gi"
    """Memory limit of the environment's process and its child processes together. On Kubernetes, the head requests this
    much memory in addition, unless head.resources sets its memory."""

    @field_validator("args")
    @classmethod
    def _limit_args(cls, args: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if (size := len(json.dumps(args).encode())) > _MAX_ENVIRONMENT_ARGS_BYTES:
            raise ValueError(f"has {size} bytes as JSON, more than {_MAX_ENVIRONMENT_ARGS_BYTES}")
        return args

    @model_validator(mode="after")
    def _require_exactly_one(self) -> Self:
        if (self.verifiers is None) == (self.entry_point is None):
            raise PydanticCustomError("one_of", _ONE_ENVIRONMENT)
        return self

    @property
    def field(self) -> str:
        """Name of the field that is set, as in a manifest."""
        return "entryPoint" if self.verifiers is None else "verifiers"


_ONE_KIND_OF_PROBLEMS = "name either tasks or environment"
_SEED_OF_TASKS = "only tasks are generated with a seed; pass it to an environment in environment.args, or remove it"


class DatasetSource(ManifestModel):
    """The job takes prompts from a problem set, and computes the rewards itself. Exactly one of tasks and environment
    is set.
    """

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            ("has(self.tasks) != has(self.environment)", _ONE_KIND_OF_PROBLEMS),
            ("!has(self.environment) || self.seed == 0", f"seed: {_SEED_OF_TASKS}"),
            (
                "size(self.checkpoints) == 0 || size(self.checkpoints) == self.epochs",
                "checkpoints: list one for each epoch, or none",
            ),
        )
    )

    tasks: list[Task] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Families of generated problems, with different names."""
    environment: Environment | None = None
    """Environment of verifiers or of your own, which provides problems and rewards."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed with which the problems of tasks are generated."""
    epochs: int = Field(default=1, ge=1, le=10_000)
    """Number of passes over all problems."""
    checkpoints: list[Text] = Field(default_factory=list, max_length=10_000)
    """Model of each epoch, in order, in the same form as model.uri. If empty, model.uri is used for all."""

    @field_validator("tasks")
    @classmethod
    def _require_unique_names(cls, tasks: list[Task] | None) -> list[Task] | None:
        names = [task.name for task in tasks or ()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"names must differ; used more than once: {', '.join(twice)}")
        return tasks

    @field_validator("checkpoints")
    @classmethod
    def _require_one_per_epoch(cls, checkpoints: list[str], info: ValidationInfo) -> list[str]:
        epochs = info.data.get("epochs")
        if epochs is not None and checkpoints and len(checkpoints) != epochs:
            raise ValueError(f"{len(checkpoints)} checkpoints for {epochs} epochs; list one for each epoch, or none")
        return checkpoints

    @field_validator("seed")
    @classmethod
    def _require_tasks_with_seed(cls, seed: int, info: ValidationInfo) -> int:
        if seed and info.data.get("environment") is not None:
            raise PydanticCustomError("seed", _SEED_OF_TASKS)
        return seed

    @model_validator(mode="after")
    def _require_exactly_one(self) -> Self:
        if (self.tasks is None) == (self.environment is None):
            raise PydanticCustomError("one_of", _ONE_KIND_OF_PROBLEMS)
        return self


class TrainerSource(ManifestModel):
    """The job serves trainers that connect to it, until one of them closes the job."""


class Source(ManifestModel):
    """Where prompts come from. Exactly one of dataset and trainer is set."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(("has(self.dataset) != has(self.trainer)", "name either dataset or trainer"))
    )

    dataset: DatasetSource | None = None
    """Sample the problems of a dataset for some epochs."""
    trainer: TrainerSource | None = None
    """Serve external trainers until they close the job."""

    @model_validator(mode="after")
    def _require_exactly_one(self) -> Self:
        if (self.dataset is None) == (self.trainer is None):
            raise ValueError("name either dataset or trainer")
        return self


class ModelCache(ManifestModel):
    """Where pods keep models. ``rollout run`` uses ``--model-cache`` instead."""

    persistent_volume_claim: DnsName | None = None
    """PersistentVolumeClaim that all pods of the job mount. Default: each pod downloads into its own volume."""
    size_limit: Quantity | None = None
    """Size limit of the volume of a pod that has its own. A worker requests this much ephemeral storage."""
    prefetch: bool = False
    """Download the model into the claim once, by a pod of its own, before the head and the workers are created. They
    mount the claim read-only."""


class Model(ManifestModel):
    """The model that is sampled."""

    uri: Text
    """An absolute directory or file:// URI, a directory of the model cache (das/tiny-qwen3), or a Hugging Face model id
    (Qwen/Qwen3-8B)."""
    revision: Text | None = None
    """Branch, tag or commit of a Hugging Face model."""
    token_secret_ref: SecretKey | None = None
    """Secret with a Hugging Face token, for gated models. rollout run uses HF_TOKEN instead."""
    cache: ModelCache = Field(default_factory=ModelCache)


class Weights(ManifestModel):
    """Where weights may be loaded from while the job runs."""

    persistent_volume_claim: DnsName | None = None
    """PersistentVolumeClaim that all pods mount at /weights, for weights that a trainer publishes there."""
    allowed_roots: list[Annotated[str, StringConstraints(max_length=1024, pattern=r"^/")]] = Field(
        default_factory=list, max_length=64
    )
    """Absolute directories from which checkpoints and published weights may be loaded, in addition to the model cache,
    the directory of model.uri and /weights."""
    transfer: Literal["auto", "nccl", "sparse_nccl", "ipc", "none"] = "auto"
    """vLLM's backend for weights that a trainer sends from its memory; auto: nccl; none: they are refused. CPU workers
    always use gloo. Engines connect to the address that the trainer names. With ipc, they also unpickle what it
    sends."""
    trainer_pods: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=64)
    """Labels of the trainer's pods, which may connect to the job's pods on all ports. NCCL and gloo need this. Default:
    the label das.rollout.dev/trainer with the job's name."""
    trainer_namespace: DnsName | None = None
    """Namespace of the trainer's pods. Default: that of the job."""

    @field_validator("allowed_roots", mode="before")
    @classmethod
    def _require_absolute(cls, roots: object) -> object:
        for root in roots if isinstance(roots, list) else []:
            if isinstance(root, str) and not root.startswith("/"):
                raise ValueError(f"{root!r} is not an absolute directory")
        return roots


_VllmName = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-_a-z0-9]*[a-z0-9])?$")]
"""A name whose meaning only vLLM knows."""
_MAX_EXTRA_ARGS_BYTES = 16_384
_EXPERTS_NEED_GPUS = (
    "enableExpertParallel divides the experts among the GPUs of tensorParallelSize; set that to at least 2"
)
_ONE_CACHE_SIZE = (
    "kvCacheMemory already determines the KV cache, and vLLM would ignore gpuMemoryUtilizationPercentage; remove one"
)


class Engine(ManifestModel):
    """Settings with which vLLM starts."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            ("!self.enableExpertParallel || self.tensorParallelSize > 1", _EXPERTS_NEED_GPUS),
            ("!has(self.kvCacheMemory) || !has(self.gpuMemoryUtilizationPercentage)", _ONE_CACHE_SIZE),
        )
    )

    max_model_len: int = Field(default=4096, ge=16, le=10_000_000)
    """Maximum number of tokens of a prompt and its response."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations. auto uses that of the checkpoint."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Number of GPUs among which each layer is divided."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    """Number of groups of GPUs among which the layers are divided."""
    enable_expert_parallel: bool = False
    """Divide whole experts of a mixture-of-experts model, instead of every expert, among the GPUs of
    tensorParallelSize."""
    quantization: _VllmName | None = None
    """vLLM's name of a quantization method, for example fp8, to quantize weights when they are loaded. It changes the
    model that is sampled. Default: that of the checkpoint."""
    max_num_seqs: int = Field(default=128, ge=1, le=4096)
    """Maximum number of rollouts that one engine decodes at the same time."""
    max_lora_rank: int = Field(default=0, ge=0, le=512)
    """Maximum rank of LoRA adapters that may be published as weights; 0 means that none may."""
    kv_cache_memory: Quantity | None = None
    """Memory for the KV cache. Default: what vLLM finds free (1Gi on a CPU worker)."""
    kv_cache_dtype: _VllmName = "auto"
    """vLLM's name of the data type of the KV cache, for example fp8, fp8_e4m3 or fp8_e5m2. A type with less precision
    than the model's changes the model that is sampled. auto uses that of the model."""
    gpu_memory_utilization_percentage: int | None = Field(default=None, ge=1, le=100)
    """Percentage of a GPU's memory that an engine uses for weights, activations and KV cache. Default: vLLM's (92 in
    vLLM 0.32)."""
    checkpoint_tokens: int = Field(default=256, ge=32, le=65_536)
    """Tokens between two checkpoints of a partial rollout. At most this many tokens, and those of one decoding step,
    are sampled again after an engine was lost."""
    logprobs_mode: Literal["processed", "raw"] = "processed"
    """Log-probabilities of sampled tokens: processed are those of the distribution from which they were sampled, after
    temperature, filters and penalties; raw are those of the model before all of this."""
    enforce_eager: bool = False
    """Skip compilation and CUDA graphs. The engine starts sooner but decodes more slowly."""
    extra_args: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """Further arguments of vLLM's AsyncEngineArgs by name, for example max_num_batched_tokens: 8192; at most 16Ki as
    JSON. Arguments that have a field of their own, or that would break what das-rollout guarantees, are rejected with
    the reason."""

    @field_validator("enable_expert_parallel")
    @classmethod
    def _require_gpus_for_experts(cls, enabled: bool, info: ValidationInfo) -> bool:
        if enabled and info.data.get("tensor_parallel_size") == 1:
            raise PydanticCustomError("expert_parallel", _EXPERTS_NEED_GPUS)
        return enabled

    @field_validator("gpu_memory_utilization_percentage")
    @classmethod
    def _require_one_cache_size(cls, percentage: int | None, info: ValidationInfo) -> int | None:
        if percentage is not None and info.data.get("kv_cache_memory") is not None:
            raise PydanticCustomError("cache_size", _ONE_CACHE_SIZE)
        return percentage

    @field_validator("extra_args")
    @classmethod
    def _reject_reserved_args(cls, args: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if errors := [f"{name}: {error}" for name in args if (error := extra_arg_error(name)) is not None]:
            raise ValueError("; ".join(errors))
        if (size := len(json.dumps(args).encode())) > _MAX_EXTRA_ARGS_BYTES:
            raise ValueError(f"has {size} bytes as JSON, more than {_MAX_EXTRA_ARGS_BYTES}")
        return args

    @property
    def gpus(self) -> int:
        """Number of GPUs of one engine, if workers have GPUs."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


_UNSUPPORTED_WITH_DRAFTS = ("min_p", "logit_bias")


def _reject_boolean(key: object) -> object:
    if isinstance(key, bool):
        raise ValueError("must be a token id")
    return key


_TokenId = Annotated[int, BeforeValidator(_reject_boolean)]
"""A key of a mapping, which is text in JSON."""


MAX_TOP_LOGPROBS = 20
"""Largest number of most likely tokens per position, which is vLLM's default of ``max_logprobs``."""

MAX_KEPT_TOP_K = 128
"""Largest ``top_k`` of a request whose kept tokens are returned."""


class Sampling(ManifestModel):
    """How responses are sampled. The names and ranges are vLLM's."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(("self.minTokens <= self.maxTokens", "minTokens must not be more than maxTokens"))
    )

    n: int = Field(default=8, ge=1, le=4096, alias="rolloutsPerPrompt")
    """Number of rollouts per prompt, which form a group."""
    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    """Sampling temperature; 0 means greedy decoding."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Probability mass of the most likely tokens that are kept; 1 keeps all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens that are kept; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Minimum probability of a token, relative to the most likely one. Rollouts with it are not drafted."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum number of tokens of a response."""
    min_tokens: int = Field(default=0, ge=0)
    """Number of tokens before which a response cannot end."""
    stop: list[Annotated[str, StringConstraints(min_length=1)]] = Field(default_factory=list, max_length=64)
    """Strings that end a response."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """Tokens that end a response, in addition to the model's own."""
    ignore_eos: bool = False
    """Continue responses behind the model's own end tokens, for example in benchmarks."""
    allowed_token_ids: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    """If not empty, only these tokens are sampled."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Penalty for tokens that occurred before in the response."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Penalty for each earlier occurrence of a token in the response."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0)
    """Divisor of the logits of tokens that occurred before."""
    logit_bias: dict[_TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(default_factory=dict)
    """Token id → value added to its logit. Rollouts with it are not drafted."""
    structured_outputs: dict[str, JsonValue] = Field(default_factory=dict)
    """What responses must match: one of json (a JSON schema), regex, choice (a list of texts), grammar, json_object and
    structural_tag, with vLLM's meanings and options. Such rollouts are not continued by another engine, but sampled
    anew."""
    logprobs: bool = False
    """Return the behavior log-probability of each sampled token."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """Also return the log-probabilities of this many most likely tokens at each position. It implies logprobs."""
    prompt_logprobs: bool = False
    """Return the log-probability of each prompt token but the first, under the model's distribution without temperature
    and filters. The prompt is then not read from the prefix cache."""
    top_prompt_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """Also return the log-probabilities of this many most likely tokens at each position of the prompt but the first.
    It implies promptLogprobs."""
    kept_tokens: bool = Field(
        default=False,
        description="Return the token ids among which the token at each position was sampled: those that topK, topP "
        f"and the other settings keep. It needs a temperature above 0 and a topK from 1 to {MAX_KEPT_TOP_K}.",
    )
    routed_experts: bool = False
    """Return the experts of a mixture-of-experts model to which each token was routed. It needs engine.extraArgs:
    {enable_return_routed_experts: true} and vLLM's V2 model runner."""
    seed: int | None = Field(default=None, ge=0, lt=2**31)
    """Seed of the random streams. Drafting changes the sampled tokens, but not the output distribution."""

    @field_validator("min_tokens")
    @classmethod
    def _require_min_below_max(cls, min_tokens: int, info: ValidationInfo) -> int:
        max_tokens = info.data.get("max_tokens")
        if max_tokens is not None and min_tokens > max_tokens:
            raise ValueError(f"{min_tokens} is more than maxTokens, {max_tokens}")
        return min_tokens

    @field_validator("structured_outputs")
    @classmethod
    def _check_structured_outputs(cls, given: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return check_structured_outputs(given)

    @property
    def excludes_drafts(self) -> bool:
        """Whether nothing may be drafted, because vLLM does not support a setting with drafts."""
        return self.min_p > 0 or any(self.logit_bias.values())

    @property
    def returns_logprobs(self) -> bool:
        """Whether each sampled token has a log-probability."""
        return self.logprobs or self.top_logprobs > 0

    @property
    def returns_prompt_logprobs(self) -> bool:
        """Whether each prompt token but the first has a log-probability."""
        return self.prompt_logprobs or self.top_prompt_logprobs > 0

    def kept_tokens_problem(self) -> str | None:
        """Return why the kept tokens cannot be returned, as a sentence; None if they can, or are not requested."""
        if not self.kept_tokens:
            return None
        if self.temperature == 0:
            return "it needs a temperature above 0: greedy decoding keeps one token"
        if not 1 <= self.top_k <= MAX_KEPT_TOP_K:
            return f"it needs a top-k from 1 to {MAX_KEPT_TOP_K}, which bounds the number of kept tokens"
        return None

    def tokens_outside(self, vocabulary: int) -> dict[str, int]:
        """Return the settings that contain a token id outside a vocabulary of this size, each with one such id."""
        settings = {name: getattr(self, name) for name in ("stop_token_ids", "allowed_token_ids", "logit_bias")}
        return {name: token for name, ids in settings.items() for token in ids if not 0 <= token < vocabulary}

    def unsupported_with_drafts(self) -> list[str]:
        """Return the settings in use, named as in a manifest, that vLLM does not support with speculation."""
        return [to_camel(name) for name in _UNSUPPORTED_WITH_DRAFTS if getattr(self, name)]


class Queue(ManifestModel):
    """Limits of what may be queued."""

    max_rollouts: int = Field(default=100_000, ge=1)
    """Maximum number of open rollouts of all clients. Further requests wait in Redis. Rollouts that cannot start do not
    count, up to this number for each client: those that wait for weights that no engine serves or loads, and those of a
    client that has too many unread results, or that has probably died: it has not noticed new results for a minute."""
    max_request_bytes: Quantity = "512Ki"
    """Maximum size of an encoded request, without its images."""
    max_image_bytes: Quantity = "16Mi"
    """Maximum size of the encoded images of a request. Redis keeps each image once for all requests that contain it,
    until an hour after the last of them has ended, or for less time if there is no room for others: all images of the
    job together may have 64 times this size."""
    max_unread_results: Quantity = "256Mi"
    """Size of a client's unread results above which no further rollouts of this client are started. Those of a client
    that has probably died are not started either while there are other clients."""


def _false_to_off(value: object) -> object:
    """Accept ``off`` without quotes, which is false in YAML 1.1, as PyYAML reads it."""
    return "off" if value is False else value


PolicyName = Literal["marginal", "marginal-with-lengths", "das-classes", "das-optimal", "fixed", "unlimited"]
"""Values of ``speculation.policy`` that draft anything."""


_UNLIMITED_DRAFT_TOKENS = 64
"""Maximum draft length under ``unlimited``: no draft of an index is longer."""


class Speculation(ManifestModel):
    """How rollouts are drafted."""

    policy: Annotated[Literal[PolicyName, "off"], BeforeValidator(_false_to_off)] = "marginal"
    """Draft policy. marginal drafts a token if it is expected to save the batch more time than verifying it costs.
    marginal-with-lengths gives more weight to rollouts that are expected to end last. das-classes and das-optimal
    are the policies of DAS (arXiv 2511.13841): they draft more for rollouts that are expected to be long. fixed drafts
    maxDraftTokens for every rollout, and unlimited drafts up to 64. With all of these, the governor disables drafting
    that does not pay. off disables drafting; write "off" in quotes, because kubectl reads it as false otherwise."""
    max_draft_tokens: int = Field(default=16, ge=1, le=64)
    """Maximum number of draft tokens per rollout and step."""
    min_survival: float | None = Field(default=None, ge=0, le=1)
    """A draft ends before the first token whose survival, the probability that it is reached and accepted, is below
    this, in addition to what the policy decides. Without it, drafts of all policies but marginal and
    marginal-with-lengths end only at their maximum length, or where the drafter knows no continuation."""
    window: int = Field(default=16, ge=1, le=1024)
    """Number of generations whose rollouts are kept and drafted from, counted per problem: the newest ones in which the
    problem was sampled."""
    index_bytes: Size = "2Gi"
    """Limit for the size of an engine's suffix index in memory. Beyond it, the problems that were drafted for least
    recently are evicted. They are read from Redis again when their rollouts start. Rollouts of the history take about 6
    to 8 bytes per token; running rollouts take 40 to 65 bytes per token, and up to 64 KiB each for drafts. The history
    may always use half of the limit, so very many running rollouts may exceed it."""

    @property
    def max_draft_length(self) -> int:
        """Maximum number of tokens of a draft, which ``max_draft_tokens`` sets for all policies but ``unlimited``."""
        return _UNLIMITED_DRAFT_TOKENS if self.policy == "unlimited" else self.max_draft_tokens


class SecretUrl(ManifestModel):
    """A reference to a Redis URL in a Secret."""

    secret_key_ref: SecretKey
    """Secret and key with the URL, including credentials."""


_NO_CREDENTIALS = "!self.contains('@') && !self.matches('[?&](sentinel_|ssl_)?(password|username)=')"
_CREDENTIALS_HINT = "must not contain credentials, because a manifest is not secret; use urlFrom"


def _scheme_pattern(schemes: tuple[str, ...]) -> str:
    return f"^({'|'.join(schemes)})://".replace("+", "[+]")


def _one_of(schemes: tuple[str, ...]) -> str:
    *others, last = (f"{scheme}://" for scheme in schemes)
    return f"{', '.join(others)} or {last}"


def _check_url(url: str, schemes: tuple[str, ...], *, option: str, variable: str) -> str:
    if not url.startswith(tuple(f"{scheme}://" for scheme in schemes)):
        raise ValueError(f"must begin with {_one_of(schemes)}")
    query = parse_qs(url.partition("?")[2])
    secret = {f"{whose}{what}" for whose in ("", "sentinel_", "ssl_") for what in ("password", "username")}
    if "@" in url or query.keys() & secret:
        raise ValueError(
            "must not contain credentials, because a manifest is not secret; put the whole URL into a Secret "
            f"(urlFrom), or pass it to rollout run with {option} or in {variable}"
        )
    return url


def _url_rules(schemes: tuple[str, ...]) -> dict[str, Any]:
    """Return the CEL rules that check the same as :func:`_check_url`."""
    return cel_rules(
        (f"self.matches('{_scheme_pattern(schemes)}')", f"must begin with {_one_of(schemes)}"),
        (_NO_CREDENTIALS, _CREDENTIALS_HINT),
    )


_ServerUrl = Annotated[
    Text,
    AfterValidator(partial(_check_url, schemes=SERVER_SCHEMES, option="--redis", variable="ROLLOUT_REDIS_URL")),
    Field(json_schema_extra=_url_rules(SERVER_SCHEMES)),
]
_HistoryUrl = Annotated[
    Text,
    AfterValidator(
        partial(_check_url, schemes=SCHEMES, option="--history-redis", variable="ROLLOUT_HISTORY_REDIS_URL")
    ),
    Field(json_schema_extra=_url_rules(SCHEMES)),
]
_ONE_URL = "name either url or urlFrom"
_ONE_URL_RULE = ("!has(self.url) || !has(self.urlFrom)", _ONE_URL)


class _RedisServer(ManifestModel):
    model_config = ConfigDict(json_schema_extra=cel_rules(_ONE_URL_RULE))

    url: Text | None = None
    url_from: SecretUrl | None = None

    @model_validator(mode="after")
    def _require_at_most_one(self) -> Self:
        if self.url is not None and self.url_from is not None:
            raise PydanticCustomError("one_of", _ONE_URL)
        return self


class Redis(_RedisServer):
    """The Redis server with the job's messages, and by default with its history."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            _ONE_URL_RULE,
            (
                "!has(self.managed) || !self.managed || !(has(self.url) || has(self.urlFrom))",
                "managed creates the job's own URL; remove url and urlFrom",
            ),
        )
    )

    url: _ServerUrl | None = None
    """URL without credentials: redis://, rediss:// (with TLS), unix://, or redis+sentinel://HOST,HOST,…/SERVICE
    (rediss+sentinel:// with TLS). Default: on Kubernetes, a Redis user of the job's own (managed) if the chart runs
    rollout-redis-users, else the key url of the Secret rollout-redis; with rollout run, a server that the job
    starts."""
    url_from: SecretUrl | None = None
    """Secret with the URL. rollout run uses --redis or ROLLOUT_REDIS_URL instead."""
    managed: bool = False
    """Use a Redis user that can access only this job and its history. rollout-redis-users creates it and stores its URL
    in the Secret <job>-redis. Only on Kubernetes, where the chart runs rollout-redis-users; there it is the default
    (redisUsers.byDefault) if neither url nor urlFrom is set."""

    @model_validator(mode="after")
    def _require_no_url_if_managed(self) -> Self:
        if self.managed and (self.url is not None or self.url_from is not None):
            raise PydanticCustomError("one_of", "managed creates the job's own URL; remove url and urlFrom")
        return self


class HistoryRedis(_RedisServer):
    """A separate Redis server or Redis Cluster for the history. The job's messages stay on the server of ``redis``."""

    url: _HistoryUrl | None = None
    """URL without credentials, in the same form as redis.url, or redis+cluster:// or rediss+cluster://. Default: the
    server of the job's messages."""
    url_from: SecretUrl | None = None
    """Secret with the URL. rollout run uses --history-redis or ROLLOUT_HISTORY_REDIS_URL instead."""


class History(ManifestModel):
    """The history that the job drafts from and appends to. It outlives jobs and may be shared by several."""

    name: DnsLabel | None = None
    """Name of the history within the namespace. Default: the job's name."""
    redis: HistoryRedis = Field(default_factory=HistoryRedis)
    """Redis server of the history, if it is not that of the job's messages."""
    max_bytes: Size = "1Gi"
    """Byte cap of the history in Redis. Above it, the oldest generations of all problems are deleted first, and once
    each problem has one generation left, the least recently used problems."""
    allow_model_mismatch: bool = False
    """Accept a history that was created with another model of the same tokenizer."""
