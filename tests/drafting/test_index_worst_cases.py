"""Repetitive text, which models do generate, is at most a constant factor slower than other text."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from rollout_worker.drafting import SuffixIndex

SIZE = 50_000

TEXTS: dict[str, Callable[[int], np.ndarray]] = {
    "constant": np.zeros,
    "alternating": lambda size: np.arange(size) % 2,
    "long period": lambda size: np.arange(size) % 997,
    "constant with a different last token": lambda size: (np.arange(size) == size - 1) * 1,
    "runs": lambda size: (np.arange(size) % 64 == 63) * (np.arange(size) // 64 % 3 + 1),
    "fibonacci": lambda size: np.diff(np.floor(np.arange(1, size + 2) * 0.6180339887)),
}


def best(action: Callable[[], object], repeats: int = 3) -> float:
    """Return the fewest CPU seconds of a few repetitions."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


@pytest.mark.parametrize("name", TEXTS)
def test_twice_the_text_takes_about_twice_the_time(name: str) -> None:
    """Building and extending are O(n log n) at most; quadratic growth would take four times as long."""

    def build(text: np.ndarray) -> None:
        SuffixIndex().add("p", [("a", 0, text)])

    def extend(text: np.ndarray) -> None:
        index = SuffixIndex()
        handle = index.open("p", text[: len(text) // 2])
        index.extend(handle, text[len(text) // 2 :])

    small, large = (TEXTS[name](size).astype(np.uint32) for size in (SIZE, 2 * SIZE))
    for work in (build, extend):
        assert best(lambda: work(large)) < 3.2 * best(lambda: work(small)) + 0.01  # noqa: B023


@pytest.mark.parametrize("name", TEXTS)
def test_the_time_of_a_draft_does_not_grow_with_the_text(name: str) -> None:
    def seconds(size: int, known: int) -> float:
        index = SuffixIndex()
        text = TEXTS[name](size).astype(np.uint32)
        index.add("p", [("a", 0, text)])
        handle = index.open("p", text)
        index.extend(handle, text[:known])
        return best(lambda: [index.draft(handle, 16) for _ in range(100)])

    for known in (0, 1, 3, 200):
        # With eight times the text, binary searches take only a few more steps.
        assert seconds(8 * SIZE, known) < 4 * seconds(SIZE, known) + 0.01


def test_many_small_additions_cost_little_more_than_one_large_addition() -> None:
    """Segments are merged geometrically. They neither accumulate nor are all rebuilt at each addition."""
    rng = np.random.default_rng(0)
    rollouts = [(str(i), i, rng.integers(0, 50, 100).astype(np.uint32)) for i in range(2000)]

    def one_by_one() -> SuffixIndex:
        index = SuffixIndex()
        for rollout in rollouts:
            index.add("p", [rollout])
        return index

    def at_once() -> SuffixIndex:
        index = SuffixIndex()
        index.add("p", rollouts)
        return index

    def draft(index: SuffixIndex) -> float:
        handle = index.open("p")
        index.extend(handle, rollouts[7][2][:50])
        return best(lambda: [index.draft(handle, 8) for _ in range(200)])

    assert best(one_by_one) < 20 * best(at_once)
    assert draft(one_by_one()) < 20 * draft(at_once())
