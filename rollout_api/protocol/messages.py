"""Messages between trainers, the coordinator and engines, and their encoding.

A message is one binary field: the msgpack map ``{"v": schema version, "kind": …, …}``. Token ids are packed as
little-endian uint32, and log-probabilities as float32, or as float16 on request. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import math
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgpack
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator
from typing_extensions import Self

from rollout_api.manifest.field_types import first_error
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.history_encoding import decode_draft_sources, num_encoded_tokens, source_names
from rollout_api.str_enum import StrEnum

SCHEMA_VERSION = 1
"""Version of the protocol, which job and client must share."""
MAX_KEEP_SECONDS = 24 * 3600
"""Longest time that a request may ask to keep its rollouts."""
CLIENT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
"""Pattern of client names."""
TRACEPARENT_PATTERN = r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
"""Pattern of the HTTP header ``traceparent``, version 00."""
TokenId = Annotated[int, Field(ge=0, lt=2**32 - 1)]
"""A token id. 2³²−1 is reserved."""


class CodecError(ValueError):
    """Bytes cannot be decoded as a message."""


class Purpose(StrEnum):
    """What a rollout is sampled for."""

    TRAIN = "train"
    """Training. The rollout is appended to the history."""
    EVAL = "eval"
    """Evaluation. The rollout is not appended to the history."""


class FinishReason(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"
    """The model sampled an end-of-sequence token, or a stop string or stop token occurred."""
    LENGTH = "length"
    """The rollout reached ``max_tokens``. Its full length would have been larger."""
    DEADLINE = "deadline"
    """The request's deadline passed. The rollout has the tokens sampled until then, possibly none."""
    CANCELLED = "cancelled"
    """The client cancelled the request. The rollout has the tokens sampled until then, possibly none."""
    FAILED = "failed"
    """The rollout cannot be sampled; ``detail`` contains the reason."""

    @property
    def complete(self) -> bool:
        """Whether sampling reached its regular end instead of being interrupted."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class DraftMode(StrEnum):
    """What a request's rollouts are drafted from. No mode changes the output distribution."""

    HISTORY = "history"
    """All sources: history, siblings, the rollout's own text and the cross-problem pool."""
    OWN_TEXT = "own_text"
    """Only the rollout's own text."""
    OFF = "off"
    """No drafts. An engine without speculation is preferred if the job has one."""


class WeightsKind(StrEnum):
    """What a weight update contains."""

    FULL = "full"
    """The weights of the whole model."""
    LORA = "lora"
    """A LoRA adapter for the full weights that are served."""


class UpdateMode(StrEnum):
    """What happens to running rollouts during a weight update."""

    DRAIN = "drain"
    """They finish with the old weights before the new ones are loaded."""
    RECOMPUTE = "recompute"
    """They continue with the new weights, which also recompute their keys and values."""
    KEEP = "keep"
    """They continue with the new weights and keep the keys and values of the old ones."""


class PauseMode(StrEnum):
    """What happens to running rollouts when a job is paused."""

    KEEP = "keep"
    """They stop after their current token, and continue when the job is resumed."""
    WAIT = "wait"
    """They finish first. Queued ones start when the job is resumed."""
    SLEEP = "sleep"
    """As with ``keep``, and the engines free the memory of their GPUs: vLLM's sleep at level 1, which keeps the weights
    in main memory."""
    DEEP_SLEEP = "deep-sleep"
    """As with ``sleep``, but the engines read their weights again when the job is resumed: vLLM's sleep at level 2."""

    @property
    def sleep_level(self) -> int:
        """Level of vLLM's sleep; 0 if the engines keep their memory."""
        return {PauseMode.SLEEP: 1, PauseMode.DEEP_SLEEP: 2}.get(self, 0)


