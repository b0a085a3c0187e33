"""The lengths that an engine knows: statistics, what is forgotten, and a reader while they are written."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.length_stats import MIN_ROLLOUTS_OF_ALL, LengthStats
from rollout_store.history.known_lengths import MAX_LENGTHS_OF_ALL, KnownLengths, Length

LENGTHS = st.tuples(st.integers(1, 6), st.integers(1, 500), st.booleans())
PROBLEMS = st.sampled_from("pqr")
CHANGES = st.one_of(
    st.tuples(st.just("add"), PROBLEMS, st.lists(LENGTHS, max_size=8)),
    st.tuples(st.just("drop_before"), PROBLEMS, st.integers(1, 7)),
    st.tuples(st.just("drop_problem"), PROBLEMS),
)


def stats_of_all(lengths: Sequence[Length]) -> LengthStats:
    return LengthStats.from_lengths(lengths, min_rollouts=MIN_ROLLOUTS_OF_ALL)


@given(st.lists(CHANGES, max_size=12))
def test_a_problem_has_the_statistics_of_what_was_added_and_not_dropped(changes: list[tuple[Any, ...]]) -> None:
    known = KnownLengths()
    kept: dict[str, list[Length]] = {problem: [] for problem in "pqr"}
    for method, problem, *arguments in changes:
        getattr(known, method)(problem, *arguments)
        match method, arguments:
            case "add", [lengths]:
                kept[problem] += lengths
            case "drop_before", [generation]:
                kept[problem] = [length for length in kept[problem] if length[0] >= generation]
            case _:
                kept[problem] = []
        expected = {problem: LengthStats.from_lengths(lengths) for problem, lengths in kept.items()}
        assert expected == {problem: known.of_problem(problem) for problem in kept}


def test_the_statistics_of_all_problems_do_not_depend_on_their_windows() -> None:
    known = KnownLengths()
    known.add("p", [(1, 10, False), (2, 20, False)])
    known.add("q", [(3, 30, True)])
    known.drop_before("p", 2)
    assert known.of_problem("p").count == 1
    assert known.overall() == stats_of_all([(1, 10, False), (2, 20, False), (3, 30, True)])


def test_a_problem_that_is_read_again_counts_once() -> None:
    known = KnownLengths()
    known.add("q", [(1, 30, False)])
    for _ in range(3):
        known.add("p", [(1, 10, False), (1, 20, True)])
        known.drop_problem("p")
        assert known.overall() == stats_of_all([(1, 30, False)])
        assert known.of_problem("p").count == 0
    known.add("p", [(1, 10, False), (1, 20, True)])
    assert known.overall() == stats_of_all([(1, 30, False), (1, 10, False), (1, 20, True)])


@pytest.mark.parametrize("order", [range(10, 0, -1), range(1, 11)], ids=["newest read first", "oldest read first"])
def test_the_newest_lengths_of_all_problems_are_kept(order: Sequence[int]) -> None:
    """An engine that starts reads problem by problem, each from its oldest rollout."""
    known, of_each = KnownLengths(), MAX_LENGTHS_OF_ALL // 8
    for generation in order:
        known.add(f"p{generation}", [(generation, 100 * generation, False)] * of_each)
    newest = [(generation, 100 * generation, False) for generation in range(3, 11) for _ in range(of_each)]
    assert known.overall() == stats_of_all(newest)


def test_the_statistics_of_all_problems_follow_single_rollouts() -> None:
    known = KnownLengths()
    for number in range(3 * MAX_LENGTHS_OF_ALL // 2):
        known.add(str(number % 50), [(1, 100 if number < MAX_LENGTHS_OF_ALL // 2 else 900, False)])
    assert known.overall().count == MAX_LENGTHS_OF_ALL
    assert known.overall().mean == pytest.approx(900, rel=0.05)


def test_a_reader_sees_complete_statistics_while_others_are_written() -> None:
    """All lengths of a problem are the same at any time, and so is their mean, unless a read mixes two states."""
    known, problems, stopping = KnownLengths(), [str(number) for number in range(20)], threading.Event()
    faults: list[LengthStats] = []
    num_reads = 0

    def read() -> None:
        nonlocal num_reads
        while not stopping.is_set():
            for problem in problems:
                stats = known.of_problem(problem)
                if stats.count and (stats.mean, stats.quantile(1.0)) != (stats.longest, stats.longest):
                    faults.append(stats)
                num_reads += 1

    reader = threading.Thread(target=read)
    reader.start()
    for generation in range(1, 40):
        for problem in problems:
            known.drop_problem(problem)
            known.add(problem, [(generation, 10 * generation, False)] * 16)
    stopping.set()
    reader.join()
    assert num_reads > 100
    assert faults == []
