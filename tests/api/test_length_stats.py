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


# Censored rollouts.


def test_without_rollouts_no_end_is_expected() -> None:
    stats = LengthStats.from_lengths([])
    assert (0, 0.0, 0.0, 0.0, 0) == (stats.count, stats.weight, stats.censored_share, stats.mean, stats.longest)
    assert [1, 1] == [stats.prob_longer_than(10), stats.prob_longer_than(10**6, so_far=10**5)]
    assert stats.quantile(0.5) is None


# Age.


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