class RolloutId(NamedTuple):
    """Identity of a rollout. It does not depend on the engine that samples it, or on how often it is sampled."""

    job_uid: str
    request_id: str
    sample: int
    turn: int = 0

    def __str__(self) -> str:
        return f"{self.job_uid}/{self.request_id}/{self.sample}/{self.turn}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text that ``str`` returns.

        Raises:
            ValueError: *text* is not a rollout id.
        """
        uid, _, rest = text.partition("/")
        try:
            request_id, sample, turn = rest.rsplit("/", 2)
            return cls(uid, request_id, int(sample), int(turn))
        except ValueError:
            raise ValueError(f"{text!r} is not a rollout id (job uid/request id/sample/turn)") from None


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class WeightSpan(_Message):
    """The tokens of a response that one weight version sampled. The span ends where the next one starts."""

    start: int = Field(ge=0)
    """Index of the span's first token in the response."""
    weight_version: int = Field(ge=0)
    """Weight version that sampled the span."""


_LOGPROB_FIELDS = ("logprobs", "ranks", "top_logprobs", "kept_token_ids")
"""Fields of a response that have one entry for each token, and are None if they were not requested."""
_PROMPT_LOGPROB_FIELDS = ("prompt_logprobs", "prompt_ranks", "top_prompt_logprobs")
"""Fields with one entry for each token of the prompt but the first, and None if they were not requested."""


class _Response(_Message):
    token_ids: list[TokenId]
    """Token ids of the response."""
    logprobs: list[float] | None = None
    """Behavior log-probability of each token, if requested."""
    ranks: list[Annotated[int, Field(ge=1, lt=2**32)]] | None = None
    """Rank of each token among all tokens, 1 for the most likely one, if top_logprobs was requested."""
    top_logprobs: list[dict[TokenId, float]] | None = None
    """The most likely tokens at each position, most likely first, with their behavior log-probabilities, if requested.
    Tokens that cannot be sampled are left out."""
    kept_token_ids: list[list[TokenId]] | None = None
    """Token ids among which the token at each position was sampled, in ascending order, if requested. An empty list
    means that they are unknown, because very many tokens tie at the limit of top_k."""
    prompt_logprobs: list[float] | None = None
    """Log-probability of each token of the prompt but the first, if requested. It is computed by the weight version
    that sampled the response's first token, without temperature and filters; -9999 stands for minus infinity. A
    response without tokens may lack it."""
    prompt_ranks: list[Annotated[int, Field(ge=1, lt=2**32)]] | None = None
    """Rank of each token of the prompt but the first, if top_prompt_logprobs was requested."""
    top_prompt_logprobs: list[dict[TokenId, float]] | None = None
    """The most likely tokens at each position of the prompt but the first, most likely first, if requested."""
    weight_spans: list[WeightSpan]
    """Which weight version sampled which tokens, in order; empty without tokens."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        for name, values in self.logprob_fields().items():
            if len(values) != len(self.token_ids):
                raise ValueError(f"{len(values)} {name} for {len(self.token_ids)} tokens")
        if len({len(values) for values in self.prompt_logprob_fields().values()}) > 1:
            raise ValueError("fields about the prompt's tokens have different lengths")
        if self.token_ids and not self.weight_spans:
            raise ValueError("tokens without a weight span")
        if self.weight_spans and self.weight_spans[0].start != 0:
            raise ValueError("the first weight span must start at 0")
        return self

    @property
    def weight_version(self) -> int | None:
        """Weight version that sampled the last token; None without tokens."""
        return self.weight_spans[-1].weight_version if self.weight_spans else None

    @property
    def weight_versions(self) -> list[int]:
        """Weight version that sampled each token."""
        ends = [*(span.start for span in self.weight_spans[1:]), len(self.token_ids)]
        return [
            span.weight_version
            for span, end in zip(self.weight_spans, ends, strict=False)  # without tokens, there is no span
            for _ in range(span.start, end)
        ]

    @property
    def oldest_weight_version(self) -> int | None:
        """Oldest weight version that sampled a token; None without tokens."""
        return min((span.weight_version for span in self.weight_spans), default=None)

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    def logprob_fields(self) -> dict[str, Any]:
        """Return the fields about log-probabilities of its tokens that the response has, by name."""
        return {name: values for name in _LOGPROB_FIELDS if (values := getattr(self, name)) is not None}

    def prompt_logprob_fields(self) -> dict[str, Any]:
        """Return the fields about log-probabilities of the prompt's tokens that the response has, by name."""
        return {name: values for name in _PROMPT_LOGPROB_FIELDS if (values := getattr(self, name)) is not None}

    def without_logprobs(self) -> Self:
        """Return the response without the fields about log-probabilities."""
        return self.model_copy(update=dict.fromkeys([*self.logprob_fields(), *self.prompt_logprob_fields()]))

    def since(self, start: int) -> Partial:
        """Return the tokens from index *start* on, as a partial of their own.

        Only a partial from index 0 on has the log-probabilities of the prompt's tokens.
        """
        fields: dict[str, Any] = {name: values[start:] for name, values in self.logprob_fields().items()}
        if start == 0:
            fields |= self.prompt_logprob_fields()
        spans = spans_since(self.weight_spans, start, len(self.token_ids))
        return Partial(token_ids=self.token_ids[start:], weight_spans=spans, **fields)


