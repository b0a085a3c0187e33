"""The tokens of a response, while it is generated and afterwards."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from rollout_api.protocol.history_encoding import DRAFT_SOURCES, SAMPLED, encode_draft_sources
from rollout_api.protocol.messages import FinishReason, Partial, RoutedExperts, WeightSpan, spans_since
from rollout_store.job.engines import EngineError
from rollout_worker.engine.sampling_params import StopStrings
from rollout_worker.engine.vllm_client import VllmClient, ignore_failure

logger = logging.getLogger(__name__)
_MIN_LOGPROB = -9999.0
"""The value for the log-probability −∞ of a prompt token, as in vLLM's servers."""
_SOURCE_CODES = range(SAMPLED + 1, SAMPLED + 1 + len(DRAFT_SOURCES))


class UnusableOutputError(RuntimeError):
    """What the model has returned cannot be part of a response. The text says why."""


class NotFiniteError(ValueError):
    """A log-probability is not a number, or is infinite where it cannot be."""


class ResponseDraftCounts(NamedTuple):
    """What the drafter knows about the draft tokens of one response."""

    drafted_by_source: Sequence[int] = (0,) * len(DRAFT_SOURCES)
    """Number of verified draft tokens of each of the :data:`~rollout_api.protocol.history_encoding.DRAFT_SOURCES`."""
    token_sources: bytes = b""
    """Code of each response token up to the last accepted draft token; see
    :mod:`rollout_api.protocol.history_encoding`.

    It includes the prefix, and accepted draft tokens beyond the end of the response, which vLLM cuts off."""
    length_class: str = ""
    """The last length class of the rollout; '' if the draft policy determines none."""

    @property
    def drafted(self) -> int:
        """Number of verified draft tokens."""
        return sum(self.drafted_by_source)

    def sources_of(self, num_tokens: int) -> bytes:
        """Return the code of each of the response's *num_tokens* tokens."""
        return self.token_sources[:num_tokens].ljust(num_tokens, bytes([SAMPLED]))


class DraftCountReader:
    """Reads the counts; the responses that end in the same step share one round trip to the worker processes."""

    def __init__(self, client: VllmClient) -> None:
        self._client = client
        self._ended: list[str] = []
        self._reading: asyncio.Task[dict[str, ResponseDraftCounts]] | None = None
        self._has_failed = False
        """Whether counts could not be read once, which is logged."""

    async def take(self, call_id: str) -> ResponseDraftCounts:
        """Return the counts of a response that has ended; the drafter forgets it."""
        return (await asyncio.shield(self._request(call_id))).get(call_id, ResponseDraftCounts())

    def discard(self, call_id: str) -> None:
        """Let the drafter forget a response, in the background."""
        self._request(call_id).add_done_callback(ignore_failure)

    def _request(self, call_id: str) -> asyncio.Task[dict[str, ResponseDraftCounts]]:
        self._ended.append(call_id)
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
        return self._reading

    async def _read(self) -> dict[str, ResponseDraftCounts]:
        await asyncio.sleep(0)  # so that the other responses that end in this step are included
        ended, self._ended, self._reading = self._ended, [], None
        counts: dict[str, ResponseDraftCounts] = {}
        try:
            ranks = await self._client.collective_rpc("das_take_counts", ended, action="reading draft counts")
        except EngineError as error:
            if self._client.stopped:
                raise
            if not self._has_failed:  # a fault of the drafter must not cost responses
                logger.warning("Responses have no counts of their drafts: %s", error)
            self._has_failed = True
            return counts
        for rank in ranks:
            counts |= {call_id: ResponseDraftCounts(*fields) for call_id, fields in rank.items()}
        return counts


