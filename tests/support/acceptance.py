"""Counts of accepted draft tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Sampled(Protocol):
    """A rollout, or an entry of a ledger or a report that describes one."""

    num_accepted_tokens: int
    num_decoding_steps: int


def accepted_per_step(rollouts: Iterable[Sampled]) -> float:
    """Return the accepted draft tokens per decoding step of a rollout."""
    found = list(rollouts)
    return sum(each.num_accepted_tokens for each in found) / sum(each.num_decoding_steps for each in found)