class Partial(_Response):
    """Tokens of a response.

    They are the checkpoint of an unfinished rollout, tokens of it that are streamed, or the prefix where a request
    continues.
    """

    kind: Literal["partial"] = "partial"

    @classmethod
    def join(cls, parts: Sequence[Partial]) -> Self:
        """Return the tokens of *parts*, one after the other."""
        spans: list[WeightSpan] = []
        tokens: list[int] = []
        fields = [part.logprob_fields() for part in parts]
        common = [name for name in _LOGPROB_FIELDS if fields and all(name in each for each in fields)]
        for part in parts:
            for span in part.weight_spans:
                if not spans or spans[-1].weight_version != span.weight_version:
                    start = len(tokens) + span.start
                    spans.append(WeightSpan(start=start, weight_version=span.weight_version))
            tokens += part.token_ids
        joined: dict[str, Any] = {name: [one for each in fields for one in each[name]] for name in common}
        if parts:
            joined |= parts[0].prompt_logprob_fields()
        return cls(token_ids=tokens, weight_spans=spans, **joined)


def spans_since(spans: Sequence[WeightSpan], start: int, end: int) -> list[WeightSpan]:
    """Return the weight spans of the tokens with indices *start* to *end*, relative to *start*."""
    if not spans:
        return []
    clipped: list[WeightSpan] = []
    for span, following in zip(spans, [*(span.start for span in spans[1:]), end], strict=True):
        if start < following and span.start < end:
            clipped.append(WeightSpan(start=max(0, span.start - start), weight_version=span.weight_version))
    return clipped


