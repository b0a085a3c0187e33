"""Histograms of rollout lengths for the command line."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from rollout_api.length_stats import LengthStats
from rollout_worker.history_service.formatting import new_table

_MAX_BINS = 12
_BAR_WIDTH = 40
"""Characters of the longest bar."""


def bin_edges(longest: int) -> list[int]:
    """Return the edges of at most 12 bins of equal, round width, from 0 to at least *longest*."""
    width, decade = 1, 1
    while width * _MAX_BINS < longest:
        factor = next((factor for factor in (2, 5, 10) if factor * decade * _MAX_BINS >= longest), None)
        if factor is None:
            decade *= 10
            continue
        width = factor * decade
    return list(range(0, max(longest, 1) + width, width))


def length_shares(lengths: LengthStats) -> list[tuple[int, int | None, float]]:
    """Return the share of rollouts in each bin of lengths.

    Returns:
        For each bin its lower edge (exclusive), its upper edge (inclusive) and its share. The upper edge is None for
        rollouts that are estimated to be longer than all that were seen.
    """
    if not lengths.count:
        return []
    edges = bin_edges(lengths.longest)
    longer_than = [lengths.prob_longer_than(edge) for edge in edges]
    longer_than[0] = 1.0  # the first bin includes rollouts without tokens
    bins: list[tuple[int, int | None, float]] = [
        (low, high, above_low - above_high)
        for low, high, above_low, above_high in zip(edges, edges[1:], longer_than, longer_than[1:], strict=False)
    ]
    return [*bins, (edges[-1], None, longer_than[-1])] if longer_than[-1] else bins


def count_histogram(lengths: Sequence[tuple[int, bool]]) -> Table:
    """Return a histogram of rollouts, given by their length and whether they were cut off."""
    edges = bin_edges(max(length for length, _ in lengths))
    bins = [[0, 0] for _ in edges[1:]]
    for length, cut_off in lengths:
        bins[max(0, (length - 1) // edges[1])][cut_off] += 1
    largest = max(sum(counts) for counts in bins)
    table = new_table(">tokens", "", ">rollouts", ">cut off (░)")
    for low, high, (num_complete, num_cut_off) in zip(edges, edges[1:], bins, strict=False):
        bar = Text("█" * _bar_length(num_complete, largest)) + Text(
            "░" * _bar_length(num_cut_off, largest), style="yellow"
        )
        table.add_row(
            f"{low:,}–{high:,}", bar, f"{num_complete + num_cut_off:,}", f"{num_cut_off:,}" if num_cut_off else ""
        )
    return table


def share_histogram(bins: Sequence[tuple[int, int | None, float]]) -> Table:
    """Return a histogram of the result of :func:`length_shares`."""
    largest = max(share for _, _, share in bins)
    table = new_table(">tokens", "", ">share")
    for low, high, share in bins:
        if high is None:
            bar = Text("░" * _bar_length(share, largest), style="yellow")
            table.add_row("longer", bar, f"{share:.1%}", "(cut off before they ended)")
        else:
            table.add_row(f"{low:,}–{high:,}", "█" * _bar_length(share, largest), f"{share:.1%}")
    return table


def acceptance_table(by_age: dict[int, tuple[float, float]]) -> Table:
    """Return a table of (drafted, accepted) draft tokens by age."""
    table = new_table(">age", ">drafted", ">accepted", ">share", "")
    for age, (drafted, accepted) in by_age.items():
        share = accepted / drafted if drafted else 0.0
        table.add_row(f"{age}", f"{drafted:,.0f}", f"{accepted:,.0f}", f"{share:.1%}", "█" * round(_BAR_WIDTH * share))
    return table


def _bar_length(value: float, largest: float) -> int:
    """Return the length of a bar, which is visible unless the value is zero."""
    return max(1, round(_BAR_WIDTH * value / largest)) if value else 0
