"""Counts of accepted draft tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Sampled(Protocol):
    """A rollout, or an entry of a ledger or a report that describes one."""

    num_accepted_tokens: int
    num_decoding_steps: int


FIRST_REFERENCE_STEPS = 1
"""Number of the first 30 steps of a restarted engine that the governor decodes without drafts, for reference.

It does so after 16 steps, if an earlier engine has measured a gain without being certain of it."""


def accepted_per_step(rollouts: Iterable[Sampled], reference_steps: int = 0) -> float:
    """Return the accepted draft tokens per decoding step of a rollout, apart from its reference steps."""
    found = list(rollouts)
    num_steps = sum(each.num_decoding_steps - reference_steps for each in found)
    return sum(each.num_accepted_tokens for each in found) / num_steps
