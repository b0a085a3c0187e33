"""Translates a request's sampling settings into vLLM's, and implements what vLLM lacks: kept tokens and stop strings.

**Kept tokens** are those that a token was sampled from. vLLM sets the logits of all tokens that ``top_k``, ``top_p``
or another setting removes to minus infinity, and returns log-probabilities of the resulting distribution. The kept
tokens are found among the most likely ones that it returns. vLLM's own option for this, ``return_sampling_mask``, needs
the V2 model runner, and a ``top_k`` and a temperature in every request of the engine.

**Stop strings.** A response that is continued from a prefix is a new request for vLLM, which does not look into the
prefix. The end of a response must not depend on that, so the stop strings of continued responses are found here. In
others, vLLM finds them, and discards what a step has sampled behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rollout_api.manifest.spec import MAX_KEPT_TOP_K, Sampling
from rollout_api.protocol.messages import derived_seed
from rollout_worker.engine.draft_settings import DraftSettings

_MIN_TIED = 16
_DECODING_CONTEXT = 64
"""Number of tokens before a token with which vLLM's detokenizer decodes it."""


def vllm_sampling_params(
    sampling: Sampling,
    stream_name: str,
    draft_settings: DraftSettings | None,
    *,
    prefix_tokens: int = 0,
    interval: int = 0,
    min_logprobs: int = 0,
) -> Any:
    """Return ``vllm.SamplingParams`` for one response.

    With a seed, each response has a random stream of its own, derived from the seed and *stream_name*. The samples of a
    group therefore differ, and a repeated response has the same tokens.

    Args:
        sampling: the request's settings.
        stream_name: name of the response's random stream.
        draft_settings: the response's drafting settings; None on an engine without speculation.
        prefix_tokens: number of response tokens that were sampled earlier and are part of vLLM's prompt; less than
            ``max_tokens``.
        interval: number of new tokens after which they are returned; 0 to return them when the response ends.
        min_logprobs: number of most likely tokens that the engine itself needs at each position.

    Raises:
        ValueError: if vLLM rejects the settings.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    # vLLM would look for them in the new tokens only; see rollout_worker.engine.sampling_params.
    stop = [] if prefix_tokens else sampling.stop
    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens - prefix_tokens,
        min_tokens=max(0, sampling.min_tokens - prefix_tokens),
        stop=stop or None,
        stop_token_ids=sampling.stop_token_ids or None,
        ignore_eos=sampling.ignore_eos,
        allowed_token_ids=sampling.allowed_token_ids or None,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias or None,
        structured_outputs=_structured_outputs(sampling),
        logprobs=max(sampling.top_logprobs, min_logprobs) if sampling.returns_logprobs or min_logprobs else None,
        # Those of a continued response are in its prefix. vLLM would also compute them for the prefix.
        prompt_logprobs=(
            sampling.top_prompt_logprobs if sampling.returns_prompt_logprobs and not prefix_tokens else None
        ),
        seed=None if sampling.seed is None else derived_seed(sampling.seed, f"{stream_name}/{prefix_tokens}"),
        # Only stop strings require the text of the response.
        detokenize=bool(stop),
        extra_args=draft_settings.as_extra_args() if draft_settings else None,
        output_kind=RequestOutputKind.DELTA if interval else RequestOutputKind.FINAL_ONLY,
        # vLLM holds tokens back in the frontend process, which receives them after each step.
        stream_interval=interval or None,
    )


def _structured_outputs(sampling: Sampling) -> Any:
    """Return ``vllm.sampling_params.StructuredOutputsParams``; None if any text may be sampled."""
    if not sampling.structured_outputs:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(**sampling.structured_outputs)


def check_v2_limits(params: Any, num_end_tokens: int) -> None:
    """Check what vLLM's V2 model runner has memory for. It would end the engine.

    *num_end_tokens* is the number of the model's own end tokens, which vLLM adds to the request's.

    Raises:
        ValueError: if a setting of a request has too many tokens.
    """
    from vllm.v1.worker.gpu.sample import logit_bias as limits

    for name, count, limit in (
        ("allowedTokenIds", len(params.allowed_token_ids or ()), limits.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logitBias", len(params.logit_bias or ()), limits.MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stopTokenIds", len(set(params.stop_token_ids or ())), limits.MAX_NUM_STOP_TOKEN_IDS - num_end_tokens),
    ):
        if count > limit and (name != "stopTokenIds" or params.min_tokens):
            raise ValueError(f"sampling.{name} has {count} tokens; the V2 model runner supports at most {limit}")


def end_token_ids(params: Any) -> list[int]:
    """Return the tokens that end a response, from the ``SamplingParams`` of a request that vLLM has accepted.

    vLLM adds the model's own end tokens to them when it accepts the request, unless they are ignored.
    """
    ends = list(params.stop_token_ids or ())
    return ends if params.eos_token_id is None else [*ends, params.eos_token_id]


def _with_ties(top_k: int) -> int:
    """Return how many tokens to ask for: vLLM keeps all tokens whose logit equals the smallest one of *top_k*."""
    return 2 * top_k + _MIN_TIED


MAX_KEPT_WIDTH = _with_ties(MAX_KEPT_TOP_K)
"""Largest number of most likely tokens that an engine asks vLLM for."""


def kept_width(sampling: Sampling, vocabulary: int) -> int:
    """Return how many most likely tokens vLLM must return at each position; 0 if no kept tokens were requested.

    *vocabulary* is the model's number of tokens.
    """
    return min(_with_ties(sampling.top_k), vocabulary) if sampling.kept_tokens else 0


def kept_tokens(logprobs: Mapping[int, Any], width: int, vocabulary: int) -> list[int]:
    """Return the kept tokens at one position, in ascending order; empty if they may be more than vLLM has returned.

    Args:
        logprobs: vLLM's ``Logprob`` of the sampled token and of the *width* most likely ones.
        width: number of most likely tokens that vLLM was asked for.
        vocabulary: number of tokens of the model.
    """
    kept = sorted(token for token, one in logprobs.items() if one.logprob > -math.inf)
    return kept if len(kept) < width or width == vocabulary else []


Decode = Callable[[int], str]
"""Returns the text that a token adds to a response. It is called for each token in order."""


class StopStrings:
    """Reads the tokens of one response and finds the first one that completes a stop string."""

    def __init__(
        self, stop: Sequence[str], min_tokens: int, prefix: Sequence[int], decoder: Callable[[Sequence[int]], Decode]
    ) -> None:
        """Start after the *prefix*, of which only the end is decoded that a stop string may begin in.

        Args:
            stop: the stop strings, none of them empty.
            min_tokens: number of first tokens that cannot end the response. A stop string that one of them completes
                does not count later either.
            prefix: the first tokens of the response.
            decoder: returns a function that decodes the tokens after the given ones, which begin the response.
        """
        self._stop, self._min_tokens = tuple(stop), min_tokens
        self._tail_length = max(map(len, self._stop)) - 1
        self.completed_by_prefix = False
        """Whether the last token of the prefix completes a stop string."""
        num_decoded = _DECODING_CONTEXT
        while not self._read_end(prefix, max(0, len(prefix) - num_decoded), decoder):
            num_decoded *= 2

    def _read_end(self, prefix: Sequence[int], first: int, decoder: Callable[[Sequence[int]], Decode]) -> bool:
        """Read the prefix from index *first* on. Return whether its text is long enough."""
        self._decode = decoder(prefix[:first])
        self._tail, self._num_tokens = "", first
        is_long_enough = first == 0
        for token in prefix[first:]:
            is_long_enough = is_long_enough or len(self._tail) == self._tail_length
            self.completed_by_prefix = self.completed_by(token)
        return is_long_enough

    def completed_by(self, token: int) -> bool:
        """Read the next token of the response, and return whether it completes a stop string."""
        self._num_tokens += 1
        new = self._decode(token)
        if not new:
            return False
        num_known = len(self._tail)
        text = self._tail + new
        self._tail = text[max(0, len(text) - self._tail_length) :]
        if self._num_tokens <= self._min_tokens:
            return False
        return any(text.find(string, max(0, num_known - len(string) + 1)) >= 0 for string in self._stop)


def token_decoder(tokenizer: Any, prompt: Sequence[int], prefix: Sequence[int] = ()) -> Decode:
    """Return a function that decodes the tokens after a prompt and a prefix of the response, as vLLM does."""
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    context = [*prompt[-_DECODING_CONTEXT:], *prefix[-_DECODING_CONTEXT:]][-_DECODING_CONTEXT:]
    request = SimpleNamespace(
        request_id="", prompt_token_ids=context, prompt_embeds=None, sampling_params=SamplingParams()
    )
    detokenizer: Any = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def decode(token: int) -> str:
        # Its method update() would append the text to that of the whole response.
        detokenizer.token_ids.append(token)
        return str(detokenizer.decode_next(token))

    return decode
