"""Learns online how many draft tokens are accepted as a function of draft length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rollout_store.arrays import Floats

_DECAY = 0.998
"""Weight of a draft relative to the next one, so that about the last 500 drafts count."""
_PRIOR_DRAFTS = 2.0
"""Weight of the prior of an acceptance rate, in drafts."""
_PRIOR_RATE = 0.5
"""Acceptance rate that is assumed before anything is known."""
_OVERALL_PRIOR_DRAFTS = 10 * _PRIOR_DRAFTS
"""Weight of the overall curve in the curve of one problem, in drafts."""
_EFFICIENCY_GRID = np.geomspace(0.01, 50.0, 120)
"""Values of α among which :meth:`AcceptanceCurve.fit_das` searches."""
_MIN_CAPACITY, _MAX_CAPACITY = 1e-3, 0.999


class DasAcceptance(NamedTuple):
    """Parameters of DAS's acceptance model ``A = k · l · (1 - exp(-α · p / l))`` (arXiv 2511.13841, Eq. 5).

    A is the number of accepted tokens when p tokens are drafted for a rollout of l tokens.
    """

    capacity: float
    """k: the largest share of a rollout's tokens that can be accepted draft tokens; between 0 and 1, exclusive."""
    efficiency: float
    """α: ``k · α`` is the acceptance probability of the first draft tokens."""


class AcceptanceCurve:
    """The acceptance rate of each position in a draft, given that all positions before it were accepted."""

    def __init__(self, positions: int, *, prior: AcceptanceCurve | None = None) -> None:
        """Create a curve without observations.

        Args:
            positions: maximum number of tokens of a draft.
            prior: the curve that applies until enough drafts were observed.
        """
        self._reached = np.zeros(positions)
        self._accepted = np.zeros(positions)
        self._prior = prior

    def observe(self, drafted: int, accepted: int) -> None:
        """Record that the first *accepted* tokens of a draft of *drafted* tokens were accepted."""
        reached = min(drafted, accepted + 1)
        self._reached *= _DECAY
        self._accepted *= _DECAY
        self._reached[:reached] += 1
        self._accepted[:accepted] += 1

    def rates(self) -> Floats:
        """Return the acceptance rates by position, shape (positions,).

        Without a prior curve, a position that was rarely reached is assumed to have the rate of the one before it.
        """
        if self._prior is None:
            rates = np.empty(len(self._reached))
            previous = _PRIOR_RATE
            for position, (reached, accepted) in enumerate(zip(self._reached, self._accepted, strict=True)):
                previous = (accepted + _PRIOR_DRAFTS * previous) / (reached + _PRIOR_DRAFTS)
                rates[position] = previous
            return rates
        return np.asarray(
            (self._accepted + _OVERALL_PRIOR_DRAFTS * self._prior.rates()) / (self._reached + _OVERALL_PRIOR_DRAFTS)
        )

    def expected_accepted(self) -> Floats:
        """Return the expected accepted tokens of drafts of 0, 1, … tokens, shape (positions + 1,)."""
        return np.concatenate([[0.0], np.cumsum(np.cumprod(self.rates()))])

    def fit_das(self) -> DasAcceptance:
        """Fit DAS's acceptance model to this curve by least squares.

        A step with a draft of n tokens generates ``1 + accepted(n)`` tokens, so that the model predicts
        ``accepted / generated = k · (1 - exp(-α · n / generated))``. For each α, the best k has a closed form.
        """
        accepted = self.expected_accepted()
        generated = 1 + accepted[1:]
        draft_ratios = np.arange(1, len(accepted)) / generated
        accepted_shares = accepted[1:] / generated
        shapes = 1 - np.exp(-np.outer(_EFFICIENCY_GRID, draft_ratios))
        capacities = np.clip(
            (shapes @ accepted_shares) / (shapes**2).sum(axis=1),
            _MIN_CAPACITY,
            _MAX_CAPACITY,
        )
        errors = ((capacities[:, None] * shapes - accepted_shares) ** 2).sum(axis=1)
        best = int(errors.argmin())
        return DasAcceptance(float(capacities[best]), float(_EFFICIENCY_GRID[best]))
