"""From a request's sampling settings to vLLM's, with what the drafter needs to know alongside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Drafts, Partial
from rollout_worker.engine.compat import streaming, top_p_for_drafts

EXTRA_ARGS_KEY = "das"

Integers = npt.NDArray[np.int64]

SOURCES: dict[Drafts, tuple[str, ...]] = {
    Drafts.HISTORY: ("history", "self", "siblings", "foreign"),
    Drafts.OWN_TEXT: ("self",),
    Drafts.OFF: ("self",),  # the drafter follows every rollout; a budget of 0 keeps it from drafting
}
"""The drafter's names of what a request may be drafted from."""


class AdmissionError(ValueError):
    """A request that this engine cannot serve as it stands; the text names the setting."""


@dataclass(frozen=True)
class DraftScope:
    """What the drafter is told about a request, carried through vLLM's ``extra_args``."""

    key: str
    """The rollout's id."""
    problem: str
    max_tokens: int
    """No draft reaches beyond this many response tokens."""
    min_tokens: int = 0
    """No draft reaches across this many response tokens; see :func:`draft_limits`."""
    budget: int | None = None
    """Most tokens drafted a step; None: the job's ``maxDraftTokens``."""
    sources: Sequence[str] = SOURCES[Drafts.HISTORY]
    later_turn: bool = False
    """Whether the response goes on a trajectory: the end of the prompt is its context then."""
    undrafted: int = 0
    """For so many of the response's first tokens nothing is drafted."""
    prefix: int = 0
    """How many tokens at the end of what vLLM takes for the prompt are the response's own, sampled earlier."""

    def as_extra_args(self) -> dict[str, Any]:
        """The value for ``SamplingParams.extra_args``."""
        return {
            EXTRA_ARGS_KEY: {
                "key": self.key,
                "problem": self.problem,
                "max_tokens": self.max_tokens,
                "min_tokens": self.min_tokens,
                "budget": self.budget,
                "sources": list(self.sources),
                "later_turn": self.later_turn,
                "undrafted": self.undrafted,
                "prefix": self.prefix,
            }
        }

    @classmethod
    def from_extra_args(cls, extra_args: dict[str, Any] | None) -> DraftScope | None:
        """The scope in a request's ``extra_args``; None for a request that is to have no drafts."""
        if not extra_args or EXTRA_ARGS_KEY not in extra_args:
            return None
        return cls(**extra_args[EXTRA_ARGS_KEY])


def draft_limits(
    produced: Integers, *, undrafted: Integers, min_tokens: Integers, max_tokens: Integers, most: Integers
) -> Integers:
    """How many tokens to draft at most for responses of *produced* tokens; arrays of shape (responses,).

    The token after the last draft is sampled as well, so one position is left to it. While a response is shorter than
    ``min_tokens``, vLLM bars its end one position too far in a step with drafts, and for the token after them however
    far they reach (vllm#41768, seen in 0.32): a step that stays below ``min_tokens`` is exact.
    """
    ends = np.where(produced < min_tokens, min_tokens, max_tokens)
    limits = np.maximum(np.minimum(most, ends - produced - 1), 0)
    return np.asarray(np.where(produced < undrafted, 0, limits))


def can_continue(sampling: Sampling) -> bool:
    """Whether a response that goes on from a prefix has the law of one that was never interrupted.

    vLLM is given the prefix as part of the prompt, which changes nothing for temperature, top_p, top_k, min_p, biases,
    allowed tokens, the repetition penalty (it counts prompts too), ``max_tokens`` and ``min_tokens`` (they are lowered
    by its length). Not so for presence and frequency penalties, which do not count prompts, and for stop strings, which
    are looked for in what is sampled after it alone: one that spans the border would be missed. A seeded response
    keeps its law; the stream is another, named by the prefix's length, and so are its tokens.
    """
    return not (sampling.presence_penalty or sampling.frequency_penalty or sampling.stop)


def admit(
    sampling: Sampling, prompt_tokens: int, *, max_model_len: int, speculating: bool, prefix: Partial | None = None
) -> None:
    """Refuse a request that would be cut, served wrongly or not at all.

    Raises:
        AdmissionError: naming the setting and the way out.
    """
    if speculating and (refused := sampling.refused_with_drafts()):
        raise AdmissionError(
            f"sampling.{refused[0]}: vLLM does not support it with speculation; remove it, or run the job with "
            "speculation.policy: off"
        )
    if prompt_tokens + sampling.max_tokens > max_model_len:
        raise AdmissionError(
            f"a prompt of {prompt_tokens} tokens and sampling.maxTokens {sampling.max_tokens} exceed "
            f"engine.maxModelLen {max_model_len}; raise the one or lower the other"
        )
    if prefix is None or not prefix.token_ids:
        return
    if not can_continue(sampling):
        raise AdmissionError(
            "sampling.presencePenalty, frequencyPenalty and stop: with them a response cannot go on from a prefix "
            "by its own law; leave the prefix out, to sample it anew"
        )
    if len(prefix.token_ids) > sampling.max_tokens:
        raise AdmissionError(
            f"a prefix of {len(prefix.token_ids)} tokens exceeds sampling.maxTokens {sampling.max_tokens}"
        )
    if sampling.logprobs and prefix.logprobs is None:
        raise AdmissionError("sampling.logprobs: the prefix has none; give them, or leave the prefix out")


def vllm_sampling(
    sampling: Sampling, stream: str, scope: DraftScope | None, *, prefix: int = 0, interval: int = 0
) -> Any:
    """``vllm.SamplingParams`` for one rollout.

    A seeded job gives each rollout its own stream, derived from the seed and *stream*, so that the samples of a group
    differ and a repeated rollout repeats.

    Args:
        sampling: the request's settings.
        stream: names the random stream of a seeded rollout.
        scope: of its drafts; None on an engine without speculation.
        prefix: response tokens that were sampled earlier and that vLLM takes for prompt, fewer than ``max_tokens``.
        interval: hand tokens over whenever there are so many new ones; 0: when the response ends.
    """
    from vllm import SamplingParams

    seed = None
    if sampling.seed is not None:
        name = f"{sampling.seed}/{stream}/{prefix}" if prefix else f"{sampling.seed}/{stream}"
        digest = blake2b(name.encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "little") >> 1
    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=top_p_for_drafts(sampling.top_p, sampling.top_k) if scope else sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens - prefix,
        min_tokens=max(0, sampling.min_tokens - prefix),
        stop=sampling.stop or None,
        stop_token_ids=sampling.stop_token_ids or None,
        allowed_token_ids=sampling.allowed_token_ids or None,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias or None,
        logprobs=0 if sampling.logprobs else None,
        seed=seed,
        # text is needed only to find stop strings
        detokenize=bool(sampling.stop),
        extra_args=scope.as_extra_args() if scope else None,
        **streaming(interval),
    )


def end_tokens(sampling: Any) -> list[int]:
    """Tokens that end a response under these ``SamplingParams``, as vLLM holds them for a request that it has taken.

    It adds the model's own to them when the request comes in.
    """
    ends = list(sampling.stop_token_ids or ())
    return ends if sampling.eos_token_id is None else [*ends, sampling.eos_token_id]
