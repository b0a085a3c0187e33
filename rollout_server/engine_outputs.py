"""Translates rollouts into outputs of vLLM's engine core."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats, RequestSpecDecodeMetrics
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplingMaskLists

from rollout_api.arrays import routed_experts_array
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
    """The outputs that vLLM's server builds one response from.

    Args:
        request: the request.
        reported_draft_length: maximum number of tokens of a draft, if the response has metrics of its drafts.
    """

    def __init__(self, request: EngineCoreRequest, reported_draft_length: int | None = None) -> None:
        params = request.params
        self._reported_draft_length = reported_draft_length
        self._request_id = request.request_id
        self._num_prompt_tokens = len(request.prompt_token_ids or ())
        self._prompt_token_ids = list(request.prompt_token_ids or ())
        self._awaits_prompt_logprobs = params.prompt_logprobs is not None
        self._num_prompt_alternatives: int = params.prompt_logprobs or 0
        self._num_alternatives: int | None = params.logprobs
        """Number of most likely tokens per position that the server wants; None without log-probabilities."""
        self._end_tokens = frozenset(end_token_ids(params))
        self._num_tokens = 0
        self._first_routed_token: int = params.routed_experts_prompt_start

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
        last = EngineCoreOutput(request_id=self._request_id, new_token_ids=[], finish_reason=end)
        outputs = [
            *self._outputs(remaining, None if is_ended_by_text else end, rollout.num_cached_tokens),
            EngineCoreOutputs(outputs=[last]),
        ]
        if self._reported_draft_length is not None:
            outputs[0].outputs[0].spec_decode_metrics = _draft_metrics(rollout, self._reported_draft_length)
        if rollout.routed_experts is not None:
            rows = routed_experts_array(rollout.routed_experts)
            outputs[0].outputs[0].routed_experts = rows[self._first_routed_token :]
        yield from outputs

    def _outputs(self, tokens: Partial, end: FinishReason | None, num_cached: int) -> Iterator[EngineCoreOutputs]:
        """Yield one output for each weight version; the last one has the finish reason *end*."""
        length = len(tokens.token_ids)
        bounds = pairwise([*(span.start for span in tokens.weight_spans), length])
        for (start, stop), span in zip(bounds, tokens.weight_spans, strict=True):
            output = EngineCoreOutput(
                request_id=self._request_id,
                new_token_ids=tokens.token_ids[start:stop],
                new_logprobs=self._logprobs(tokens, start, stop),
                new_sampling_mask=_sampling_mask(tokens, start, stop),
                new_prompt_logprobs_tensors=self._prompt_logprobs(tokens),
                finish_reason=end if stop == length else None,
                # vLLM reads it from the first output of a response only.
                prefill_stats=PrefillStats(
                    num_prompt_tokens=self._num_prompt_tokens,
                    num_cached_tokens=min(num_cached, self._num_prompt_tokens),
                ),
            )
            yield EngineCoreOutputs(outputs=[output], weight_version=str(span.weight_version))
        self._num_tokens += length

    def _prompt_logprobs(self, tokens: Partial) -> LogprobsTensors | None:
        """Return the log-probabilities of the prompt as vLLM's sampler would return them, once per response."""
        logprobs = tokens.prompt_logprobs
        if not self._awaits_prompt_logprobs or not logprobs:
            return None
        self._awaits_prompt_logprobs = False
        ranks = tokens.prompt_ranks or [0] * len(logprobs)
        token_rows: list[list[int]] = [[token] for token in self._prompt_token_ids[1:]]
        logprob_rows = [[logprob] for logprob in logprobs]
        if tokens.top_prompt_logprobs:
            for index, likely in enumerate(tokens.top_prompt_logprobs):
                token_rows[index] += list(likely)[: self._num_prompt_alternatives]
                logprob_rows[index] += list(likely.values())[: self._num_prompt_alternatives]
        return LogprobsTensors(
            logprob_token_ids=torch.tensor(token_rows),
            logprobs=torch.tensor(logprob_rows, dtype=torch.float32),
            selected_token_ranks=torch.tensor(ranks),
        )

    def _logprobs(self, tokens: Partial, start: int, stop: int) -> LogprobsLists | None:
        """Return what vLLM's sampler would return: at each position the sampled token, then the most likely ones.

        A position has fewer of them if fewer tokens can be sampled. Ranks that are not known are 0.
        """
        if self._num_alternatives is None:
            return None
        logprobs = tokens.logprobs or []
        ranks = np.array(tokens.ranks[start:stop] if tokens.ranks is not None else [0] * (stop - start), dtype=np.int64)
        if not tokens.top_logprobs:
            return LogprobsLists(
                logprob_token_ids=np.array(tokens.token_ids[start:stop], dtype=np.int64)[:, None],
                logprobs=np.array(logprobs[start:stop], dtype=np.float32)[:, None],
                sampled_token_ranks=ranks,
            )
        token_rows, logprob_rows = [], []
        for index in range(start, stop):
            likely = list(tokens.top_logprobs[index].items())[: self._num_alternatives]
            row_tokens, row_logprobs = zip((tokens.token_ids[index], logprobs[index]), *likely, strict=True)
            token_rows.append(np.array(row_tokens, dtype=np.int64))
            logprob_rows.append(np.array(row_logprobs, dtype=np.float32))
        # vLLM's server reads them one position after the other, so that they may have different lengths.
        rows: Any = token_rows, logprob_rows
        return LogprobsLists(*rows, sampled_token_ranks=ranks)


def _draft_metrics(rollout: Rollout, max_draft_length: int) -> RequestSpecDecodeMetrics:
    """Return a rollout's drafts as vLLM's scheduler counts them, except that all steps are counted.

    vLLM leaves out the steps without a draft, which rollouts do not count.
    """
    metrics = RequestSpecDecodeMetrics.new(max_draft_length)
    metrics.num_draft_tokens = rollout.num_draft_tokens
    # A token that is no accepted draft token ends a step.
    is_accepted = "".join("1" if source else "0" for source in rollout.token_sources or [])
    for accepted in filter(None, is_accepted.split("0")):
        metrics.histogram[min(len(accepted), max_draft_length)] += 1
    metrics.histogram[0] = max(0, rollout.num_decoding_steps - sum(metrics.histogram))
    return metrics


def _sampling_mask(tokens: Partial, start: int, stop: int) -> SamplingMaskLists | None:
    """Return the kept tokens of a part of the response as vLLM's sampler would, which calls them sampling masks."""
    if tokens.kept_token_ids is None:
        return None
    kept = tokens.kept_token_ids[start:stop]
    # An empty list stands for unknown tokens, which vLLM does not know; it never returns one.
    offsets = np.cumsum([0, *map(len, kept)], dtype=np.int64)
    return SamplingMaskLists(np.array([token for one in kept for token in one], dtype=np.int32), offsets)
