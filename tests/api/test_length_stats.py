"""Length statistics: compared with a textbook Kaplan–Meier estimate in exact fractions, and their invariants."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import LengthClass, LengthStats

CAP = 40
Lengths = list[tuple[int, int, bool]]

# There are few lengths, so that many rollouts have the same one.
generations = st.integers(0, 300)
rollouts = st.tuples(generations, st.integers(1, CAP), st.booleans())
some_lengths = st.lists(rollouts, max_size=25)
at_least_one = st.lists(rollouts, min_size=1, max_size=25)
tokens = st.integers(0, CAP + 5)


def weights_of(lengths: Lengths) -> list[Fraction]:
    """Return the weight of each rollout."""
    return [Fraction(0.5 ** (len({newer for newer, _, _ in lengths if newer > g}) / 4)) for g, _, _ in lengths]


def survival(lengths: Lengths, length: int) -> Fraction:
    """Return P(length > *length*): the product over all lengths of the share of rollouts at risk that did not end."""
    weights = weights_of(lengths)
    probability = Fraction(1)
    for at in range(length + 1):
        at_risk = sum(w for w, (_, rollout_length, _) in zip(weights, lengths, strict=True) if rollout_length >= at)
        ended = sum(
            w
            for w, (_, rollout_length, cut_off) in zip(weights, lengths, strict=True)
            if rollout_length == at and not cut_off
        )
        if ended:
            probability *= 1 - Fraction(ended) / at_risk
    return probability


def ended(*lengths: int) -> LengthStats:
    return LengthStats.from_lengths((0, length, False) for length in lengths)


# Comparison with the reference.


@given(some_lengths, tokens, tokens)
def test_survival_is_the_weighted_kaplan_meier_estimate(lengths: Lengths, than: int, so_far: int) -> None:
    reached = survival(lengths, so_far)
    expected = survival(lengths, than) / reached if than > so_far and reached else 1
    assert float(expected) == pytest.approx(
        LengthStats.from_lengths(lengths).prob_longer_than(than, so_far=so_far), abs=1e-12
    )


@given(some_lengths, st.integers(1, 12), tokens)
def test_quantile_is_the_smallest_sufficient_length(lengths: Lengths, twelfths: int, so_far: int) -> None:
    reached = survival(lengths, so_far)
    enough = [
        at
        for at in range(so_far + 1, CAP + 1)
        if reached and survival(lengths, at) <= reached * (1 - Fraction(twelfths, 12)) * (1 + Fraction(1, 10**9))
    ]
    assert (enough[0] if enough else None) == LengthStats.from_lengths(lengths).quantile(twelfths / 12, so_far=so_far)


@given(at_least_one)
def test_mean_is_the_area_under_the_observed_survival_curve(lengths: Lengths) -> None:
    stats = LengthStats.from_lengths(lengths)
    longest = max(length for _, length, _ in lengths)
    assert longest == stats.longest
    assert float(sum(survival(lengths, at) for at in range(longest))) == pytest.approx(stats.mean)


@given(at_least_one)
def test_weight_and_censored_share(lengths: Lengths) -> None:
    stats = LengthStats.from_lengths(lengths)
    weights = weights_of(lengths)
    whole = sum(weights)
    cut = sum(w for w, (_, _, cut_off) in zip(weights, lengths, strict=True) if cut_off)
    assert len(lengths) == stats.count
    assert float(whole) == pytest.approx(stats.weight)
    assert float(Fraction(cut) / whole) == pytest.approx(stats.censored_share)


# Invariants.


@given(some_lengths, st.floats(-5, CAP + 5), st.floats(-5, CAP + 5), st.floats(0, CAP + 5))
def test_survival_decreases(lengths: Lengths, one: float, other: float, so_far: float) -> None:
    stats = LengthStats.from_lengths(lengths)
    fewer, more = sorted([one, other])
    assert 1 >= stats.prob_longer_than(fewer, so_far=so_far) >= stats.prob_longer_than(more, so_far=so_far) >= 0


@given(some_lengths, st.floats(0, CAP + 5), st.floats(0, CAP + 5))
def test_survival_up_to_the_current_length_is_one(lengths: Lengths, so_far: float, less: float) -> None:
    stats = LengthStats.from_lengths(lengths)
    assert (
        1 == stats.prob_longer_than(so_far, so_far=so_far) == stats.prob_longer_than(min(less, so_far), so_far=so_far)
    )


@given(at_least_one, st.randoms())
def test_order_of_rollouts_is_irrelevant(lengths: Lengths, random: object) -> None:
    shuffled = list(lengths)
    random.shuffle(shuffled)
    stats, other = LengthStats.from_lengths(lengths), LengthStats.from_lengths(shuffled)
    assert [stats.prob_longer_than(at) for at in range(CAP)] == pytest.approx(
        [other.prob_longer_than(at) for at in range(CAP)]
    )


@given(at_least_one, st.integers(1, 100))
def test_distance_between_generations_is_irrelevant(lengths: Lengths, apart: int) -> None:
    """A problem that is sampled in every hundredth generation is described as well as one that is sampled in each."""
    stretched = [(apart * generation, length, cut_off) for generation, length, cut_off in lengths]
    assert LengthStats.from_lengths(lengths) == LengthStats.from_lengths(stretched)


@given(some_lengths)
def test_truncation_changes_nothing_below_the_limit(lengths: Lengths) -> None:
    cap = CAP // 2
    capped = [(g, min(length, cap), cut_off or length > cap) for g, length, cut_off in lengths]
    whole, cut = LengthStats.from_lengths(lengths), LengthStats.from_lengths(capped)
    assert [whole.prob_longer_than(at) for at in range(cap)] == pytest.approx(
        [cut.prob_longer_than(at) for at in range(cap)]
    )


# Censored rollouts.


def test_censored_rollout_is_not_counted_as_ended() -> None:
    stats = LengthStats.from_lengths([(0, 100, False), (0, 200, False), (0, 400, True), (0, 400, True)])
    assert [0.75, 0.5, 0.5, 0.5] == [stats.prob_longer_than(than) for than in (100, 200, 400, 10**9)]
    assert [100, 200, None] == [stats.quantile(p) for p in (0.25, 0.5, 0.51)]
    assert (0.5, 400, 275) == (stats.censored_share, stats.longest, stats.mean)


def test_rollout_censored_at_the_length_of_an_end_counts_as_longer() -> None:
    assert 0.5 == LengthStats.from_lengths([(0, 400, False), (0, 400, True)]).prob_longer_than(400)


def test_only_censored_rollouts() -> None:
    stats = LengthStats.from_lengths([(0, 64, True)] * 5)
    assert (5, 5.0, 1.0, 64.0, 64) == (stats.count, stats.weight, stats.censored_share, stats.mean, stats.longest)
    assert [1, 1] == [stats.prob_longer_than(63), stats.prob_longer_than(1000, so_far=64)]
    assert stats.quantile(0.01) is None


def test_without_rollouts_no_end_is_expected() -> None:
    stats = LengthStats.from_lengths([])
    assert (0, 0.0, 0.0, 0.0, 0) == (stats.count, stats.weight, stats.censored_share, stats.mean, stats.longest)
    assert [1, 1] == [stats.prob_longer_than(10), stats.prob_longer_than(10**6, so_far=10**5)]
    assert stats.quantile(0.5) is None


def test_rollout_longer_than_all_others_is_expected_to_continue() -> None:
    stats = ended(10, 20)
    assert [0.5, 0, 1, 1] == [
        stats.prob_longer_than(than, so_far=so_far) for than, so_far in [(15, 5), (20, 5), (21, 20), (9, 8)]
    ]
    assert (20, None) == (stats.quantile(0.5, so_far=10), stats.quantile(0.5, so_far=20))


# Age.


def test_weight_halves_after_four_generations() -> None:
    stats = LengthStats.from_lengths([(generation, 10 if generation else 20, True) for generation in range(5)])
    assert 0.5 + sum(0.5 ** (age / 4) for age in range(4)) == pytest.approx(stats.weight)
    between = LengthStats.from_lengths([(900, 10, False), (0, 20, False)])
    assert 1 + 0.5**0.25 == pytest.approx(between.weight), "generations without rollouts are not counted"
    assert 0.5**0.25 / between.weight == pytest.approx(between.prob_longer_than(10))


def test_tail_known_only_from_old_rollouts_is_kept() -> None:
    newer = [(generation, 10, False) for generation in range(1, 1000)]
    stats = LengthStats.from_lengths([*newer, (0, 1000, False), (0, 2000, False)])
    assert 1e-15 > stats.prob_longer_than(10) > 0
    assert 0.5 == stats.prob_longer_than(1500, so_far=10)


# Length classes.


def test_class_limits_are_terciles() -> None:
    overall = ended(*range(1, 301))
    assert [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.MEDIUM, LengthClass.LONG] == [
        ended(length).length_class(overall) for length in (100, 101, 200, 201)
    ]


def test_problem_has_the_class_of_most_of_its_rollouts() -> None:
    overall = ended(*range(1, 301))
    assert LengthClass.SHORT is ended(10, 20, 290).length_class(overall), "the mean length would be medium"
    assert LengthClass.LONG is ended(10, 290).length_class(overall), "the longer of two equally probable classes"


def test_class_changes_as_a_rollout_grows() -> None:
    problem, overall = ended(10, 20, 20, 290), ended(*range(1, 301))
    assert [LengthClass.SHORT, LengthClass.LONG] == [problem.length_class(overall, so_far=at) for at in (19, 20)]
    assert LengthClass.LONG is ended(10).length_class(overall, so_far=201), "the rollout itself is long by now"


def test_most_frequent_length_is_medium() -> None:
    overall = ended(100, 100, 100, 100)
    assert [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.LONG] == [
        ended(length).length_class(overall) for length in (99, 100, 101)
    ]


def test_length_between_two_classes_is_medium() -> None:
    overall = ended(100, 100, 900, 900)
    assert [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.LONG] == [
        ended(length).length_class(overall) for length in (100, 500, 900)
    ]


def test_rollouts_censored_at_the_common_limit_are_long() -> None:
    capped = [(0, 64, True)] * 9
    overall = LengthStats.from_lengths([*capped, (0, 30, False)])
    assert LengthClass.LONG is LengthStats.from_lengths(capped).length_class(overall)
    assert LengthClass.SHORT is ended(30).length_class(overall)


@given(some_lengths, st.floats(0, CAP))
def test_unknown_problem_is_long(lengths: Lengths, so_far: float) -> None:
    assert LengthClass.LONG is LengthStats.from_lengths([]).length_class(
        LengthStats.from_lengths(lengths), so_far=so_far
    )


def test_every_problem_is_long_if_nothing_else_is_known() -> None:
    assert LengthClass.LONG is ended(5).length_class(LengthStats.from_lengths([]))


@given(some_lengths, some_lengths, st.integers(1, CAP))
def test_longer_rollouts_have_no_shorter_class(problem: Lengths, others: Lengths, more: int) -> None:
    overall = LengthStats.from_lengths(others)
    rising = [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.LONG]
    single = [rising.index(ended(length).length_class(overall)) for length in range(1, CAP + more)]
    assert sorted(single) == single
    grown = LengthStats.from_lengths([(g, length + 3 * CAP, cut_off) for g, length, cut_off in problem])
    assert LengthClass.LONG is grown.length_class(overall)


@pytest.mark.parametrize("p", [0, -0.1, 1.1, float("nan")])
def test_quantile_rejects_invalid_probabilities(p: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        ended(1).quantile(p)
