"""Acceptance of draft tokens from the history is counted by the age of the rollouts."""

from __future__ import annotations

import threading
from fractions import Fraction

import numpy as np
import pytest

from rollout_worker.drafting import SuffixIndex


def step(index: SuffixIndex, problem: str, sampled: list[int], budget: int = 1) -> list[int]:
    """Draft at the beginning of a request, extend it by *sampled*, and return the draft."""
    handle = index.open(problem, sources=("history",))
    drafted = index.draft(handle, budget).tokens
    index.extend(handle, sampled)
    index.close(handle)
    return drafted


def test_nothing_is_counted_before_anything_is_verified() -> None:
    index = SuffixIndex()
    index.add("p", [("a", 3, [1, 2])])
    handle = index.open("p")
    assert [1, 2] == index.draft(handle, 2).tokens
    assert {} == index.accepted_by_age()
    index.extend(handle, [1])
    assert {0: (1.0, 1.0)} == index.accepted_by_age()


def test_accepted_and_rejected_tokens_count_for_their_age() -> None:
    """Counts accumulate. Draft tokens after a rejected one are not counted."""
    index = SuffixIndex()
    index.add("old", [("a", 3, [1, 2, 3, 4])])
    index.add("new", [("a", 8, [5])])
    assert [1, 2, 3, 4] == step(index, "old", [1, 2, 9, 4], budget=4)
    assert {5: (3.0, 2.0)} == index.accepted_by_age()
    assert [1, 2] == step(index, "old", [1, 2], budget=2)
    assert {5: (5.0, 4.0)} == index.accepted_by_age()


def test_ages_are_counted_separately() -> None:
    """Young rollouts are right in nine of ten cases, old ones in one of ten."""
    index = SuffixIndex()
    for problem in range(20):
        index.add(f"young {problem}", [("a", 9, [problem, 1])])
        index.add(f"old {problem}", [("a", 2, [problem, 1])])
    index.add("newest", [("a", 10, [])])
    for problem in range(20):
        assert [problem] == step(index, f"young {problem}", [problem if problem % 10 else 99])
        assert [problem] == step(index, f"old {problem}", [99 if problem % 10 else problem])
    assert {1: (20.0, 18.0), 8: (20.0, 2.0)} == index.accepted_by_age()


def test_a_token_counts_in_equal_parts_for_the_ages_that_propose_it() -> None:
    """The number of rollouts of an age does not matter, nor do rollouts that propose another token."""
    index = SuffixIndex()
    index.add(
        "p", [(f"{generation}/{i}", generation, [1]) for generation, n in ((4, 5), (6, 1), (7, 2)) for i in range(n)]
    )
    index.add("p", [("other", 5, [2])])
    assert [1] == step(index, "p", [1])
    third = float(Fraction(1, 3))
    assert {0: (third, third), 1: (third, third), 3: (third, third)} == index.accepted_by_age()
    for _ in range(2):
        step(index, "p", [2])
    assert {0: (1.0, third), 1: (1.0, third), 3: (1.0, third)} == index.accepted_by_age()


@pytest.mark.parametrize("ages", [17, 23, 31])
def test_the_parts_of_a_token_add_up_to_one(ages: int) -> None:
    """If a token cannot be divided evenly, the youngest age takes the negligible remainder."""
    index = SuffixIndex()
    index.add("p", [(f"{generation}", generation, [1]) for generation in range(ages)])
    for _ in range(100):
        step(index, "p", [1])
    parts = [accepted for _, accepted in index.accepted_by_age().values()]
    assert ages == len(parts)
    assert pytest.approx(100, abs=1e-9) == sum(parts)
    assert pytest.approx([100 / ages] * ages, rel=1e-2) == parts


