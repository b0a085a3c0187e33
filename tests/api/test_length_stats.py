"""Statistics of lengths and rewards, compared with their definitions, and the encoding of their entries."""

from __future__ import annotations

import logging
import math
import struct
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api import LengthClass, LengthStats, RewardStats
from rollout_api.length_stats import MIN_ROLLOUTS_OF_ALL
from rollout_api.protocol.history_encoding import (
    ENTRY_BYTES,
    KEY_BYTES,
    LengthEntry,
    pack_entry,
    pack_recent,
    rollout_key,
    unpack_entries,
    unpack_recent,
)

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


@pytest.mark.parametrize(("versions", "rollouts"), [(1, 8000), (10, 800), (1000, 8)])
def test_the_latest_rollouts_of_all_problems_are_represented_however_many_weight_versions_an_epoch_has(
    versions: int, rollouts: int
) -> None:
    lengths = [(version, 10, False) for version in range(versions) for _ in range(rollouts)]
    stats = LengthStats.from_lengths(lengths, min_rollouts=MIN_ROLLOUTS_OF_ALL)
    assert 8000 == stats.count
    assert stats.weight > 350


@given(at_least_one, st.integers(1, 10), st.integers(10, 20))
def test_generations_with_enough_rollouts_count_as_a_whole(lengths: Lengths, enough: int, copies: int) -> None:
    repeated = lengths * copies
    assert LengthStats.from_lengths(repeated) == LengthStats.from_lengths(repeated, min_rollouts=enough)


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


rewards = st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False)
entries = st.lists(
    st.builds(LengthEntry, st.just(b"rollout_"), st.integers(0, 5), st.integers(1, 99), st.booleans(), rewards)
)


@given(entries, st.floats(-1e30, 1e30), st.none() | st.integers(1, 7))
def test_statistics_follow_their_definitions(
    entries: list[LengthEntry], threshold: float, generations: int | None
) -> None:
    stats = RewardStats.from_entries(entries, threshold=threshold, generations=generations)
    newer = [len({newer.generation for newer in entries if newer.generation > entry.generation}) for entry in entries]
    counted = [entry for entry, rank in zip(entries, newer, strict=True) if generations is None or rank < generations]
    known = [entry.reward for entry in counted if entry.reward is not None]
    assert (len(counted), len(known)) == (stats.num_rollouts, stats.count)
    if not known:
        assert (None, None, None) == (stats.mean, stats.pass_rate, stats.newest_generation)
        return
    assert stats.mean is not None
    assert math.isclose(sum(known) / len(known), stats.mean, rel_tol=1e-6, abs_tol=1e-6 * max(map(abs, known)))
    [rounded] = struct.unpack("<f", struct.pack("<f", threshold))
    assert sum(reward >= rounded for reward in known) / len(known) == stats.pass_rate
    assert max(entry.generation for entry in counted if entry.reward is not None) == stats.newest_generation


@given(st.floats(-1e30, 1e30))
def test_reward_reaches_the_threshold_of_the_same_value(reward: float) -> None:
    [stored] = struct.unpack("<f", struct.pack("<f", reward))
    stats = RewardStats.from_entries([LengthEntry(b"rollout_", 1, 1, False, stored)], threshold=reward)
    assert stats.pass_rate == 1.0


@pytest.mark.parametrize(("threshold", "share"), [(1e300, 0.0), (-1e300, 1.0)])
def test_threshold_beyond_binary32(threshold: float, share: float) -> None:
    entry = LengthEntry(b"rollout_", 1, 1, False, 3.0e38)
    assert share == RewardStats.from_entries([entry], threshold=threshold).pass_rate


def test_infinite_rewards_of_other_programs_are_ignored() -> None:
    entries = [LengthEntry(b"rollout_", 1, 1, False, reward) for reward in (math.inf, 1.0)]
    stats = RewardStats.from_entries(entries)
    assert (2, 1, 1.0) == (stats.num_rollouts, stats.count, stats.mean)


lengths = st.integers(0, 2**31 - 1)
recorded = st.tuples(st.text(max_size=20), lengths, st.booleans(), rewards)


@given(st.dictionaries(st.integers(0, 2**53 - 1), st.lists(recorded, max_size=5), max_size=5))
def test_entries_are_decoded_with_the_oldest_generation_first(
    generations: dict[int, list[tuple[str, int, bool, float | None]]],
) -> None:
    stored = {
        str(generation).encode(): b"".join(pack_entry(*rollout) for rollout in rollouts)
        for generation, rollouts in generations.items()
    }
    expected = [
        LengthEntry(rollout_key(rollout_id), generation, length, cut_off, reward)
        for generation in sorted(generations)
        for rollout_id, length, cut_off, reward in generations[generation]
    ]
    assert expected == unpack_entries(stored)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), lengths, st.booleans())))
def test_recent_lengths_are_decoded_in_order(entries: list[tuple[int, int, bool]]) -> None:
    assert entries == unpack_recent(pack_recent(*entry) for entry in entries)


def test_entry_has_the_documented_layout() -> None:
    entry = pack_entry("job/request/0/0", 300, True, 0.5)
    assert (16, 8) == (ENTRY_BYTES, KEY_BYTES)
    assert rollout_key("job/request/0/0") + bytes([0x59, 0x02, 0, 0]) + struct.pack("<f", 0.5) == entry
    assert bytes([7, 0, 0, 0, 0x58, 0x02, 0, 0]) == pack_recent(7, 300, False)


def test_keys_of_rollouts_are_distinct() -> None:
    ids = [f"uid/request-{request}/{sample}/0" for request in range(50) for sample in range(20)]
    assert len(ids) == len({rollout_key(one) for one in ids})


@pytest.mark.parametrize(
    ("field", "entries"),
    [
        (b"3", pack_entry("a", 1, False)[:-1]),
        (b"-3", pack_entry("a", 1, False)),
        (b"uid/request/0/0", b"3 120 stop"),
        (b"", pack_entry("a", 1, False)),
        (b"9" * 5000, pack_entry("a", 1, False)),
    ],
)
def test_malformed_generation_is_skipped_and_reported(
    field: bytes, entries: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        read = unpack_entries({field: entries, b"4": pack_entry("b", 9, True)})
    assert [(4, 9, True)] == [(entry.generation, entry.length, entry.cut_off) for entry in read]
    assert ["1 of 2 generations"] == [record.message[:18] for record in caplog.records]


def test_malformed_recent_length_is_skipped_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read = unpack_recent([pack_recent(1, 5, False), b"short", pack_recent(2, 6, True)])
    assert [(1, 5, False), (2, 6, True)] == read
    assert ["1 of the latest rollouts' lengths"] == [record.message[:33] for record in caplog.records]