_NO_DRAFTS = ResponseDraftCounts()


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a prompt; each list has one entry for each of its tokens but the first."""

    logprobs: list[float]
    """Log-probability of each token under the model's distribution, without temperature and filters."""
    ranks: list[int] | None = None
    """Rank of each token, 1 for the most likely one; None if the most likely tokens were not requested."""
    top_logprobs: list[dict[int, float]] | None = None
    """The most likely tokens with their log-probabilities; None if they were not requested."""

    @classmethod
    def from_vllm(cls, positions: Sequence[Mapping[int, Any] | None], prompt: Sequence[int], count: int) -> Self | None:
        """Return the log-probabilities in a ``RequestOutput`` of vLLM.

        At the first of the *positions* there are none; *count* most likely tokens are returned.

        Returns:
            None if vLLM has not computed all of them, because the response was stopped before.

        Raises:
            NotFiniteError: some are not numbers.
        """
        if len(positions) != len(prompt):
            return None
        known = [(position, token) for position, token in zip(positions, prompt, strict=True) if position is not None]
        if len(known) != len(prompt) - 1:
            return None
        logprobs = [position[token].logprob for position, token in known]
        if any(map(math.isnan, logprobs)):
            raise NotFiniteError("the model has computed log-probabilities of the prompt that are not numbers")
        return cls(
            logprobs=[max(_MIN_LOGPROB, logprob) for logprob in logprobs],
            ranks=[position[token].rank for position, token in known] if count else None,
            top_logprobs=[_most_likely(position, count) for position, _ in known] if count else None,
        )

    @classmethod
    def of_prefix(cls, prefix: Partial) -> Self | None:
        """Return the log-probabilities that a prefix has; None if it has none."""
        if prefix.prompt_logprobs is None:
            return None
        return cls(prefix.prompt_logprobs, prefix.prompt_ranks, prefix.top_prompt_logprobs)

    def fields(self) -> dict[str, Any]:
        """Return them as fields of a partial."""
        fields: dict[str, Any] = {"prompt_logprobs": self.logprobs}
        if self.top_logprobs is not None:
            fields |= {"prompt_ranks": self.ranks, "top_prompt_logprobs": self.top_logprobs}
        return fields


@dataclass(frozen=True)
class GenerationResult:
    """One response of an engine, including the prefix that it was continued from."""

    token_ids: list[int]
    logprobs: list[float] | None
    """Behavior log-probability of each token; None if they were not requested."""
    ranks: list[int] | None
    """Rank of each token, 1 for the most likely one; None if the most likely tokens were not requested."""
    top_logprobs: list[dict[int, float]] | None
    """The most likely tokens at each position with their log-probabilities; None if they were not requested."""
    kept_token_ids: list[list[int]] | None
    """The tokens among which each token was sampled, empty where they are unknown; None if they were not requested."""
    weight_spans: list[WeightSpan]
    """Which weight version sampled which tokens; empty without tokens."""
    finish_reason: FinishReason | None
    """STOP or LENGTH; None if the caller stopped the response."""
    num_decoding_steps: int
    """Number of decoding steps on this engine; the prefix took none."""
    draft_tokens_by_source: dict[str, int]
    """Number of verified draft tokens, by source; sources without any are left out."""
    accepted_tokens_by_source: dict[str, int]
    """The same of accepted draft tokens up to the end of the response."""
    draft_sources: bytes | None
    """The sources of accepted draft tokens, as in a rollout; None if no draft was verified."""
    num_cached_tokens: int
    """Number of tokens of prompt and prefix whose keys and values were cached."""
    started: float
    """``time.monotonic()`` when the engine was asked for the response."""
    finished: float
    """``time.monotonic()`` when the last token arrived."""
    prompt_logprobs: PromptLogprobs | None = None
    """Those of the prompt; None if they were not requested, or if the response was stopped before."""
    routed_experts: RoutedExperts | None = None
    """Those of prompt and response; None if they were not requested or the response was interrupted."""
    length_class: str = ""
    """The last length class of the rollout; '' if the draft policy determines none."""

    @property
    def num_draft_tokens(self) -> int:
        """Number of verified draft tokens."""
        return sum(self.draft_tokens_by_source.values())

    @property
    def num_accepted_tokens(self) -> int:
        """Number of tokens that are accepted draft tokens."""
        return sum(self.accepted_tokens_by_source.values())

    @property
    def tokens(self) -> Partial:
        """The tokens, with their log-probabilities and weight spans."""
        return _partial(
            self.token_ids,
            self.logprobs,
            self.ranks,
            self.top_logprobs,
            self.kept_token_ids,
            self.weight_spans,
            self.prompt_logprobs,
        )


class TokensSoFar:
    """The tokens of a response that is being generated, without copying them."""

    def __init__(self, response: ResponseBuilder, starts: Sequence[tuple[int, int]]) -> None:
        """Refer to the current tokens of *response*; see :meth:`ResponseBuilder.weight_spans` for *starts*."""
        self._response, self._starts = response, starts

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self._response.token_ids)

    def since(self, first: int) -> Partial:
        """Return the tokens from index *first* on."""
        return self._response.since(first, self._starts)


