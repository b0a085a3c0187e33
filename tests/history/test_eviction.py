"""What leaves at the byte cap: the oldest generations of all problems alike, whole problems last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_worker.history.eviction import Held, select_evictions

HELD = st.lists(st.builds(Held, st.integers(0, 10**6), st.integers(1, 20)), max_size=30)
SHARE = st.floats(0, 1.5)


def size(held: list[Held], kept: list[int]) -> float:
    return sum(one.bytes * keeps / one.generations for one, keeps in zip(held, kept, strict=True))


@given(HELD, SHARE)
def test_what_is_kept_fits_and_no_more_leaves_than_must(held: list[Held], share: float) -> None:
    target = share * sum(one.bytes for one in held)
    kept = select_evictions(held, target)
    assert all(0 <= keeps <= one.generations for one, keeps in zip(held, kept, strict=True))
    assert size(held, kept) <= target + 1e-3
    lost = [place for place, one in enumerate(held) if kept[place] < one.generations]
    if lost:  # the last step was of the most recently used of those that have the fewest
        level = max(kept[place] for place in lost)
        fewest = [place for place in lost if kept[place] == min(kept[one] for one in lost)]
        last = fewest[-1]
        assert size(held, [*kept[:last], kept[last] + 1, *kept[last + 1 :]]) > target - 1e-3
        assert level - kept[last] <= 1


@given(HELD, SHARE)
def test_problems_lose_alike_and_the_least_recently_used_first(held: list[Held], share: float) -> None:
    kept = select_evictions(held, share * sum(one.bytes for one in held))
    level = max(kept, default=0)
    if all(keeps == one.generations for one, keeps in zip(held, kept, strict=True)):
        return
    cut = [keeps for one, keeps in zip(held, kept, strict=True) if one.generations >= level]
    assert sorted(cut) == cut, "those used last keep more"
    assert {level, level - 1} >= set(cut)
    assert all(keeps == one.generations for one, keeps in zip(held, kept, strict=True) if one.generations < level)


def test_nobody_loses_anything_below_the_cap() -> None:
    assert [3, 1] == select_evictions([Held(300, 3), Held(100, 1)], 400)
    assert [] == select_evictions([], 0)


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        (600, [1, 2, 3]),
        (599, [1, 2, 2]),
        (500, [1, 2, 2]),
        (499, [1, 1, 2]),
        (400, [1, 1, 2]),
        (300, [1, 1, 1]),
        (299, [0, 1, 1]),
        (100, [0, 0, 1]),
        (99, [0, 0, 0]),
    ],
)
def test_generations_leave_before_problems(target: int, kept: list[int]) -> None:
    assert kept == select_evictions([Held(100, 1), Held(200, 2), Held(300, 3)], target)


@pytest.mark.parametrize("epochs", [1.5, 2.5, 7.2])
def test_a_problem_that_comes_up_once_an_epoch_is_never_gone_when_it_does(epochs: float) -> None:
    """As long as one epoch fits; with whole problems leaving in the order of their use, each would be."""
    problems, generations = 50, dict.fromkeys(range(50), 0)
    used = list(range(problems))
    for epoch in range(12):
        for problem in range(problems):
            assert generations[problem] > 0 or epoch == 0
            generations[problem] += 1
            used.remove(problem)
            used.append(problem)
            held = [Held(100 * generations[one], max(1, generations[one])) for one in used]
            if sum(one.bytes for one in held) > epochs * problems * 100:
                for one, keeps in zip(used, select_evictions(held, 0.95 * epochs * problems * 100), strict=True):
                    generations[one] = min(generations[one], keeps)
    assert min(generations.values()) >= int(0.95 * epochs)
