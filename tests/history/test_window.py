"""What a history keeps: the window and the byte cap."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_store.history.maintenance.planner import ProblemSize, generations_to_keep
from rollout_store.history.window import oldest_kept

GENERATIONS = st.lists(st.integers(0, 300), max_size=40)


@settings(max_examples=500)
@given(GENERATIONS, st.integers(1, 20))
def test_newest_generations_are_kept(sampled: list[int], window: int) -> None:
    """The order of the generations and repetitions do not matter."""
    oldest = oldest_kept(sampled, window)
    assert sorted(set(sampled))[-window:] == sorted({generation for generation in sampled if generation >= oldest})
    assert oldest == oldest_kept([*sampled, *sampled][::-1], window)


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
