"""Translates vLLM's sampling parameters into those of a request to a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout_api.manifest.spec import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from vllm import SamplingParams

_UNSUPPORTED = {
    "prompt_logprob_token_ids": "prompt_logprob_token_ids",
    "logprob_token_ids": "logprob_token_ids",
    "structured_outputs": "structured outputs, which response formats, strict tools and required tools use",
    "bad_words": "bad_words",
    "repetition_detection": "repetition_detection",
    "thinking_token_budget": "thinking_token_budget",
}
"""Parameters that engines of a job do not apply, and how errors call them. They must have vLLM's defaults."""


class UnsupportedSamplingError(ValueError):
    """A sampling parameter cannot be applied; ``parameter`` is its name."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def sampling_overrides(params: SamplingParams) -> dict[str, Any]:
    """Return the settings of a request, as fields of :class:`rollout_api.Sampling`.

    All settings but the seed are explicit, because the job's defaults have been applied before.

    Args:
        params: parameters of a prompt, as vLLM's server passes them to its engine.

    Raises:
        UnsupportedSamplingError: a parameter cannot be applied.
    """
    from vllm import SamplingParams

    defaults = SamplingParams()
    for name in _UNSUPPORTED:
        if getattr(params, name, None) != getattr(defaults, name, None):
            raise UnsupportedSamplingError(
                name, f"engines of a rollout job do not support {_UNSUPPORTED[name]}; remove it"
            )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
            raise UnsupportedSamplingError(
                name,
                f"engines of a rollout job return at most the {MAX_TOP_LOGPROBS} most likely tokens; ask for fewer",
            )
    overrides: dict[str, Any] = {
        "n": params.n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(0, params.top_k),
        "min_p": params.min_p,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop": list(params.stop or ()),
        "stop_token_ids": list(params.stop_token_ids or ()),
        "allowed_token_ids": list(params.allowed_token_ids or ()),
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": dict(params.logit_bias or {}),
        "logprobs": params.logprobs is not None,
    }
    if params.seed is not None:
        # Without a seed of its own, a request has the job's. Seeds of a job have 31 bits.
        overrides["seed"] = params.seed % 2**31
    if params.logprobs:
        overrides["top_logprobs"] = params.logprobs
    if params.prompt_logprobs is not None:
        overrides["prompt_logprobs"] = True
    if params.prompt_logprobs:
        overrides["top_prompt_logprobs"] = params.prompt_logprobs
    if params.ignore_eos:
        overrides["ignore_eos"] = True
    return overrides
