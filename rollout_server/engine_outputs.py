"""Translates rollouts into outputs of vLLM's engine core."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from rollout_api.protocol.messages import FinishReason as RolloutEnd
from rollout_api.protocol.messages import Partial, Rollout
from rollout_worker.engine.sampling_params import end_token_ids

_ENDS = {
    RolloutEnd.STOP: FinishReason.STOP,
    RolloutEnd.LENGTH: FinishReason.LENGTH,
    RolloutEnd.DEADLINE: FinishReason.ABORT,
    RolloutEnd.CANCELLED: FinishReason.ABORT,
}


class ResponseOutputs:
    """The outputs from which vLLM's server builds one response.

    Args:
        request: the request of vLLM's server for this response.
    """

    def __init__(self, request: EngineCoreRequest) -> None:
        params = request.params
        self._request_id = request.request_id
        self._num_prompt_tokens = len(request.prompt_token_ids or ())
        self._with_logprobs = params.logprobs is not None
        self._end_tokens = frozenset(end_token_ids(params))
        self._num_tokens = 0

    def append(self, tokens: Partial) -> Iterator[EngineCoreOutputs]:
        """Yield the outputs for the next tokens of an unfinished rollout."""
        yield from self._outputs(tokens, None, 0)

    def finish(self, rollout: Rollout) -> Iterator[EngineCoreOutputs]:
        """Yield the outputs for the remaining tokens of a finished rollout, which must not have failed.

        If a stop string has ended it, the output with its last token has no finish reason, because vLLM's server looks
        for stop strings itself and cuts the text where it finds one. The last output, which has no tokens, ends the
        response in any case.
        """
        end, tokens = _ENDS[rollout.finish_reason], rollout.token_ids
        is_ended_by_text = end is FinishReason.STOP and not (tokens and tokens[-1] in self._end_tokens)
        remaining = rollout.since(self._num_tokens)
        yield from self._outputs(remaining, None if is_ended_by_text else end, rollout.num_cached_tokens)
        last = EngineCoreOutput(request_id=self._request_id, new_token_ids=[], finish_reason=end)
        yield EngineCoreOutputs(outputs=[last])

    def _outputs(self, tokens: Partial, end: FinishReason | None, num_cached: int) -> Iterator[EngineCoreOutputs]:
        """Yield one output for each weight version; the last one has the finish reason *end*."""
        length = len(tokens.token_ids)
        bounds = pairwise([*(span.start for span in tokens.weight_spans), length])
        for (start, stop), span in zip(bounds, tokens.weight_spans, strict=True):
            output = EngineCoreOutput(
                request_id=self._request_id,
                new_token_ids=tokens.token_ids[start:stop],
                new_logprobs=_logprobs(tokens, start, stop) if self._with_logprobs else None,
                finish_reason=end if stop == length else None,
                # vLLM reads it from the first output of a response only.
                prefill_stats=PrefillStats(
                    num_prompt_tokens=self._num_prompt_tokens,
                    num_cached_tokens=min(num_cached, self._num_prompt_tokens),
                ),
            )
            yield EngineCoreOutputs(outputs=[output], weight_version=str(span.weight_version))
        self._num_tokens += length


def _logprobs(tokens: Partial, start: int, stop: int) -> LogprobsLists:
    """Return the log-probabilities of the sampled tokens, whose ranks are not known and are reported as 0."""
    logprobs = tokens.logprobs or []
    return LogprobsLists(
        logprob_token_ids=np.asarray(tokens.token_ids[start:stop], dtype=np.int64)[:, None],
        logprobs=np.asarray(logprobs[start:stop], dtype=np.float32)[:, None],
        sampled_token_ranks=np.zeros(stop - start, dtype=np.int64),
    )
