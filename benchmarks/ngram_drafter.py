"""vLLM's n-gram drafter in a replay: vLLM's own function, applied to a rollout's own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.replay import Draft
from benchmarks.traces import Tokens, Trajectory

MIN_NGRAM, MAX_NGRAM = 2, 4
"""Lengths of the n-grams that are searched, in tokens; vLLM's documentation uses up to 4."""
_NO_LENGTH_LIMIT = 2**30


class NgramDrafter:
    """Drafts what followed the longest match of a rollout's last tokens in its own prompt and response."""

    def __init__(self) -> None:
        from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

        self._propose: Any = _find_longest_matched_ngram_and_propose_tokens
        self._texts: dict[int, tuple[np.ndarray, int]] = {}
        """By key: a buffer, and the number of tokens in it."""

    def add_history(self, trajectory: Trajectory) -> None:
        """Do nothing: this drafter uses no history."""

    def open(self, key: int, problem: str, prompt: Tokens) -> None:
        """Begin a rollout."""
        self._texts[key] = (np.zeros(0, np.int32), 0)
        self._append(key, prompt)

    def add_environment_tokens(self, key: int, tokens: Tokens) -> None:
        """Append the environment's answer."""
        self._append(key, tokens)

    def add_sampled_tokens(self, key: int, tokens: Tokens) -> None:
        """Append the tokens that the model sampled."""
        self._append(key, tokens)

    def _append(self, key: int, tokens: Tokens) -> None:
        buffer, length = self._texts[key]
        if length + len(tokens) > len(buffer):
            buffer = np.concatenate([buffer, np.zeros(len(buffer) + len(tokens) + 256, np.int32)])
        buffer[length : length + len(tokens)] = tokens
        self._texts[key] = (buffer, length + len(tokens))

    def draft(self, keys: Sequence[int], budgets: Sequence[int]) -> Sequence[Draft]:
        """Return one draft per key; all probabilities are 0.5, as n-grams have none."""
        drafts = []
        for key, budget in zip(keys, budgets, strict=True):
            buffer, length = self._texts[key]
            tokens = self._propose(buffer[:length], MIN_NGRAM, MAX_NGRAM, _NO_LENGTH_LIMIT, budget).tolist()
            drafts.append(Draft(tokens, [0.5] * len(tokens)))
        return drafts

    def close(self, key: int) -> None:
        """End a rollout."""
        del self._texts[key]

    def release_problem(self, problem: str) -> None:
        """Do nothing: nothing is stored per problem."""
