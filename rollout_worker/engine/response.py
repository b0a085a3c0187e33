"""A response while it comes out of the engine, and once it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_api.protocol.messages import FinishReason, Partial, WeightSpan


@dataclass(frozen=True)
class Generated:
    """One response as it came out of the engine, what it went on from included."""

    token_ids: list[int]
    logprobs: list[float] | None
    spans: list[WeightSpan]
    """Which weight version sampled which tokens; empty without tokens."""
    finish_reason: FinishReason | None
    """STOP or LENGTH; None where the caller ended it early."""
    steps: int
    """Decoding steps; what it went on from took none here."""
    drafted: int
    accepted: int
    cached_tokens: int
    """Tokens of the prompt, and of what it went on from, whose keys and values were cached."""
    started: float
    """``time.monotonic()`` when the engine was asked."""
    finished: float

    @property
    def weight_version(self) -> int | None:
        """The version that sampled the last token; None without tokens."""
        return self.spans[-1].weight_version if self.spans else None


class Response:
    """The tokens of a response that have come out of the engine so far."""

    def __init__(self, prefix: Partial | None, *, logprobs: bool) -> None:
        """Go on from *prefix*.

        Args:
            prefix: tokens sampled earlier; with log-probabilities if *logprobs*.
            logprobs: whether each token has one.
        """
        self.token_ids: list[int] = list(prefix.token_ids) if prefix is not None else []
        self.logprobs: list[float] | None = None
        if logprobs:
            self.logprobs = list(prefix.logprobs or ()) if prefix is not None else []
        self._spans = prefix.spans if prefix is not None else []
        self._prefix = len(self.token_ids)

    def extend(self, completion: Any) -> None:
        """Append what vLLM hands over next: the new tokens of its ``CompletionOutput``."""
        self.token_ids += completion.token_ids
        if self.logprobs is not None and completion.token_ids:
            steps = zip(completion.logprobs or (), completion.token_ids, strict=True)
            self.logprobs += [step[token].logprob for step, token in steps]

    def ended(
        self,
        reason: FinishReason | None,
        starts: Sequence[tuple[int, int]],
        *,
        started: float,
        finished: float,
        drafted: int = 0,
        accepted: int = 0,
        cached_tokens: int = 0,
    ) -> Generated:
        """The whole response; see :class:`Generated`, and :meth:`spans` for *starts*."""
        return Generated(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            spans=self.spans(starts),
            finish_reason=reason,
            steps=len(self.token_ids) - self._prefix - accepted,  # each makes its accepted tokens and one more
            drafted=drafted,
            accepted=accepted,
            cached_tokens=cached_tokens,
            started=started,
            finished=finished,
        )

    def spans(self, starts: Sequence[tuple[int, int]]) -> list[WeightSpan]:
        """The spans of all tokens so far.

        Args:
            starts: (version, index of its first token after the prefix) in order; some may lie beyond what has come
                out so far, and those of equal index end where they begin.
        """
        spans = list(self._spans)
        for version, start in starts:
            first = self._prefix + start
            if first >= len(self.token_ids):
                break
            if spans and spans[-1].start == first:
                spans.pop()
            if not spans or spans[-1].weight_version != version:
                spans.append(WeightSpan(start=first, weight_version=version))
        return spans

    def partial(self, starts: Sequence[tuple[int, int]]) -> Partial:
        """All of it so far; *starts* as for :meth:`spans`."""
        return Partial(token_ids=self.token_ids, logprobs=self.logprobs, spans=self.spans(starts))
