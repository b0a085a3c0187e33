"""Rejects requests that an engine would cut off, serve incorrectly, or not serve at all."""

from __future__ import annotations

from rollout_api.manifest.spec import Sampling
from rollout_api.protocol.messages import Partial


def can_continue(sampling: Sampling) -> bool:
    """Return whether a response may be continued from a prefix without changing its output distribution.

    vLLM receives the prefix as part of the prompt. This makes no difference for temperature, top_p, top_k, min_p, logit
    bias, allowed tokens and the repetition penalty, which counts prompts, too; ``max_tokens`` and ``min_tokens`` are
    reduced by its length. Stop strings are also found if they begin in the prefix
    (:mod:`rollout_worker.engine.sampling_params`). It does make a difference for presence and frequency penalties,
    which do not count prompts, and for structured outputs, whose grammar begins after the prompt. A continued response
    with a seed has the same distribution but a different random stream, and therefore other tokens.
    """
    return not (sampling.presence_penalty or sampling.frequency_penalty or sampling.structured_outputs)


def check_admission(
    sampling: Sampling,
    prompt_tokens: int,
    *,
    max_model_len: int,
    raw_logprobs: bool = False,
    routed_experts: bool = False,
    prefix: Partial | None = None,
) -> None:
    """Check that an engine can serve a request.

    Args:
        sampling: the request's settings.
        prompt_tokens: length of its prompt.
        max_model_len: ``engine.maxModelLen`` of the manifest.
        raw_logprobs: whether the engine's log-probabilities are those of the model before filters.
        routed_experts: whether the engine returns the experts of each token.
        prefix: tokens that the response continues from.

    Raises:
        AdmissionError: if it cannot; the message names the setting and what to do.
    """
    if problem := sampling.kept_tokens_problem():
        raise AdmissionError(f"sampling.keptTokens: {problem}")
    if sampling.routed_experts and not routed_experts:
        raise AdmissionError(
            "sampling.routedExperts needs engine.extraArgs: {enable_return_routed_experts: true}, which vLLM offers "
            "for mixture-of-experts models with its V2 model runner"
        )
    if sampling.kept_tokens and raw_logprobs:
        raise AdmissionError("sampling.keptTokens needs engine.logprobsMode: processed")
    if prompt_tokens + sampling.max_tokens > max_model_len:
        raise AdmissionError(
            f"a prompt of {prompt_tokens} tokens and sampling.maxTokens {sampling.max_tokens} exceed "
            f"engine.maxModelLen {max_model_len}; increase the latter or reduce one of the former"
        )
    if prefix is None or not prefix.token_ids:
        return
    if not can_continue(sampling):
        raise AdmissionError(
            "a response with sampling.presencePenalty, frequencyPenalty or structuredOutputs cannot be continued from "
            "a prefix, because its output distribution would change; omit the prefix to sample the response from the "
            "start"
        )
    if len(prefix.token_ids) > sampling.max_tokens:
        raise AdmissionError(
            f"a prefix of {len(prefix.token_ids)} tokens exceeds sampling.maxTokens {sampling.max_tokens}"
        )
    if sampling.returns_logprobs and prefix.logprobs is None:
        raise AdmissionError(
            "sampling.logprobs requires log-probabilities of the prefix, but it has none; add them or omit the prefix"
        )
    if sampling.kept_tokens and prefix.kept_token_ids is None:
        raise AdmissionError(
            "sampling.keptTokens requires the kept tokens of the prefix, but it has none; add its kept_token_ids or "
            "omit the prefix"
        )
    if sampling.returns_prompt_logprobs and prefix.prompt_logprobs is None:
        raise AdmissionError(
            "sampling.promptLogprobs requires the prompt's log-probabilities in the prefix, but it has none; add its "
            "prompt_logprobs or omit the prefix"
        )
    if sampling.top_prompt_logprobs and (prefix.top_prompt_logprobs is None or prefix.prompt_ranks is None):
        raise AdmissionError(
            "sampling.topPromptLogprobs requires prompt_ranks and top_prompt_logprobs in the prefix, but it lacks "
            "them; add them or omit the prefix"
        )
    if sampling.top_logprobs and (prefix.top_logprobs is None or prefix.ranks is None):
        raise AdmissionError(
            "sampling.topLogprobs requires ranks and top_logprobs of the prefix, but it lacks them; add them or omit "
            "the prefix"
        )


class AdmissionError(ValueError):
    """The engine cannot serve a request as it is. The message names the setting."""
