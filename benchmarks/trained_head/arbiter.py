"""Chooses each draft token among several drafters, by calibrated survival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.replay import Draft

_PLACES = 4
"""Calibrations differ between the first tokens of a draft; from this one on they are the same."""
_RATE = 0.2
_MAX_LOG_ODDS = 6.0


class _Candidate(NamedTuple):
    token: int
    log_odds: tuple[float, ...]
    """By drafter that proposes the token, in ascending order of the drafters."""
    drafters: tuple[int, ...]
    place: int

    @property
    def calibration(self) -> tuple[tuple[int, ...], int]:
        """Which candidates are calibrated together."""
        return self.drafters, self.place


class _Logistic:
    """Online logistic regression with AdaGrad."""

    def __init__(self, inputs: int) -> None:
        self._weights = [1.0 / inputs] * inputs + [0.0]
        self._squares = [1.0] * (inputs + 1)

    def predict(self, inputs: Sequence[float]) -> float:
        total = sum(weight * value for weight, value in zip(self._weights, (*inputs, 1.0), strict=True))
        return 1 / (1 + math.exp(-total))

    def learn(self, inputs: Sequence[float], *, accepted: bool) -> None:
        error = accepted - self.predict(inputs)
        for index, value in enumerate((*inputs, 1.0)):
            gradient = error * value
            self._squares[index] += gradient * gradient
            self._weights[index] += _RATE * gradient / math.sqrt(self._squares[index])


class Choice(NamedTuple):
    """A draft, with all that was considered at its positions."""

    draft: Draft
    considered: list[list[_Candidate]]
    """By position, including the one whose survival was too low."""


class Arbiter:
    """Merges the chains of several drafters into one draft.

    At each position, the drafters that have proposed all tokens before it compete: the token with the highest
    calibrated probability is drafted. A token that several drafters propose is calibrated by all of them together. The
    draft ends before the first token with too low a survival.
    """

    def __init__(self) -> None:
        self._calibrations: dict[tuple[tuple[int, ...], int], _Logistic] = {}

    def choose(self, chains: Sequence[Draft], min_survival: float) -> Choice:
        """Return the draft of one request.

        Args:
            chains: the draft of each drafter.
            min_survival: survival below which nothing is drafted.
        """
        following = set(range(len(chains)))
        tokens: list[int] = []
        probabilities: list[float] = []
        considered: list[list[_Candidate]] = []
        survival = 1.0
        while following:
            position = len(tokens)
            candidates = _candidates(chains, following, position)
            if not candidates:
                break
            considered.append(candidates)
            best = max(candidates, key=self._probability)
            probability = self._probability(best)
            survival *= probability
            if survival < min_survival:
                break
            tokens.append(best.token)
            probabilities.append(probability)
            following = set(best.drafters)
        return Choice(Draft(tokens, probabilities), considered)

    def learn(self, choice: Choice, sampled: Sequence[int]) -> None:
        """Learn from the tokens that the model has sampled after a draft was made."""
        for position, candidates in enumerate(choice.considered[: len(sampled)]):
            actual = int(sampled[position])
            for candidate in candidates:
                self._of(candidate).learn(candidate.log_odds, accepted=candidate.token == actual)
            if position >= len(choice.draft.tokens) or choice.draft.tokens[position] != actual:
                return

    def _of(self, candidate: _Candidate) -> _Logistic:
        return self._calibrations.setdefault(candidate.calibration, _Logistic(len(candidate.drafters)))

    def _probability(self, candidate: _Candidate) -> float:
        return self._of(candidate).predict(candidate.log_odds)


def _candidates(chains: Sequence[Draft], following: set[int], position: int) -> list[_Candidate]:
    proposers: dict[int, list[int]] = {}
    for drafter in sorted(following):
        if position < len(chains[drafter].tokens):
            proposers.setdefault(int(chains[drafter].tokens[position]), []).append(drafter)
    return [
        _Candidate(
            token,
            tuple(_log_odds(chains[drafter].probabilities[position]) for drafter in drafters),
            tuple(drafters),
            min(position, _PLACES - 1),
        )
        for token, drafters in proposers.items()
    ]


def _log_odds(probability: float) -> float:
    limit = 1 / (1 + math.exp(_MAX_LOG_ODDS))
    probability = min(max(probability, limit), 1 - limit)
    return math.log(probability / (1 - probability))
