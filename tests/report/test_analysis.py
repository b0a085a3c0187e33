"""Numbers and sentences from recordings: hand-made data, and properties."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_api.length_stats import LengthStats
from rollout_api.protocol.timeline import Measurement
from rollout_tools.report.engines import disabled_spans, engine_histories, engine_times, interruptions
from rollout_tools.report.recording import ClassCounts, DraftCounts, JobRecording, PastLength
from rollout_tools.report.rollout_plots import (
    Acceptance,
    by_position,
    by_source,
    calibration,
    drafts_by_class,
    predictions,
    stats_before,
)
from rollout_tools.report.step_plots import arrange, gantt
from rollout_tools.report.steps import (
    PublishedVersions,
    RunningCount,
    Slowdown,
    Step,
    compare,
    intervals_without_drafts,
    makespan_without_drafts,
    rewards_of,
    running_counts,
    slowdowns,
    staleness_of,
    steps_of,
    thinned,
    timed_steps,
    training_steps,
)
from rollout_tools.report.summary import findings as findings_of
from rollout_tools.report.summary import summarize
from tests.support.recordings import START, ended, engine, measurement, recording, small_job

_TIMES = st.floats(0, 1000)
intervals = st.lists(st.tuples(_TIMES, _TIMES).map(lambda pair: (min(pair), max(pair))), max_size=30)


def step_of(*spans: tuple[float, float], engine: str = "engine-0-1a2b") -> Step:
    """Return a step whose rollouts ran from and to these seconds of the job."""
    rollouts = [
        ended(sample=sample, engine=engine, started_at=START + begin, finished_at=START + end)
        for sample, (begin, end) in enumerate(spans)
    ]
    [step] = steps_of(recording(rollouts))
    return step


# Steps


def test_rollouts_belong_to_the_step_of_their_request_or_to_the_version_with_which_it_began() -> None:
    rollouts = [
        ended(request_id="a", step=4),
        ended(request_id="b", step=None, oldest_version=7, finished_at=START + 9),
        ended(request_id="b", step=None, sample=1, oldest_version=8, finished_at=START + 10),
        ended(request_id="c", step=4, purpose="eval", draft_mode="off"),
    ]
    steps = steps_of(recording(rollouts))
    found = {(step.purpose, step.draft_mode, step.number): len(step.scored) for step in steps}
    assert {("train", "history", 4): 1, ("train", "history", 7): 2, ("eval", "off", 4): 1} == found
    assert [4, 7] == [step.number for step in training_steps(steps)]


def test_the_figures_of_a_step() -> None:
    rollouts = [ended(), ended(sample=1, finish_reason="length", tokens=30, finished_at=START + 8)]
    [step] = steps_of(recording(rollouts))
    assert (8.0, 40, 5.0) == (step.makespan, step.tokens, step.tokens_per_second)
    assert 1.0 == step.accepted_per_step


def test_only_the_same_rollouts_with_the_same_weights_are_compared() -> None:
    rollouts = [
        ended(),
        ended(request_id="same", purpose="eval", draft_mode="off", step=31),
        ended(request_id="other problem", purpose="eval", draft_mode="own_text", step=32, problem_id="q"),
        ended(request_id="validation", purpose="eval", step=33),
    ]
    [comparison] = compare(steps_of(recording(rollouts)))
    assert ["off"] == list(comparison.baselines)


# Running rollouts


@given(intervals, _TIMES)
def test_running_rollouts_are_those_whose_time_contains_the_moment(spans: list[tuple[float, float]], at: float) -> None:
    before = [one.count for one in running_counts(spans) if one.time <= at]
    assert sum(begin <= at < end for begin, end in spans) == (before[-1] if before else 0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200), st.integers(2, 40))
def test_thinned_counts_keep_the_largest_and_the_last_one(values: list[int], most: int) -> None:
    counts = [RunningCount(float(time), value) for time, value in enumerate(values)]
    kept = thinned(counts, most)
    assert len(kept) <= max(most, 2) + 1
    assert max(values) == max(one.count for one in kept)
    assert counts[-1] == kept[-1]
    assert sorted(kept, key=lambda one: one.time) == kept


def test_the_tail_begins_when_fewer_than_half_of_the_rollouts_still_run() -> None:
    step = step_of((0, 1), (0, 2), (0, 3), (0, 11))
    assert START + 3 == step.tail_start
    assert pytest.approx(8 / 11) == step.tail_share


def test_a_step_that_ends_at_once_has_no_tail() -> None:
    assert 0.0 == step_of((0, 5), (0, 5)).tail_share


# Without drafts


def test_the_time_of_an_engine_is_stretched_by_its_slowdown() -> None:
    slowdown = Slowdown([10.0, 20.0], [2.0, 3.0])
    assert 20.0 == slowdown.stretched(0.0, 10.0)
    assert 2.0 * 5 + 3.0 * 5 == slowdown.stretched(5.0, 15.0)
    assert 3.0 * 10 == slowdown.stretched(25.0, 35.0)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.5, 4)), max_size=8), st.lists(_TIMES, min_size=3, max_size=3))
def test_stretched_times_add_up(parts: list[tuple[float, float]], moments: list[float]) -> None:
    times = [sum(length for length, _ in parts[: index + 1]) for index in range(len(parts))]
    slowdown = Slowdown(times, [ratio for _, ratio in parts])
    first, second, third = sorted(moments)
    assert slowdown.stretched(first, third) == pytest.approx(
        slowdown.stretched(first, second) + slowdown.stretched(second, third)
    )


def measured_steps(*counters: tuple[float, float, float]) -> list[Measurement]:
    """Return measurements of one engine at these times, with these seconds of steps, measured and without drafts."""
    return [
        measurement(time, [engine(timed_seconds=timed, timed_seconds_without_drafts=without)])
        for time, timed, without in counters
    ]


def test_steps_are_timed_for_at_least_a_second_and_anew_after_a_restart() -> None:
    measured = measured_steps((1, 0, 0), (5, 4, 8), (6, 4.5, 18), (7, 6, 9), (8, 1, 3), (9, 1.5, 3))
    steps = [(START + 1, START + 5, 4.0, 8.0), (START + 5, START + 7, 2.0, 1.0), (START + 7, START + 8, 1.0, 3.0)]
    assert {"engine-0": steps} == timed_steps(measured)


def test_only_decoding_steps_take_longer_without_drafts() -> None:
    # The engine decodes for 4 of 10 s, is idle for 10 s, and decodes all the time for 10 s.
    measured = measured_steps((0, 0, 0), (10, 4, 8), (20, 4, 8), (30, 14, 33))
    slowdown = slowdowns(measured)["engine-0"]
    assert 10 + 4 == pytest.approx(slowdown.stretched(START, START + 10))
    assert 10 == pytest.approx(slowdown.stretched(START + 10, START + 20))
    assert 10 + 15 == pytest.approx(slowdown.stretched(START + 20, START + 30))


def test_the_time_before_the_first_measurement_is_taken_for_decoding_steps() -> None:
    assert 2 * 4 == pytest.approx(slowdowns(measured_steps((10, 3, 6)))["engine-0"].stretched(START, START + 4))


def test_a_step_without_drafts_takes_as_much_longer_as_its_engine() -> None:
    step = step_of((1, 2), (2, 6))
    by_engine = {"engine-0": Slowdown([START + 100], [1.5])}
    assert [(1.5, 3.0), (3.0, 9.0)] == intervals_without_drafts(step, by_engine)
    assert 9.0 == makespan_without_drafts(step, by_engine)
    assert makespan_without_drafts(step, {}) is None


# Rows of engines


@given(intervals)
def test_rollouts_in_a_row_do_not_overlap_and_no_row_is_superfluous(spans: list[tuple[float, float]]) -> None:
    spans = [(begin, end + 1) for begin, end in spans]
    if not spans:
        return
    bars, [engine_rows] = arrange(step_of(*spans), len(spans))
    rows: dict[int, list[tuple[float, float]]] = {}
    for bar in bars:
        rows.setdefault(bar.row, []).append((bar.scored.started, bar.scored.rollout.finished_at))
    for in_row in rows.values():
        ordered = sorted(in_row)
        assert all(before[1] <= after[0] for before, after in pairwise(ordered))
    starts_and_ends = [(START + begin, START + end) for begin, end in spans]
    assert max(one.count for one in running_counts(starts_and_ends)) == engine_rows.count == len(rows)


def test_of_too_many_rollouts_the_longest_are_arranged() -> None:
    bars, _ = arrange(step_of((0, 1), (0, 9), (3, 5)), most=2)
    assert [9.0, 2.0] == [bar.scored.rollout.finished_at - bar.scored.started for bar in bars]


# Lengths


def past(generation: int, *lengths: int, cut_off: bool = False) -> list[PastLength]:
    return [PastLength(generation, length, cut_off, None) for length in lengths]


def test_a_generation_is_predicted_from_the_earlier_ones() -> None:
    entries = past(1, 10, 20, 30) + past(4, 50) + past(5, 60)
    assert [4, 5] == [one.generation for one in predictions(entries)]
    assert LengthStats.from_lengths((1, length, False) for length in (10, 20, 30)) == stats_before(entries)[4]
    assert 20.0 == predictions(entries)[0].median


def test_predictions_are_calibrated_if_lengths_do_not_change() -> None:
    lengths = {str(problem): past(1, *range(1, 101)) + past(2, *range(1, 101)) for problem in range(3)}
    points = calibration(lengths)
    assert [one.predicted for one in points] == pytest.approx([one.observed for one in points], abs=0.011)
    assert {300} == {one.count for one in points}


def test_a_rollout_that_was_cut_off_below_a_quantile_does_not_count() -> None:
    entries = past(1, 10, 20, 30, 40) + past(2, 5, cut_off=True) + past(2, 100, cut_off=True)
    assert {1} == {one.count for one in calibration({"p": entries})}
    assert {0.0} == {one.observed for one in calibration({"p": entries})}


# Rewards, staleness, acceptance


def test_groups_with_equal_rewards_are_counted() -> None:
    rollouts = [ended(problem_id=problem, sample=sample) for problem in "abc" for sample in range(2)]
    [step] = steps_of(recording(rollouts, rewards=[0.0, 1.0, 1.0, 1.0, None, 1.0]))
    rewards = rewards_of(step)
    assert rewards is not None
    assert 0.8 == rewards.mean
    assert pytest.approx(math.sqrt(0.2 / 5)) == rewards.error
    assert 0.5 == rewards.equal_groups


def test_a_step_without_rewards_has_none() -> None:
    assert rewards_of(step_of((0, 1))) is None


def test_staleness_is_counted_from_the_version_that_was_published_when_a_rollout_ended() -> None:
    measurements = [measurement(time, [], weight_version=version) for time, version in ((0, 1), (5, 3), (9, 4))]
    rollouts = [ended(oldest_version=1, finished_at=START + end) for end in (4, 6, 20)]
    rollouts.append(ended(oldest_version=None, finished_at=START + 20))
    [step] = steps_of(recording(rollouts))
    assert Counter({0: 1, 2: 1, 3: 1}) == staleness_of(step, PublishedVersions(measurements))


def test_draft_tokens_are_added_by_source_and_position() -> None:
    [step] = steps_of(recording([ended(), ended(sample=1)]))
    assert {"history": Acceptance(12, 8), "self": Acceptance(4, 2)} == by_source(step)
    counts = [DraftCounts("a", "16+", 5, 1), DraftCounts("a", "2", 10, 5), DraftCounts("b", "2", 2, 2)]
    assert [("2", Acceptance(12, 7)), ("16+", Acceptance(5, 1))] == list(by_position(counts).items())


def test_draft_tokens_per_step_are_shown_by_length_class() -> None:
    counts = [
        ClassCounts("a", "long", 10, 160, 100, 50),
        ClassCounts("b", "long", 30, 160, 20, 10),
        ClassCounts("a", "medium", 20, 160, 40, 0),
    ]
    bars = {trace.name: (trace.x, trace.y) for trace in drafts_by_class(counts).data}
    classes = ("long", "medium", "short")
    assert bars == {
        "permitted": (classes, (8.0, 8.0, 0.0)),
        "verified": (classes, (3.0, 2.0, 0.0)),
        "accepted": (classes, (1.5, 0.0, 0.0)),
    }


def test_a_bar_of_a_rollout_says_its_length_class_if_it_has_one() -> None:
    def details(**changes: Any) -> str:
        (step,) = steps_of(recording([ended(**changes)]))
        return str([trace.customdata for trace in gantt(step).data])

    assert "5 of 8 draft tokens accepted" in details()
    assert "length class" not in details()
    assert "length class medium" in details(length_class="medium")


# Engines


def test_the_time_of_an_engine_is_divided() -> None:
    states = [
        (0, engine(assigned=3, drafting_disabled=1)),
        (10, engine(assigned=3, drafting_seconds=2.0)),
        (14, engine(version=2, weights_gap_seconds=1.0, drafting_seconds=2.5)),
        (20, engine(version=2, weights_gap_seconds=1.0, drafting_seconds=2.5)),
        (25, engine(version=2, weights_gap_seconds=1.0, drafting_seconds=2.5)),
        (32, engine(version=2, weights_gap_seconds=1.0, drafting_seconds=2.5)),
    ]
    measured = [measurement(time, [one]) for time, one in states]
    rollouts = [
        ended(started_at=START, arrived_at=START, finished_at=START + 14),
        ended(engine="engine-1-x", arrived_at=START + 13, started_at=START + 16, finished_at=START + 23),
        ended(engine="plain-x", draft_mode="off", arrived_at=START, started_at=START + 30, finished_at=START + 40),
    ]
    time = engine_times(measured, rollouts)["engine-0"]
    assert (13.0, 2.5, 1.0, 10.0) == (time.busy, time.drafting, time.weights, time.disabled)
    assert (6.0, 5.0, 7.0) == (time.idle_with_waiting, time.idle_in_tail, time.idle)
    assert 32.0 == time.total


def test_an_interruption_is_a_time_without_measurements() -> None:
    measured = [measurement(time, []) for time in (0, 1, 2, 100, 101)]
    assert [(START + 2, START + 100)] == interruptions(measured)


def test_the_growing_distance_of_measurements_is_no_interruption() -> None:
    assert [] == interruptions([measurement(100 * 1.3**index, []) for index in range(30)])


def test_the_governors_decisions_over_time() -> None:
    disabled = [False, True, True, False, True]
    measured = [
        measurement(time, [engine(drafting_disabled=float(one), cost_base_seconds=0.004, drafting_stops=time)])
        for time, one in enumerate(disabled)
    ]
    history = engine_histories(measured)["engine-0"]
    assert [(START + 1, START + 3), (START + 4, START + 4)] == disabled_spans(history)
    assert [(0.004, stops) for stops in range(5)] == [
        (engine.cost_base_seconds, engine.drafting_stops) for _, engine in history.measured
    ]


# The summary


def findings(job: JobRecording) -> list[str]:
    return findings_of(job, summarize(job))


def test_the_summary_counts_the_training_steps_alone() -> None:
    rollouts = [
        ended(tokens=100, finished_at=START + 10),
        ended(request_id="plain", purpose="eval", draft_mode="off", step=9, tokens=100, finished_at=START + 16),
    ]
    summary = summarize(recording(rollouts))
    assert (1, 1, 100, 10.0, 10.0) == (
        summary.num_steps,
        summary.num_rollouts,
        summary.num_tokens,
        summary.seconds,
        summary.tokens_per_second,
    )
    assert 1.0 == summary.accepted_per_step
    assert summary.measured_saving == pytest.approx(1 - 10 / 16)
    assert summary.estimated_saving is None


def test_the_estimated_saving_comes_from_the_cost_model() -> None:
    measured = [measurement(5, [engine(timed_seconds=4.0, timed_seconds_without_drafts=5.0)])]
    assert summarize(recording([ended()], measurements=measured)).estimated_saving == pytest.approx(0.2)


def test_a_job_without_training_is_summarized_by_its_evaluation() -> None:
    assert 1 == summarize(recording([ended(purpose="eval")])).num_rollouts


def test_what_stands_out_is_said() -> None:
    text = "\n".join(findings(small_job()))
    assert "With drafts, they took 37% less time in total." in text
    assert "Drafting was disabled for 19% of the time in which engine-0 had rollouts" in text
    assert "The mean reward went from 0.25 to 0.81." in text


def test_idle_engines_failures_long_tails_and_interruptions_are_said() -> None:
    rollouts = [
        *[ended(sample=sample) for sample in range(7)],
        ended(sample=7, finish_reason="length", engine="engine-1-x", started_at=START + 9, finished_at=START + 30),
        ended(sample=8, finish_reason="failed", engine=""),
    ]
    measured = [
        measurement(time, [engine(), engine("engine-1", version=1 + (time >= 10), weights_gap_seconds=9.0)])
        for time in (0, 2, 6, 10, 20, 100)
    ]
    text = "\n".join(findings(recording(rollouts, measurements=measured)))
    assert "engine-0 was idle for 10 s (10% of its time) although rollouts were waiting." in text
    assert "engine-0 was idle for 90 s (90% of its time) while other engines finished" in text
    assert "engine-1 was idle for 6.0 s (6% of its time) although rollouts were waiting." in text
    assert "Rollouts that failed: 1." in text
    assert "11% of the rollouts were cut off at max_tokens." in text
    assert "The longest tail took 93% of step 1: for 28 s" in text
    assert "The job was interrupted for 80 s" in text


def test_an_unremarkable_job_has_nothing_that_stands_out() -> None:
    assert [] == findings(recording([ended(), ended(sample=1)]))


def test_an_acceptance_that_stays_at_zero_is_not_mentioned() -> None:
    rollouts = [ended(step=step, draft_tokens=0, accepted_tokens=0, decoding_steps=10) for step in (0, 1)]
    assert not [sentence for sentence in findings(recording(rollouts)) if "Accepted" in sentence]
