"""How many draft tokens were accepted: by step, source, position and age."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rollout_worker.report.analysis.steps import Step
from rollout_worker.report.recording import DraftCounts


class Acceptance(NamedTuple):
    """Verified draft tokens, and those of them that were accepted."""

    drafted: float
    accepted: float

    @property
    def rate(self) -> float:
        """The acceptance rate; 0 without draft tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0


def by_source(step: Step) -> dict[str, Acceptance]:
    """Return the draft tokens of a step by their source."""
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for one in step.scored:
        drafted.update(one.rollout.draft_tokens_by_source)
        accepted.update(one.rollout.accepted_tokens_by_source)
    return {source: Acceptance(count, accepted[source]) for source, count in drafted.items()}


def by_position(counts: Iterable[DraftCounts]) -> dict[int, Acceptance]:
    """Return the draft tokens of all engines by their position in the draft, from 1."""
    sums: defaultdict[int, Acceptance] = defaultdict(lambda: Acceptance(0, 0))
    for one in counts:
        known = sums[one.position]
        sums[one.position] = Acceptance(known.drafted + one.drafted, known.accepted + one.accepted)
    return dict(sorted(sums.items()))


def by_age(counts: Mapping[int, Sequence[float]]) -> dict[int, Acceptance]:
    """Return the draft tokens from the history by the age of the rollouts behind them."""
    return {age: Acceptance(*of_age) for age, of_age in sorted(counts.items())}
