"""Counters of draft tokens with a label: their source, or their position in the draft."""

from __future__ import annotations

from rollout_worker.drafting.index import SuffixIndex


def labeled_counters(index: SuffixIndex) -> dict[str, dict[str, int]]:
    """Return an index's counters of draft tokens by name, and then by label.

    Labels are sources, or the positions 1, 2, … of a draft, of which the last one, such as 16+, also counts all later
    positions. Positions after the last one that was verified are left out.
    """
    by_source, by_position = index.verification_counts()
    positions = [str(number) for number in range(1, len(by_position))] + [f"{len(by_position)}+"]
    used = {label: counts for label, counts in zip(positions, by_position, strict=True) if counts.verified}
    return {
        "source_proposed_tokens": {source: counts.drafted for source, counts in index.counters().items()},
        "source_draft_tokens": {source: counts.verified for source, counts in by_source.items()},
        "source_accepted_tokens": {source: counts.accepted for source, counts in by_source.items()},
        "position_draft_tokens": {label: counts.verified for label, counts in used.items()},
        "position_accepted_tokens": {label: counts.accepted for label, counts in used.items()},
    }
