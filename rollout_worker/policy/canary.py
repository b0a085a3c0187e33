"""Whether drafts leave the law of what is sampled alone: rollouts without drafts, compared with their siblings.

Of some groups one sample is the canary: nothing is drafted for its first tokens. The samples of a group are
exchangeable, as prompt, settings and weights are the same, so the canary's rank among its siblings, in whatever can be
measured, is uniform. If it is not, drafts have changed what is sampled. The test may be looked at after every group:
it bets against uniformity with money that cannot grow in expectation, so that the chance of ever reaching
:data:`ALARM` times the stake is at most one in as many (Ville's inequality; Shafer 2021, *Testing by betting*).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from hashlib import blake2b

CANARY_TOKENS = 256
"""So many of a canary's first tokens are not drafted: enough to see, and few beside a rollout that holds a step up."""
ALARM = 1000.0
_ONE_OF = 16
"""Groups of which one has a canary."""
_TILTS = (-0.9, -0.5, -0.25, 0.25, 0.5, 0.9)
"""Bets that ranks are lower, or higher, than they should be. None is smaller: a lack of one in a hundred of the longest
canaries, which an update of the weights may have cut off because they take a little longer, wins nothing."""
_SPREADS = (-0.45, -0.25, 0.3, 0.8)
"""Bets that ranks are in the middle, or at the ends, more often than they should be."""
_RUIN = math.log(1e-12)


def canary_of(request_id: str, samples: int) -> int | None:
    """Which sample of a request is the canary; None for most requests, and where there are no siblings.

    The same wherever it is asked, and not a matter of what is sampled.
    """
    if samples < 2:
        return None
    digest = int.from_bytes(blake2b(request_id.encode(), digest_size=8, person=b"canary").digest(), "little")
    chosen, sample = digest % _ONE_OF == 0, digest // _ONE_OF % samples
    return sample if chosen else None


def uniform_rank(canary: float, siblings: Sequence[float], chance: random.Random) -> float:
    """Uniform between 0 and 1 if canary and siblings are exchangeable, however many of them are equal."""
    below = sum(one < canary for one in siblings)
    equal = sum(one == canary for one in siblings)
    return (below + chance.randint(0, equal) + chance.random()) / (len(siblings) + 1)


class DriftTest:
    """Bets on the ranks of canaries, in several quantities at once."""

    def __init__(self, quantities: int, wealth: Sequence[float] | None = None, canaries: int = 0) -> None:
        """Begin, or go on with what an earlier test had.

        Args:
            quantities: how many are measured of each rollout.
            wealth: logarithms, of each bet on each quantity.
            canaries: that were seen.
        """
        bets = quantities * (len(_TILTS) + len(_SPREADS))
        self.canaries = canaries
        self.wealth = list(wealth) if wealth is not None and len(wealth) == bets else [0.0] * bets
        self._quantities = quantities

    @property
    def evidence(self) -> float:
        """What a stake of 1, divided among all bets, has become; it is not expected to grow while all is well."""
        return sum(map(math.exp, self.wealth)) / len(self.wealth)

    @property
    def drifted(self) -> bool:
        """Whether drafts have changed the law. It stays so."""
        return self.evidence >= ALARM

    def observe(self, ranks: Sequence[float | None]) -> None:
        """A canary's ranks, see :func:`uniform_rank`; None for a quantity that was not measured."""
        self.canaries += 1
        if self.drifted:
            return
        each = len(_TILTS) + len(_SPREADS)
        for quantity, rank in zip(range(self._quantities), ranks, strict=True):
            if rank is None:
                continue
            tilt, spread = 2 * rank - 1, 12 * (rank - 0.5) ** 2 - 1
            factors = [1 + bet * tilt for bet in _TILTS] + [1 + bet * spread for bet in _SPREADS]
            for place, factor in enumerate(factors, each * quantity):
                self.wealth[place] = max(self.wealth[place] + math.log(factor), _RUIN)
