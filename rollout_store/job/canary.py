"""Detects drift of the output distribution by comparing rollouts without drafts with their siblings.

In some groups, one sample is the *canary*: nothing is drafted for its first tokens. The samples of a group are
exchangeable, because they have the same prompt, settings and weights. The rank of the canary among its siblings, in any
measured quantity, is therefore uniformly distributed, unless drafting changes the output distribution.

The test is an anytime-valid sequential test (an e-process): it may be evaluated after every group. If the ranks are
uniform, the e-value does not grow in expectation, so that the probability that it ever reaches :data:`ALARM_E_VALUE` is
at most 1 / :data:`ALARM_E_VALUE` (Ville's inequality; Shafer 2021, *Testing by betting*).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from rollout_api.protocol.messages import FinishReason, Rollout, RolloutRequest

CANARY_TOKENS = 256
"""Number of a canary's first tokens without drafts: enough for the test, and few for a long rollout."""
ALARM_E_VALUE = 1000.0
"""E-value at which the output distribution is considered to have drifted."""
_GROUPS_PER_CANARY = 16
"""One of so many groups has a canary."""
_TILTS = (-0.9, -0.5, -0.25, 0.25, 0.5, 0.9)
"""Slopes of the alternatives with lower or higher ranks than expected.

There are no smaller ones: weight updates may cut off some long canaries that take slightly longer, and a deficit of 1 %
of the longest canaries must not raise the e-value."""
_SPREADS = (-0.45, -0.25, 0.3, 0.8)
"""Curvatures of the alternatives with more ranks in the middle, or at the ends, than expected."""
_MIN_LOG_E_VALUE = math.log(1e-12)


def canary_sample(request_id: str, samples: int) -> int | None:
    """Return the sample of a request that is the canary, or None if the request has none.

    The choice depends on the request id only, so that every process makes the same one. A request with one sample has
    no canary.
    """
    if samples < 2:
        return None
    digest = int.from_bytes(blake2b(request_id.encode(), digest_size=8, person=b"canary").digest(), "little")
    has_canary, sample = digest % _GROUPS_PER_CANARY == 0, digest // _GROUPS_PER_CANARY % samples
    return sample if has_canary else None


def uniform_rank(canary: float, siblings: Sequence[float], rng: random.Random) -> float:
    """Return the randomized rank of the canary's value among those of its siblings, between 0 and 1.

    If canary and siblings are exchangeable, the rank is uniformly distributed, even where values are equal.
    """
    below = sum(value < canary for value in siblings)
    equal = sum(value == canary for value in siblings)
    return (below + rng.randint(0, equal) + rng.random()) / (len(siblings) + 1)


class DriftTest:
    """The sequential test. It observes ranks of canaries in several quantities at once."""

    def __init__(self, quantities: int, log_e_values: Sequence[float] | None = None, canaries: int = 0) -> None:
        """Start a test, or continue an earlier one.

        Args:
            quantities: number of quantities that are measured of each rollout.
            log_e_values: natural logarithm of the e-value of each alternative in each quantity, from an earlier test.
            canaries: number of canaries that the earlier test has observed.

        Raises:
            ValueError: if *log_e_values* does not have one finite number for each alternative in each quantity.
        """
        count = quantities * (len(_TILTS) + len(_SPREADS))
        log_e_values = [0.0] * count if log_e_values is None else list(log_e_values)
        if len(log_e_values) != count or not all(map(math.isfinite, log_e_values)):
            raise ValueError(f"{count} finite logarithms of e-values are needed, but there are {log_e_values}")
        self.canaries = canaries
        """Number of observed canaries."""
        self.log_e_values = log_e_values
        self._quantities = quantities

    @property
    def e_value(self) -> float:
        """The mean of the e-values of all alternatives; its expectation is at most 1 without drift."""
        return sum(map(math.exp, self.log_e_values)) / len(self.log_e_values)

    @property
    def drifted(self) -> bool:
        """Whether the output distribution has drifted. Once True, it remains True."""
        return self.e_value >= ALARM_E_VALUE

    def observe(self, ranks: Sequence[float | None]) -> None:
        """Observe a canary's rank in each quantity (see :func:`uniform_rank`); None if a quantity was not measured."""
        self.canaries += 1
        if self.drifted:
            return
        per_quantity = len(_TILTS) + len(_SPREADS)
        for quantity, rank in zip(range(self._quantities), ranks, strict=True):
            if rank is None:
                continue
            # Both are polynomials in the rank whose mean over uniform ranks is 0, so that each factor has the mean 1.
            tilt, spread = 2 * rank - 1, 12 * (rank - 0.5) ** 2 - 1
            factors = [1 + slope * tilt for slope in _TILTS] + [1 + curvature * spread for curvature in _SPREADS]
            for index, factor in enumerate(factors, per_quantity * quantity):
                self.log_e_values[index] = max(self.log_e_values[index] + math.log(factor), _MIN_LOG_E_VALUE)


class Measurement(NamedTuple):
    """The quantities of one sample that the test compares."""

    version: int
    """The weight version that sampled all of its tokens."""
    length: int
    """Number of tokens."""
    logprob: float | None
    """Mean log-probability of the first tokens; None if the request did not ask for log-probabilities."""


def measure(request: RolloutRequest, rollout: Rollout, sample: int) -> bytes:
    """Measure a finished sample.

    Returns:
        An encoded :class:`Measurement` for the coordinator; empty if the group has no canary, or if the sample cannot
        be compared because it was cut off or sampled with several weight versions.
    """
    if canary_sample(request.request_id, request.sampling.n) is None or not rollout.token_ids:
        return b""
    versions = {span.weight_version for span in rollout.weight_spans}
    if rollout.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH) or len(versions) != 1:
        return b""
    first = None if rollout.logprobs is None else list(rollout.logprobs[:CANARY_TOKENS])
    logprob = sum(first) / len(first) if first else None
    return json.dumps(Measurement(versions.pop(), len(rollout.token_ids), logprob)).encode()
