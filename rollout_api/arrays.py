"""Rollouts as NumPy arrays: one array per rollout, or a padded batch. This module needs NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from rollout_api.client.trajectory import Trajectory
from rollout_api.errors import InvalidRequestError
from rollout_api.protocol.messages import Rollout, RoutedExperts

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int32]

_NO_VERSION = -1
"""Weight version of tokens that the model has not sampled."""


@dataclass(frozen=True)
class TokenArrays:
    """The response of one rollout; each array has one element per token."""

    token_ids: Integers
    """Token ids."""
    logprobs: Floats | None
    """Behavior log-probabilities; None if the rollout was sampled without ``sampling.logprobs``."""
    weight_versions: Integers
    """Weight version that sampled each token."""
    prompt_logprobs: Floats | None = None
    """Log-probabilities of the prompt's tokens but the first, shape (prompt tokens − 1,); None if the rollout was
    sampled without ``sampling.prompt_logprobs``."""
    kept_token_ids: TokenIds | None = None
    """The kept tokens of all positions, one position after the other, shape (kept tokens,); those of token *t* are
    ``kept_token_ids[kept_offsets[t] : kept_offsets[t + 1]]``. None if the rollout was sampled without
    ``sampling.kept_tokens``."""
    kept_offsets: Integers | None = None
    """Where the kept tokens of each position begin, shape (tokens + 1,)."""
    routed_experts: npt.NDArray[np.unsignedinteger[Any]] | None = None
    """The experts of each token of the prompt and the response, except for the last token, shape (prompt tokens +
    response tokens − 1, layers, experts per token), read-only. None if the rollout was sampled without
    ``sampling.routed_experts``, or has been interrupted."""

    @classmethod
    def of(cls, rollout: Rollout) -> Self:
        """Return the arrays of a rollout.

        Raises:
            InvalidRequestError: the kept tokens of a position are unknown.
        """
        kept = flatten_kept_tokens(rollout.kept_token_ids) if rollout.kept_token_ids is not None else (None, None)
        return cls(
            token_ids=np.array(rollout.token_ids, np.int64),
            logprobs=None if rollout.logprobs is None else np.array(rollout.logprobs, np.float32),
            weight_versions=np.array(rollout.weight_versions, np.int64),
            prompt_logprobs=None if rollout.prompt_logprobs is None else np.array(rollout.prompt_logprobs, np.float32),
            kept_token_ids=kept[0],
            kept_offsets=kept[1],
            routed_experts=None if rollout.routed_experts is None else routed_experts_array(rollout.routed_experts),
        )


@dataclass(frozen=True)
class PaddedBatch:
    """Prompts and responses as arrays of the shape (sequences, tokens), padded on the right.

    Element *t* of a row describes token *t* of the sequence in every array.
    """

    input_ids: Integers
    """Token ids of the prompt and the response, then padding."""
    attention_mask: Integers
    """1 for tokens of the prompt and the response, 0 for padding."""
    loss_mask: Integers
    """1 for tokens that the model has sampled, 0 for the prompt, the environment's tokens and padding."""
    logprobs: Floats | None
    """Behavior log-probabilities; 0 where ``loss_mask`` is 0. None if the rollouts were sampled without them."""
    weight_version: Integers
    """Weight version that sampled each token; -1 where ``loss_mask`` is 0."""


@dataclass(frozen=True)
class _Sequence:
    """A prompt and the response to it."""

    prompt: Sequence[int]
    response: Sequence[int]
    mask: Sequence[int]
    """1 for each token of the response that the model has sampled."""
    logprobs: Sequence[float] | None
    versions: Sequence[int]
    """Weight version of each token that the model has sampled."""
    name: str

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


