"""What a history keeps: the window, the age limit, which follows the drift of the policy, and the byte cap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_store.history.maintenance.planner import ProblemSize, generations_to_keep
from rollout_store.history.window import next_age_limit, oldest_kept

Counts = Mapping[int, tuple[float, float]]

NO_LIMIT = 64
"""Stands for no age limit: ages from 63 on are counted together, so no limit is greater."""
LIMITS = st.none() | st.integers(1, 80)
COUNTS = st.dictionaries(
    st.integers(0, 80),
    st.tuples(st.floats(0, 1e7), st.floats(0, 1)).map(lambda counts: (counts[0], counts[0] * counts[1])),
)
SEEDS = st.integers(0, 2**32 - 1)
GENERATIONS = st.lists(st.integers(0, 300), max_size=40)


def as_number(limit: int | None) -> int:
    """Return an age limit as a number that can be compared."""
    return NO_LIMIT if limit is None else limit


def expected_counts(window: int, rate: Callable[[int], float], tokens: float) -> dict[int, tuple[float, float]]:
    """Return the expected counts if equally many tokens are drafted from each age."""
    return {age: (tokens, tokens * rate(age)) for age in range(window)}


def halving(half_life: float, youngest: float = 0.8) -> Callable[[int], float]:
    """Return an acceptance rate that halves every *half_life* generations."""
    return lambda age: youngest * 0.5 ** (age / half_life)


class TrainingRun:
    """A simulated training run that drafts equally from all kept generations of a problem.

    Args:
        seed: seed of the random numbers.
        start: initial age limit.
        window: number of generations that are kept per problem.
        tokens: number of tokens drafted from each age per round.
        decay: factor by which counts are multiplied in each round.
        epoch: number of generations after which a problem is sampled again.
    """

    def __init__(
        self, seed: int, start: int | None, *, window: int, tokens: int = 20_000, decay: float = 0.0, epoch: int = 1
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._window, self._tokens, self._decay, self._epoch = window, tokens, decay, epoch
        self._counts: dict[int, tuple[float, float]] = {}
        self.age_limit = start

    def rounds(self, number: int, rate: Callable[[int], float]) -> Iterator[int | None]:
        """Yield the age limit after each round. Tokens are accepted or rejected in groups of four."""
        newest = 10_000
        for _ in range(number):
            self._counts = {
                age: (drafted * self._decay, accepted * self._decay)
                for age, (drafted, accepted) in self._counts.items()
            }
            cutoff = newest - as_number(self.age_limit) + 1 if self.age_limit else 0
            sampled = [newest - self._epoch * rounds for rounds in range(100)]
            oldest = oldest_kept(sampled, self._window, cutoff)
            for age in (newest - generation for generation in sampled if generation >= oldest):
                drafted, accepted = self._counts.get(age, (0.0, 0.0))
                newly_accepted = 4 * int(self._rng.binomial(self._tokens // 4, rate(age)))
                self._counts[age] = (drafted + self._tokens, accepted + newly_accepted)
            self.age_limit = next_age_limit(self.age_limit, self._counts)
            yield self.age_limit


def num_reversals(limits: list[int | None]) -> int:
    """Return how often the age limit changed its direction."""
    steps = [as_number(after) > as_number(before) for before, after in pairwise(limits) if after != before]
    return sum(before != after for before, after in pairwise(steps))


# What is kept of a problem.


@settings(max_examples=500)
@given(GENERATIONS, st.integers(1, 20), st.integers(0, 320))
def test_newest_generations_from_the_cutoff_on_are_kept(sampled: list[int], window: int, cutoff: int) -> None:
    """Two are kept in any case. The order of the generations and repetitions do not matter."""
    oldest = oldest_kept(sampled, window, cutoff)
    kept = {generation for generation in sampled if generation >= oldest}
    newest = sorted(set(sampled))[-window:]
    assert set(newest[-2:]) | {generation for generation in newest if generation >= cutoff} == kept
    assert oldest == oldest_kept([*sampled, *sampled][::-1], window, cutoff)


@given(GENERATIONS, st.integers(1, 20), st.integers(0, 320), st.integers(0, 20), st.integers(0, 320))
def test_larger_window_and_earlier_cutoff_keep_no_less(
    sampled: list[int], window: int, cutoff: int, wider: int, earlier: int
) -> None:
    assert oldest_kept(sampled, window + wider, max(0, cutoff - earlier)) <= oldest_kept(sampled, window, cutoff)


# The age limit after one call.


@settings(max_examples=500)
@given(LIMITS, COUNTS)
def test_limit_stays_within_its_bounds(current: int | None, by_age: Counts) -> None:
    after = next_age_limit(current, by_age)
    assert after is None or 2 <= after < NO_LIMIT
    if current is not None and 2 <= current:
        assert min(current, NO_LIMIT) <= 2 * as_number(after)
        assert as_number(after) <= 2 * current


@pytest.mark.parametrize("current", [0, -1])
def test_limit_below_one_generation_is_rejected(current: int) -> None:
    with pytest.raises(ValueError, match=f"got {current}"):
        next_age_limit(current, {})


@settings(max_examples=500)
@given(st.integers(2, 63), COUNTS, st.data())
def test_better_acceptance_of_old_rollouts_raises_the_limit_and_of_young_ones_lowers_it(
    current: int, by_age: Counts, data: st.DataObject
) -> None:
    before = as_number(next_age_limit(current, by_age))
    for age, (drafted, accepted) in by_age.items():
        more = data.draw(st.floats(accepted, max(accepted, drafted)), label=f"accepted at age {age}")
        after = as_number(next_age_limit(current, {**by_age, age: (drafted, more)}))
        if age < (current + 1) // 2:
            assert after <= before
        else:
            assert after >= before


@given(st.none() | st.integers(2, 63), st.floats(0.2, 100), st.floats(1, 10), st.floats(0.05, 1))
def test_slower_drift_never_gives_a_lower_limit(
    current: int | None, half_life: float, factor: float, youngest: float
) -> None:
    fast = next_age_limit(current, expected_counts(current or 16, halving(half_life, youngest), 1e6))
    slow = next_age_limit(current, expected_counts(current or 16, halving(factor * half_life, youngest), 1e6))
    assert as_number(fast) <= as_number(slow)


@given(st.none() | st.integers(2, 63), st.floats(0, 1), st.floats(0, 1))
def test_too_few_tokens_change_nothing(current: int | None, young: float, old: float) -> None:
    ages = current or 16
    counts = expected_counts(ages, lambda age: young if age < 2 else old, 500 / ages)
    assert current == next_age_limit(current, counts)


@given(st.none() | st.integers(2, 63), st.floats(0, 1))
def test_nothing_changes_without_young_rollouts(current: int | None, rate: float) -> None:
    ages = range((as_number(current) + 1) // 2, as_number(current))
    assert current == next_age_limit(current, dict.fromkeys(ages, (1000000.0, 1000000.0 * rate)))


@given(st.integers(2, 63), st.floats(0, 1))
def test_limit_is_raised_if_the_window_has_no_old_rollouts(current: int, rate: float) -> None:
    """Rollouts that do not exist are no evidence of drift."""
    counts = dict.fromkeys(range((current + 1) // 2), (1000000.0, 1000000.0 * rate))
    assert min(NO_LIMIT, current + current // 2) == as_number(next_age_limit(current, counts))


def test_only_significantly_outdated_ages_are_deleted() -> None:
    """Ages with few tokens are kept, and at most half of the ages are deleted at once."""
    good = dict.fromkeys(range(10), (10000.0, 8000.0))
    bad = dict.fromkeys(range(10, 16), (10000.0, 1000.0))
    for current in (16, None):
        assert 10 == next_age_limit(current, good | bad)
        assert 12 == next_age_limit(current, good | bad | {10: (100.0, 10.0), 11: (100.0, 10.0)})
        assert 8 == next_age_limit(current, {age: (10_000.0, 8000.0 if age < 3 else 0.0) for age in range(16)})
    # No single age has enough tokens. Three ages together do, which is evidence against the last of them.
    assert 12 == next_age_limit(16, good | dict.fromkeys(range(10, 14), (200.0, 0.0)))


def test_few_drafts_from_very_old_rollouts_do_not_hide_the_drift() -> None:
    """Some problems were sampled long ago, and others all the time."""
    drift = {age: (10_000.0, 8000.0 if age < 8 else 800.0) for age in range(16)}
    assert 8 == next_age_limit(None, drift | {60: (500.0, 400.0)})


def test_moderate_difference_changes_nothing() -> None:
    """Between the two thresholds the limit stays, however significant the difference is."""
    assert 8 == next_age_limit(8, expected_counts(8, lambda age: 0.8 if age < 4 else 0.45, 1e7))
    assert 8 == next_age_limit(8, expected_counts(8, lambda age: 0.8 if age < 4 else 0.62, 1e7))
    assert next_age_limit(None, expected_counts(8, lambda age: 0.8 if age < 4 else 0.45, 1e7)) is None


def test_ages_above_63_are_counted_as_one() -> None:
    fresh = dict.fromkeys(range(63), (10000.0, 8000.0))
    for stale in ({63: (30_000.0, 1000.0)}, dict.fromkeys(range(63, 66), (10000.0, 300.0))):
        assert [63, 63, 63] == [next_age_limit(current, fresh | stale) for current in (None, 80, 63)]
    for kept in ({63: (30_000.0, 24_000.0)}, dict.fromkeys(range(63, 66), (10000.0, 8000.0))):
        assert [60, None, None] == [next_age_limit(current, fresh | kept) for current in (40, 60, 80)]


# The age limit over a training run.


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.none() | st.integers(2, 32), st.floats(0.1, 0.95), st.sampled_from([500, 3000, 20_000]))
def test_limit_is_never_lowered_without_drift(seed: int, start: int | None, rate: float, tokens: int) -> None:
    limits = [start, *TrainingRun(seed, start, window=32, tokens=tokens).rounds(40, lambda _: rate)]
    assert sorted(limits, key=as_number) == limits


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 32), st.floats(0.3, 0.95))
def test_limit_is_removed_without_drift(seed: int, start: int, rate: float) -> None:
    assert list(TrainingRun(seed, start, window=100, decay=0.8).rounds(20, lambda _: rate))[-1] is None


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.none() | st.integers(2, 64), st.floats(1, 24), st.sampled_from([0.0, 0.8]))
def test_steady_drift_gives_a_limit_of_about_its_half_life(
    seed: int, start: int | None, half_life: float, decay: float
) -> None:
    """The limit approaches it from one side, never changes its direction, and hardly changes any more."""
    run = TrainingRun(seed, start, window=100, tokens=100_000, decay=decay)
    limits = [start, *run.rounds(30, halving(half_life))]
    assert 0 == num_reversals(limits)
    last = [as_number(limit) for limit in limits[-10:]]
    assert len(set(last)) <= 2
    assert 0.5 * half_life <= min(last)
    assert max(last) <= 1.15 * half_life + 2


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(2, 32), st.floats(0.5, 100), st.floats(0.2, 0.95), st.sampled_from([300, 1000, 5000]))
def test_noise_does_not_make_the_limit_oscillate(
    seed: int, start: int, half_life: float, youngest: float, tokens: int
) -> None:
    run = TrainingRun(seed, start, window=32, tokens=tokens)
    assert num_reversals([start, *run.rounds(60, halving(half_life, youngest))]) <= 1


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(3, 20))
def test_abrupt_change_is_remembered(seed: int, change: int) -> None:
    """Ages that were found too old are tried again only once their counts have decayed."""
    run = TrainingRun(seed, 32, window=32, decay=0.8)
    limits = [as_number(limit) for limit in run.rounds(40, lambda age: 0.8 if age < change else 0.05)][5:]
    assert change == min(limits)
    assert change == sorted(limits)[len(limits) // 2]
    assert num_reversals(list(limits)) <= 4


def test_limit_follows_drift_that_changes() -> None:
    run = TrainingRun(0, None, window=16)
    fast, slow, fast_again = (list(run.rounds(15, halving(half_life)))[-1] for half_life in (2, 100, 2))
    assert fast is not None
    assert 3 <= fast <= 4
    assert slow is None
    assert fast == fast_again


@pytest.mark.parametrize("epoch", [20, 100])
def test_problems_sampled_once_per_epoch_keep_their_last_epochs(epoch: int) -> None:
    """This does not depend on the number of versions per epoch. With fast drift, the last two epochs are kept."""
    slow, fast = TrainingRun(0, None, window=4, epoch=epoch), TrainingRun(0, None, window=4, epoch=epoch)
    assert {None} == set(slow.rounds(10, lambda age: 0.8 * 0.5 ** (age / epoch / 50)))
    limit = list(fast.rounds(10, lambda age: 0.8 * 0.5 ** (age / epoch * 2)))[-1]
    assert limit is not None
    oldest = oldest_kept(range(0, 1001, epoch), 4, 1000 - limit + 1)
    assert 2 == len([age for age in range(0, 10 * epoch, epoch) if 1000 - age >= oldest])


@pytest.mark.parametrize("epoch", [3, 20, 100])
def test_end_of_the_drift_is_seen_from_the_generations_that_are_always_kept(epoch: int) -> None:
    """The limit is raised again, but not before the drift is over."""
    run = TrainingRun(0, None, window=4, epoch=epoch)
    during = list(run.rounds(12, lambda age: 0.8 * 0.5 ** (age / epoch)))[3:]
    assert 0 == num_reversals(during)
    assert during[-1] is not None
    slower = list(run.rounds(12, lambda age: 0.8 if age < epoch else 0.5))
    assert {during[-1]} == set(slower)
    assert list(run.rounds(12, lambda _: 0.8))[-1] is None


SIZES = st.lists(st.builds(ProblemSize, st.integers(0, 10**6), st.integers(1, 20)), max_size=30)
FRACTIONS = st.floats(0, 1.5)


def bytes_of(problems: list[ProblemSize], kept: list[int]) -> float:
    """Return the size of the generations that are kept."""
    return sum(problem.bytes * count / problem.generations for problem, count in zip(problems, kept, strict=True))


@given(SIZES, FRACTIONS)
def test_kept_generations_fit_and_no_more_are_deleted_than_necessary(
    problems: list[ProblemSize], fraction: float
) -> None:
    target = fraction * sum(problem.bytes for problem in problems)
    kept = generations_to_keep(problems, target)
    assert all(0 <= count <= problem.generations for problem, count in zip(problems, kept, strict=True))
    assert bytes_of(problems, kept) <= target + 1e-3
    trimmed = [position for position, problem in enumerate(problems) if kept[position] < problem.generations]
    if trimmed:
        # The last generation was deleted from the most recently used of the problems that keep fewest generations.
        fewest = min(kept[position] for position in trimmed)
        last = [position for position in trimmed if kept[position] == fewest][-1]
        assert bytes_of(problems, [*kept[:last], fewest + 1, *kept[last + 1 :]]) > target - 1e-3
        assert max(kept[position] for position in trimmed) - fewest <= 1


@given(SIZES, FRACTIONS)
def test_problems_are_trimmed_alike_and_the_least_recently_used_ones_first(
    problems: list[ProblemSize], fraction: float
) -> None:
    kept = generations_to_keep(problems, fraction * sum(problem.bytes for problem in problems))
    level = max(kept, default=0)
    if all(count == problem.generations for problem, count in zip(problems, kept, strict=True)):
        return
    trimmed = [count for problem, count in zip(problems, kept, strict=True) if problem.generations >= level]
    assert sorted(trimmed) == trimmed, "recently used problems keep more"
    assert {level, level - 1} >= set(trimmed)
    assert all(
        count == problem.generations
        for problem, count in zip(problems, kept, strict=True)
        if problem.generations < level
    )


@pytest.mark.parametrize("epochs", [1.5, 2.5, 7.2])
def test_problem_sampled_once_per_epoch_is_still_there_when_it_is_sampled_again(epochs: float) -> None:
    """This holds if one epoch fits. If whole problems were deleted in the order of their use, all would be missing."""
    problems, generations = 50, dict.fromkeys(range(50), 0)
    used = list(range(problems))
    for epoch in range(12):
        for problem in range(problems):
            assert generations[problem] > 0 or epoch == 0
            generations[problem] += 1
            used.remove(problem)
            used.append(problem)
            sizes = [ProblemSize(100 * generations[candidate], max(1, generations[candidate])) for candidate in used]
            if sum(size.bytes for size in sizes) > epochs * problems * 100:
                kept = generations_to_keep(sizes, 0.95 * epochs * problems * 100)
                for candidate, count in zip(used, kept, strict=True):
                    generations[candidate] = min(generations[candidate], count)
    assert min(generations.values()) >= int(0.95 * epochs)
