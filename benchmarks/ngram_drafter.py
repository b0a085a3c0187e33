"""vLLM's n-gram drafter as :mod:`benchmarks.replay` compares it: its own function, on a rollout's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.replay import Draft
from benchmarks.traces import Tokens, Trajectory

SHORTEST, LONGEST = 2, 4
"""Of an n-gram, in tokens; vLLM's documentation goes to 4."""
_NO_LIMIT = 2**30


class Ngram:
    """Drafts what followed the longest match of a rollout's last tokens in its own prompt and response."""

    def __init__(self) -> None:
        from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

        self._find: Any = _find_longest_matched_ngram_and_propose_tokens
        self._texts: dict[int, tuple[np.ndarray, int]] = {}
        """Key → a buffer, and how much of it is said."""

    def learn(self, trajectory: Trajectory) -> None:
        """It has no history."""

    def begin(self, key: int, problem: str, prompt: Tokens) -> None:
        """Open a rollout."""
        self._texts[key] = (np.zeros(0, np.int32), 0)
        self.accept(key, prompt)

    def observe(self, key: int, tokens: Tokens) -> None:
        """Go on behind the environment's answer."""
        self.accept(key, tokens)

    def accept(self, key: int, tokens: Tokens) -> None:
        """Take what the model sampled."""
        buffer, length = self._texts[key]
        if length + len(tokens) > len(buffer):
            buffer = np.concatenate([buffer, np.zeros(len(buffer) + len(tokens) + 256, np.int32)])
        buffer[length : length + len(tokens)] = tokens
        self._texts[key] = (buffer, length + len(tokens))

    def draft(self, keys: Sequence[int], budgets: Sequence[int]) -> Sequence[Draft]:
        """Ask for drafts."""
        drafts = []
        for key, budget in zip(keys, budgets, strict=True):
            buffer, length = self._texts[key]
            found = self._find(buffer[:length], SHORTEST, LONGEST, _NO_LIMIT, budget).tolist()
            drafts.append(Draft(found, [0.5] * len(found)))
        return drafts

    def end(self, key: int) -> None:
        """Close a rollout."""
        del self._texts[key]

    def leave(self, problem: str) -> None:
        """It keeps nothing of a problem."""
