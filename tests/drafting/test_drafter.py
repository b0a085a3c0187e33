"""Drafts for a running batch: budgets, what a token must promise to be drafted, and the counts."""

from __future__ import annotations

import numpy as np

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


def draft(drafting: Drafter, keys: list[str], budgets: list[int], survival: float = 0.0) -> list[list[int]]:
    return [one.tokens for one in drafting.draft(keys, budgets, [survival] * len(keys))]


def test_it_drafts_what_earlier_rollouts_went_on_with() -> None:
    drafting = drafter()
    drafting.open("a", "p", PROMPT, ("history", "self"))
    drafting.advance("a", tokens(0))
    assert [[1, 2, 3]] == draft(drafting, ["a"], [3])


def test_no_draft_is_longer_than_its_budget() -> None:
    drafting = drafter()
    for key in "abc":
        drafting.open(key, "p", PROMPT, ("history",))
        drafting.advance(key, tokens(0, 1))
    assert [[], [2, 3], [2, 3, 4, 5, 6]] == draft(drafting, list("abc"), [0, 2, 5])


def test_counts_are_what_was_verified_and_what_was_accepted() -> None:
    drafting = drafter()
    drafting.open("a", "p", PROMPT, ("history",))
    drafting.advance("a", tokens(0))
    first = draft(drafting, ["a"], [4])[0]
    drafting.advance("a", tokens(1, 2, 77), drafted=len(first))  # two accepted, then one of the model's own
    second = draft(drafting, ["a"], [4])[0]
    drafting.advance("a", tokens(78), drafted=len(second))
    counts = drafting.close("a")
    assert counts.accepted == 2
    assert counts.drafted == len(first) + len(second) >= 4
    assert set() == drafting.running()


def test_tokens_from_before_are_context_and_count_as_nothing() -> None:
    drafting = drafter()
    drafting.open("a", "p", PROMPT, ("history",))
    drafting.advance("a", tokens(0, 1, 2, 3))
    assert [[4, 5]] == draft(drafting, ["a"], [2])
    drafting.advance("a", tokens(4, 5, 6), drafted=2)
    assert (2, 2) == ((counts := drafting.close("a")).drafted, counts.accepted)


def test_a_later_turn_goes_on_from_what_came_before_it() -> None:
    index = SuffixIndex()
    said, answered = [1, 2, 3, END], [700, 701, 702]
    index.add("p", [("turn 0", 1, said), ("turn 1", 1, [50, 51, 52, END], answered)])
    drafting = Drafter(index)
    prompt = np.array([900, 901, *said, *answered], dtype=np.uint32)
    drafting.open("first", "p", PROMPT, ("history",))
    drafting.open("later", "p", prompt, ("history",), later_turn=True)
    first, later = draft(drafting, ["first", "later"], [8, 8])
    assert [1, 2, 3, END] == first
    assert [50, 51, 52, END] == later


def test_nothing_is_drafted_behind_the_end_of_a_turn() -> None:
    drafting = Drafter(SuffixIndex())
    prompt = np.array([900, 1, 2, END, 700, 701, 900, 1], dtype=np.uint32)  # an earlier turn, its answer, and a cue
    for key, ends in (("open", ()), ("ends", (END, 5))):
        drafting.open(key, "p", prompt, ("self",), ends=ends)
    open_, ended = draft(drafting, ["open", "ends"], [4, 4])
    assert [2, END, 700, 701] == open_
    assert [2, END] == ended


def test_what_must_be_more_probable_is_drafted_less_far() -> None:
    lengths = []
    for survival in (0.0, 0.5, 1.0):
        drafting = drafter()
        drafting.open("a", "p", PROMPT, ("history",))
        drafting.advance("a", tokens(0, 1))
        lengths.append(len(draft(drafting, ["a"], [8], survival)[0]))
    assert lengths == sorted(lengths, reverse=True)
    assert (8, 0) == (lengths[0], lengths[-1])
