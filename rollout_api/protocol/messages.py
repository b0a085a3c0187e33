"""Messages between trainers, the coordinator and workers, and how they are written on the wire.

A message is one binary field: msgpack of ``{"v": schema version, "kind": …, …}``. Token ids travel as packed
little-endian uint32, log-probabilities as float32 (or float16 where asked for). Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Any, Literal, NamedTuple, Self

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollout_api.manifest.spec import Sampling

SCHEMA_VERSION = 1
CLIENT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
TokenId = Annotated[int, Field(ge=0, lt=2**32 - 1)]


class CodecError(ValueError):
    """Bytes that are no message of a known schema; the text says what is wrong with them."""


class Purpose(StrEnum):
    """Why a rollout is made; evaluation rollouts never enter a history."""

    TRAIN = "train"
    EVAL = "eval"


class FinishReason(StrEnum):
    """Why a rollout ended."""

    STOP = "stop"
    """The model ended it, or a stop string or token did."""
    LENGTH = "length"
    """It was cut at ``max_tokens``: its true length is longer than what is recorded."""
    DEADLINE = "deadline"
    """The request's deadline passed: what there was by then, possibly nothing."""
    CANCELLED = "cancelled"
    """The client cancelled it: what there was by then, possibly nothing."""
    FAILED = "failed"
    """It cannot be made; ``detail`` says why."""

    @property
    def complete(self) -> bool:
        """Whether the response ended as sampling ends, rather than being broken off."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class Drafts(StrEnum):
    """What a request's rollouts may be drafted from. No choice changes their law."""

    HISTORY = "history"
    """Earlier rollouts of the problem, and the rollout's own text."""
    OWN_TEXT = "own_text"
    """The rollout's own text alone."""
    OFF = "off"
    """Nothing; on an engine without speculation where the job has one."""


class WeightsKind(StrEnum):
    """What a weight update brings."""

    FULL = "full"
    """Safetensors of the whole model."""
    LORA = "lora"
    """A LoRA adapter on top of the full weights in place."""


class UpdateMode(StrEnum):
    """What becomes of rollouts that run while weights change."""

    DRAIN = "drain"
    """They end under the old weights first."""
    RECOMPUTE = "recompute"
    """They go on under the new weights, their keys and values computed again by these."""
    KEEP = "keep"
    """They go on under the new weights, with the old weights' keys and values."""


class RolloutId(NamedTuple):
    """Identity of one rollout: the same whoever produces it and however often."""

    job_uid: str
    request_id: str
    sample: int
    turn: int = 0

    def __str__(self) -> str:
        return f"{self.job_uid}/{self.request_id}/{self.sample}/{self.turn}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of ``str``.

        Raises:
            ValueError: if *text* is no rollout id.
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
    """Tokens from ``start`` (an index into the response) on were sampled from ``weight_version``."""

    start: int = Field(ge=0)
    weight_version: int = Field(ge=0)


class _Response(_Message):
    token_ids: list[TokenId]
    logprobs: list[float] | None = Field(
        default=None, description="Log-probability of each token under the policy that sampled it."
    )
    spans: list[WeightSpan] = Field(description="Which weight version sampled which tokens; empty without tokens.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.token_ids)} tokens")
        if self.token_ids and not self.spans:
            raise ValueError("tokens without a weight span")
        if self.spans and self.spans[0].start != 0:
            raise ValueError("the first weight span must start at 0")
        return self

    @property
    def weight_version(self) -> int | None:
        """The version that sampled the last token; None without tokens."""
        return self.spans[-1].weight_version if self.spans else None


class Partial(_Response):
    """A response so far: what an engine checkpoints, and what a request may go on from."""

    kind: Literal["partial"] = "partial"


