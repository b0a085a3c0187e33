"""Length statistics against a Kaplan–Meier estimate by the book, in fractions, and what they must never say."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import LengthClass, LengthStats

CAP = 40
Lengths = list[tuple[int, int, bool]]

# few lengths, so that many are equal
generations = st.integers(0, 300)
rollouts = st.tuples(generations, st.integers(1, CAP), st.booleans())
some_lengths = st.lists(rollouts, max_size=25)
at_least_one = st.lists(rollouts, min_size=1, max_size=25)
tokens = st.integers(0, CAP + 5)


def weights_of(lengths: Lengths) -> list[Fraction]:
    """Of each rollout."""
    return [Fraction(0.5 ** (len({one for one, _, _ in lengths if one > g}) / 4)) for g, _, _ in lengths]


def survival(lengths: Lengths, than: int) -> Fraction:
    """P(length > *than*): at each length at which rollouts ended, the share of those as long that did not end there."""
    weights = weights_of(lengths)
    left = Fraction(1)
    for at in range(than + 1):
        as_long = sum(w for w, (_, length, _) in zip(weights, lengths, strict=True) if length >= at)
        ended = sum(w for w, (_, length, cut_off) in zip(weights, lengths, strict=True) if length == at and not cut_off)
        if ended:
            left *= 1 - Fraction(ended) / as_long
    return left


def ended(*lengths: int) -> LengthStats:
    return LengthStats.of((0, length, False) for length in lengths)


# against the oracle


@given(some_lengths, tokens, tokens)
def test_longer_is_the_weighted_kaplan_meier_estimate(lengths: Lengths, than: int, so_far: int) -> None:
    reached = survival(lengths, so_far)
    expected = survival(lengths, than) / reached if than > so_far and reached else 1
    assert float(expected) == pytest.approx(LengthStats.of(lengths).longer(than, so_far=so_far), abs=1e-12)


@given(some_lengths, st.integers(1, 12), tokens)
def test_a_quantile_is_the_least_length_that_is_not_exceeded_so_often(
    lengths: Lengths, twelfths: int, so_far: int
) -> None:
    reached = survival(lengths, so_far)
    enough = [
        at
        for at in range(so_far + 1, CAP + 1)
        if reached and survival(lengths, at) <= reached * (1 - Fraction(twelfths, 12)) * (1 + Fraction(1, 10**9))
    ]
    assert (enough[0] if enough else None) == LengthStats.of(lengths).quantile(twelfths / 12, so_far=so_far)


@given(at_least_one)
def test_the_mean_is_what_lies_under_the_curve_as_far_as_was_seen(lengths: Lengths) -> None:
    stats = LengthStats.of(lengths)
    longest = max(length for _, length, _ in lengths)
    assert longest == stats.longest
    assert float(sum(survival(lengths, at) for at in range(longest))) == pytest.approx(stats.mean)


@given(at_least_one)
def test_weights_and_the_share_that_was_cut_off(lengths: Lengths) -> None:
    stats = LengthStats.of(lengths)
    weights = weights_of(lengths)
    whole = sum(weights)
    cut = sum(w for w, (_, _, cut_off) in zip(weights, lengths, strict=True) if cut_off)
    assert len(lengths) == stats.count
    assert float(whole) == pytest.approx(stats.weight)
    assert float(Fraction(cut) / whole) == pytest.approx(stats.cut_off)


# what must hold whatever the lengths


@given(some_lengths, st.floats(-5, CAP + 5), st.floats(-5, CAP + 5), st.floats(0, CAP + 5))
def test_more_tokens_are_never_likelier(lengths: Lengths, one: float, other: float, so_far: float) -> None:
    stats = LengthStats.of(lengths)
    fewer, more = sorted([one, other])
    assert 1 >= stats.longer(fewer, so_far=so_far) >= stats.longer(more, so_far=so_far) >= 0


@given(some_lengths, st.floats(0, CAP + 5), st.floats(0, CAP + 5))
def test_what_a_rollout_has_it_has_surely(lengths: Lengths, so_far: float, less: float) -> None:
    stats = LengthStats.of(lengths)
    assert 1 == stats.longer(so_far, so_far=so_far) == stats.longer(min(less, so_far), so_far=so_far)


@given(at_least_one, st.randoms())
def test_the_order_in_which_rollouts_came_does_not_count(lengths: Lengths, random: object) -> None:
    shuffled = list(lengths)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = LengthStats.of(lengths), LengthStats.of(shuffled)
    assert [one.longer(at) for at in range(CAP)] == pytest.approx([other.longer(at) for at in range(CAP)])


@given(at_least_one, st.integers(1, 100))
def test_how_far_apart_generations_are_does_not_count(lengths: Lengths, apart: int) -> None:
    """A problem that comes up every hundred generations is as well known as one that comes up in each."""
    stretched = [(apart * generation, length, cut_off) for generation, length, cut_off in lengths]
    assert LengthStats.of(lengths) == LengthStats.of(stretched)


@given(some_lengths)
def test_cutting_off_at_a_cap_changes_nothing_below_it(lengths: Lengths) -> None:
    cap = CAP // 2
    capped = [(g, min(length, cap), cut_off or length > cap) for g, length, cut_off in lengths]
    whole, cut = LengthStats.of(lengths), LengthStats.of(capped)
    assert [whole.longer(at) for at in range(cap)] == pytest.approx([cut.longer(at) for at in range(cap)])


# what was cut off


def test_what_was_cut_off_is_never_taken_to_have_ended_there() -> None:
    stats = LengthStats.of([(0, 100, False), (0, 200, False), (0, 400, True), (0, 400, True)])
    assert [0.75, 0.5, 0.5, 0.5] == [stats.longer(than) for than in (100, 200, 400, 10**9)]
    assert [100, 200, None] == [stats.quantile(p) for p in (0.25, 0.5, 0.51)]
    assert (0.5, 400, 275) == (stats.cut_off, stats.longest, stats.mean)


def test_an_end_where_others_were_cut_off_counts_these_as_longer() -> None:
    assert 0.5 == LengthStats.of([(0, 400, False), (0, 400, True)]).longer(400)


def test_all_cut_off() -> None:
    stats = LengthStats.of([(0, 64, True)] * 5)
    assert (5, 5.0, 1.0, 64.0, 64) == (stats.count, stats.weight, stats.cut_off, stats.mean, stats.longest)
    assert [1, 1] == [stats.longer(63), stats.longer(1000, so_far=64)]
    assert stats.quantile(0.01) is None


def test_nothing_known_is_no_reason_to_expect_an_end() -> None:
    stats = LengthStats.of([])
    assert (0, 0.0, 0.0, 0.0, 0) == (stats.count, stats.weight, stats.cut_off, stats.mean, stats.longest)
    assert [1, 1] == [stats.longer(10), stats.longer(10**6, so_far=10**5)]
    assert stats.quantile(0.5) is None


def test_a_rollout_longer_than_all_others_is_expected_to_go_on() -> None:
    stats = ended(10, 20)
    assert [0.5, 0, 1, 1] == [
        stats.longer(than, so_far=so_far) for than, so_far in [(15, 5), (20, 5), (21, 20), (9, 8)]
    ]
    assert (20, None) == (stats.quantile(0.5, so_far=10), stats.quantile(0.5, so_far=20))


# age


def test_a_rollout_counts_half_after_four_generations() -> None:
    stats = LengthStats.of([(generation, 10 if generation else 20, True) for generation in range(5)])
    assert 0.5 + sum(0.5 ** (age / 4) for age in range(4)) == pytest.approx(stats.weight)
    between = LengthStats.of([(900, 10, False), (0, 20, False)])
    assert 1 + 0.5**0.25 == pytest.approx(between.weight), "generations without rollouts do not count"
    assert 0.5**0.25 / between.weight == pytest.approx(between.longer(10))


def test_a_tail_that_only_old_rollouts_know_is_not_forgotten() -> None:
    newer = [(generation, 10, False) for generation in range(1, 1000)]
    stats = LengthStats.of([*newer, (0, 1000, False), (0, 2000, False)])
    assert 1e-15 > stats.longer(10) > 0
    assert 0.5 == stats.longer(1500, so_far=10)


# classes


def test_classes_are_the_thirds_of_all_rollouts() -> None:
    of_all = ended(*range(1, 301))
    assert [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.MEDIUM, LengthClass.LONG] == [
        ended(length).length_class(of_all) for length in (100, 101, 200, 201)
    ]


def test_a_problem_is_in_the_class_of_most_of_its_rollouts() -> None:
    of_all = ended(*range(1, 301))
    assert LengthClass.SHORT is ended(10, 20, 290).length_class(of_all), "its mean would be medium"
    assert LengthClass.LONG is ended(10, 290).length_class(of_all), "between two, the longer"


def test_the_class_changes_as_a_rollout_grows() -> None:
    problem, of_all = ended(10, 20, 20, 290), ended(*range(1, 301))
    assert [LengthClass.SHORT, LengthClass.LONG] == [problem.length_class(of_all, so_far=at) for at in (19, 20)]
    assert LengthClass.LONG is ended(10).length_class(of_all, so_far=201), "whatever others did, it is long by now"


def test_a_length_that_most_rollouts_have_is_medium() -> None:
    of_all = ended(100, 100, 100, 100)
    assert [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.LONG] == [
        ended(length).length_class(of_all) for length in (99, 100, 101)
    ]


def test_what_lies_between_two_lengths_is_between_their_classes() -> None:
    of_all = ended(100, 100, 900, 900)
    assert [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.LONG] == [
        ended(length).length_class(of_all) for length in (100, 500, 900)
    ]


def test_what_is_cut_off_where_all_are_is_long() -> None:
    capped = [(0, 64, True)] * 9
    of_all = LengthStats.of([*capped, (0, 30, False)])
    assert LengthClass.LONG is LengthStats.of(capped).length_class(of_all)
    assert LengthClass.SHORT is ended(30).length_class(of_all)


@given(some_lengths, st.floats(0, CAP))
def test_a_problem_of_which_nothing_is_known_may_be_long(lengths: Lengths, so_far: float) -> None:
    assert LengthClass.LONG is LengthStats.of([]).length_class(LengthStats.of(lengths), so_far=so_far)


def test_beside_nothing_every_problem_may_be_long() -> None:
    assert LengthClass.LONG is ended(5).length_class(LengthStats.of([]))


@given(some_lengths, some_lengths, st.integers(1, CAP))
def test_longer_rollouts_are_in_no_shorter_class(problem: Lengths, others: Lengths, more: int) -> None:
    of_all = LengthStats.of(others)
    rising = [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.LONG]
    single = [rising.index(ended(length).length_class(of_all)) for length in range(1, CAP + more)]
    assert sorted(single) == single
    grown = LengthStats.of([(g, length + 3 * CAP, cut_off) for g, length, cut_off in problem])
    assert LengthClass.LONG is grown.length_class(of_all)


@pytest.mark.parametrize("p", [0, -0.1, 1.1, float("nan")])
def test_a_quantile_of_no_probability_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        ended(1).quantile(p)
