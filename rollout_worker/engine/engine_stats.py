"""The statistics that an engine reports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

_STATS = (
    "decoding_steps",
    "drafting_seconds",
    "drafting_failures",
    "index_bytes",
    "cost_base_seconds",
    "cost_token_seconds",
    "length_explained_ratio",
    "cost_context_token_seconds",
    "cost_drafting_seconds",
    "cost_experts_seconds",
    "cost_error_ratio",
    "timed_seconds",
    "timed_seconds_without_drafts",
    "drafting_disabled",
    "drafting_stops",
    "trial_tokens",
    "proposed_tokens",
)
_HISTORY_STATS = ("rollouts", "tokens", "corrupt", "evictions", "failures")


def counters_of(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return those statistics of ``DraftingExtension.das_stats`` that are reported, by name, with the current time."""
    history: Mapping[str, float] = stats.get("history", {})
    return (
        {name: stats[name] for name in _STATS if name in stats}
        | {f"history_{name}": history[name] for name in _HISTORY_STATS if name in history}
        | {"measured_timestamp_seconds": time.time()}
    )
