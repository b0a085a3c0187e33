"""Drafts for a running batch: budgets, what a token must promise to be drafted, and the counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.drafting.drafter import Drafter, break_even
from rollout_worker.drafting.index import SuffixIndex

PROMPT = np.array([900, 901], dtype=np.uint32)
END = 800


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.uint32)


def drafter(base_tokens: float = 1e9, most: int = 8) -> Drafter:
    index = SuffixIndex()
    index.add("p", [(str(number), 1, np.arange(100, dtype=np.uint32)) for number in range(4)])
    return Drafter(index, max_draft_tokens=most, base_tokens=base_tokens)


def test_it_drafts_what_earlier_rollouts_went_on_with() -> None:
    drafting = drafter()
    drafting.open("a", "p", PROMPT, ("history", "self"))
    drafting.advance("a", tokens(0))
    assert [[1, 2, 3]] == drafting.draft(["a"], [3])


def test_no_draft_is_longer_than_its_budget_or_the_job_allows() -> None:
    drafting = drafter(most=5)
    for key in "abc":
        drafting.open(key, "p", PROMPT, ("history",))
        drafting.advance(key, tokens(0, 1))
    assert [[], [2, 3], [2, 3, 4, 5, 6]] == drafting.draft(list("abc"), [0, 2, 50])


def test_counts_are_what_was_verified_and_what_was_accepted() -> None:
    drafting = drafter()
    drafting.open("a", "p", PROMPT, ("history",))
    drafting.advance("a", tokens(0))
    drafting.draft(["a"], [4])
    drafting.advance("a", tokens(1, 2, 77))  # two accepted, then one of the model's own
    drafting.draft(["a"], [4])
    drafting.advance("a", tokens(78))
    counts = drafting.close("a")
    assert counts.accepted == 2
    assert counts.drafted >= 4
    assert set() == drafting.running()


def test_tokens_from_before_are_context_and_count_as_nothing() -> None:
    drafting = drafter()
    drafting.open("a", "p", PROMPT, ("history",))
    drafting.advance("a", tokens(0, 1, 2, 3), new_step=False)
    assert [[4, 5]] == drafting.draft(["a"], [2])
    drafting.advance("a", tokens(4, 5, 6))
    assert (2, 2) == ((counts := drafting.close("a")).drafted, counts.accepted)


def test_a_later_turn_goes_on_from_what_came_before_it() -> None:
    index = SuffixIndex()
    said, answered = [1, 2, 3, END], [700, 701, 702]
    index.add("p", [("turn 0", 1, said), ("turn 1", 1, [50, 51, 52, END], answered)])
    drafting = Drafter(index, max_draft_tokens=8, base_tokens=1e9)
    prompt = np.array([900, 901, *said, *answered], dtype=np.uint32)
    drafting.open("first", "p", PROMPT, ("history",))
    drafting.open("later", "p", prompt, ("history",), later_turn=True)
    first, later = drafting.draft(["first", "later"], [8, 8])
    assert [1, 2, 3, END] == first
    assert [50, 51, 52, END] == later


def test_nothing_is_drafted_behind_the_end_of_a_turn() -> None:
    drafting = Drafter(SuffixIndex(), max_draft_tokens=8, base_tokens=1e9)
    prompt = np.array([900, 1, 2, END, 700, 701, 900, 1], dtype=np.uint32)  # an earlier turn, its answer, and a cue
    for key, ends in (("open", ()), ("ends", (END, 5))):
        drafting.open(key, "p", prompt, ("self",), ends=ends)
    open_, ended = drafting.draft(["open", "ends"], [4, 4])
    assert [2, END, 700, 701] == open_
    assert [2, END] == ended


def test_where_tokens_are_dear_less_is_drafted() -> None:
    lengths = []
    for base_tokens in (1e9, 3.0, 1e-9):
        drafting = drafter(base_tokens)
        drafting.open("a", "p", PROMPT, ("history",))
        drafting.advance("a", tokens(0, 1))
        lengths.append(len(drafting.draft(["a"], [8])[0]))
    assert lengths == sorted(lengths, reverse=True)
    assert (8, 0) == (lengths[0], lengths[-1])


@given(st.integers(1, 1000), st.floats(0.1, 1e4))
def test_break_even_is_a_probability_that_rises_with_the_batch(running: int, base_tokens: float) -> None:
    assert 0 < break_even(running, base_tokens) < break_even(running + 1, base_tokens) < 1


def test_break_even_is_where_the_cost_model_says() -> None:
    """Time for one token of each of n rollouts, with and without one draft token each of probability p."""
    c_base, c_tok, n = 8.0, 0.026, 64
    p = break_even(n, c_base / c_tok)
    plain = (c_base + c_tok * n) / n
    drafted = (c_base + c_tok * 2 * n) / (n * (1 + p))
    assert plain == pytest.approx(drafted)
