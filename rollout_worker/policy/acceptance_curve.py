"""What drafts of a length have accepted, learned online, and DAS's two parameters of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_KEPT = 0.998
"""What a draft counts beside the next one: some 500 tell how it is now."""
_PRIOR_TRIES = 2.0
_PRIOR_RATE = 0.5
_EFFICIENCIES = np.geomspace(0.01, 50.0, 120)
_MOST_SHARE = 0.999

Floats = npt.NDArray[np.float64]


class DasAcceptance(NamedTuple):
    """``accepted = share · l · (1 - exp(-efficiency · p / l))`` for p tokens drafted over l said (DAS, Eq. 5)."""

    share: float
    """k: of the tokens said, accepted ones at most, if drafts are as long as one likes; below 1."""
    efficiency: float
    """α: ``share · efficiency`` is the probability with which the first tokens drafted are accepted."""


class AcceptanceCurve:
    """Probability of each place in a draft of being accepted if those before it are."""

    def __init__(self, places: int, *, prior: AcceptanceCurve | None = None) -> None:
        """Of drafts of at most *places* tokens; until much is known, as *prior* says."""
        self._tried = np.zeros(places)
        self._passed = np.zeros(places)
        self._prior = prior

    def observe(self, drafted: int, accepted: int) -> None:
        """A draft of so many tokens was verified."""
        tried = min(drafted, accepted + 1)
        self._tried *= _KEPT
        self._passed *= _KEPT
        self._tried[:tried] += 1
        self._passed[:accepted] += 1

    def rates(self) -> Floats:
        """By place, shape (places,); a place that was seldom reached is taken to be as the one before it."""
        if self._prior is None:
            found = np.empty(len(self._tried))
            before = _PRIOR_RATE
            for place, (tried, passed) in enumerate(zip(self._tried, self._passed, strict=True)):
                before = (passed + _PRIOR_TRIES * before) / (tried + _PRIOR_TRIES)
                found[place] = before
            return found
        return np.asarray((self._passed + 10 * _PRIOR_TRIES * self._prior.rates()) / (self._tried + 10 * _PRIOR_TRIES))

    def accepted(self) -> Floats:
        """Expected accepted tokens of a draft of 0, 1, … tokens, shape (places + 1,)."""
        return np.concatenate([[0.0], np.cumsum(np.cumprod(self.rates()))])

    def das(self) -> DasAcceptance:
        """The parameters with which DAS's formula comes nearest to it."""
        accepted = self.accepted()
        # a step says one token more than it accepts
        said = 1 + accepted[1:]
        drafted = np.arange(1, len(accepted)) / said
        shares = accepted[1:] / said
        shapes = 1 - np.exp(-np.outer(_EFFICIENCIES, drafted))
        share = np.clip((shapes @ shares) / (shapes**2).sum(axis=1), 1e-3, _MOST_SHARE)
        errors = ((share[:, None] * shapes - shares) ** 2).sum(axis=1)
        best = int(errors.argmin())
        return DasAcceptance(float(share[best]), float(_EFFICIENCIES[best]))