class RolloutRequest(_Message):
    """Ask for ``sampling.n`` rollouts of one prompt."""

    kind: Literal["request"] = "request"
    job_uid: str = Field(min_length=1)
    request_id: str = Field(
        min_length=1,
        max_length=256,
        description="The client's idempotency key, unique within the job: a request sent twice is one request.",
    )
    reply_to: str = Field(
        default="trainer",
        pattern=CLIENT_PATTERN,
        description="Name of the client whose result stream gets the rollouts.",
    )
    problem_id: str = Field(
        default="", max_length=256, description="Default: blake2b-128 of the packed prompt token ids, in hex."
    )
    prompt_token_ids: list[TokenId] = Field(min_length=1)
    sampling: Sampling = Field(
        default_factory=Sampling, description="Fields that are present override the job's spec.sampling."
    )
    purpose: Purpose = Purpose.TRAIN
    priority: int = Field(default=0, ge=-(2**31), lt=2**31, description="Higher starts earlier.")
    deadline_seconds: float | None = Field(
        default=None, gt=0, description="Counted from the request's arrival in Redis; then rollouts end as they are."
    )
    weight_version: int | None = Field(
        default=None,
        ge=0,
        description="Sample with exactly this version, from the first token to the last; default: the newest.",
    )
    trajectory_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Ties the turns of a multi-turn trajectory together: they are served where their prefix is cached.",
    )
    turn: int = Field(default=0, ge=0)
    prefix: Partial | None = Field(
        default=None, description="The model's own tokens so far, to go on from; they are part of the rollout."
    )
    drafts: Drafts = Drafts.HISTORY
    step: int | None = Field(default=None, ge=0, description="The trainer's step that it is for.")
    draft_budget: int | None = Field(default=None, ge=0, description="Most tokens drafted a step; default: the job's.")
    half_logprobs: bool = Field(default=False, description="Return log-probabilities as float16.")

    @model_validator(mode="after")
    def _turns(self) -> Self:
        if self.turn and self.trajectory_id is None:
            raise ValueError(f"turn {self.turn} of no trajectory: set trajectory_id")
        if self.turn and not self.problem_id:
            raise ValueError(f"turn {self.turn} must name the problem_id that its trajectory's turn 0 has")
        return self

    @property
    def problem(self) -> str:
        """The problem's id, computed from the prompt where the client named none."""
        return self.problem_id or problem_id_of(self.prompt_token_ids)

    def under(self, defaults: Sampling) -> Self:
        """This request with *defaults* (the job's) for every sampling setting that it leaves open.

        Raises:
            ValueError: if the two do not go together.
        """
        own = self.sampling.model_dump(include=self.sampling.model_fields_set)
        return self.model_copy(update={"sampling": Sampling.model_validate(defaults.model_dump() | own)})

    def rollout_id(self, sample: int) -> RolloutId:
        """Identity of this request's rollout number *sample*."""
        return RolloutId(self.job_uid, self.request_id, sample, self.turn)


class Rollout(_Response):
    """One ended rollout."""

    kind: Literal["rollout"] = "rollout"
    rollout_id: str
    problem_id: str
    step: int | None = Field(default=None, ge=0, description="As in its request.")
    purpose: Purpose = Purpose.TRAIN
    finish_reason: FinishReason
    detail: str = Field(default="", description="Why, where finish_reason does not say it all.")
    steps: int = Field(
        default=0,
        ge=0,
        description="Decoding steps of the engine that ended it, each of which made its accepted draft tokens and one "
        "more. Tokens that the engine went on from are of none of them.",
    )
    drafted: int = Field(default=0, ge=0, description="Draft tokens verified in these steps.")
    accepted: int = Field(default=0, ge=0, description="Draft tokens accepted in these steps.")
    engine: str = Field(default="", description="Id of the engine that sampled the last token.")
    cached_tokens: int = Field(default=0, ge=0, description="Context tokens whose keys and values were cached.")
    started_at: float = Field(default=0.0, ge=0, description="Unix time at which an engine first took it.")
    finished_at: float = Field(default=0.0, ge=0, description="Unix time at which it ended.")

    @classmethod
    def of(
        cls, request: RolloutRequest, sample: int, said: Partial | None, finish_reason: FinishReason, **about: Any
    ) -> Self:
        """How a request's rollout number *sample* ended, with what was *said* by then; *about* are further fields."""
        return cls(
            rollout_id=str(request.rollout_id(sample)),
            problem_id=request.problem,
            step=request.step,
            purpose=request.purpose,
            token_ids=said.token_ids if said else [],
            logprobs=said.logprobs if said else None,
            spans=said.spans if said else [],
            finish_reason=finish_reason,
            **about,
        )


class Refusal(_Message):
    """A request that gets no rollouts, and why."""

    kind: Literal["refusal"] = "refusal"
    request_id: str
    reason: str
    answered: bool = Field(
        default=False, description="It was answered before: asked under another request id, it is sampled anew."
    )


class TensorToCome(_Message):
    """One tensor of a broadcast."""

    name: str
    dtype: str = Field(description="As torch calls it: bfloat16, float32, …")
    shape: list[int]


class Broadcast(_Message):
    """Tensors that the trainer, as rank 0 of a group of processes, broadcasts from its memory one after the other."""

    group: str = Field(min_length=1, description="Names the group; an engine that is in it does not join again.")
    ranks: dict[str, int] = Field(
        min_length=1, description="Engine → rank of its first worker process; its others have those that follow."
    )
    world_size: int = Field(ge=2)
    tensors: list[TensorToCome] = Field(min_length=1, description="In the order in which they come.")


