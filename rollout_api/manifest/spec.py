"""The ``spec`` of a RolloutJob, except for the sections about pods (:mod:`rollout_api.manifest.pod_spec`).

The models are the source of truth for fields, defaults and rules: the CRD's schema and ``docs/manifest.md`` are made
from them. What is described with a CEL rule is checked by a validator here, too.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import parse_qs

from pydantic import (
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

from rollout_api.manifest.field_types import DnsLabel, DnsName, Part, Quantity, SecretKey, Text, rules
from rollout_api.manifest.quantity import parse_quantity

_RESERVED = ("seed", "size")
_AT_LEAST_1MI = rules(("quantity(string(self)).compareTo(quantity('1Mi')) >= 0", "must be at least 1Mi"))


def _at_least_1mi(size: str) -> str:
    if parse_quantity(size) < 2**20:
        raise ValueError(f"{size!r} must be at least 1Mi")
    return size


class Task(Part):
    """One family of problems in a dataset source."""

    name: DnsLabel = Field(description="Names the entry within the list.")
    generator: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(
        description="Name of the reasoning-gym dataset that makes the problems, as in chain_sum.",
    )
    problems: int = Field(default=8, ge=1, le=100_000, description="How many problems to draw.")
    config: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Settings of the generator, passed on as they are.",
        json_schema_extra={"not": {"anyOf": [{"required": [name]} for name in _RESERVED]}},
    )

    @field_validator("config")
    @classmethod
    def _no_reserved(cls, config: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if reserved := sorted(set(_RESERVED) & config.keys()):
            raise ValueError(
                f"{', '.join(reserved)}: set by the source's seed and the task's problems; remove it from here"
            )
        return config


class DatasetSource(Part):
    """The job draws prompts from a problem set and scores the answers by itself."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "size(self.checkpoints) == 0 || size(self.checkpoints) == self.epochs",
                "checkpoints: name one for each epoch, or none",
            )
        )
    )

    tasks: list[Task] = Field(
        min_length=1,
        max_length=64,
        description="What problems to draw; names differ.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of the problems that are drawn.")
    epochs: int = Field(default=1, ge=1, le=10_000, description="How often to go over all problems.")
    checkpoints: list[Text] = Field(
        default_factory=list,
        max_length=10_000,
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


class TrainerSource(Part):
    """The job serves trainers that connect to it, until one of them closes it."""


class Source(Part):
    """Where prompts come from: exactly one of the two."""

    model_config = ConfigDict(
        json_schema_extra=rules(("has(self.dataset) != has(self.trainer)", "name either dataset or trainer"))
    )

    dataset: DatasetSource | None = Field(default=None, description="Draw problems and run them for some epochs.")
    trainer: TrainerSource | None = Field(default=None, description="Serve external trainers until they close the job.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.dataset is None) == (self.trainer is None):
            raise ValueError("name either dataset or trainer")
        return self


class ModelCache(Part):
    """Where models are kept in a pod; on one machine, ``--model-cache`` says so."""

    persistent_volume_claim: DnsName | None = Field(
        default=None,
        description="Claim that all pods of the job mount; default: each pod has a cache of its own, and downloads.",
    )
    size_limit: Quantity | None = Field(default=None, description="Most that a pod's own cache may take of its node.")


class Model(Part):
    """The policy that is sampled."""

    uri: Text = Field(
        description="An absolute directory or file:// URI, a directory of the model cache (das/tiny-qwen3), or a "
        "Hugging Face model id (Qwen/Qwen3-8B).",
    )
    revision: Text | None = Field(default=None, description="Branch, tag or commit of a Hugging Face model.")
    token_secret_ref: SecretKey | None = Field(
        default=None, description="Secret with the token of a gated Hugging Face model; on one machine: HF_TOKEN."
    )
    cache: ModelCache = Field(default_factory=ModelCache)


class Weights(Part):
    """Where weights may be loaded from while the job runs."""

    persistent_volume_claim: DnsName | None = Field(
        default=None,
        description="Claim that is mounted at /weights in all pods, for weights that a trainer publishes from there.",
    )
    allowed_roots: list[Annotated[str, StringConstraints(max_length=1024, pattern=r"^/")]] = Field(
        default_factory=list,
        max_length=64,
        description="Absolute directories below which an epoch's checkpoint, or weights that a trainer publishes, must "
        "lie, besides the model cache, the directory of model.uri and the claim's.",
    )
    broadcast: bool = Field(
        default=False,
        description="Let engines connect to the trainer and take weights that it broadcasts from its memory (by NCCL; "
        "by gloo into CPU workers).",
    )

    @field_validator("allowed_roots", mode="before")
    @classmethod
    def _absolute(cls, roots: object) -> object:
        for root in roots if isinstance(roots, list) else []:
            if isinstance(root, str) and not root.startswith("/"):
                raise ValueError(f"{root!r} is not an absolute directory")
        return roots


class Engine(Part):
    """How vLLM is started."""

    max_model_len: int = Field(
        default=4096, ge=16, le=10_000_000, description="Most tokens of a prompt and its response together."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of weights and activations; auto takes the checkpoint's."
    )
    tensor_parallel_size: int = Field(default=1, ge=1, le=64, description="GPUs that share each layer.")
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64, description="Groups of GPUs that share out the layers.")
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

    @property
    def gpus(self) -> int:
        """GPUs of one engine, where it has any."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


_REFUSED_WITH_DRAFTS = ("min_p", "logit_bias")


class Sampling(Part):
    """How responses are sampled. The names and ranges are vLLM's."""

    model_config = ConfigDict(
        json_schema_extra=rules(("self.minTokens <= self.maxTokens", "minTokens must not be more than maxTokens"))
    )

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


class Queue(Part):
    """How much may be waiting."""

    max_rollouts: int = Field(default=100_000, ge=1, description="Most rollouts asked for and not ended.")
    max_request_bytes: Quantity = Field(default="512Ki", description="Largest request, as encoded.")
    max_unread_results: Quantity = Field(
        default="256Mi",
        description="Results that a client has not read yet; beyond it none of its rollouts is started.",
    )


def _off_in_yaml(value: object) -> object:
    """``off`` without quotes is false in YAML 1.1, as PyYAML reads it."""
    return "off" if value is False else value


class Speculation(Part):
    """How drafts are made."""

    policy: Annotated[
        Literal["marginal", "das-optimal", "das-classes", "fixed", "unlimited", "off"], BeforeValidator(_off_in_yaml)
    ] = Field(
        default="marginal",
        description="How much is drafted for which rollout. marginal: each token that saves the batch more time than "
        "verifying it costs, so most for the rollouts that hold it up. das-optimal, das-classes: as DAS does, by its "
        "optimum or by three classes of length. fixed: maxDraftTokens for every rollout, unlimited: 64. Under all of "
        'these, drafting that does not pay is stopped. off: none (write "off" with quotes: without, kubectl takes it '
        "for false).",
    )
    max_draft_tokens: int = Field(
        default=16, ge=1, le=64, description="Most tokens drafted for one rollout in one step."
    )
    window: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Weight versions whose rollouts of a problem are kept and drafted from: the newest in which that "
        "problem was sampled.",
    )
    index_bytes: Quantity = Field(
        default="2Gi",
        description="Most memory that an engine takes to find drafts: for rollouts of the history, some 6 to 8 bytes a "
        "token, and for what is being said, some 50 to 100. Beyond it, the problems that were drafted for least "
        "recently leave it, and come back from Redis when their rollouts are about to start.",
        json_schema_extra=_AT_LEAST_1MI,
    )

    @field_validator("index_bytes")
    @classmethod
    def _room_for_an_index(cls, size: str) -> str:
        return _at_least_1mi(size)