def test_the_age_is_the_one_at_the_time_of_the_draft() -> None:
    """It equals `Draft.ages`, even if newer generations are added before the tokens are verified."""
    index = SuffixIndex()
    index.add("p", [("a", 4, [1, 2])])
    index.add("q", [("a", 6, [5])])
    handle = index.open("p")
    assert [2] == index.draft(handle, 1).ages
    index.add("q", [("b", 9, [5])])
    index.extend(handle, [1])
    assert {2: (1.0, 1.0)} == index.accepted_by_age()
    assert [5] == index.draft(handle, 1).ages
    index.extend(handle, [3])
    assert {2: (1.0, 1.0), 5: (1.0, 0.0)} == index.accepted_by_age()


@pytest.mark.parametrize(("age", "counted"), [(0, 0), (62, 62), (63, 63), (64, 63), (2**63 - 1, 63)])
def test_large_ages_are_counted_together(age: int, counted: int) -> None:
    index = SuffixIndex()
    index.add("p", [("a", -1, [1])])
    index.add("q", [("a", age - 1, [1])])
    step(index, "p", [1])
    assert {counted: (1.0, 1.0)} == index.accepted_by_age()


def test_only_tokens_from_the_history_are_counted() -> None:
    """Tokens from other problems, from siblings and from the prompt are not."""
    index = SuffixIndex(pool_tokens=1000)
    index.add("other", [("a", 1, [1, 2, 3, 4, 5])])
    handle, sibling = index.open("p"), index.open("p", prompt=[6, 7, 8, 9])
    index.extend(handle, [1, 2])
    assert ["cross_problem", "cross_problem"] == index.draft(handle, 2).sources
    index.extend(handle, [3, 9])
    index.extend(sibling, [6, 7])
    assert ["self"] == index.draft(sibling, 1).sources
    index.extend(sibling, [8])
    index.extend(sibling, [1, 2])
    assert ["siblings"] == index.draft(sibling, 1).sources
    index.extend(sibling, [3])
    assert {} == index.accepted_by_age()


def test_the_last_token_of_a_rollout_is_counted() -> None:
    """Nothing is drafted after it."""
    index = SuffixIndex()
    index.add("p", [("a", 0, [1, 7, 2])])
    handle = index.open("p", stop_tokens=[7])
    assert [1, 7] == index.draft(handle, 4).tokens
    index.extend(handle, [1, 7])
    assert {0: (2.0, 2.0)} == index.accepted_by_age()


def test_counts_are_consistent_under_concurrent_reads_and_writes() -> None:
    """All parts add up to the tokens of the history, accepted never exceed verified tokens, and no count decreases."""
    index = SuffixIndex(threads=2)
    rng = np.random.default_rng(0)
    text = rng.integers(0, 6, 400).tolist()
    index.add("p", [(f"{generation}", generation, text[generation:]) for generation in range(16)])
    errors: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            before: dict[int, tuple[float, float]] = {}
            while not done.is_set():
                now = index.accepted_by_age()
                for age, (verified, accepted) in now.items():
                    verified_before, accepted_before = before.get(age, (0.0, 0.0))
                    assert -1e-9 <= accepted - accepted_before <= verified - verified_before + 1e-9
                assert before.keys() <= now.keys()
                before = now
        except BaseException as error:
            errors.append(error)

    def generate(seed: int) -> None:
        try:
            steps = np.random.default_rng(seed)
            handles = [index.open("p", sources=("history",)) for _ in range(4)]
            position = int(steps.integers(0, 50))
            while position < len(text):
                index.draft_batch(handles, [4] * 4)
                sampled = text[position : position + 3] if steps.random() < 0.7 else [9]
                index.extend_batch(handles, [sampled] * 4)
                position += 3
            for handle in handles:
                index.close(handle)
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    generators = [threading.Thread(target=generate, args=(seed,)) for seed in range(3)]
    for thread in (reader, *generators):
        thread.start()
    for generation in range(16, 24):
        index.add("p", [(f"{generation}", generation, text)])
    for thread in generators:
        thread.join()
    done.set()
    reader.join()
    if errors:
        raise errors[0]
    by_age, history = index.accepted_by_age(), index.counters()["history"]
    assert 100 < history.accepted < history.verified
    assert history.verified == pytest.approx(sum(verified for verified, _ in by_age.values()))
    assert history.accepted == pytest.approx(sum(accepted for _, accepted in by_age.values()))
