"""A step's makespan and tail, compared with counting the running rollouts second by second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.figures.timeline import Timeline

INTERVALS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 8)).map(lambda run: (run[0], run[0] + run[1])), min_size=1, max_size=12
)


def timeline(*intervals: tuple[float, float]) -> Timeline:
    result = Timeline.from_intervals(intervals)
    assert result is not None
    return result


@given(INTERVALS)
def test_the_tail_begins_after_the_last_second_in_which_half_of_the_peak_runs(intervals: list[tuple[int, int]]) -> None:
    first, last = min(start for start, _ in intervals), max(end for _, end in intervals)
    running = [sum(start <= second < end for start, end in intervals) for second in range(first, last)]
    tail = 0
    while 2 * running[-1 - tail] < max(running):
        tail += 1
    assert Timeline(len(running), tail, max(end - start for start, end in intervals)) == timeline(*intervals)


@given(INTERVALS, st.data())
def test_the_order_of_rollouts_does_not_matter(intervals: list[tuple[int, int]], data: st.DataObject) -> None:
    assert timeline(*intervals) == timeline(*data.draw(st.permutations(intervals)))


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        pytest.param([(0, 10), (0, 10), (0, 10), (0, 10)], Timeline(10, 0, 10), id="no tail"),
        pytest.param([(0, 10), (0, 10), (0, 10), (0, 30)], Timeline(30, 20, 30), id="one long rollout"),
        pytest.param([(0, 10), (0, 10), (0, 30), (0, 30)], Timeline(30, 0, 30), id="half of the peak is no tail"),
        pytest.param([(0, 10), (0, 10), (0, 10), (10, 20), (10, 25), (10, 30)], Timeline(30, 5, 20), id="two at once"),
        pytest.param([(0, 10), (5, 4)], Timeline(10, 0, 10), id="clocks that differ"),
        pytest.param([(3, 3)], Timeline(0, 0, 0), id="no duration"),
    ],
)
def test_examples(intervals: list[tuple[float, float]], expected: Timeline) -> None:
    assert expected == timeline(*intervals)


def test_a_step_without_rollouts_has_no_timeline() -> None:
    assert Timeline.from_intervals([]) is None