class SecretUrl(Part):
    """A Redis URL in a Secret."""

    secret_key_ref: SecretKey = Field(description="Secret and key that hold the URL, credentials included.")


_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_HISTORY_SCHEMES = (*_SCHEMES, "redis+cluster", "rediss+cluster")
_NO_CREDENTIALS = "!self.contains('@') && !self.matches('[?&](sentinel_|ssl_)?(password|username)=')"
_CREDENTIALS_HINT = "must not hold credentials, since a manifest is no place for secrets; use urlFrom"


def _scheme_pattern(schemes: tuple[str, ...]) -> str:
    return f"^({'|'.join(schemes)})://".replace("+", "[+]")


def _one_of(schemes: tuple[str, ...]) -> str:
    *others, last = (f"{scheme}://" for scheme in schemes)
    return f"{', '.join(others)} or {last}"


def _checked_url(url: str | None, schemes: tuple[str, ...], *, option: str, variable: str) -> str | None:
    if url is None:
        return None
    if not url.startswith(tuple(f"{scheme}://" for scheme in schemes)):
        raise ValueError(f"must begin with {_one_of(schemes)}")
    query = parse_qs(url.partition("?")[2])
    secret = {f"{whose}{what}" for whose in ("", "sentinel_", "ssl_") for what in ("password", "username")}
    if "@" in url or query.keys() & secret:
        raise ValueError(
            "must not hold credentials, since a manifest is no place for secrets; give the whole URL in a Secret "
            f"(urlFrom), and rollout run with {option} or in {variable}"
        )
    return url


