"""Drafting for a running batch: budgets, the survival threshold, and token counts."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_worker.drafting.drafter import Drafter
from rollout_worker.drafting.index import SuffixIndex

PROMPT = np.array([900, 901], dtype=np.uint32)
END = 800


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def new_drafter() -> Drafter:
    index = SuffixIndex()
    index.add("p", [(str(number), 1, np.arange(100, dtype=np.uint32)) for number in range(4)])
    return Drafter(index)


def draft(drafter: Drafter, rows: list[int], budgets: list[int], survival: float = 0.0) -> list[list[int]]:
    found = drafter.draft(np.array(rows), np.array(budgets), np.full(len(rows), survival))
    return [draft.tokens for draft in found]


def advance(drafter: Drafter, row: int, sampled: np.ndarray, drafted: int = 0) -> None:
    drafter.advance(np.array([row]), [sampled], np.array([drafted]))


def test_a_draft_continues_as_earlier_rollouts_did() -> None:
    drafter = new_drafter()
    drafter.open(0, "p", PROMPT, ("history", "self"))
    advance(drafter, 0, tokens(0))
    assert [[1, 2, 3]] == draft(drafter, [0], [3])


def test_no_draft_is_longer_than_its_budget() -> None:
    drafter = new_drafter()
    for row in range(3):
        drafter.open(row, "p", PROMPT, ("history",))
        advance(drafter, row, tokens(0, 1))
    assert [[], [2, 3], [2, 3, 4, 5, 6]] == draft(drafter, [0, 1, 2], [0, 2, 5])


def test_close_returns_counts_of_verified_and_accepted_tokens() -> None:
    drafter = new_drafter()
    drafter.open(0, "p", PROMPT, ("history",))
    advance(drafter, 0, tokens(0))
    first = draft(drafter, [0], [4])[0]
    advance(drafter, 0, tokens(1, 2, 77), drafted=len(first))  # two accepted tokens and one other
    second = draft(drafter, [0], [4])[0]
    advance(drafter, 0, tokens(78), drafted=len(second))
    counts = drafter.close(0)
    assert counts.accepted == 2
    assert counts.drafted == len(first) + len(second) >= 4


def test_counts_start_at_zero_when_a_row_is_reused() -> None:
    drafter = new_drafter()
    for row in (40, 3):
        drafter.open(row, "p", PROMPT, ("history",))
    drafter.advance(np.array([3, 40]), [tokens(0), tokens(50, 51)], np.array([0, 1]))
    assert [[51 + 1], [1]] == draft(drafter, [40, 3], [1, 1])
    assert (1, 1, 2) == drafter.close(40)
    drafter.open(40, "p", PROMPT, ("history",))
    advance(drafter, 40, tokens(7))
    assert (0, 0, 1) == drafter.close(40)
    assert (0, 0, 1) == drafter.close(3)


def test_earlier_tokens_of_a_resumed_rollout_are_not_counted_as_accepted() -> None:
    drafter = new_drafter()
    drafter.open(0, "p", PROMPT, ("history",))
    advance(drafter, 0, tokens(0, 1, 2, 3))
    assert [[4, 5]] == draft(drafter, [0], [2])
    advance(drafter, 0, tokens(4, 5, 6), drafted=2)
    assert (2, 2) == ((counts := drafter.close(0)).drafted, counts.accepted)


def test_a_later_turn_matches_the_context_before_it() -> None:
    index = SuffixIndex()
    response, answer = [1, 2, 3, END], [700, 701, 702]
    index.add("p", [("turn 0", 1, response), ("turn 1", 1, [50, 51, 52, END], answer)])
    drafter = Drafter(index)
    prompt = np.array([900, 901, *response, *answer], dtype=np.uint32)
    drafter.open(0, "p", PROMPT, ("history",))
    drafter.open(1, "p", prompt, ("history",), later_turn=True)
    first, later = draft(drafter, [0, 1], [8, 8])
    assert [1, 2, 3, END] == first
    assert [50, 51, 52, END] == later


def test_a_draft_ends_with_a_stop_token() -> None:
    drafter = Drafter(SuffixIndex())
    # an earlier turn, the answer to it, and the same beginning again
    prompt = np.array([900, 1, 2, END, 700, 701, 900, 1], dtype=np.uint32)
    for row, stop_tokens in ((0, ()), (1, (END, 5))):
        drafter.open(row, "p", prompt, ("self",), stop_tokens=stop_tokens)
    without_stop, with_stop = draft(drafter, [0, 1], [4, 4])
    assert [2, END, 700, 701] == without_stop
    assert [2, END] == with_stop


def test_a_higher_survival_threshold_gives_shorter_drafts() -> None:
    lengths = []
    for survival in (0.0, 0.5, 1.0):
        drafter = new_drafter()
        drafter.open(0, "p", PROMPT, ("history",))
        advance(drafter, 0, tokens(0, 1))
        lengths.append(len(draft(drafter, [0], [8], survival)[0]))
    assert lengths == sorted(lengths, reverse=True)
    assert (8, 0) == (lengths[0], lengths[-1])


def test_a_draft_has_its_expected_number_of_accepted_tokens() -> None:
    drafter = new_drafter()
    drafter.open(0, "p", PROMPT, ("history",))
    advance(drafter, 0, tokens(0, 1))
    (found,) = drafter.draft(np.array([0]), np.array([8]), np.zeros(1))
    assert len(found) == 8
    assert found.expected == pytest.approx(np.cumprod(found.probabilities).sum())
