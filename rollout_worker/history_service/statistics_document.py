"""The statistics of a history as a JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.keys import HistoryKeys
from rollout_worker.history_service.histograms import length_shares

_QUANTILES = (0.1, 0.5, 0.9, 0.99)


def length_quantiles(lengths: LengthStats) -> dict[float, float | None]:
    """Return the quantiles that are shown of lengths; None for one above the longest rollout."""
    return {p: lengths.quantile(p) for p in _QUANTILES} if lengths.count else {}


def statistics_document(
    keys: HistoryKeys, lengths: LengthStats, acceptance: Mapping[int, tuple[float, float]]
) -> dict[str, Any]:
    """Return the statistics in the form of ``rollout history stats --json``.

    Args:
        keys: the history.
        lengths: lengths of its latest rollouts.
        acceptance: (drafted, accepted) draft tokens by age.
    """
    return {
        "history": keys.full_name,
        "rollouts": lengths.count,
        "weight": lengths.weight,
        "cut_off": lengths.censored_share,
        "mean": lengths.mean,
        "longest": lengths.longest,
        "quantiles": {str(p): quantile for p, quantile in length_quantiles(lengths).items()},
        "histogram": [{"above": low, "to": high, "share": share} for low, high, share in length_shares(lengths)],
        "acceptance": [
            {"age": age, "drafted": drafted, "accepted": accepted} for age, (drafted, accepted) in acceptance.items()
        ],
    }
