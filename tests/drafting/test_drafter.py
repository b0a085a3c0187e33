"""Drafts for a running batch: budgets, what a token must promise to be drafted, and the counts."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_worker.drafting.drafter import Drafter
from rollout_worker.drafting.index import SuffixIndex

PROMPT = np.array([900, 901], dtype=np.uint32)
END = 800


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def drafter() -> Drafter:
    index = SuffixIndex()
    index.add("p", [(str(number), 1, np.arange(100, dtype=np.uint32)) for number in range(4)])
    return Drafter(index)


def draft(drafting: Drafter, rows: list[int], budgets: list[int], survival: float = 0.0) -> list[list[int]]:
    found = drafting.draft(np.array(rows), np.array(budgets), np.full(len(rows), survival))
    return [one.tokens for one in found]


def say(drafting: Drafter, row: int, said: np.ndarray, drafted: int = 0) -> None:
    drafting.advance(np.array([row]), [said], np.array([drafted]))


def test_it_drafts_what_earlier_rollouts_went_on_with() -> None:
    drafting = drafter()
    drafting.open(0, "p", PROMPT, ("history", "self"))
    say(drafting, 0, tokens(0))
    assert [[1, 2, 3]] == draft(drafting, [0], [3])


def test_no_draft_is_longer_than_its_budget() -> None:
    drafting = drafter()
    for row in range(3):
        drafting.open(row, "p", PROMPT, ("history",))
        say(drafting, row, tokens(0, 1))
    assert [[], [2, 3], [2, 3, 4, 5, 6]] == draft(drafting, [0, 1, 2], [0, 2, 5])


def test_counts_are_what_was_verified_and_what_was_accepted() -> None:
    drafting = drafter()
    drafting.open(0, "p", PROMPT, ("history",))
    say(drafting, 0, tokens(0))
    first = draft(drafting, [0], [4])[0]
    say(drafting, 0, tokens(1, 2, 77), drafted=len(first))  # two accepted, then one of the model's own
    second = draft(drafting, [0], [4])[0]
    say(drafting, 0, tokens(78), drafted=len(second))
    counts = drafting.close(0)
    assert counts.accepted == 2
    assert counts.drafted == len(first) + len(second) >= 4


def test_a_row_may_be_anothers_later_and_counts_begin_anew() -> None:
    drafting = drafter()
    for row in (40, 3):
        drafting.open(row, "p", PROMPT, ("history",))
    drafting.advance(np.array([3, 40]), [tokens(0), tokens(50, 51)], np.array([0, 1]))
    assert [[51 + 1], [1]] == draft(drafting, [40, 3], [1, 1])
    assert (1, 1, 2) == drafting.close(40)
    drafting.open(40, "p", PROMPT, ("history",))
    say(drafting, 40, tokens(7))
    assert (0, 0, 1) == drafting.close(40)
    assert (0, 0, 1) == drafting.close(3)


def test_tokens_from_before_are_context_and_count_as_nothing() -> None:
    drafting = drafter()
    drafting.open(0, "p", PROMPT, ("history",))
    say(drafting, 0, tokens(0, 1, 2, 3))
    assert [[4, 5]] == draft(drafting, [0], [2])
    say(drafting, 0, tokens(4, 5, 6), drafted=2)
    assert (2, 2) == ((counts := drafting.close(0)).drafted, counts.accepted)


def test_a_later_turn_goes_on_from_what_came_before_it() -> None:
    index = SuffixIndex()
    said, answered = [1, 2, 3, END], [700, 701, 702]
    index.add("p", [("turn 0", 1, said), ("turn 1", 1, [50, 51, 52, END], answered)])
    drafting = Drafter(index)
    prompt = np.array([900, 901, *said, *answered], dtype=np.uint32)
    drafting.open(0, "p", PROMPT, ("history",))
    drafting.open(1, "p", prompt, ("history",), later_turn=True)
    first, later = draft(drafting, [0, 1], [8, 8])
    assert [1, 2, 3, END] == first
    assert [50, 51, 52, END] == later


def test_nothing_is_drafted_behind_the_end_of_a_turn() -> None:
    drafting = Drafter(SuffixIndex())
    prompt = np.array([900, 1, 2, END, 700, 701, 900, 1], dtype=np.uint32)  # an earlier turn, its answer, and a cue
    for row, ends in ((0, ()), (1, (END, 5))):
        drafting.open(row, "p", prompt, ("self",), ends=ends)
    open_, ended = draft(drafting, [0, 1], [4, 4])
    assert [2, END, 700, 701] == open_
    assert [2, END] == ended


def test_what_must_be_more_probable_is_drafted_less_far() -> None:
    lengths = []
    for survival in (0.0, 0.5, 1.0):
        drafting = drafter()
        drafting.open(0, "p", PROMPT, ("history",))
        say(drafting, 0, tokens(0, 1))
        lengths.append(len(draft(drafting, [0], [8], survival)[0]))
    assert lengths == sorted(lengths, reverse=True)
    assert (8, 0) == (lengths[0], lengths[-1])


def test_a_draft_says_how_much_of_it_is_to_be_accepted() -> None:
    drafting = drafter()
    drafting.open(0, "p", PROMPT, ("history",))
    say(drafting, 0, tokens(0, 1))
    (found,) = drafting.draft(np.array([0]), np.array([8]), np.zeros(1))
    assert len(found) == 8
    assert found.expected == pytest.approx(np.cumprod(found.probabilities).sum())
