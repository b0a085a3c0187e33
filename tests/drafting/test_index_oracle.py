"""The index answers exactly what trying everything answers."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from oracle import Drafted, Oracle

from rollout_worker.drafting import Draft, SuffixIndex

# Two or three different tokens make matches long and votes divided; the largest token id must sort before START.
TOKENS = st.sampled_from([0, 1, 2**32 - 2])


@st.composite
def texts(draw: st.DrawFn, max_size: int = 40) -> list[int]:
    """Free text, or repetitions of a short piece with a few slips: where matches are longest and most ambiguous."""
    if draw(st.booleans()):
        return draw(st.lists(TOKENS, max_size=max_size))
    piece = draw(st.lists(TOKENS, min_size=1, max_size=4))
    text = (piece * max_size)[: draw(st.integers(0, max_size))]
    for slip in draw(st.lists(st.integers(0, max_size - 1), max_size=3)):
        if slip < len(text):
            text[slip] = draw(TOKENS)
    return text


GENERATIONS = st.integers(-2, 3)
ROLLOUT_IDS = st.integers(0, 12).map(str)
ROLLOUTS = st.lists(st.tuples(ROLLOUT_IDS, GENERATIONS, texts()), max_size=6)
PROBLEMS = st.sampled_from(["p", "q"])
SOURCES = st.sampled_from([("history", "self"), ("history",), ("self",)])
SURVIVALS = st.sampled_from([0.0, 0.05, 0.2, 0.5])


def as_array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.uint32)


def assert_same(expected: Drafted, actual: Draft) -> None:
    drafted = Drafted(actual.tokens, actual.probabilities, actual.source, actual.match_length)
    assert expected == drafted
    assert all(0.0 < probability <= 1.0 for probability in drafted.probabilities)


@settings(max_examples=300, deadline=None)
@given(
    batches=st.lists(ROLLOUTS, max_size=4),
    prompt=texts(),
    response=texts(),
    sources=SOURCES,
    max_match=st.sampled_from([1, 2, 3, 5, 8, 64]),
    min_match=st.integers(1, 3),
    budget=st.integers(0, 12),
    min_survival=SURVIVALS,
)
def test_draft_from_fresh_history(
    batches: list[list[tuple[str, int, list[int]]]],
    prompt: list[int],
    response: list[int],
    sources: tuple[str, ...],
    max_match: int,
    min_match: int,
    budget: int,
    min_survival: float,
) -> None:
    min_match = min(min_match, max_match)
    index, oracle = SuffixIndex(max_match, min_match), Oracle(max_match, min_match)
    for batch in batches:
        assert oracle.add("p", batch) == index.add("p", [(i, g, as_array(t)) for i, g, t in batch])
    handle = index.open("p", as_array(prompt), sources=sources)
    oracle.open(handle, "p", prompt, sources)
    index.extend(handle, as_array(response))
    oracle.extend(handle, response)
    assert_same(oracle.draft(handle, budget, min_survival), index.draft(handle, budget, min_survival))


@pytest.mark.parametrize(("size", "period"), [(90, 1), (300, 1), (300, 2), (3000, 1), (3000, 7), (3000, 97)])
def test_more_occurrences_than_vote(size: int, period: int) -> None:
    """The newest 64 vote: over one and several rollouts, with matches shorter and longer than max_match."""
    rng = np.random.default_rng(size + period)
    text = [int(token) for token in np.tile(rng.integers(0, 4, period), size // period + 1)[:size]]
    # Different continuations by age, so that another choice of occurrences votes otherwise.
    rollouts = [(str(i), i % 3, [*text[: size // 3 * (i % 3 + 1)], 10 + i, 20 + i]) for i in range(5)]
    index, oracle = SuffixIndex(max_match=4), Oracle(max_match=4, min_match=1)
    for rollout in rollouts:
        index.add("p", [rollout])
    oracle.add("p", rollouts)
    for response in ([], text[:1], text[:3], text[:50], [99, *text[:2]], [99, *text[3:6]]):
        for prompt in ([], text, [*text, 5]):
            for sources in (("history",), ("self",)):
                handle = index.open("p", prompt, sources=sources)
                oracle.open(handle, "p", prompt, sources)
                index.extend(handle, response)
                oracle.extend(handle, response)
                assert_same(oracle.draft(handle, 6, 0.0), index.draft(handle, 6, 0.0))


@pytest.mark.parametrize("batch", [1, 7, 100])
@pytest.mark.parametrize("generations", [1, 2, 100])
def test_the_newest_rollouts_vote(batch: int, generations: int) -> None:
    """Of 100 rollouts, those of higher generations, and of equal ones those added later."""
    rollouts = [(str(i), i * 37 % generations, [5, i // 20]) for i in range(100)]
    index, oracle = SuffixIndex(), Oracle(max_match=64, min_match=1)
    for first in range(0, 100, batch):
        index.add("p", rollouts[first : first + batch])
    oracle.add("p", rollouts)
    for response in ([], [5], [6, 5]):
        handle = index.open("p", sources=("history",))
        oracle.open(handle, "p", [], ("history",))
        index.extend(handle, response)
        oracle.extend(handle, response)
        assert_same(oracle.draft(handle, 2, 0.0), index.draft(handle, 2, 0.0))


def test_the_newest_of_occurrences_that_are_far_apart_in_order() -> None:
    """The sorted contexts of rollouts that follow each other lie 64 apart, and each of the newest 64 matters."""
    count, matched, a, b, others = 200 * 64, 500_000, 1_000_000, 1_000_001, 1_000_002
    continuations = [others] * (count - 64) + [a] * 31 + [b] * 32 + [a]
    rollouts = [(str(i), 0, [1 + i % 200 * 64 + i // 200, matched, token]) for i, token in enumerate(continuations)]
    # A few contexts before these, so that they do not begin where a block of any size does.
    smaller = [(f"smaller {i}", -1, [0, i]) for i in range(10)]
    index = SuffixIndex()
    index.add("p", rollouts + smaller)
    handle = index.open("p", sources=("history",))
    index.extend(handle, [others, matched])
    draft = index.draft(handle, 1)
    assert (draft.tokens, draft.match_length) == ([a], 1)


def test_the_newest_of_own_occurrences_that_are_far_apart_in_order() -> None:
    """As above within one text, checked after each 64 occurrences while what keeps them in order grows and splits."""
    matched, a, b = 500_000, 1_000_000, 1_000_001
    continuations = [a] * 31 + [b] * 32 + [a]
    index = SuffixIndex()
    handle = index.open("p", sources=("self",))
    for row in range(256):
        for i, token in enumerate(continuations):
            index.extend(handle, [1 + i * 256 + row, matched, token])
        index.extend(handle, [2_000_000 + row, matched])
        draft = index.draft(handle, 1)
        assert (draft.tokens, draft.match_length) == ([a], 1)


@pytest.mark.parametrize("source", ["history", "self"])
@pytest.mark.parametrize("segments", [1, 3])
def test_short_match_in_long_text(source: str, segments: int) -> None:
    """Thousands of occurrences, all shorter than max_match, of which old and new ones go on differently."""
    rng = np.random.default_rng(segments)
    size = 30_000
    # What follows a 0 is more and more often a 0 towards the end.
    text = [int(token) for token in rng.random(size) > np.linspace(0.2, 0.8, size)]
    index, oracle = SuffixIndex(max_match=3), Oracle(max_match=3, min_match=1)
    for i in range(segments):
        rollout = (str(i), i, text[: size // (i + 1)])
        index.add("p", [rollout])
        oracle.add("p", [rollout])
    for end in ([2, 0], [2, 1], [2, 0, 0], [2, 0, 1]):
        # Half of it is read in at once, half token by token. The first 2 has not been seen: what follows it is the
        # whole match.
        prompt, response = text[: size // 2], [*text[size // 2 :], *end]
        handle = index.open("p", prompt, sources=(source,))
        oracle.open(handle, "p", prompt, (source,))
        index.extend(handle, response)
        oracle.extend(handle, response)
        assert_same(oracle.draft(handle, 12, 0.0), index.draft(handle, 12, 0.0))


def test_the_threshold_itself_is_drafted() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 0, [1, 2, 3]), ("b", 0, [1, 2, 3])])
    handle = index.open("p")
    first, second, _ = index.draft(handle, 3).probabilities
    assert len(index.draft(handle, 3, min_survival=first * second)) == 2
    assert len(index.draft(handle, 3, min_survival=float(np.nextafter(first * second, 1.0)))) == 1


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), alphabet=st.integers(1, 5))
def test_long_self_text_token_by_token(seed: int, alphabet: int) -> None:
    """Long enough that the sorted positions of a text fill and split several blocks."""
    rng = np.random.default_rng(seed)
    text = [int(token) for token in rng.integers(0, alphabet, 1500)]
    index, oracle = SuffixIndex(max_match=6), Oracle(max_match=6, min_match=1)
    prompt, rest = text[:300], text[300:]
    handle = index.open("p", prompt, sources=("self",))
    oracle.open(handle, "p", prompt, ("self",))
    while rest:
        step = int(rng.integers(1, 60))
        index.extend(handle, rest[:step])
        oracle.extend(handle, rest[:step])
        rest = rest[step:]
        assert_same(oracle.draft(handle, 4, 0.0), index.draft(handle, 4, 0.0))


class IndexMachine(RuleBasedStateMachine):
    """Any sequence of calls, against the oracle."""

    requests: Bundle[int] = Bundle("requests")

    @initialize(max_match=st.sampled_from([2, 4, 16, 64]), min_match=st.integers(1, 2))
    def make(self, max_match: int, min_match: int) -> None:
        self.index = SuffixIndex(max_match, min_match)
        self.oracle = Oracle(max_match, min_match)
        self.ids = count()

    @rule(problem=PROBLEMS, rollouts=ROLLOUTS)
    def add(self, problem: str, rollouts: list[tuple[str, int, list[int]]]) -> None:
        expected = self.oracle.add(problem, rollouts)
        assert expected == self.index.add(problem, [(i, g, as_array(t)) for i, g, t in rollouts])

    @rule(problem=PROBLEMS, generation=GENERATIONS, tokens=texts())
    def add_new(self, problem: str, generation: int, tokens: list[int]) -> None:
        rollout = (f"new {next(self.ids)}", generation, tokens)
        assert self.oracle.add(problem, [rollout]) == self.index.add(problem, [rollout])

    @rule(problem=PROBLEMS, rollout_id=ROLLOUT_IDS)
    def drop_rollout(self, problem: str, rollout_id: str) -> None:
        assert self.oracle.drop_rollout(problem, rollout_id) == self.index.drop_rollout(problem, rollout_id)

    @rule(problem=PROBLEMS, generation=GENERATIONS)
    def drop_before(self, problem: str, generation: int) -> None:
        assert self.oracle.drop_before(problem, generation) == self.index.drop_before(problem, generation)

    @rule(problem=PROBLEMS)
    def drop_problem(self, problem: str) -> None:
        assert self.oracle.drop_problem(problem) == self.index.drop_problem(problem)

    @rule(target=requests, problem=PROBLEMS, prompt=texts(), sources=SOURCES)
    def open(self, problem: str, prompt: list[int], sources: tuple[str, ...]) -> int:
        handle = self.index.open(problem, as_array(prompt), sources=sources)
        self.oracle.open(handle, problem, prompt, sources)
        return handle

    @rule(handle=consumes(requests))
    def close(self, handle: int) -> None:
        self.index.close(handle)
        self.oracle.close(handle)
        with pytest.raises(KeyError, match=f"handle {handle}"):
            self.index.draft(handle, 1)

    @rule(handle=requests, tokens=texts(max_size=8))
    def extend(self, handle: int, tokens: list[int]) -> None:
        self.index.extend(handle, as_array(tokens))
        self.oracle.extend(handle, tokens)

    @rule(handle=requests, budget=st.integers(1, 12), min_survival=SURVIVALS, kept=st.integers(0, 12), wrong=TOKENS)
    def step(self, handle: int, budget: int, min_survival: float, kept: int, wrong: int) -> None:
        """One verification step: some of the draft is accepted and one more token sampled."""
        draft = self.index.draft(handle, budget, min_survival)
        assert_same(self.oracle.draft(handle, budget, min_survival), draft)
        sampled = [*draft.tokens[:kept], wrong]
        self.index.extend(handle, as_array(sampled))
        self.oracle.extend(handle, sampled)

    @rule(handles=st.lists(requests, max_size=4), budget=st.integers(0, 8), min_survival=SURVIVALS)
    def draft_batch(self, handles: list[int], budget: int, min_survival: float) -> None:
        budgets = [budget + i for i in range(len(handles))]
        drafts = self.index.draft_batch(handles, budgets, min_survival)
        assert len(handles) == len(drafts)
        for handle, limit, draft in zip(handles, budgets, drafts, strict=True):
            assert_same(self.oracle.draft(handle, limit, min_survival), draft)

    @invariant()
    def same_content(self) -> None:
        if not hasattr(self, "oracle"):
            return
        assert sorted(name for name, known in self.oracle.problems.items() if known) == self.index.problems()
        for problem in ("p", "q"):
            known = self.oracle.problems.get(problem, {})
            assert sorted(known, key=lambda i: known[i][1]) == self.index.rollouts(problem)
            assert sum(len(tokens) for _, _, tokens in known.values()) == self.index.tokens(problem)

    @invariant()
    def same_calibration(self) -> None:
        if not hasattr(self, "oracle"):
            return
        rows = {tuple(row[:4]): tuple(row[4:]) for row in self.index.calibration()}
        expected = {cell: (*seen, self.oracle.probability(cell)) for cell, seen in self.oracle.observed.items()}
        assert expected == rows
        assert {source: tuple(seen) for source, seen in self.oracle.counters.items()} == self.index.counters()


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
