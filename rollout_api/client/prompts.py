"""What a trainer asks for."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self, TypedDict, TypeVar

from rollout_api.errors import InvalidRequestError
from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Drafts, Partial, Purpose, Rollout

_Choice = TypeVar("_Choice", bound=StrEnum)


class SamplingOverrides(TypedDict, total=False):
    """The fields of :class:`Sampling`, each overriding the job's ``spec.sampling``."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    min_tokens: int
    stop: list[str]
    stop_token_ids: list[int]
    allowed_token_ids: list[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float]
    logprobs: bool
    seed: int | None


@dataclass(frozen=True)
class Prompt:
    """One prompt to be sampled ``n`` times. Fields as in :class:`~rollout_api.protocol.messages.RolloutRequest`."""

    token_ids: Sequence[int]
    problem_id: str = ""
    """Ties it to its earlier rollouts, from which drafts are made; default: a hash of the token ids."""
    sampling: Sampling | SamplingOverrides | Mapping[str, Any] = field(default_factory=dict)
    """What is set here overrides the job's sampling."""
    purpose: Purpose = Purpose.TRAIN
    priority: int = 0
    deadline_seconds: float | None = None
    weight_version: int | None = None
    prefix: Partial | None = None
    drafts: Drafts = Drafts.HISTORY
    draft_budget: int | None = None
    half_logprobs: bool = False

    def continue_from(self, rollout: Rollout) -> Self:
        """Ask for the rest of a rollout of this prompt that was broken off (cancelled, or at its deadline).

        The new rollout (one, n = 1) begins with the tokens that were there, and its spans say which weights sampled
        what. It is pinned to no weight version, since its beginning has one already.

        Raises:
            InvalidRequestError: if *rollout* was not broken off.
        """
        if rollout.finish_reason.complete:
            raise InvalidRequestError(f"rollout {rollout.rollout_id} ended by itself; there is no rest of it")
        return replace(
            self, sampling=overrides_of(self.sampling) | {"n": 1}, weight_version=None, prefix=partial_of(rollout)
        )


def partial_of(rollout: Rollout) -> Partial | None:
    """What a request may go on from; None if the rollout has no tokens."""
    if not rollout.token_ids:
        return None
    return Partial(token_ids=rollout.token_ids, logprobs=rollout.logprobs, spans=rollout.spans)


def make_prompts(
    prompts: Sequence[Sequence[int]],
    problem_ids: Sequence[str] | None,
    sampling: Sampling | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
    purpose: Purpose | str,
    priority: int,
    deadline_seconds: float | None,
    weight_version: int | None,
    drafts: Drafts | str,
) -> list[Prompt]:
    """The prompts of ``generate``.

    Raises:
        InvalidRequestError: if arguments do not fit each other.
    """
    if problem_ids is not None and len(problem_ids) != len(prompts):
        raise InvalidRequestError(f"{len(problem_ids)} problem_ids for {len(prompts)} prompts")
    return [
        Prompt(
            tokens,
            problem_id=problem_ids[index] if problem_ids is not None else "",
            sampling=overrides_of(sampling or {}) | dict(overrides),
            purpose=one_of(Purpose, purpose, "purpose"),
            priority=priority,
            deadline_seconds=deadline_seconds,
            weight_version=weight_version,
            drafts=one_of(Drafts, drafts, "drafts"),
        )
        for index, tokens in enumerate(prompts)
    ]


def one_of(kind: type[_Choice], value: str, name: str) -> _Choice:
    """*value* as one of *kind*'s.

    Raises:
        InvalidRequestError: if it is none.
    """
    try:
        return kind(value)
    except ValueError:
        raise InvalidRequestError(f"{name}: {value!r} is none of {', '.join(kind)}") from None


def token_list(tokens: Sequence[int], where: str) -> list[int]:
    """Token ids as plain integers; a list, a tuple, an array or a tensor will do.

    Raises:
        InvalidRequestError: if they are not integers.
    """
    plain = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        if isinstance(plain, str | bytes):
            raise TypeError(f"{type(plain).__name__} given")
        return [operator.index(token) for token in plain]
    except TypeError as error:
        raise InvalidRequestError(f"{where}: token ids must be a sequence of integers ({error})") from None


def overrides_of(sampling: Sampling | Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are set."""
    if isinstance(sampling, Sampling):
        return sampling.model_dump(include=sampling.model_fields_set)
    return dict(sampling)