def pad_batch(
    samples: Sequence[tuple[Sequence[int], Rollout] | Trajectory], *, pad_token_id: int, pad_to_multiple_of: int = 1
) -> PaddedBatch:
    """Return prompts and responses as a padded batch.

    Args:
        samples: the token ids of each prompt with the rollout that responds to it, or trajectories.
        pad_token_id: token id that pads ``input_ids``.
        pad_to_multiple_of: the padded length is a multiple of this number of tokens.

    Raises:
        InvalidRequestError: there are no samples, or only some of them have log-probabilities.
    """
    sequences = [_sequence(sample) for sample in samples]
    if not sequences:
        raise InvalidRequestError("a padded batch: no rollouts")
    longest = max(sequence.length for sequence in sequences)
    shape = (len(sequences), -(-longest // pad_to_multiple_of) * pad_to_multiple_of)
    input_ids = np.full(shape, pad_token_id, np.int64)
    attention_mask, loss_mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    logprobs = np.zeros(shape, np.float32) if _have_logprobs(sequences) else None
    weight_version = np.full(shape, _NO_VERSION, np.int64)
    for row, sequence in enumerate(sequences):
        start, end = len(sequence.prompt), sequence.length
        input_ids[row, :start] = sequence.prompt
        input_ids[row, start:end] = sequence.response
        attention_mask[row, :end] = 1
        loss_mask[row, start:end] = sequence.mask
        weight_version[row, loss_mask[row] == 1] = sequence.versions
        if logprobs is not None and sequence.logprobs is not None:
            logprobs[row, start:end] = sequence.logprobs
    return PaddedBatch(input_ids, attention_mask, loss_mask, logprobs, weight_version)


def flatten_kept_tokens(kept: Sequence[Sequence[int]]) -> tuple[TokenIds, Integers]:
    """Return the kept tokens of all positions, one position after the other, and where each position begins.

    Args:
        kept: the kept tokens of each position.

    Returns:
        Arrays of the shapes (kept tokens,) and (positions + 1,).

    Raises:
        InvalidRequestError: those of a position are unknown, which is not the same as none.
    """
    unknown = next((position for position, tokens in enumerate(kept) if not tokens), None)
    if unknown is not None:
        raise InvalidRequestError(
            f"the kept tokens at position {unknown} are unknown, because very many tokens tie at the limit of top_k; "
            "leave the rollout out, or sample it again"
        )
    offsets = np.zeros(len(kept) + 1, np.int64)
    np.cumsum([len(tokens) for tokens in kept], out=offsets[1:])
    return np.array([token for tokens in kept for token in tokens], np.int32), offsets


def routed_experts_array(experts: RoutedExperts) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return a read-only view of routed experts, of their shape."""
    return np.frombuffer(experts.data, np.dtype(experts.dtype).newbyteorder("<")).reshape(experts.shape)


def _sequence(sample: tuple[Sequence[int], Rollout] | Trajectory) -> _Sequence:
    if isinstance(sample, Trajectory):
        versions = [version for turn in sample.turns for version in turn.weight_versions]
        name = f"trajectory {sample.trajectory_id}"
        return _Sequence(
            sample.prompt_token_ids, sample.response_token_ids, sample.mask, sample.logprobs, versions, name
        )
    prompt, rollout = sample
    return _Sequence(
        prompt,
        rollout.token_ids,
        [1] * rollout.num_tokens,
        rollout.logprobs,
        rollout.weight_versions,
        f"rollout {rollout.rollout_id}",
    )


def _have_logprobs(sequences: Sequence[_Sequence]) -> bool:
    """Return whether the model's tokens have log-probabilities. Sequences without such tokens need none.

    Raises:
        InvalidRequestError: only some have them; zeros in their place would mean that the model was certain.
    """
    sampled = [sequence for sequence in sequences if sequence.versions]
    without = [sequence for sequence in sampled if sequence.logprobs is None]
    if without and len(without) < len(sampled):
        raise InvalidRequestError(
            f"a padded batch: {without[0].name} was sampled without log-probabilities, but others were sampled with "
            "them; request all rollouts of a batch with logprobs=True"
        )
    return not without
