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

from rollout_api.job import Sampling

SCHEMA_VERSION = 1
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


class RolloutRequest(_Message):
    """Ask for ``sampling.n`` rollouts of one prompt."""

    kind: Literal["request"] = "request"
    job_uid: str = Field(min_length=1)
    request_id: str = Field(min_length=1, description="The client's idempotency key.")
    problem_id: str = Field(min_length=1, max_length=256)
    prompt_token_ids: list[TokenId] = Field(min_length=1)
    sampling: Sampling
    purpose: Purpose = Purpose.TRAIN
    draft_budget: int | None = Field(default=None, ge=0, description="Most tokens drafted a step; default: the job's.")

    def rollout_id(self, sample: int, turn: int = 0) -> RolloutId:
        """Identity of this request's rollout number *sample*."""
        return RolloutId(self.job_uid, self.request_id, sample, turn)


class Rollout(_Message):
    """One finished rollout."""

    kind: Literal["rollout"] = "rollout"
    rollout_id: str
    problem_id: str
    purpose: Purpose = Purpose.TRAIN
    token_ids: list[TokenId]
    logprobs: list[float] | None = Field(
        default=None, description="Log-probability of each token under the policy that sampled it."
    )
    spans: list[WeightSpan] = Field(min_length=1, description="Which weight version sampled which tokens.")
    finish_reason: FinishReason
    drafted: int = Field(default=0, ge=0, description="Draft tokens verified for this rollout.")
    accepted: int = Field(default=0, ge=0, description="Draft tokens accepted.")
    reward: float | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.token_ids)} tokens")
        if self.spans[0].start != 0:
            raise ValueError("the first weight span must start at 0")
        return self

    @property
    def weight_version(self) -> int:
        """The version that sampled the last token."""
        return self.spans[-1].weight_version


Message = RolloutRequest | Rollout
_KINDS: dict[str, type[RolloutRequest] | type[Rollout]] = {"request": RolloutRequest, "rollout": Rollout}
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
    """One message as bytes; with *half_logprobs*, log-probabilities are rounded to float16."""
    body: dict[str, Any] = {"v": SCHEMA_VERSION, **message.model_dump(mode="json", exclude_defaults=True)}
    body["kind"] = message.kind
    for name in _TOKEN_FIELDS:
        if name in body:
            body[name] = pack_tokens(body[name])
    if body.get("logprobs") is not None:
        body["logprobs"] = _pack_logprobs(body["logprobs"], half_logprobs)
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


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
        for name in _TOKEN_FIELDS:
            if name in body:
                body[name] = unpack_tokens(body[name])
        if body.get("logprobs") is not None:
            body["logprobs"] = _unpack_logprobs(body["logprobs"])
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