class WeightUpdate(_Message):
    """Control: sample with these weights from now on."""

    kind: Literal["weights"] = "weights"
    weight_version: int = Field(ge=1, description="It only grows; 0 is the model that the job began with.")
    uri: str = Field(
        min_length=1,
        description="Directory of safetensors; or, with broadcast, nccl:// or gloo:// and the trainer's host:port. See "
        "spec.weights for what is allowed.",
    )
    broadcast: Broadcast | None = Field(default=None, description="Full weights that do not lie in any directory.")
    weights: WeightsKind = WeightsKind.FULL
    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="See rollout_api.weights.checksum.checksum; default: not checked.",
    )
    mode: UpdateMode = UpdateMode.RECOMPUTE

    @property
    def identity(self) -> str:
        """Tells these weights from others: their checksum, or where they are."""
        return self.sha256 or self.uri


class Cancel(_Message):
    """Control: end these requests' rollouts now; each is answered with what there is of it."""

    kind: Literal["cancel"] = "cancel"
    request_ids: list[str] = Field(min_length=1)


class Rewards(_Message):
    """Control: the trainer's rewards of rollouts that it received."""

    kind: Literal["rewards"] = "rewards"
    rewards: dict[str, float] = Field(min_length=1, description="Rollout id → reward.")


class Close(_Message):
    """Control: no further requests will come; the job ends when all that are open are answered."""

    kind: Literal["close"] = "close"


Message = RolloutRequest | Rollout | Partial | Refusal | WeightUpdate | Cancel | Rewards | Close
MESSAGES: tuple[type[Message], ...] = (RolloutRequest, Rollout, Partial, Refusal, WeightUpdate, Cancel, Rewards, Close)
_KINDS: dict[str, type[Message]] = {model.model_fields["kind"].default: model for model in MESSAGES}
_TOKEN_FIELDS = ("prompt_token_ids", "token_ids")


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32, 4 bytes each.

    Raises:
        OverflowError: for a value outside [0, 2^32).
    """
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of :func:`pack_tokens`.

    Raises:
        CodecError: if the length is no multiple of 4.
    """
    if len(data) % 4:
        raise CodecError(f"{len(data)} bytes of token ids are no whole number of uint32")
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
        raise CodecError(f"logprobs in unknown format {code!r}")
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def encode(message: Message, *, half_logprobs: bool = False) -> bytes:
    """One message as bytes; with *half_logprobs*, log-probabilities are rounded to float16.

    What was left at its default is left out, so that a default which the reader knows better (the job's sampling) is
    told from a value that happens to equal it.
    """
    body: dict[str, Any] = message.model_dump(mode="json", exclude_unset=True)
    body = {"v": SCHEMA_VERSION, "kind": message.kind, **body}
    _pack(body, half_logprobs)
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def _pack(body: dict[str, Any], half_logprobs: bool) -> None:
    for name in _TOKEN_FIELDS:
        if name in body:
            body[name] = pack_tokens(body[name])
    if body.get("logprobs") is not None:
        body["logprobs"] = _pack_logprobs(body["logprobs"], half_logprobs)
    if isinstance(prefix := body.get("prefix"), dict):
        _pack(prefix, half_logprobs)


def _unpack(body: dict[str, Any]) -> None:
    for name in _TOKEN_FIELDS:
        if name in body:
            body[name] = unpack_tokens(body[name])
    if body.get("logprobs") is not None:
        body["logprobs"] = _unpack_logprobs(body["logprobs"])
    if isinstance(prefix := body.get("prefix"), dict):
        _unpack(prefix)


def decode(data: bytes) -> Message:
    """The message in *data*.

    Raises:
        CodecError: if the bytes are no msgpack map, the schema version or kind is unknown, or a field is
            missing, unknown or out of range.
    """
    try:
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises a dozen unrelated types, ValueError to UnicodeDecodeError
        raise CodecError(f"no msgpack: {error or type(error).__name__}") from None
    if not isinstance(body, dict):
        raise CodecError(f"a message is a map, this is {type(body).__name__}")
    version = body.pop("v", None)
    if version != SCHEMA_VERSION:
        raise CodecError(f"schema version {version!r}; this program reads {SCHEMA_VERSION}")
    model = _KINDS.get(kind) if isinstance(kind := body.get("kind"), str) else None
    if model is None:
        raise CodecError(f"unknown kind of message: {kind!r}")
    try:
        _unpack(body)
        return model.model_validate(body)
    except CodecError:
        raise
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CodecError(f"{kind}: {where}: {first['msg']}") from None
    except (TypeError, KeyError, ValueError, OverflowError, struct.error) as error:
        raise CodecError(f"{kind}: malformed field: {error}") from None


def problem_id_of(prompt_token_ids: Sequence[int]) -> str:
    """The problem id of a prompt for which the trainer names none: blake2b-128 of its packed token ids, in hex."""
    return blake2b(pack_tokens(prompt_token_ids), digest_size=16).hexdigest()