class RolloutRequest(_Message):
    """A request for ``sampling.n`` rollouts of one prompt."""

    kind: Literal["request"] = "request"
    job_uid: str = Field(min_length=1)
    """Uid of the job."""
    request_id: str = Field(min_length=1, max_length=256)
    """Idempotency key, unique within the job. A request that is sent twice is answered once."""
    reply_to: str = Field(default="trainer", pattern=CLIENT_PATTERN)
    """Name of the client that is told about the results."""
    problem_id: str = Field(default="", max_length=256)
    """Id of the problem. Default: see :func:`problem_id_of`."""
    prompt_token_ids: list[TokenId] = Field(min_length=1)
    """Token ids of the prompt."""
    images: list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]] = Field(default=[])
    """SHA-256 in hex of each encoded image of the prompt, in the order of the tokens that stand for them. The images
    are under keys of their own."""
    image_positions: list[tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]]] | None = None
    """Index of the first token, and number of tokens, of each image in a prompt that contains all tokens of its images.
    Default: the prompt contains what the chat template writes for an image, and the engine replaces it."""
    sampling: Sampling = Field(default_factory=Sampling)
    """Sampling settings. Fields that are set override the job's spec.sampling."""
    purpose: Purpose = Purpose.TRAIN
    """Purpose of the rollouts."""
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Requests with a higher priority start earlier."""
    deadline_seconds: float | None = Field(default=None, gt=0)
    """Seconds after the request's arrival in Redis at which unfinished rollouts end."""
    weight_version: int | None = Field(default=None, ge=0)
    """Weight version that samples all tokens. Default: the newest, which may change during a rollout."""
    min_weight_version: int | None = Field(default=None, ge=0)
    """Oldest weight version that may sample a token. Rollouts wait until an engine serves it or a later one."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Largest number of weight versions by which an engine, and the tokens that another engine has sampled before, may
    be behind the newest published version when a rollout is dispatched to the engine. Tokens that are older are sampled
    again. Weights that are published afterwards do not end a rollout."""
    trajectory_id: str | None = Field(default=None, min_length=1, max_length=256)
    """Id of a multi-turn trajectory. Its turns are preferably sampled where their prefix is cached."""
    turn: int = Field(default=0, ge=0)
    """Number of the turn within its trajectory."""
    prefix: Partial | None = None
    """Partial rollout to continue. Its tokens become part of the rollout."""
    draft_mode: DraftMode = DraftMode.HISTORY
    """Sources of drafts."""
    step: int | None = Field(default=None, ge=0)
    """Training step of the request."""
    draft_budget: int | None = Field(default=None, ge=0)
    """Maximum number of draft tokens per verification step. Default: the job's."""
    half_logprobs: bool = False
    """Return log-probabilities as float16."""
    keep_seconds: int | None = Field(default=None, ge=1, le=MAX_KEEP_SECONDS)
    """Seconds for which the rollouts are kept after the last of them. Default: until the client releases them."""
    stream: bool = False
    """Let every process read the tokens while they are sampled. Responses with presence or frequency penalties are not
    streamed, because an interrupted one begins anew."""
    traceparent: str | None = Field(default=None, pattern=TRACEPARENT_PATTERN)
    """Span of the caller, as in the HTTP header traceparent of W3C Trace Context. The request's spans become part of
    its trace."""

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.stream and self.max_staleness is not None:
            raise ValueError("stream excludes max_staleness: tokens that were streamed cannot be sampled again")
        if self.weight_version is not None and (self.min_weight_version, self.max_staleness) != (None, None):
            raise ValueError("weight_version excludes min_weight_version and max_staleness: leave these out")
        if self.turn and self.trajectory_id is None:
            raise ValueError(f"turn {self.turn} needs a trajectory_id")
        if self.turn and not self.problem_id:
            raise ValueError(f"turn {self.turn} needs the problem_id of the trajectory's turn 0")
        if self.image_positions is not None:
            if len(self.image_positions) != len(self.images):
                raise ValueError(f"{len(self.image_positions)} image_positions for {len(self.images)} images")
            ends = [0, *(index + count for index, count in self.image_positions)]
            starts = [*(index for index, _ in self.image_positions), len(self.prompt_token_ids)]
            if any(start < end for start, end in zip(starts, ends, strict=True)):
                raise ValueError("image_positions must be in order, separate, and within the prompt")
        return self

    @property
    def problem(self) -> str:
        """Problem id, computed from the prompt if the client has not set one."""
        return self.problem_id or problem_id_of(self.prompt_token_ids, self.images)

    def with_defaults(self, defaults: Sampling) -> Self:
        """Return this request with the job's *defaults* for all sampling settings that it does not set.

        The job's seed results in a seed of its own for each request. A request that sets its seed keeps it.

        Raises:
            ValueError: the combined settings contradict each other.
        """
        own = self.sampling.model_dump(include=self.sampling.model_fields_set)
        if "seed" not in own and defaults.seed is not None:
            own["seed"] = derived_seed(defaults.seed, self.request_id)
        return self.model_copy(update={"sampling": Sampling.model_validate(defaults.model_dump() | own)})

    def rollout_id(self, sample: int) -> RolloutId:
        """Return the id of one of this request's rollouts."""
        return RolloutId(self.job_uid, self.request_id, sample, self.turn)


def derived_seed(seed: int, name: str) -> int:
    """Return the seed of a random stream with this name, which differs from those of other names; 31 bits."""
    return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little") >> 1


def _decode_base64(data: Any) -> Any:
    """Return the bytes of a text, which is how JSON represents them."""
    return base64.b64decode(data, validate=True) if isinstance(data, str) else data


def _encode_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


_Bytes = Annotated[
    bytes, BeforeValidator(_decode_base64), PlainSerializer(_encode_base64, return_type=str, when_used="json")
]


