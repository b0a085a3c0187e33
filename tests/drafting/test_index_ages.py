"""Acceptance of draft tokens from the history is counted by the age of the rollouts."""

from __future__ import annotations

import threading

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


@pytest.mark.parametrize(("age", "counted"), [(0, 0), (62, 62), (63, 63), (64, 63), (2**63 - 1, 63)])
def test_large_ages_are_counted_together(age: int, counted: int) -> None:
    index = SuffixIndex()
    index.add("p", [("a", -1, [1])])
    index.add("q", [("a", age - 1, [1])])
    step(index, "p", [1])
    assert {counted: (1.0, 1.0)} == index.accepted_by_age()


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