class ResponseBuilder:
    """Collects the tokens of a response as vLLM returns them."""

    def __init__(
        self,
        prefix: Partial | None,
        *,
        logprobs: bool,
        top_logprobs: int = 0,
        prompt_logprobs: bool = False,
        kept_tokens: Callable[[Mapping[int, Any]], list[int]] | None = None,
        stop_strings: StopStrings | None = None,
    ) -> None:
        """Continue from *prefix*.

        Args:
            prefix: tokens that were sampled earlier, with log-probabilities if *logprobs*, and with ranks and most
                likely tokens if *top_logprobs*. They are never cut off.
            logprobs: whether each token has a log-probability.
            top_logprobs: number of most likely tokens that each position has.
            prompt_logprobs: whether the tokens of the prompt have log-probabilities, which are those of the prefix if
                it has tokens.
            kept_tokens: returns the kept tokens among vLLM's ``Logprob`` of one position; None if they were not
                requested. If they were, those of the prefix are known.
            stop_strings: the response's stop strings, after the prefix; None if vLLM finds them, or if there are none.
        """
        self.token_ids: list[int] = list(prefix.token_ids) if prefix is not None else []
        self.logprobs: list[float] | None = None
        if logprobs:
            self.logprobs = list(prefix.logprobs or ()) if prefix is not None else []
        self.ranks: list[int] | None = None
        self.top_logprobs: list[dict[int, float]] | None = None
        if top_logprobs:
            self.ranks = list(prefix.ranks or ()) if prefix is not None else []
            self.top_logprobs = list(prefix.top_logprobs or ()) if prefix is not None else []
        self._num_top_logprobs = top_logprobs
        self._kept_tokens = kept_tokens
        self.kept_token_ids: list[list[int]] | None = None
        if kept_tokens is not None:
            self.kept_token_ids = list(prefix.kept_token_ids or ()) if prefix is not None else []
        self.prompt_logprobs: PromptLogprobs | None = None
        if prompt_logprobs and prefix is not None and prefix.token_ids:
            self.prompt_logprobs = PromptLogprobs.of_prefix(prefix)
        self.prefix_tokens = len(self.token_ids)
        """Number of tokens of the prefix."""
        self.stopped = stop_strings is not None and stop_strings.completed_by_prefix
        """Whether the last token completes one of the *stop_strings*, so that the response has ended."""
        self._stop_strings = stop_strings
        self._prefix_spans = prefix.weight_spans if prefix is not None else []

    def append(self, completion: Any) -> None:
        """Append the new tokens in a ``CompletionOutput`` of vLLM, up to the first one that completes a stop string.

        Raises:
            NotFiniteError: their log-probabilities are not numbers. Nothing is appended then.
        """
        tokens: Sequence[int] = completion.token_ids
        count = self._count_tokens(tokens)
        if self.logprobs is not None and tokens:
            positions = list(itertools.islice(zip(completion.logprobs or (), tokens, strict=True), count))
            values = [logprobs[token].logprob for logprobs, token in positions]
            if not math.isfinite(sum(values)):  # those of other tokens are infinite if they cannot be sampled
                raise NotFiniteError("the model has computed log-probabilities that are not finite numbers")
            self.logprobs += values
            if self.ranks is not None and self.top_logprobs is not None:
                self.ranks += [logprobs[token].rank for logprobs, token in positions]
                self.top_logprobs += [_most_likely(logprobs, self._num_top_logprobs) for logprobs, _ in positions]
        self.token_ids += tokens[:count]
        if self.kept_token_ids is not None and self._kept_tokens is not None and tokens:
            positions_of_tokens = zip(completion.logprobs or (), tokens, strict=True)
            self.kept_token_ids += [self._kept_tokens(one) for one, _ in itertools.islice(positions_of_tokens, count)]

    def _count_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many new tokens belong to the response."""
        if self.stopped:
            return 0
        if self._stop_strings is not None:
            for number, token in enumerate(tokens, start=1):
                if self._stop_strings.completed_by(token):
                    self.stopped = True
                    return number
        return len(tokens)

    def weight_spans(self, starts: Sequence[tuple[int, int]]) -> list[WeightSpan]:
        """Return the weight spans of all tokens so far.

        Args:
            starts: (version, index of its first token after the prefix), in order. Indices may exceed the number of
                tokens so far. Of several versions that start at the same index, the last one counts.
        """
        spans = list(self._prefix_spans)
        for version, start in starts:
            first = self.prefix_tokens + start
            if first >= len(self.token_ids):
                break
            if spans and spans[-1].start == first:
                spans.pop()
            if not spans or spans[-1].weight_version != version:
                spans.append(WeightSpan(start=first, weight_version=version))
        return spans

    def partial(self, starts: Sequence[tuple[int, int]]) -> Partial:
        """Return all tokens so far; see :meth:`weight_spans` for *starts*."""
        return self.since(0, starts)

    def since(self, first: int, starts: Sequence[tuple[int, int]]) -> Partial:
        """Return the tokens so far from index *first* on; see :meth:`weight_spans` for *starts*."""
        return _partial(
            self.token_ids[first:],
            None if self.logprobs is None else self.logprobs[first:],
            None if self.ranks is None else self.ranks[first:],
            None if self.top_logprobs is None else self.top_logprobs[first:],
            None if self.kept_token_ids is None else self.kept_token_ids[first:],
            spans_since(self.weight_spans(starts), first, len(self.token_ids)),
            None if first else self.prompt_logprobs,
        )

    def finish(
        self,
        reason: FinishReason | None,
        starts: Sequence[tuple[int, int]],
        *,
        started: float,
        finished: float,
        draft_counts: ResponseDraftCounts = _NO_DRAFTS,
        num_cached_tokens: int = 0,
        routed_experts: RoutedExperts | None = None,
    ) -> GenerationResult:
        """Return the whole response; see :class:`GenerationResult`, and :meth:`weight_spans` for *starts*."""
        sources = draft_counts.sources_of(len(self.token_ids))
        # A step samples one token that was not drafted. That of the last step is cut off if the response ends with a
        # draft token.
        num_decoding_steps = sources.count(SAMPLED, self.prefix_tokens) + any(sources[-1:])
        return GenerationResult(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            ranks=self.ranks,
            top_logprobs=self.top_logprobs,
            kept_token_ids=self.kept_token_ids,
            weight_spans=self.weight_spans(starts),
            finish_reason=reason,
            num_decoding_steps=num_decoding_steps,
            draft_tokens_by_source=_by_source(draft_counts.drafted_by_source),
            accepted_tokens_by_source=_by_source([sources.count(code) for code in _SOURCE_CODES]),
            draft_sources=encode_draft_sources(sources) if draft_counts.drafted else None,
            num_cached_tokens=num_cached_tokens,
            started=started,
            finished=finished,
            prompt_logprobs=self.prompt_logprobs,
            routed_experts=routed_experts,
            length_class=draft_counts.length_class,
        )


def _by_source(counts: Sequence[int]) -> dict[str, int]:
    return {source: count for source, count in zip(DRAFT_SOURCES, counts, strict=True) if count}


def routed_experts_of(rows: Any, num_tokens: int) -> RoutedExperts | None:
    """Return the routed experts in a ``CompletionOutput`` of vLLM.

    The *rows* have the shape (tokens, layers, experts per token). The last of the *num_tokens* tokens of prompt and
    response was not processed by the model.

    Returns:
        None if vLLM has not returned those of all tokens, because the response was interrupted.
    """
    if rows is None or len(rows) < num_tokens - 1:
        return None
    rows = rows[: num_tokens - 1]
    little_endian = rows.astype(rows.dtype.newbyteorder("<"), copy=False)
    dtype: Literal["uint8", "uint16"] = "uint8" if rows.dtype.itemsize == 1 else "uint16"
    return RoutedExperts(shape=list(rows.shape), dtype=dtype, data=little_endian.tobytes())


def _most_likely(logprobs: Mapping[int, Any], count: int) -> dict[int, float]:
    """Return the most likely tokens that can be sampled, most likely first."""
    ranked = sorted(logprobs.items(), key=lambda item: int(item[1].rank))
    return {token: one.logprob for token, one in ranked if one.rank <= count and one.logprob > -math.inf}


def _partial(
    token_ids: list[int],
    logprobs: list[float] | None,
    ranks: list[int] | None,
    top_logprobs: list[dict[int, float]] | None,
    kept_token_ids: list[list[int]] | None,
    weight_spans: list[WeightSpan],
    prompt_logprobs: PromptLogprobs | None,
) -> Partial:
    """Return a partial that has the fields that were requested."""
    fields: dict[str, Any] = {
        "logprobs": logprobs,
        "ranks": ranks,
        "top_logprobs": top_logprobs,
        "kept_token_ids": kept_token_ids,
    }
    requested = {name: values for name, values in fields.items() if values is not None}
    if prompt_logprobs is not None:
        requested |= prompt_logprobs.fields()
    return Partial(token_ids=token_ids, weight_spans=weight_spans, **requested)