class RoutedExperts(_Message):
    """The experts that processed the tokens: an array of three dimensions."""

    shape: list[Annotated[int, Field(ge=0)]] = Field(min_length=3, max_length=3)
    """Numbers of tokens, of layers, and of experts per token and layer."""
    dtype: Literal["uint8", "uint16"]
    """Type of the numbers of experts."""
    data: _Bytes
    """Numbers of the experts, little-endian, in the order of the dimensions."""

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        expected = math.prod(self.shape) * (1 if self.dtype == "uint8" else 2)
        if len(self.data) != expected:
            raise ValueError(f"routed experts of the shape {self.shape} have {len(self.data)} bytes, not {expected}")
        return self


class Rollout(_Response):
    """A finished rollout."""

    kind: Literal["rollout"] = "rollout"
    rollout_id: str
    """Id of the rollout."""
    problem_id: str
    """Id of the problem."""
    step: int | None = Field(default=None, ge=0)
    """Training step of the request."""
    purpose: Purpose = Purpose.TRAIN
    """Purpose of the rollout."""
    finish_reason: FinishReason
    """Why the rollout ended."""
    detail: str = ""
    """Explanation of the finish reason, if it needs one."""
    refused: bool = False
    """Whether the rollout failed because no engine can serve its request as it is. Other requests may succeed."""
    routed_experts: RoutedExperts | None = None
    """Experts to which each token of the prompt and the response but the last was routed, if requested. A rollout that
    was interrupted may lack them."""
    num_decoding_steps: int = Field(default=0, ge=0)
    """Decoding steps of the engine that finished the rollout. Each step adds its accepted draft tokens and one more
    token. Tokens of a prefix or of an earlier engine are not included."""
    num_draft_tokens: int = Field(default=0, ge=0)
    """Draft tokens that were verified in these steps."""
    num_accepted_tokens: int = Field(default=0, ge=0)
    """Tokens of the response that are accepted draft tokens of these steps. If the last token is one, the token that
    the last step has sampled after it was cut off."""
    draft_tokens_by_source: dict[str, int] = Field(default_factory=dict)
    """Source → number of its draft tokens among num_draft_tokens. Sources are history, self (the rollout's own text),
    siblings and cross_problem; those without draft tokens are left out."""
    accepted_tokens_by_source: dict[str, int] = Field(default_factory=dict)
    """Source → number of its draft tokens among num_accepted_tokens."""
    draft_sources: _Bytes | None = None
    """Which tokens of the response are accepted draft tokens, and of which source; absent if no draft was verified.
    Each byte is a run of successive tokens: its lower 3 bits are their code, and its upper 5 bits are their number
    minus 1. The runs cover all tokens. Code 0 is a token that the model sampled without an accepted draft token, or
    whose source is unknown, such as those of a prefix or of an earlier engine; 1 is a draft token from the history, 2
    from the rollout's own text, 3 from siblings, and 4 from the cross-problem pool."""
    length_class: str = ""
    """The last length class of the rollout by the lengths of its problem's earlier ones: long, medium or short; empty
    if the draft policy determines none."""
    engine: str = ""
    """Id of the engine that sampled the last token."""
    num_cached_tokens: int = Field(default=0, ge=0)
    """Context tokens whose keys and values were cached."""
    started_at: float = Field(default=0.0, ge=0)
    """Unix time at which an engine started the rollout."""
    finished_at: float = Field(default=0.0, ge=0)
    """Unix time at which the rollout finished."""

    @model_validator(mode="after")
    def _check_draft_sources(self) -> Self:
        if self.draft_sources is not None and num_encoded_tokens(self.draft_sources) != self.num_tokens:
            count = num_encoded_tokens(self.draft_sources)
            raise ValueError(f"draft sources of {count} tokens for {self.num_tokens} tokens")
        return self

    @property
    def digest(self) -> str:
        """Digest of the token ids, as rewards name the text that they are for (:func:`digest_of`)."""
        return digest_of(pack_tokens(self.token_ids))

    @property
    def token_sources(self) -> list[str | None]:
        """Source of each token that is an accepted draft token (see ``draft_sources``); None for the others."""
        if self.draft_sources is None:
            return [None] * self.num_tokens
        return source_names(decode_draft_sources(self.draft_sources))

    @classmethod
    def from_request(
        cls,
        request: RolloutRequest,
        sample: int,
        generated: Partial | None,
        finish_reason: FinishReason,
        **fields: Any,
    ) -> Self:
        """Return a finished rollout of a request.

        Args:
            request: the request.
            sample: index of the rollout within the request.
            generated: the sampled tokens; None if there are none.
            finish_reason: why the rollout ended.
            fields: further fields of the rollout.
        """
        return cls(
            rollout_id=str(request.rollout_id(sample)),
            problem_id=request.problem,
            step=request.step,
            purpose=request.purpose,
            token_ids=generated.token_ids if generated else [],
            **(generated.logprob_fields() | generated.prompt_logprob_fields() if generated else {}),
            weight_spans=generated.weight_spans if generated else [],
            finish_reason=finish_reason,
            **fields,
        )

    def without_logprobs(self) -> Self:
        """Return the rollout without the fields about log-probabilities, and without routed experts."""
        rest = super().without_logprobs()
        return rest if rest.routed_experts is None else rest.model_copy(update={"routed_experts": None})


