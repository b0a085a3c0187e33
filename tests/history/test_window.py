"""What is kept of a problem; the horizon follows the drift, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.history.window import next_horizon, oldest_kept

Counts = Mapping[int, tuple[float, float]]

FARTHEST = 64
"""Ages from 63 on are counted together, so that no horizon is beyond."""
HORIZONS = st.none() | st.integers(1, 80)
COUNTS = st.dictionaries(
    st.integers(0, 80), st.tuples(st.floats(0, 1e7), st.floats(0, 1)).map(lambda of: (of[0], of[0] * of[1]))
)
SEEDS = st.integers(0, 2**32 - 1)
GENERATIONS = st.lists(st.integers(0, 300), max_size=40)


def far(horizon: int | None) -> int:
    """As a number: none is as good as the farthest."""
    return FARTHEST if horizon is None else horizon


def expected(window: int, rate: Callable[[int], float], tokens: float) -> dict[int, tuple[float, float]]:
    """Counts as they are in the mean, from as many tokens of each age."""
    return {age: (tokens, tokens * rate(age)) for age in range(window)}


def decay(half_life: float, youngest: float = 0.8) -> Callable[[int], float]:
    return lambda age: youngest * 0.5 ** (age / half_life)


class Run:
    """A training run: history of each age in the window and within the horizon is drafted from, round by round."""

    def __init__(
        self, seed: int, start: int | None, *, window: int, tokens: int = 20_000, memory: float = 0.0, lap: int = 1
    ) -> None:
        """Problems come up every *lap* generations; counts fade to *memory* of what they were with each round."""
        self._rng = np.random.default_rng(seed)
        self._window, self._tokens, self._memory, self._lap = window, tokens, memory, lap
        self._counts: dict[int, tuple[float, float]] = {}
        self.horizon = start

    def rounds(self, number: int, rate: Callable[[int], float]) -> Iterator[int | None]:
        """The horizon after each round; four tokens at a time are accepted or refused together."""
        for _ in range(number):
            self._counts = {
                age: (drafted * self._memory, accepted * self._memory)
                for age, (drafted, accepted) in self._counts.items()
            }
            since = 10_000 - far(self.horizon) + 1 if self.horizon else 0
            sampled = [10_000 - self._lap * rounds for rounds in range(100)]
            oldest = oldest_kept(sampled, self._window, since)
            for age in (10_000 - generation for generation in sampled if generation >= oldest):
                drafted, accepted = self._counts.get(age, (0.0, 0.0))
                right = 4 * int(self._rng.binomial(self._tokens // 4, rate(age)))
                self._counts[age] = (drafted + self._tokens, accepted + right)
            self.horizon = next_horizon(self.horizon, self._counts)
            yield self.horizon


def turns(horizons: list[int | None]) -> int:
    """How often it changed its direction."""
    steps = [far(after) > far(before) for before, after in pairwise(horizons) if after != before]
    return sum(before != after for before, after in pairwise(steps))


@settings(max_examples=500)
@given(GENERATIONS, st.integers(1, 20), st.integers(0, 320))
def test_a_problem_keeps_the_newest_of_its_own_generations(sampled: list[int], window: int, since: int) -> None:
    """Those within the horizon, or two; no matter in which order or how often they are named."""
    oldest = oldest_kept(sampled, window, since)
    kept = {generation for generation in sampled if generation >= oldest}
    newest = sorted(set(sampled))[-window:]
    assert set(newest[-2:]) | {generation for generation in newest if generation >= since} == kept
    assert oldest_kept([*sampled, *sampled][::-1], window, since) == oldest


@given(GENERATIONS, st.integers(1, 20), st.integers(0, 320), st.integers(0, 20), st.integers(0, 320))
def test_a_wider_window_and_a_further_horizon_keep_no_less(
    sampled: list[int], window: int, since: int, wider: int, further: int
) -> None:
    assert oldest_kept(sampled, window + wider, max(0, since - further)) <= oldest_kept(sampled, window, since)


@settings(max_examples=500)
@given(HORIZONS, COUNTS)
def test_the_horizon_stays_within_its_bounds(current: int | None, by_age: Counts) -> None:
    after = next_horizon(current, by_age)
    assert after is None or 2 <= after < FARTHEST
    if current is not None and 2 <= current:
        assert min(current, FARTHEST) <= 2 * far(after)
        assert far(after) <= 2 * current


@pytest.mark.parametrize("current", [0, -1])
def test_a_horizon_of_nothing_is_refused(current: int) -> None:
    with pytest.raises(ValueError, match=f"got {current}"):
        next_horizon(current, {})


@settings(max_examples=500)
@given(st.integers(2, 63), COUNTS, st.data())
def test_the_better_the_old_the_further_and_the_better_the_young_the_nearer(
    current: int, by_age: Counts, data: st.DataObject
) -> None:
    before = far(next_horizon(current, by_age))
    for age, (drafted, accepted) in by_age.items():
        more = data.draw(st.floats(accepted, max(accepted, drafted)), label=f"accepted of age {age}")
        after = far(next_horizon(current, {**by_age, age: (drafted, more)}))
        if age < (current + 1) // 2:
            assert after <= before
        else:
            assert after >= before


@given(st.none() | st.integers(2, 63), st.floats(0.2, 100), st.floats(1, 10), st.floats(0.05, 1))
def test_slower_drift_never_gives_a_nearer_horizon(
    current: int | None, half_life: float, slower: float, youngest: float
) -> None:
    fast = next_horizon(current, expected(current or 16, decay(half_life, youngest), 1e6))
    slow = next_horizon(current, expected(current or 16, decay(slower * half_life, youngest), 1e6))
    assert far(fast) <= far(slow)


@given(st.none() | st.integers(2, 63), st.floats(0, 1), st.floats(0, 1))
def test_few_tokens_change_nothing(current: int | None, young: float, old: float) -> None:
    ages = current or 16
    assert current == next_horizon(current, expected(ages, lambda age: young if age < 2 else old, 500 / ages))


@given(st.none() | st.integers(2, 63), st.floats(0, 1))
def test_without_young_history_nothing_changes(current: int | None, rate: float) -> None:
    ages = range((far(current) + 1) // 2, far(current))
    assert current == next_horizon(current, dict.fromkeys(ages, (1000000.0, 1000000.0 * rate)))


@given(st.integers(2, 63), st.floats(0, 1))
def test_where_the_window_ends_before_the_old_half_the_horizon_moves_away(current: int, rate: float) -> None:
    """It says nothing of history that is not there."""
    counts = dict.fromkeys(range((current + 1) // 2), (1000000.0, 1000000.0 * rate))
    assert min(FARTHEST, current + current // 2) == far(next_horizon(current, counts))


def test_what_is_dropped_is_what_is_sure_to_be_too_old() -> None:
    """And not a generation that little was drafted from, nor more than half of what is there at a time."""
    good = dict.fromkeys(range(10), (10000.0, 8000.0))
    bad = dict.fromkeys(range(10, 16), (10000.0, 1000.0))
    for current in (16, None):
        assert 10 == next_horizon(current, good | bad)
        assert 12 == next_horizon(current, good | bad | {10: (100.0, 10.0), 11: (100.0, 10.0)})
        assert 8 == next_horizon(current, {age: (10_000.0, 8000.0 if age < 3 else 0.0) for age in range(16)})
    # each says too little; three together are enough, and tell of the last of them
    assert 12 == next_horizon(16, good | dict.fromkeys(range(10, 14), (200.0, 0.0)))


def test_a_few_drafts_from_very_old_history_do_not_hide_the_drift() -> None:
    """Of problems that came up long ago, beside others that come up all the time."""
    drift = {age: (10_000.0, 8000.0 if age < 8 else 800.0) for age in range(16)}
    assert 8 == next_horizon(None, drift | {60: (500.0, 400.0)})


def test_a_slight_difference_changes_nothing() -> None:
    """In between, the horizon neither comes nearer nor moves away, however sure the difference is."""
    assert 8 == next_horizon(8, expected(8, lambda age: 0.8 if age < 4 else 0.45, 1e7))
    assert 8 == next_horizon(8, expected(8, lambda age: 0.8 if age < 4 else 0.62, 1e7))
    assert next_horizon(None, expected(8, lambda age: 0.8 if age < 4 else 0.45, 1e7)) is None


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.none() | st.integers(2, 32), st.floats(0.1, 0.95), st.sampled_from([500, 3000, 20_000]))
def test_without_drift_it_never_comes_nearer(seed: int, start: int | None, rate: float, tokens: int) -> None:
    horizons = [start, *Run(seed, start, window=32, tokens=tokens).rounds(40, lambda _: rate)]
    assert sorted(horizons, key=far) == horizons


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 32), st.floats(0.3, 0.95))
def test_without_drift_it_moves_out_of_sight(seed: int, start: int, rate: float) -> None:
    assert list(Run(seed, start, window=100, memory=0.8).rounds(20, lambda _: rate))[-1] is None


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.none() | st.integers(2, 64), st.floats(1, 24), st.sampled_from([0.0, 0.8]))
def test_steady_drift_gives_a_horizon_of_about_its_half_life(
    seed: int, start: int | None, half_life: float, memory: float
) -> None:
    """It gets there from one side, never turns, and hardly moves any more."""
    run = Run(seed, start, window=100, tokens=100_000, memory=memory)
    horizons = [start, *run.rounds(30, decay(half_life))]
    assert 0 == turns(horizons)
    last = [far(horizon) for horizon in horizons[-10:]]
    assert len(set(last)) <= 2
    assert 0.5 * half_life <= min(last)
    assert max(last) <= 1.15 * half_life + 2


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(2, 32), st.floats(0.5, 100), st.floats(0.2, 0.95), st.sampled_from([300, 1000, 5000]))
def test_noise_does_not_make_it_oscillate(
    seed: int, start: int, half_life: float, youngest: float, tokens: int
) -> None:
    run = Run(seed, start, window=32, tokens=tokens)
    assert turns([start, *run.rounds(60, decay(half_life, youngest))]) <= 1


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(3, 20))
def test_a_change_from_one_generation_to_the_next_is_kept_in_mind(seed: int, before: int) -> None:
    """What was found too old is tried again only once the counts of it have faded."""
    run = Run(seed, 32, window=32, memory=0.8)
    horizons = [far(horizon) for horizon in run.rounds(40, lambda age: 0.8 if age < before else 0.05)][5:]
    assert before == min(horizons)
    assert before == sorted(horizons)[len(horizons) // 2]
    assert turns(list(horizons)) <= 4


def test_it_follows_drift_that_changes() -> None:
    """Fast at first, then slow, then fast again."""
    run = Run(0, None, window=16)
    fast, slow, again = (list(run.rounds(15, decay(half_life)))[-1] for half_life in (2, 100, 2))
    assert fast is not None
    assert 3 <= fast <= 4
    assert slow is None
    assert fast == again


@pytest.mark.parametrize("lap", [20, 100])
def test_problems_that_come_up_once_an_epoch_keep_their_last_epochs(lap: int) -> None:
    """However many versions one has; where that drifts away, the last two."""
    slowly, fast = Run(0, None, window=4, lap=lap), Run(0, None, window=4, lap=lap)
    assert {None} == set(slowly.rounds(10, lambda age: 0.8 * 0.5 ** (age / lap / 50)))
    horizon = list(fast.rounds(10, lambda age: 0.8 * 0.5 ** (age / lap * 2)))[-1]
    assert horizon is not None
    assert 2 == len(
        [
            age
            for age in range(0, 10 * lap, lap)
            if 1000 - age >= oldest_kept(range(0, 1001, lap), 4, 1000 - horizon + 1)
        ]
    )


@pytest.mark.parametrize("lap", [3, 20, 100])
def test_it_moves_away_again_where_only_what_always_stays_is_behind_it(lap: int) -> None:
    """From that alone it is seen that the drift is over; while it is not over, nothing moves."""
    run = Run(0, None, window=4, lap=lap)
    during = list(run.rounds(12, lambda age: 0.8 * 0.5 ** (age / lap)))[3:]
    assert 0 == turns(during)
    assert during[-1] is not None
    between = list(run.rounds(12, lambda age: 0.8 if age < lap else 0.5))
    assert {during[-1]} == set(between)
    assert list(run.rounds(12, lambda _: 0.8))[-1] is None


def test_ages_above_63_count_as_one() -> None:
    """As an index tells them."""
    fresh = dict.fromkeys(range(63), (10000.0, 8000.0))
    for stale in ({63: (30_000.0, 1000.0)}, dict.fromkeys(range(63, 66), (10000.0, 300.0))):
        assert [63, 63, 63] == [next_horizon(current, fresh | stale) for current in (None, 80, 63)]
    for kept in ({63: (30_000.0, 24_000.0)}, dict.fromkeys(range(63, 66), (10000.0, 8000.0))):
        assert [60, None, None] == [next_horizon(current, fresh | kept) for current in (40, 60, 80)]
