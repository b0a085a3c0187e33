"""The index gives the same results as an oracle that searches exhaustively, and drafts begin and end as they should."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from rollout_worker.drafting.index import SuffixIndex
from tests.support.index_oracle import Oracle

# With only three different tokens, matches are long and votes divided. The largest id must sort before the boundary.
TOKENS = st.sampled_from([0, 1, 2**32 - 2])
LENGTH = 16
GENERATIONS = st.integers(-2, 6)
ROLLOUT_IDS = st.integers(0, 12).map(str)
REWARDS = st.sampled_from([0.0, 0.5, 1.0])
PROBLEMS = st.sampled_from(["p", "q"])
SOURCES = st.sampled_from(
    [
        ("history", "self", "siblings", "cross_problem"),
        ("history", "cross_problem"),
        ("history",),
        ("self",),
        ("siblings", "history"),
        ("siblings", "cross_problem"),
    ]
)
STOP_TOKENS = st.sampled_from([(), (), (1,), (0, 1)])
SURVIVALS = st.sampled_from([0.0, 0.05, 0.2, 0.5])
PROMPT = [900, 901]


@st.composite
def texts(draw: st.DrawFn, max_size: int = 40) -> list[int]:
    """Draw any text, or repetitions of a short piece with a few errors, which have long and divided matches."""
    if draw(st.booleans()):
        return draw(st.lists(TOKENS, max_size=max_size))
    piece = draw(st.lists(TOKENS, min_size=1, max_size=4))
    text = (piece * max_size)[: draw(st.integers(0, max_size))]
    for error in draw(st.lists(st.integers(0, max_size - 1), max_size=3)):
        if error < len(text):
            text[error] = draw(TOKENS)
    return text


ROLLOUTS = st.lists(st.tuples(ROLLOUT_IDS, GENERATIONS, texts(), texts(max_size=8), st.none() | REWARDS), max_size=6)


def as_array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.uint32)


class Pair:
    """An index and its oracle."""

    def __init__(self, depth: int = 64) -> None:
        self.index, self.oracle = SuffixIndex(depth, pool_tokens=100_000), Oracle(depth)
        self.is_exact = True
        """Whether both have learned the same so far, because no decision depended on rounding."""

    def add(self, problem: str, rollouts: list[tuple]) -> None:
        given_ = [
            (name, generation, as_array(tokens), *map(as_array, more[:1]), *more[1:])
            for name, generation, tokens, *more in rollouts
        ]
        assert self.oracle.add(problem, rollouts) == self.index.add(problem, given_)

    def open(
        self,
        problem: str,
        prompt: list[int],
        sources: tuple[str, ...],
        context: int = 0,
        stop_tokens: tuple[int, ...] = (),
    ) -> int:
        handle = self.index.open(problem, as_array(prompt), sources, context_length=context, stop_tokens=stop_tokens)
        self.oracle.open(handle, problem, prompt, sources, context, stop_tokens)
        return handle

    def reward(self, problem: str, rewards: dict[str, float]) -> None:
        assert self.oracle.reward(problem, rewards) == self.index.set_rewards(problem, rewards)

    def extend(self, handle: int, tokens: list[int]) -> None:
        self.index.extend(handle, as_array(tokens))
        self.oracle.extend(handle, tokens)

    def draft(self, handle: int, budget: int, min_survival: float = 0.0) -> list[int]:
        """Draft, and check the draft and its occurrences."""
        self.index.wait_idle()  # merging may change which of equally long matches are used
        draft = self.index.draft(handle, budget, min_survival)
        found = self.index.occurrences(handle, length=LENGTH)
        self.oracle.check_occurrences(handle, found, LENGTH)
        assert all(0.0 < probability <= 1.0 for probability in draft.probabilities)
        longest = max((occurrence.match_length for occurrence in found), default=0)
        assert draft.match_length == longest * (len(draft.tokens) > 0)
        if self.is_exact:
            self.is_exact = self.oracle.check_draft(handle, draft, found, budget, min_survival)
        return draft.tokens


@settings(max_examples=300, deadline=None)
@given(
    batches=st.lists(ROLLOUTS, max_size=4),
    other_problem=ROLLOUTS,
    prompt=texts(),
    response=texts(),
    sibling=texts(),
    sources=SOURCES,
    depth=st.sampled_from([1, 2, 3, 4, 5, 8, 64, 255]),
    context=st.integers(0, 8),
    budget=st.integers(0, 12),
    min_survival=SURVIVALS,
)
def test_drafts_agree_with_the_oracle(
    batches: list[list[tuple]],
    other_problem: list[tuple],
    prompt: list[int],
    response: list[int],
    sibling: list[int],
    sources: tuple[str, ...],
    depth: int,
    context: int,
    budget: int,
    min_survival: float,
) -> None:
    pair = Pair(depth)
    for batch in batches:
        pair.add("p", batch)
    pair.add("q", other_problem)
    pair.extend(pair.open("p", prompt, ("history", "siblings")), sibling)
    handle = pair.open("p", prompt, sources, context)
    pair.extend(handle, response)
    pair.draft(handle, budget, min_survival)


@pytest.mark.parametrize("distinct", [10, 65_531, 65_532, 65_533, 65_534, 65_536, 70_000])
def test_any_number_of_different_tokens_is_supported(distinct: int) -> None:
    """Dictionary indices have two or four bytes."""
    pair = Pair()
    text = [int(token) for token in np.random.default_rng(0).permutation(distinct)]
    pair.add("p", [("a", 0, [*text[:100], *text[-100:], *text])])
    handle = pair.open("p", [], ("history",))
    for tokens in ([], text[:5], text[-5:], [distinct + 1]):
        pair.extend(handle, tokens)
        pair.draft(handle, 4)


@pytest.mark.parametrize("size", [65_300, 65_400, 65_460, 65_470, 65_536, 66_000])
def test_any_length_of_text_is_supported(size: int) -> None:
    """Positions have two or four bytes."""
    pair = Pair(depth=8)
    rng = np.random.default_rng(size)
    text = [int(token) for token in rng.integers(0, 30_000, size)]
    pair.add("p", [("a", 0, text)])
    handle = pair.open("p", [], ("history",))
    for tokens in (text[:3], text[-5:-2], text[size // 2 : size // 2 + 3]):
        pair.extend(handle, tokens)
        pair.draft(handle, 4)


def test_thousands_of_equal_contexts_are_supported() -> None:
    pair = Pair(depth=3)
    rng = np.random.default_rng(0)
    text = [int(token) for token in rng.integers(0, 2, 3000)]
    pair.add("p", [(str(i), i, text[i * 700 :]) for i in range(3)])
    handle = pair.open("p", text[:500], ("history", "self"))
    for tokens in (text[500:1500], [2], [0], [0, 1], [1]):
        pair.extend(handle, tokens)
        pair.draft(handle, 12)


def test_new_requests_share_new_live_texts_when_the_old_ones_are_long() -> None:
    """Requests that are open already keep the old ones."""
    index = SuffixIndex()
    first, second = (index.open("p", sources=("siblings", "self")) for _ in range(2))
    index.extend(first, np.arange(1 << 20, dtype=np.uint32))
    index.extend(first, [*range(100, 200)])
    held = index.bytes()
    third, fourth = (index.open("p", sources=("siblings", "self")) for _ in range(2))
    index.extend(second, [5, 6])
    assert [7, 8] == index.draft(second, 2).tokens
    index.extend(first, [7, 8])
    assert [9, 10] == index.draft(first, 2).tokens
    index.extend(third, [5, 6])
    assert [] == index.draft(third, 2).tokens
    index.extend(third, [7])
    index.extend(fourth, [5, 6])
    assert [7] == index.draft(fourth, 2).tokens
    index.close(first)
    assert index.bytes() > held / 2
    index.close(second)
    assert index.bytes() < held / 100
    index.close(third)
    index.close(fourth)
    assert 0 == index.bytes()


def test_a_survival_equal_to_the_threshold_is_drafted() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, [1, 2, 3]), ("b", 0, [1, 2, 3])])
    handle = index.open("p")
    first, second, _ = index.draft(handle, 3).probabilities
    assert len(index.draft(handle, 3, min_survival=first * second)) == 2
    beyond = float(np.nextafter(first * second, 1.0))
    assert len(index.draft(handle, 3, min_survival=beyond)) == 1
    other = index.open("p", sources=("history",))
    drafts = index.draft_batch([handle, other, handle], [3, 3, 3], [first * second, 1.0, beyond])
    assert [2, 0, 1] == [len(draft) for draft in drafts]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), alphabet=st.integers(1, 5))
def test_a_long_own_text_is_extended_in_small_steps(seed: int, alphabet: int) -> None:
    """The text is long enough that its tables fill and grow."""
    rng = np.random.default_rng(seed)
    text = [int(token) for token in rng.integers(0, alphabet, 1500)]
    pair = Pair(depth=6)
    handle = pair.open("p", text[:300], ("self", "siblings"))
    other = pair.open("p", [], ("self", "siblings"))
    rest = text[300:]
    while rest:
        step = int(rng.integers(1, 60))
        pair.extend(handle, rest[:step])
        pair.extend(other, rest[1 : step // 2])
        rest = rest[step:]
        pair.draft(handle, 4)
        pair.draft(other, 4)


class IndexMachine(RuleBasedStateMachine):
    """Compares any sequence of calls with the oracle."""

    requests: Bundle[int] = Bundle("requests")

    @initialize(depth=st.sampled_from([2, 4, 16, 64]))
    def make(self, depth: int) -> None:
        self.pair = Pair(depth)
        self.ids = count()

    @rule(problem=PROBLEMS, rollouts=ROLLOUTS)
    def add(self, problem: str, rollouts: list[tuple]) -> None:
        self.pair.add(problem, rollouts)

    @rule(problem=PROBLEMS, rewards=st.dictionaries(ROLLOUT_IDS, REWARDS))
    def reward(self, problem: str, rewards: dict[str, float]) -> None:
        self.pair.reward(problem, rewards)

    @rule(problem=PROBLEMS, generation=GENERATIONS, tokens=texts())
    def add_new(self, problem: str, generation: int, tokens: list[int]) -> None:
        self.pair.add(problem, [(f"new {next(self.ids)}", generation, tokens)])

    @rule(problem=PROBLEMS, rollout_id=ROLLOUT_IDS)
    def drop_rollout(self, problem: str, rollout_id: str) -> None:
        assert self.pair.oracle.drop_rollout(problem, rollout_id) == self.pair.index.drop_rollout(problem, rollout_id)

    @rule(problem=PROBLEMS, generation=GENERATIONS)
    def drop_before(self, problem: str, generation: int) -> None:
        assert self.pair.oracle.drop_before(problem, generation) == self.pair.index.drop_before(problem, generation)

    @rule(problem=PROBLEMS)
    def drop_problem(self, problem: str) -> None:
        assert self.pair.oracle.drop_problem(problem) == self.pair.index.drop_problem(problem)

    @rule(
        target=requests,
        problem=PROBLEMS,
        prompt=texts(),
        sources=SOURCES,
        context=st.integers(0, 8),
        stop_tokens=STOP_TOKENS,
    )
    def open(
        self,
        problem: str,
        prompt: list[int],
        sources: tuple[str, ...],
        context: int,
        stop_tokens: tuple[int, ...],
    ) -> int:
        return self.pair.open(problem, prompt, sources, context, stop_tokens)

    @rule(handle=requests, tokens=texts(max_size=8))
    def extend(self, handle: int, tokens: list[int]) -> None:
        self.pair.extend(handle, tokens)

    @rule(handle=requests, budget=st.integers(1, 12), min_survival=SURVIVALS, kept=st.integers(0, 12), wrong=TOKENS)
    def step(self, handle: int, budget: int, min_survival: float, kept: int, wrong: int) -> None:
        """Run one verification step, which accepts a part of the draft and samples one more token."""
        drafted = self.pair.draft(handle, budget, min_survival)
        self.pair.extend(handle, [*drafted[:kept], wrong])

    @invariant()
    def same_content(self) -> None:
        if not hasattr(self, "pair"):
            return
        index, oracle = self.pair.index, self.pair.oracle
        assert sorted(name for name, known in oracle.problems.items() if known) == index.problems()
        for problem in ("p", "q"):
            known = oracle.problems.get(problem, {})
            assert sorted(known) == sorted(index.rollouts(problem))
            assert sum(len(text.tokens) - text.context for text in known.values()) == index.tokens(problem)

    @invariant()
    def same_counts(self) -> None:
        if hasattr(self, "pair") and self.pair.is_exact:
            assert {source: tuple(seen) for source, seen in self.pair.oracle.counters.items()} == (
                self.pair.index.counters()
            )


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_an_anchor_does_not_continue_into_the_next_rollout() -> None:
    index = SuffixIndex(depth=4)
    index.add("p", [("a", 0, [1, 2, 3, 4, 5, 6, 7, 8]), ("b", 0, [50, 51, 9, 9, 52, 9, 53])])
    handle = index.open("p", sources=("history",))
    index.extend(handle, [1, 2, 3, 4, 5, 6, 7])
    index.draft(handle, 1)
    index.extend(handle, [60] * 8 + [9])
    assert [False] * 3 == [occurrence.anchored for occurrence in index.occurrences(handle)]


def open_request(tokens: list[int]) -> tuple[SuffixIndex, int]:
    """Return an index whose history counts from 0 to 99, and a request with these tokens."""
    index = SuffixIndex()
    index.add("p", [(str(number), 1, np.arange(100, dtype=np.uint32)) for number in range(4)])
    handle = index.open("p", PROMPT, ("history",))
    index.extend(handle, tokens)
    return index, handle


def test_a_draft_has_its_expected_number_of_accepted_tokens() -> None:
    index, handle = open_request([0, 1])
    found = index.draft(handle, 8)
    assert 8 == len(found)
    assert found.expected == pytest.approx(np.cumprod(found.probabilities).sum())


@settings(deadline=None)
@given(st.lists(texts(), max_size=6), texts().filter(bool))
def test_the_position_of_a_text_follows_from_the_occurrences_of_its_end(
    rollouts: list[list[int]], response: list[int]
) -> None:
    index = SuffixIndex()
    index.add("p", [(str(number), 0, as_array(tokens)) for number, tokens in enumerate(rollouts)])
    handle = index.open("p", PROMPT, ("history", "self"))
    index.extend(handle, as_array(response))
    found = index.occurrences(handle, length=1000)
    longest, own = (
        max((one.match_length for one in found if one.source == source), default=0) for source in ("history", "self")
    )
    rests = [len(one.tokens) + 1 for one in found if one.source == "history" and 2 * one.match_length >= longest]
    rest, match, own_match = index.text_position(handle)
    assert (longest, own) == (match, own_match)
    if rests:
        assert rest == pytest.approx(np.exp(np.log(rests).mean()))
    else:
        assert rest is None


def test_the_rest_of_a_text_is_that_of_the_rollout_that_it_follows() -> None:
    index, handle = open_request(list(range(40, 60)))
    rest, match, own_match = index.text_position(handle)
    assert rest == pytest.approx(100 - 60 + 1)
    assert (20, 0) == (match, own_match)