class Refusal(_Message):
    """A request that was refused and gets no rollouts."""

    kind: Literal["refusal"] = "refusal"
    request_id: str
    """Id of the refused request."""
    reason: str
    """Why the request was refused."""


class WeightTransfer(_Message):
    """Full weights that a trainer sends from its memory through vLLM's weight transfer."""

    group: str = Field(min_length=1)
    """Id of the trainer's group, which the engines have joined."""
    engines: list[str] = Field(min_length=1)
    """Ids of the engines that take part."""
    base: int = Field(ge=0)
    """Version of the full weights that were published before, to which differences apply."""
    update_info: dict[str, Any] | None = None
    """Names, dtype_names and shapes of the tensors, as in vLLM's update_info, if they are known beforehand. The engines
    check them before the trainer sends anything."""


class WeightUpdate(_Message):
    """Control message: sample with these weights from now on."""

    kind: Literal["weights"] = "weights"
    weight_version: int = Field(ge=1)
    """Version of the weights. It increases with every update; 0 is the model that the job started with."""
    uri: str = Field(min_length=1)
    """Directory of the safetensors files; spec.weights restricts it. With transfer: a unique text that identifies these
    weights."""
    transfer: WeightTransfer | None = None
    """The weights come from a trainer's memory instead of a directory."""
    weights_kind: WeightsKind = WeightsKind.FULL
    """What the update contains."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Checksum of the weights. Default: they are not verified."""
    mode: UpdateMode = UpdateMode.RECOMPUTE
    """What happens to running rollouts."""

    @model_validator(mode="after")
    def _check_transfer(self) -> Self:
        if self.transfer is not None and self.weights_kind is not WeightsKind.FULL:
            raise ValueError("adapters are published from a directory")
        return self

    @property
    def identity(self) -> str:
        """What identifies these weights: their checksum, or else the URI."""
        return self.sha256 or self.uri


class TransferStep(_Message):
    """What a trainer does next in a transfer of weights. Engines read these from a stream of their own."""

    kind: Literal["transfer_step"] = "transfer_step"
    step: Literal["update", "finish", "abort"]
    """update: send tensors; finish: all were sent; abort: the engines keep their weights."""
    update_info: dict[str, Any] | None = None
    """What vLLM's update_weights is called with, for update."""
    reason: str = ""
    """Why the transfer is aborted."""


class Cancel(_Message):
    """Control message: cancel requests. Running samples return their partial output, queued ones no tokens."""

    kind: Literal["cancel"] = "cancel"
    request_ids: list[str] = Field(min_length=1)
    """Ids of the requests."""


class Rewards(_Message):
    """Control message: rewards of finished rollouts."""

    kind: Literal["rewards"] = "rewards"
    rewards: dict[str, float] = Field(min_length=1)
    """Rollout id → reward."""
    digests: dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]] = Field(default={})
    """Rollout id → digest of the tokens that were rewarded (:attr:`Rollout.digest`). If Redis has lost a rollout in a
    crash after the client had received it, it is sampled again under the same id, and the reward is not for its new
    tokens. Rewards without a digest are not checked."""


