"""Drafts from siblings that generate the same text at almost the same time."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_worker.drafting import SuffixIndex

BUDGET, STEPS = 16, 30
AHEAD = 60
"""Number of tokens that the first sibling is ahead of the others."""


@pytest.mark.parametrize("siblings", [2, 8, 40, 120])
@pytest.mark.parametrize("min_survival", [0.0, 0.5])
def test_a_sibling_that_is_ahead_of_many_others_is_found(siblings: int, min_survival: float) -> None:
    """The others follow each other by a few tokens, so that most of them would provide only the next few tokens."""
    text = np.random.default_rng(0).integers(0, 5000, 1000).astype(np.uint32)
    index = SuffixIndex()
    handles = [index.open("p") for _ in range(siblings)]
    positions = [100 + AHEAD, *(100 + number % 4 for number in range(1, siblings))]
    for handle, position in zip(handles, positions, strict=True):
        index.extend(handle, text[:position])
    lengths = []
    for _ in range(STEPS):
        for number, handle in enumerate(handles):
            index.extend(handle, text[positions[number] : positions[number] + 1])
            positions[number] += 1
        for number, handle in enumerate(handles[1:], start=1):
            drafted = index.draft(handle, BUDGET, min_survival).tokens
            assert text[positions[number] : positions[number] + len(drafted)].tolist() == drafted
            lengths.append(len(drafted))
    assert np.mean(lengths) > 15.0, f"the mean length of a draft is {np.mean(lengths):.1f}"
