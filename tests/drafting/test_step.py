"""`Batch.step`: what it drafts, with and without drafting ahead, its limits, counts and arguments."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.protocol.history_encoding import DRAFT_SOURCES
from rollout_worker.drafting import SuffixIndex
from rollout_worker.drafting.batch import NO_HANDLE, NO_ROW
from rollout_worker.drafting.index import SOURCES

WIDTH = 8
PROMPT = [1, 2, 3]
TOKEN_GAIN = 0.5
TOKEN_COSTS = 0.125 * np.arange(2000)


class Stepper:
    """An engine of which every request has the prompt `PROMPT`, and a place of the same number as its handle."""

    def __init__(self, index: SuffixIndex, handles: list[int]) -> None:
        places = len(handles) + 1
        self.handles = handles
        self.token_ids = np.zeros((places, 1000), np.int32)
        self.drafts, self.lengths = np.zeros((places, WIDTH), np.int64), np.zeros(places, np.int32)
        self.batch = index.new_batch(self.token_ids, self.drafts, self.lengths)
        self.num_tokens = np.full(places, len(PROMPT), np.int32)
        self.rows = np.arange(len(handles))
        self.places = np.arange(len(handles))[::-1].copy()

    def plan(
        self,
        budget: int = WIDTH,
        min_survival: float = 0.0,
        costs: np.ndarray = TOKEN_COSTS,
        *,
        shortens: bool = False,
        uniform_lengths: Sequence[int] = (),
        time_limit_s: float = 60.0,
    ) -> None:
        count = len(self.handles)
        budgets, survivals = np.full(count, budget), np.full(count, min_survival)
        self.batch.plan(
            np.array(self.handles),
            budgets,
            survivals,
            np.full(count, TOKEN_GAIN),
            costs,
            shortens=shortens,
            uniform_lengths=uniform_lengths,
            time_limit_s=time_limit_s,
        )

    def step(self, *sampled: list[int], verified: list[int] | None = None, **limits: Any) -> list[list[int]]:
        """Report the sampled tokens of each request and return the drafts."""
        self.plan(**limits)
        for place, tokens in zip(self.places, sampled, strict=True):
            self.token_ids[place, self.num_tokens[place] : self.num_tokens[place] + len(tokens)] = tokens
            self.num_tokens[place] += len(tokens)
        all_verified = np.full(len(sampled), WIDTH) if verified is None else np.array(verified)
        self.num_drafts, self.num_draft_tokens, self.gain_s = self.batch.step(
            self.num_tokens, self.rows, self.places, all_verified
        )
        lengths = self.lengths[self.places].tolist()
        return [row[:length] for row, length in zip(self.drafts[self.places].tolist(), lengths, strict=True)]


def text(seed: int, length: int = 300) -> list[int]:
    """Return a text of few distinct tokens, so that there are many matches."""
    return np.random.default_rng(seed).integers(0, 6, length).tolist()


def filled_index(**options: Any) -> SuffixIndex:
    index = SuffixIndex(pool_tokens=2000, **options)
    for problem in ("p", "q"):
        index.add(problem, [(str(seed), seed, text(seed)) for seed in range(8)])
    index.wait_idle()
    return index


def accepted(draft: list[int], recorded: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(draft, recorded, strict=False)) if a != b), len(draft))


def test_a_step_equals_extending_and_drafting() -> None:
    index, other = filled_index(), filled_index()
    recorded = [text(1), text(100), text(3), text(101)]
    problems = ["p", "p", "q", "p"]
    handles = [index.open(problem, PROMPT) for problem in problems]
    others = [other.open(problem, PROMPT) for problem in problems]
    stepper = Stepper(index, handles)
    positions = [0] * 4
    lengths = [0] * 4
    for number in range(30):
        sampled = [text[at : at + length + 1] for text, at, length in zip(recorded, positions, lengths, strict=True)]
        positions = [at + len(tokens) for at, tokens in zip(positions, sampled, strict=True)]
        survival = [0.0, 0.1, 0.4][number % 3]
        drafts = stepper.step(*sampled, min_survival=survival)
        other.extend_batch(others, sampled)
        # `step` computes one position more than it drafts, and learns from it as well.
        expected = other.draft_batch(others, [WIDTH + 1] * 4, survival)
        assert [draft.tokens[:WIDTH] for draft in expected] == drafts
        accepted_tokens = [np.cumprod(draft.probabilities[:WIDTH]).sum() for draft in expected]
        assert accepted_tokens == pytest.approx(stepper.batch.expected[:4])
        assert [len(tokens) for tokens in sampled] == stepper.batch.generated[:4].tolist()
        assert sum(map(len, drafts)) == stepper.num_draft_tokens
        assert sum(map(bool, drafts)) == stepper.num_drafts
        assert TOKEN_GAIN * sum(accepted_tokens) - 0.125 * stepper.num_draft_tokens == pytest.approx(stepper.gain_s)
        lengths = [accepted(draft, text[at:]) for draft, text, at in zip(drafts, recorded, positions, strict=True)]
    assert (0, 120, 0) == index.look_ups()


COSTS = st.one_of(
    st.floats(0.0, 0.5).map(lambda cost: cost * np.arange(100)),
    # As in a mixture of experts: the first tokens cost most.
    st.tuples(st.floats(0.0, 1.2), st.floats(0.01, 0.5)).map(lambda c: c[0] * (1 - (1 - c[1]) ** np.arange(100))),
    # A step without a CUDA graph.
    st.integers(1, 40).map(lambda tokens: np.where(np.arange(100) < tokens, 0.01 * np.arange(100), np.inf)),
)


@given(costs=COSTS, seed=st.integers(0, 50))
def test_drafts_are_shortened_to_those_tokens_that_gain_most_together(costs: np.ndarray, seed: int) -> None:
    index, other = filled_index(), filled_index()
    problems = ["p", "q", "p", "q", "p", "q"]
    sampled = [text(seed + number, 5) for number in range(6)]
    stepper = Stepper(index, [index.open(problem, PROMPT) for problem in problems])
    others = [other.open(problem, PROMPT) for problem in problems]
    other.extend_batch(others, sampled)
    drafts = stepper.step(*sampled, costs=costs, shortens=True)
    whole = other.draft_batch(others, [WIDTH + 1] * 6, 0.0)
    survivals = [np.cumprod(draft.probabilities[:WIDTH]) for draft in whole]
    assert all(draft == one.tokens[: len(draft)] for draft, one in zip(drafts, whole, strict=True))
    kept = [one[: len(draft)] for one, draft in zip(survivals, drafts, strict=True)]
    assert [one.sum() for one in kept] == pytest.approx(stepper.batch.expected[:6])
    assert stepper.num_draft_tokens == sum(map(len, drafts))
    values = TOKEN_GAIN * np.sort(np.concatenate(survivals))[::-1]
    gains = np.concatenate([[0.0], np.cumsum(values)]) - costs[: len(values) + 1]
    if stepper.gain_s > 0:
        assert TOKEN_GAIN * sum(one.sum() for one in kept) - costs[stepper.num_draft_tokens] == pytest.approx(
            stepper.gain_s
        )
    # Tokens whose values differ by less than 1/32 may count as equally valuable.
    assert gains.max() - values[: gains.argmax()].sum() / 32 - 1e-9 <= max(stepper.gain_s, 0.0) <= gains.max() + 1e-9


@given(
    costs=COSTS,
    seed=st.integers(0, 50),
    shortens=st.booleans(),
    lengths=st.sampled_from([[0, 1, 2, 4, WIDTH], [0, 2, 5]]),
)
def test_one_length_is_chosen_for_all_drafts_where_the_engine_verifies_as_many_tokens_for_each_request(
    costs: np.ndarray, seed: int, shortens: bool, lengths: list[int]
) -> None:
    index, other = filled_index(), filled_index()
    sampled = [text(seed + number, 5) for number in range(4)]
    stepper = Stepper(index, [index.open("p", PROMPT) for _ in range(4)])
    others = [other.open("p", PROMPT) for _ in range(4)]
    other.extend_batch(others, sampled)
    drafts = stepper.step(*sampled, costs=costs, shortens=shortens, uniform_lengths=lengths)
    whole = other.draft_batch(others, [WIDTH + 1] * 4, 0.0)
    survivals = [np.cumprod(draft.probabilities[:WIDTH]) for draft in whole]
    longest = min(max(map(len, survivals)), lengths[-1])
    possible = [length for length in lengths[1:] if shortens or length >= longest]
    gains = {
        length: TOKEN_GAIN * sum(one[:length].sum() for one in survivals) - costs[min(4 * length, len(costs) - 1)]
        for length in possible
    }
    chosen = max(gains, key=lambda length: gains[length])
    if gains[chosen] <= 0:
        # Nothing is removed, except for tokens with which the step would have no CUDA graph.
        longest_possible = next(length for length in lengths if length >= longest)
        chosen = max((n for n in possible if n <= longest_possible and np.isfinite(gains[n])), default=0)
    assert [draft.tokens[: min(chosen, WIDTH)] for draft in whole] == drafts
    assert gains.get(chosen, 0.0) == pytest.approx(stepper.gain_s)
    kept = [one[:chosen].sum() for one in survivals]
    assert kept == pytest.approx(stepper.batch.expected[:4])
    assert stepper.num_draft_tokens == sum(map(len, drafts))


def test_nothing_is_removed_if_no_draft_gains_anything() -> None:
    index = filled_index()
    stepper = Stepper(index, [index.open("p", PROMPT)])
    assert [text(1, 12)[4:]] == stepper.step(text(1, 4), costs=100.0 * np.arange(20), shortens=True)
    assert stepper.gain_s < 0


@pytest.mark.parametrize("ahead", [False, True])
def test_only_the_tokens_of_shortened_drafts_are_counted(ahead: bool) -> None:
    index = filled_index(draft_ahead=ahead)
    handle = index.open("p", PROMPT)
    stepper = Stepper(index, [handle])
    recorded = text(1)
    position, costs = 4, np.array([0.0, 0.1, 0.2, np.inf])
    [draft] = stepper.step(recorded[:4], costs=costs, shortens=True)
    assert recorded[4:6] == draft
    for _ in range(5):
        index.wait_idle()
        [draft] = stepper.step(recorded[position : position + 3], costs=costs, shortens=True)
        position += 3
        assert recorded[position : position + 2] == draft
    assert (10, 10, 19) == index.close(handle)[:3]


@pytest.mark.parametrize("threads", [1, 2])
def test_drafts_that_were_prepared_are_looked_up_and_their_sources_known(threads: int) -> None:
    index = filled_index(draft_ahead=True, threads=threads)
    recorded = [text(1), text(100), text(5)]
    stepper = Stepper(index, [index.open(problem, PROMPT) for problem in ("p", "p", "q")])
    positions, lengths = [0] * 3, [0] * 3
    drafted = [b""] * 3  # whether each token of a response was
    for _ in range(30):
        sampled = [text[at : at + length + 1] for text, at, length in zip(recorded, positions, lengths, strict=True)]
        drafted = [was + b"\1" * length + b"\0" for was, length in zip(drafted, lengths, strict=True)]
        positions = [at + len(tokens) for at, tokens in zip(positions, sampled, strict=True)]
        drafts = stepper.step(*sampled, min_survival=0.1)
        index.wait_idle()
        lengths = [accepted(draft, text[at:]) for draft, text, at in zip(drafts, recorded, positions, strict=True)]
    found, computed, omitted = index.look_ups()
    assert (90, 0) == (found + computed, omitted)
    # Only the first drafts cannot be prepared, as there are only six distinct tokens.
    assert found >= 85
    assert sum(map(sum, drafted)) > 60
    for handle, expected in zip(stepper.handles, drafted, strict=True):
        counts = index.close(handle)
        assert expected.rstrip(b"\0") == bytes(map(bool, counts.token_sources))
        assert counts.accepted == sum(expected)
        assert counts.drafted == sum(counts.drafted_by_source)


@pytest.mark.parametrize("draft_ahead", [False, True])
def test_a_request_without_new_tokens_gets_no_draft(draft_ahead: bool) -> None:
    index = SuffixIndex(draft_ahead=draft_ahead)
    index.add("p", [("a", 0, list(range(50)))])
    stepper = Stepper(index, [index.open("p", PROMPT), index.open("p", PROMPT)])
    assert [[1, 2], [1, 2]] == stepper.step([0], [0], budget=2)
    index.wait_idle()
    assert [[], [4, 5]] == stepper.step([], [1, 2, 3], budget=2)
    index.wait_idle()
    assert [[5, 6], []] == stepper.step([1, 2, 3, 4], [], budget=2)
    assert [(2, 2, 5), (2, 2, 4)] == [index.close(handle)[:3] for handle in stepper.handles]


def test_drafts_for_which_a_step_has_no_time_are_computed_before_the_next_step() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(50)))])
    stepper = Stepper(index, [index.open("p", PROMPT) for _ in range(2)])
    # One draft is computed in any case.
    assert [[1, 2], []] == stepper.step([0], [7], time_limit_s=0.0, budget=2)
    assert (0, 1, 1) == index.look_ups()
    index.wait_idle()
    assert [[2, 3], [9, 10]] == stepper.step([1], [8], time_limit_s=0.0, budget=2)
    assert (2, 1, 1) == index.look_ups()
    index.wait_idle()
    # Nobody could expect the tokens 20 and 30.
    assert [[21, 22], []] == stepper.step([2, 20], [9, 30], time_limit_s=0.0, budget=2)
    index.wait_idle()
    assert [[22, 23], [32, 33]] == stepper.step([21], [31], time_limit_s=0.0, budget=2)
    assert (4, 2, 2) == index.look_ups()
    assert [(6, 1, 5), (2, 1, 5)] == [index.close(handle)[:3] for handle in stepper.handles]


def test_requests_without_a_budget_need_no_time() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(50)))])
    stepper = Stepper(index, [index.open("p", PROMPT) for _ in range(4)])
    for token in range(3):
        assert [[]] * 4 == stepper.step(*[[token]] * 4, time_limit_s=0.0, budget=0)
    assert (0, 0, 0) == index.look_ups()
    # The budget of a trial is new in the step.
    handles, budgets = np.array(stepper.handles), np.array([0, 0, 2, 0])
    stepper.batch.plan(handles, budgets, np.zeros(4), np.array([9.0, 9.0, 0.0, 9.0]), TOKEN_COSTS, time_limit_s=0.0)
    stepper.token_ids[:4, stepper.num_tokens[0]] = 3
    assert 1 == stepper.batch.step(stepper.num_tokens + 1, stepper.rows, stepper.places, np.zeros(4, int))[0]
    assert 2 == stepper.lengths[stepper.places[2]]


def test_nothing_prepared_remains_after_a_step_that_failed() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, [*range(50), 7, 60, 8])])
    stepper = Stepper(index, [index.open("p", PROMPT) for _ in range(2)])
    stepper.step([6], [0])
    index.wait_idle()
    with pytest.raises(ValueError, match="negative"):
        stepper.step([40], [-2])
    stepper.token_ids[stepper.places[1], stepper.num_tokens[0] - 1] = 1
    stepper.step([7], [])
    expected = SuffixIndex()
    expected.add("p", [("a", 0, [*range(50), 7, 60, 8])])
    handle = expected.open("p", PROMPT)
    expected.extend(handle, [6, 40, 7])
    tokens = expected.draft(handle, WIDTH).tokens
    place = stepper.places[0]
    assert tokens == stepper.drafts[place, : stepper.lengths[place]].tolist()


def test_the_most_valuable_drafts_are_computed_first() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(200)) * 5)])
    stepper = Stepper(index, [index.open("p", PROMPT) for _ in range(100)])
    stepper.step(*[[0]] * 100)
    gains = np.random.default_rng(0).permutation(100).astype(float)
    handles, limit_s, num_drafts = np.array(stepper.handles), 1e-6, 0
    # How many drafts a machine computes in some time is unknown, so that the limit grows until there are some.
    while num_drafts < 5:
        index.wait_idle()
        stepper.batch.plan(handles, np.full(100, WIDTH), np.zeros(100), gains, TOKEN_COSTS, time_limit_s=limit_s)
        # The step accepts nothing, and samples a token that could not be expected, so that no draft was prepared.
        stepper.token_ids[stepper.places, stepper.num_tokens[0]] = (stepper.num_tokens[0] * 37) % 200
        stepper.num_tokens += 1
        num_drafts, _, _ = stepper.batch.step(stepper.num_tokens, stepper.rows, stepper.places, np.zeros(100, int))
        limit_s *= 1.1
    has_draft = stepper.lengths[stepper.places] > 0
    assert num_drafts < 100
    assert gains[has_draft].min() > gains[~has_draft].max()


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_invalid_time_limits_are_rejected(limit: float) -> None:
    index = SuffixIndex()
    with pytest.raises(ValueError, match="time_limit_s must be 0 or more seconds"):
        Stepper(index, [index.open("p", PROMPT)]).plan(time_limit_s=limit)


def test_a_request_that_is_closed_or_not_followed_gets_no_draft() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(50)))])
    stepper = Stepper(index, [index.open("p", PROMPT) for _ in range(3)])
    assert [[1, 2]] * 3 == stepper.step([0], [0], [0], budget=2)
    index.close(stepper.handles[0])
    stepper.handles[0] = NO_HANDLE
    stepper.rows[1] = NO_ROW
    assert [[], [], [4, 5]] == stepper.step([1, 2, 3], [1, 2, 3], [1, 2, 3], budget=2)
    index.close(stepper.handles[2])
    # The plan still has the request.
    totals = stepper.batch.step(stepper.num_tokens + 1, stepper.rows, stepper.places, np.zeros(3, int))
    assert (0, 0, 0.0) == totals
    assert not stepper.lengths.any()


def test_tokens_that_do_not_follow_the_draft_are_accepted() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(50)))])
    stepper = Stepper(index, [index.open("p", PROMPT)])
    stepper.step([0])
    index.wait_idle()
    # The engine may have sampled in steps in which it did not draft.
    assert [21] == stepper.step([17, 18, 19, 20])[0][:1]
    index.extend(stepper.handles[0], [30])
    assert [32] == stepper.step([30, 31])[0][:1]
    assert len(PROMPT) + 7 == index.num_tokens(stepper.handles[0])


@pytest.mark.parametrize("draft_ahead", [False, True])
def test_the_limits_of_a_request_apply(draft_ahead: bool) -> None:
    index = SuffixIndex(draft_ahead=draft_ahead)
    recorded = list(range(60))
    index.add("p", [("a", 0, recorded)])
    limits = {"undrafted_tokens": 4, "min_tokens": 12, "max_tokens": 40}
    stepper = Stepper(index, [index.open("p", PROMPT, **limits, max_draft_tokens=5)])
    position, draft = 0, list[int]()
    while position < 40:
        sampled = recorded[position : position + len(draft) + 1]
        position += len(sampled)
        (draft,) = stepper.step(sampled)
        end = 12 if position < 12 else 40
        assert len(draft) == (0 if position < 4 else max(0, min(5, end - position - 1)))
        index.wait_idle()
    assert 40 == position


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 100), st.integers(0, 200), st.integers(0, 64))
def test_no_draft_crosses_a_limit(
    undrafted_tokens: int, min_tokens: int, max_tokens: int, generated: int, limit: int
) -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, [1] * 300)])
    limits = {"undrafted_tokens": undrafted_tokens, "min_tokens": min_tokens, "max_tokens": max_tokens}
    handle = index.open("p", **limits, max_draft_tokens=limit)
    index.extend(handle, [1] * generated)
    length = len(index.draft(handle, 100).tokens)
    assert 0 <= length <= (limit if generated >= undrafted_tokens else 0)
    after_step = generated + length + 1  # a step samples one token in addition to the draft
    if length:
        assert after_step <= max_tokens or generated < min_tokens
        if generated < min_tokens:
            assert after_step <= min_tokens


def test_stop_tokens_end_a_draft() -> None:
    index = SuffixIndex(draft_ahead=True)
    index.add("p", [("a", 0, list(range(50)))])
    stepper = Stepper(index, [index.open("p", PROMPT, stop_tokens=[3])])
    assert [[1, 2, 3]] == stepper.step([0])
    index.wait_idle()
    assert [[3]] == stepper.step([1, 2])


def valid_step(stepper: Stepper) -> dict[str, Any]:
    count = len(stepper.handles)
    arrays = (stepper.num_tokens, stepper.rows, stepper.places, np.zeros(count, int))
    return dict(zip(("num_tokens", "rows", "places", "verified"), arrays, strict=True))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": [0]}, TypeError, r"rows must be a C-contiguous array of shape and type \(n,\) int64"),
        ({"num_tokens": np.zeros(3, np.int64)}, TypeError, "num_tokens must be"),
        ({"places": np.zeros(4, np.int64)[::2]}, TypeError, "places must be"),
        ({"num_tokens": np.zeros(2, np.int32)}, ValueError, "num_tokens has 2 rows, but there are 3 places"),
        ({"places": np.zeros(3, np.int64)}, ValueError, "places has 3 rows, but there are 2 requests"),
        ({"places": np.array([0, 3])}, ValueError, "request 1: there is no place 3 of 3"),
        ({"places": np.array([-1, 0])}, ValueError, "request 0: there is no place -1 of 3"),
        ({"rows": np.array([0, 2])}, ValueError, "request 1: the plan has no row 2, only 2 rows"),
        ({"rows": np.array([-2, 0])}, ValueError, "request 0: the plan has no row -2"),
        ({"verified": np.array([0, -1])}, ValueError, "request 1: verified must be 0 or more tokens, got -1"),
        ({"num_tokens": np.full(3, 1001, np.int32)}, ValueError, "has 1001 tokens, but the engine's array holds 1000"),
    ],
)
def test_invalid_arguments_are_rejected(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    index = filled_index()
    stepper = Stepper(index, [index.open("p", PROMPT), index.open("p", PROMPT)])
    stepper.plan()
    with pytest.raises(error, match=message):
        stepper.batch.step(**valid_step(stepper) | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"handles": np.zeros(2, np.int32)}, TypeError, r"handles must be a C-contiguous array of shape and type"),
        ({"budgets": np.zeros(3, np.int64)}, ValueError, "budgets has 3 rows, but there are 2 handles"),
        ({"budgets": np.array([0, -2])}, ValueError, "request 1: a budget must be 0 or more tokens, got -2"),
        ({"min_survivals": np.array([0, 1.5])}, ValueError, "request 1: min_survival must be a probability"),
        ({"min_survivals": np.array([np.nan, 0])}, ValueError, "request 0: min_survival must be a probability"),
        ({"token_gains": np.zeros(1)}, ValueError, "token_gains has 1 rows"),
        ({"costs": np.zeros(0)}, ValueError, "costs must have at least one element"),
        ({"handles": np.array([0, -5])}, KeyError, "no open request has the handle -5"),
    ],
)
def test_invalid_plans_are_rejected(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    index = filled_index()
    stepper = Stepper(index, [index.open("p", PROMPT), index.open("p", PROMPT)])
    arguments = {
        "handles": np.array(stepper.handles),
        "budgets": np.zeros(2, np.int64),
        "min_survivals": np.zeros(2),
        "token_gains": np.zeros(2),
        "costs": TOKEN_COSTS,
    }
    stepper.batch.plan(**arguments)
    with pytest.raises(error, match=message):
        stepper.batch.plan(**arguments | changes)


def test_negative_token_ids_are_rejected() -> None:
    index = filled_index()
    handle = index.open("p", PROMPT)
    with pytest.raises(ValueError, match="place 0 has the token id -1; token ids must not be negative"):
        Stepper(index, [handle]).step([3, -1])
    assert (0, 0, 0) == index.close(handle)[:3]


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ((np.zeros((2, 9), np.int64), np.zeros((2, 3), np.int64), np.zeros(2, np.int32)), TypeError, "token_ids must"),
        ((np.zeros((2, 9), np.int32), np.zeros((3, 3), np.int64), np.zeros(2, np.int32)), ValueError, "drafts has 3"),
        ((np.zeros((2, 9), np.int32), np.zeros((2, 3), np.int64), np.zeros(1, np.int32)), ValueError, "lengths has 1"),
    ],
)
def test_invalid_arrays_are_rejected(arrays: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SuffixIndex().new_batch(*arrays)


def test_an_output_that_cannot_be_written_is_rejected() -> None:
    drafts = np.zeros((1, WIDTH), np.int64)
    drafts.flags.writeable = False
    with pytest.raises(TypeError, match="drafts must be"):
        SuffixIndex().new_batch(np.zeros((1, 9), np.int32), drafts, np.zeros(1, np.int32))


@pytest.mark.parametrize("limit", ["undrafted_tokens", "min_tokens", "max_tokens", "max_draft_tokens"])
def test_negative_limits_are_rejected(limit: str) -> None:
    arguments: dict[str, Any] = {limit: -1}
    with pytest.raises(ValueError, match=f"{limit} must be 0 or more tokens, got -1"):
        SuffixIndex().open("p", **arguments)


def test_closing_requests_frees_their_prepared_drafts() -> None:
    index = filled_index(draft_ahead=True)
    before = index.bytes()
    handles = [index.open("p", PROMPT) for _ in range(3)]
    stepper = Stepper(index, handles)
    for token in text(7, 20):
        stepper.step([token], [token], [token])
    for handle in handles:
        index.close(handle)
    stepper.batch.clear()
    index.wait_idle()
    assert before == index.bytes()


def test_the_sources_have_the_codes_of_messages() -> None:
    assert DRAFT_SOURCES == SOURCES


def code_of(source: str) -> int:
    return 1 + SOURCES.index(source)


@given(data=st.data(), seed=st.integers(0, 50))
def test_the_source_of_each_accepted_token_is_known(data: st.DataObject, seed: int) -> None:
    index, other = filled_index(), filled_index()
    recorded = [text(seed), text(100 + seed), text(seed)]
    handles = [index.open(problem, PROMPT) for problem in ("p", "q", "new")]
    others = [other.open(problem, PROMPT) for problem in ("p", "q", "new")]
    stepper = Stepper(index, handles)
    codes: list[list[int]] = [[], [], []]
    drafted: list[Counter[str]] = [Counter(), Counter(), Counter()]
    verified, sources = [0, 0, 0], [[], [], []]
    drafts: list[list[int]] = [[], [], []]
    for _ in range(12):
        sampled = []
        for number, whole in enumerate(recorded):
            position = len(codes[number])
            count = min(verified[number], accepted(drafts[number], whole[position:]))
            codes[number] += [code_of(source) for source in sources[number][:count]] + [0]
            drafted[number].update(sources[number][: verified[number]])
            sampled.append(whole[position : position + count + 1])
        drafts = stepper.step(*sampled, verified=verified)
        other.extend_batch(others, sampled)
        sources = [draft.sources for draft in other.draft_batch(others, [WIDTH + 1] * 3)]
        verified = [data.draw(st.integers(0, len(draft))) for draft in drafts]
    total = Counter[str]()
    for number, handle in enumerate(handles):
        counts = index.close(handle)
        assert bytes(codes[number]).rstrip(b"\0") == counts.token_sources
        assert [drafted[number][source] for source in SOURCES] == list(counts.drafted_by_source)
        total += drafted[number]
    by_source, by_position = index.verification_counts()
    assert total == Counter({source: counts.verified for source, counts in by_source.items() if counts.verified})
    expected = Counter(code for each in codes for code in each if code)
    assert expected == Counter(
        {code_of(name): counts.accepted for name, counts in by_source.items() if counts.accepted}
    )
    assert sum(expected.values()) == sum(counts.accepted for counts in by_position)
    assert total.total() == sum(counts.verified for counts in by_position)


def test_verified_and_accepted_tokens_are_counted_by_position() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, list(range(100, 200)))])
    token_ids = np.zeros((1, 1000), np.int32)
    drafts, lengths = np.zeros((1, 20), np.int64), np.zeros(1, np.int32)
    batch = index.new_batch(token_ids, drafts, lengths)
    handle = index.open("p", PROMPT)
    batch.plan(*(np.array([value]) for value in (handle, 20, 0.0, TOKEN_GAIN)), TOKEN_COSTS)
    sampled: list[int] = []
    # 18 tokens are verified and all accepted, and then 3, of which the first one is accepted.
    for verified, tokens in [(0, [100]), (18, list(range(101, 120))), (3, [120, 7])]:
        sampled += tokens
        token_ids[0, len(PROMPT) : len(PROMPT) + len(sampled)] = sampled
        num_tokens = np.array([len(PROMPT) + len(sampled)], np.int32)
        batch.step(num_tokens, np.zeros(1, int), np.zeros(1, int), np.array([verified]))
        assert 20 == lengths[0] or tokens[-1] == 7
    assert bytes([0] + [1] * 18 + [0, 1]) == index.close(handle).token_sources
    by_source, by_position = index.verification_counts()
    assert [(2, 2), (2, 1), (2, 1), *[(1, 1)] * 12, (3, 3)] == by_position
    assert (21, 19) == by_source["history"]


def test_a_step_whose_tokens_are_reported_later_is_counted() -> None:
    index = filled_index()
    handle = index.open("p", PROMPT)
    stepper = Stepper(index, [handle])
    recorded = text(1)
    [draft] = stepper.step(recorded[:4])
    assert 3 < len(draft)
    assert bytes([code_of("history")] * 2) == index.count_step(handle, 3, 2)
    stepper.step(recorded[4:7], verified=[0])
    assert (3, 2, 7, b"", (3, 0, 0, 0), "") == index.close(handle)


def test_a_long_prompt_is_indexed_in_the_background_when_drafting_ahead() -> None:
    """The caller's thread takes a fraction of the time, and afterwards the index is the same."""
    prompt = np.random.default_rng(0).integers(0, 5000, 400_000).astype(np.uint32)

    def open_seconds(index: SuffixIndex) -> float:
        started = time.thread_time()
        handles.append(index.open("p", prompt))
        return time.thread_time() - started

    handles: list[int] = []
    index, ahead = SuffixIndex(), SuffixIndex(draft_ahead=True)
    inline_s = open_seconds(index)
    assert open_seconds(ahead) < inline_s / 4
    ahead.extend(handles[1], prompt[1000:1004])
    handles.append(ahead.open("p", prompt))  # shares it
    ahead.wait_idle()
    index.extend(handles[0], prompt[1000:1004])
    handles.append(index.open("p", prompt))
    assert index.bytes() == ahead.bytes()
    expected = prompt[1004:1012].tolist()
    assert expected == index.draft(handles[0], 8).tokens == ahead.draft(handles[1], 8).tokens
    ahead.extend(handles[2], prompt[1000:1004])
    assert expected == ahead.draft(handles[2], 8).tokens


def test_requests_may_be_closed_before_their_prompt_was_indexed() -> None:
    index = SuffixIndex(draft_ahead=True)
    for number in range(20):
        prompt = np.random.default_rng(number).integers(0, 5000, 50_000).astype(np.uint32)
        handle = index.open(f"p{number % 3}", prompt)
        index.extend(handle, prompt[:4])
        assert index.draft(handle, 2).tokens in ([], prompt[4:6].tolist())
        index.close(handle)
    index.wait_idle()
    assert 0 == index.bytes()