class InitWeightTransfer(_Message):
    """Control message: call vLLM's init_weight_transfer_engine, and leave the group of an earlier trainer."""

    kind: Literal["init_weight_transfer"] = "init_weight_transfer"
    group: str = Field(min_length=1)
    """Id of the group."""
    engines: dict[str, int] = Field(min_length=1)
    """Engine id → rank of its first worker process in the group. The trainer has rank 0."""
    init_info: dict[str, Any]
    """vLLM's init_info. If it has a rank_offset, each engine replaces it by its rank."""


class Close(_Message):
    """Control message: there are no further requests. The job ends when all open requests are answered."""

    kind: Literal["close"] = "close"


class Pause(_Message):
    """Control message: the engines stop sampling until the job is resumed. Deadlines of requests continue to run."""

    kind: Literal["pause"] = "pause"
    mode: PauseMode = PauseMode.KEEP
    """What happens to running rollouts."""


class Resume(_Message):
    """Control message: the engines sample again."""

    kind: Literal["resume"] = "resume"


ControlMessage = WeightUpdate | InitWeightTransfer | Cancel | Pause | Resume | Close
Message = RolloutRequest | Rollout | Partial | Refusal | Rewards | TransferStep | ControlMessage
MESSAGES: tuple[type[Message], ...] = get_args(Message)
_SAMPLING_FIELDS = frozenset(Sampling.model_fields)
_KINDS: dict[str, type[Message]] = {model.model_fields["kind"].default: model for model in MESSAGES}


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Return token ids as little-endian uint32, 4 bytes each.

    Raises:
        OverflowError: a value is outside [0, 2³²).
    """
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Return the token ids that :func:`pack_tokens` has packed.

    Raises:
        CodecError: the length is not a multiple of 4.
    """
    if len(data) % 4:
        raise CodecError(f"{len(data)} bytes of token ids are not a multiple of 4")
    tokens = array("I", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def _pack_logprobs(values: Sequence[float], half: bool) -> dict[str, Any]:
    code = "e" if half else "f"
    return {"f": code, "b": struct.pack(f"<{len(values)}{code}", *values)}


def _unpack_logprobs(packed: Any) -> list[float]:
    code, data = packed["f"], packed["b"]
    if code not in ("e", "f"):
        raise CodecError(f"logprobs have the unknown format {code!r}")
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def _pack_top_logprobs(positions: Sequence[dict[str, float]], half: bool) -> dict[str, Any]:
    return {
        "n": pack_tokens(len(position) for position in positions),
        "t": pack_tokens(int(token) for position in positions for token in position),
        "p": _pack_logprobs([value for position in positions for value in position.values()], half),
    }


def _unpack_top_logprobs(packed: Any) -> list[dict[int, float]]:
    counts, tokens = unpack_tokens(packed["n"]), unpack_tokens(packed["t"])
    logprobs = _unpack_logprobs(packed["p"])
    if not sum(counts) == len(tokens) == len(logprobs):
        raise CodecError(
            f"top_logprobs have different numbers of tokens: {sum(counts)}, {len(tokens)} and {len(logprobs)}"
        )
    pairs = zip(tokens, logprobs, strict=True)
    return [dict(islice(pairs, count)) for count in counts]


def _pack_token_lists(lists: Sequence[Sequence[int]], _: bool) -> dict[str, bytes]:
    return {"n": pack_tokens(map(len, lists)), "t": pack_tokens(token for one in lists for token in one)}


def _unpack_token_lists(packed: Any) -> list[list[int]]:
    counts, tokens = unpack_tokens(packed["n"]), iter(unpack_tokens(packed["t"]))
    lists = [list(islice(tokens, count)) for count in counts]
    if list(map(len, lists)) != counts or next(tokens, None) is not None:
        raise CodecError(f"kept_token_ids have different numbers of tokens: {sum(counts)} in n, and others in t")
    return lists


_PACKED_FIELDS: dict[str, tuple[Callable[[Any, bool], Any], Callable[[Any], Any]]] = {
    **dict.fromkeys(
        ("prompt_token_ids", "token_ids", "ranks", "prompt_ranks"),
        (lambda tokens, _: pack_tokens(tokens), unpack_tokens),
    ),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), (_pack_logprobs, _unpack_logprobs)),
    **dict.fromkeys(("top_logprobs", "top_prompt_logprobs"), (_pack_top_logprobs, _unpack_top_logprobs)),
    "kept_token_ids": (_pack_token_lists, _unpack_token_lists),
}
"""Field → how it is packed, given whether log-probabilities are rounded to float16, and how it is unpacked."""
_BYTES_FIELDS = {"draft_sources", "routed_experts"}
"""Fields of a rollout that contain bytes, which JSON represents as text."""


