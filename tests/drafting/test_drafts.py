"""Drafts of the index: how they begin and end, and their expected number of accepted tokens."""

from __future__ import annotations

import numpy as np
import pytest

from rollout_worker.drafting.index import SuffixIndex

PROMPT = [900, 901]
END = 800


def open_request(tokens: list[int]) -> tuple[SuffixIndex, int]:
    """Return an index whose history counts from 0 to 99, and a request with these tokens."""
    index = SuffixIndex()
    index.add("p", [(str(number), 1, np.arange(100, dtype=np.uint32)) for number in range(4)])
    handle = index.open("p", PROMPT, ("history",))
    index.extend(handle, tokens)
    return index, handle


def test_a_draft_continues_as_earlier_rollouts_did_up_to_its_budget() -> None:
    index, handle = open_request([0])
    for budget, expected in ((0, []), (2, [1, 2]), (5, [1, 2, 3, 4, 5])):
        assert expected == index.draft(handle, budget).tokens


def test_a_later_turn_matches_the_context_before_it() -> None:
    index = SuffixIndex()
    response, answer = [1, 2, 3, END], [700, 701, 702]
    index.add("p", [("turn 0", 1, response), ("turn 1", 1, [50, 51, 52, END], answer)])
    prompt = [900, 901, *response, *answer]
    first = index.open("p", PROMPT, ("history",))
    later = index.open("p", prompt, ("history",), context_length=len(prompt))
    assert [1, 2, 3, END] == index.draft(first, 8).tokens
    assert [50, 51, 52, END] == index.draft(later, 8).tokens


def test_a_draft_ends_with_a_stop_token() -> None:
    index = SuffixIndex()
    # an earlier turn, the answer to it, and the same beginning again
    prompt = [900, 1, 2, END, 700, 701, 900, 1]
    for stop_tokens, expected in (((), [2, END, 700, 701]), ((END, 5), [2, END])):
        handle = index.open("p", prompt, ("self",), stop_tokens=stop_tokens)
        assert expected == index.draft(handle, 4).tokens


def test_a_higher_survival_threshold_gives_shorter_drafts() -> None:
    lengths = []
    for survival in (0.0, 0.5, 1.0):
        index, handle = open_request([0, 1])
        lengths.append(len(index.draft(handle, 8, survival)))
    assert lengths == sorted(lengths, reverse=True)
    assert (8, 0) == (lengths[0], lengths[-1])


def test_a_draft_has_its_expected_number_of_accepted_tokens() -> None:
    index, handle = open_request([0, 1])
    found = index.draft(handle, 8)
    assert 8 == len(found)
    assert found.expected == pytest.approx(np.cumprod(found.probabilities).sum())


def test_the_alternatives_of_a_draft_contain_its_tokens_and_what_else_followed() -> None:
    index = SuffixIndex()
    index.add("p", [(str(number), 1, [1, 2, 3 + (number == 0), 9]) for number in range(4)])
    handle = index.open("p", PROMPT, ("history",))
    assert [] == index.alternatives(handle)
    index.extend(handle, [1, 2])
    found = index.draft(handle, 2)
    first, second = index.alternatives(handle)
    assert {3, 4} == {one.token for one in first}
    likely, unlikely = sorted(first, key=lambda one: -one.mixed)
    assert 3 == likely.token == found.tokens[0]
    assert 0 < unlikely.mixed < likely.mixed < likely.mixed + unlikely.mixed <= 1
    assert likely.calibrated == pytest.approx(found.probabilities[0])
    assert unlikely.calibrated < likely.calibrated
    assert [9] == [one.token for one in second]
    with pytest.raises(KeyError):
        index.alternatives(handle + 1)