class Redis(Part):
    """The server that keeps messages and rollouts."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!has(self.url) || !has(self.urlFrom)", "name either url or urlFrom"),
            (
                "!has(self.managed) || !self.managed || !(has(self.url) || has(self.urlFrom))",
                "managed makes the job's own URL; leave url and urlFrom out",
            ),
        )
    )

    url: Text | None = Field(
        default=None,
        description="redis://, rediss:// or unix://, or redis+sentinel://HOST,HOST,…/SERVICE (rediss+sentinel:// with "
        "TLS), without credentials. Default: on a cluster, the Secret rollout-redis, key url; with rollout run, a "
        "server of the job's own.",
        json_schema_extra=rules(
            (f"self.matches('{_scheme_pattern(_SCHEMES)}')", f"must begin with {_one_of(_SCHEMES)}"),
            (_NO_CREDENTIALS, _CREDENTIALS_HINT),
        ),
    )
    url_from: SecretUrl | None = Field(
        default=None, description="Take the URL from a Secret; rollout run has --redis and ROLLOUT_REDIS_URL instead."
    )
    managed: bool = Field(
        default=False,
        description="Have rollout-redis-users, where the cluster runs it, make a user for this job alone, with its URL "
        "in Secret <job>-redis: pods and trainers of this job then reach nothing of others. On a cluster only.",
    )

    @field_validator("url")
    @classmethod
    def _scheme_and_no_password(cls, url: str | None) -> str | None:
        return _checked_url(url, _SCHEMES, option="--redis", variable="ROLLOUT_REDIS_URL")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.url is not None and self.url_from is not None:
            raise PydanticCustomError("one_of", "name either url or urlFrom")
        if self.managed and (self.url is not None or self.url_from is not None):
            raise PydanticCustomError("one_of", "managed makes the job's own URL; leave url and urlFrom out")
        return self


class HistoryRedis(Part):
    """Another server, or a cluster, for rollouts alone; messages stay on the one that ``redis`` names."""

    model_config = ConfigDict(
        json_schema_extra=rules(("!has(self.url) || !has(self.urlFrom)", "name either url or urlFrom"))
    )

    url: Text | None = Field(
        default=None,
        description="As redis.url; redis+cluster:// and rediss+cluster:// as well. Default: the server of the job's "
        "messages.",
        json_schema_extra=rules(
            (f"self.matches('{_scheme_pattern(_HISTORY_SCHEMES)}')", f"must begin with {_one_of(_HISTORY_SCHEMES)}"),
            (_NO_CREDENTIALS, _CREDENTIALS_HINT),
        ),
    )
    url_from: SecretUrl | None = Field(
        default=None,
        description="Take the URL from a Secret; rollout run has --history-redis and ROLLOUT_HISTORY_REDIS_URL "
        "instead.",
    )

    @field_validator("url")
    @classmethod
    def _scheme_and_no_password(cls, url: str | None) -> str | None:
        return _checked_url(url, _HISTORY_SCHEMES, option="--history-redis", variable="ROLLOUT_HISTORY_REDIS_URL")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.url is not None and self.url_from is not None:
            raise PydanticCustomError("one_of", "name either url or urlFrom")
        return self


class History(Part):
    """The rollouts that drafts come from. A history outlives jobs and may be shared by them."""

    name: DnsLabel | None = Field(default=None, description="Default: the job's name.")
    redis: HistoryRedis = Field(
        default_factory=HistoryRedis,
        description="Where rollouts are kept, if not with the job's messages.",
    )
    max_bytes: Quantity = Field(
        default="1Gi",
        description="Redis bytes of this history. When it is full, the oldest rollouts of all problems leave, and "
        "where each has but one generation left, the problems used least recently.",
        json_schema_extra=_AT_LEAST_1MI,
    )
    allow_foreign_model: bool = Field(
        default=False,
        description="Draft from, and add to, a history that was begun with another model of the same tokenizer.",
    )

    @field_validator("max_bytes")
    @classmethod
    def _room_for_a_history(cls, size: str) -> str:
        return _at_least_1mi(size)