def encode(message: Message, *, half_logprobs: bool = False) -> bytes:
    """Return a message as bytes.

    Fields that were not set are omitted. In ``sampling``, an omitted field means the job's default, which may differ
    from the model's default.

    Args:
        message: the message.
        half_logprobs: whether to round log-probabilities to float16.
    """
    body: dict[str, Any] = message.model_dump(mode="json", exclude_unset=True, exclude=_BYTES_FIELDS)
    body = {"v": SCHEMA_VERSION, "kind": message.kind, **body}
    if isinstance(message, Rollout):
        body |= message.model_dump(include=_BYTES_FIELDS, exclude_none=True)  # in which bytes stay bytes
    _pack(body, half_logprobs)
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def _pack(body: dict[str, Any], half_logprobs: bool) -> None:
    for name in body.keys() & _PACKED_FIELDS.keys():
        if body[name] is not None:
            pack, _ = _PACKED_FIELDS[name]
            body[name] = pack(body[name], half_logprobs)
    if isinstance(prefix := body.get("prefix"), dict):
        _pack(prefix, half_logprobs)


def _unpack(body: dict[str, Any]) -> None:
    for name in body.keys() & _PACKED_FIELDS.keys():
        if body[name] is not None:
            _, unpack = _PACKED_FIELDS[name]
            body[name] = unpack(body[name])
    if isinstance(prefix := body.get("prefix"), dict):
        _unpack(prefix)


def decode(data: bytes) -> Message:
    """Return the message that *data* encodes.

    Unknown fields are ignored, so that a program can read the messages of later versions. Unknown sampling settings are
    an error, because rollouts would be sampled from another distribution without them.

    Raises:
        CodecError: the bytes are not a msgpack map, the schema version, the kind or a sampling setting is unknown, or a
            field is missing or out of range.
    """
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises many unrelated types
        raise CodecError(f"not valid msgpack: {error or type(error).__name__}") from None
    if not isinstance(body, dict):
        raise CodecError(f"a message must be a map, not {type(body).__name__}")
    version = body.pop("v", None)
    if version != SCHEMA_VERSION:
        raise CodecError(f"unsupported schema version {version!r}; this program supports {SCHEMA_VERSION}")
    model = _KINDS.get(kind) if isinstance(kind := body.get("kind"), str) else None
    if model is None:
        raise CodecError(f"unknown message kind {kind!r}")
    try:
        _unpack(body)
        if isinstance(sampling := body.get("sampling"), dict) and sampling.keys() - _SAMPLING_FIELDS:
            model.model_validate(body)  # names the unknown setting, and what may have been meant
        return model.model_validate(body, extra="ignore")
    except CodecError:
        raise
    except ValidationError as invalid:
        raise CodecError(f"{kind}: {first_error(invalid, model)}") from None
    except RecursionError:
        raise CodecError(f"{kind}: it is nested too deeply") from None
    except (TypeError, KeyError, ValueError, OverflowError, struct.error) as error:
        raise CodecError(f"{kind}: malformed field: {error}") from None


def digest_of(packed_tokens: bytes) -> str:
    """Return the digest of a response, given its packed token ids: BLAKE2b-64 in hex."""
    return blake2b(packed_tokens, digest_size=8).hexdigest()


def problem_id_of(prompt_token_ids: Sequence[int], images: Sequence[str] = ()) -> str:
    """Return the default problem id of a prompt: BLAKE2b-128 of its packed token ids, in hex.

    With *images*, it is that of this text and the hashes of the images, separated by zero bytes.
    """
    problem = blake2b(pack_tokens(prompt_token_ids), digest_size=16).hexdigest()
    if not images:
        return problem
    return blake2b("\0".join([problem, *images]).encode(), digest_size=16).hexdigest()
