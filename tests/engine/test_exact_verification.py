"""The layout of steps whose drafts are made after their launch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.engine.exact_verification import fit_lengths

CAPACITY = 16


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Return lengths, capacities and a budget."""
    capacities = draw(st.lists(st.integers(0, CAPACITY), min_size=1, max_size=40))
    lengths = [draw(st.integers(0, capacity)) for capacity in capacities]
    return lengths, capacities, draw(st.integers(0, sum(capacities)))


@given(steps())
def test_lengths_fit_the_budget_and_the_longest_drafts_are_shortened(step: tuple[list[int], list[int], int]) -> None:
    lengths, capacities, budget = (np.array(values) for values in step)
    fitted, own = fit_lengths(lengths, capacities, int(budget))
    assert budget == fitted.sum()
    assert (own <= fitted).all()
    assert (fitted <= capacities).all()
    assert (own <= lengths).all()
    if lengths.sum() <= budget:
        assert (lengths == own).all()
    else:
        assert (fitted == own).all()
        shortened = own < lengths
        assert own[shortened].min() >= own.max() - 1
