"""The simulated engines: what they take can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.makespan import MODES, Case, figures_of, hardware_of
from benchmarks.problems import Problem
from benchmarks.simulation import Hardware, Mode, Simulation, Step, Truth
from benchmarks.traces import Segment, Trajectory
from rollout_worker.policy.step_cost import H100_7B, StepCost

COST = StepCost(1.0, 0.01, 0.0001)


def trajectory(problem: str, sample: int, *tokens: int, environment: int = 0) -> Trajectory:
    said = Segment(True, np.array(tokens, np.uint32))
    answer = Segment(False, np.full(environment, 7, np.uint32))
    segments = (said, answer, said) if environment else (said,)
    return Trajectory(problem, sample, "1", np.array([1, 2, 3], np.uint32), segments)


def run(mode: Mode, *rollouts: Trajectory, kv_tokens: int = 10_000, engines: int = 1, batch: int = 8) -> Step:
    history = [trajectory("p", 9, *range(10, 60))]
    problem = Problem("p", history, list(rollouts))
    return Simulation([problem], mode, Hardware(COST, kv_tokens), engines=engines, batch=batch).run()


def test_without_drafts_a_rollout_takes_a_step_a_token() -> None:
    step = run(MODES["none"], trajectory("p", 0, 20, 21, 22))
    # the prompt of 3 is read in the step that says the first token; the end of the turn is the fourth
    contexts = [3, 4, 5, 6]
    tokens = [3, 1, 1, 1]
    assert step.seconds == pytest.approx(sum(COST.time(*one) for one in zip(tokens, contexts, strict=True)))
    assert (4, 4, 0) == (step.tokens, step.rollout_steps, step.drafted)


def test_one_place_makes_rollouts_wait_and_two_engines_share_them() -> None:
    both = (trajectory("p", 0, 20, 21), trajectory("p", 1, 30, 31))
    alone = run(MODES["none"], both[0]).seconds
    assert 2 * alone == pytest.approx(run(MODES["none"], *both, batch=1).seconds)
    assert alone == pytest.approx(run(MODES["none"], *both, batch=2, engines=2).seconds)


def test_what_the_environment_says_is_read_and_not_said() -> None:
    step = run(MODES["none"], trajectory("p", 0, 20, 21, environment=5))
    assert 6 == step.tokens
    contexts = [3, 4, 5, 11, 12, 13]
    tokens = [3, 1, 1, 5, 1, 1]
    assert step.seconds == pytest.approx(sum(COST.time(*one) for one in zip(tokens, contexts, strict=True)))


def test_an_engine_that_is_full_puts_the_last_rollout_off_and_loses_none() -> None:
    rollouts = [trajectory("p", number, *range(20, 40)) for number in range(4)]
    step = run(MODES["none"], *rollouts, kv_tokens=60)
    assert step.preempted > 0
    assert (4 * 21, 4) == (step.tokens, len(step.ends))


@pytest.mark.parametrize("name", [name for name in MODES if name not in ("none", "none-longest-first", "ngram")])
def test_drafts_from_the_history_pass_and_save_time(name: str) -> None:
    rollouts = [trajectory("p", number, *range(10, 60)) for number in range(3)]
    without, step = run(MODES["none"], *rollouts), run(MODES[name], *rollouts)
    assert step.tokens == without.tokens
    assert step.accepted > 30
    # one token more comes with each step, but not behind a draft that ends the turn
    assert 0 <= step.rollout_steps + step.accepted - step.tokens <= len(rollouts)
    assert step.seconds < 0.8 * without.seconds


@pytest.mark.parametrize("name", ["none", "marginal"])
def test_a_rollout_goes_on_where_nothing_runs_when_that_ends_the_step_sooner(name: str) -> None:
    long = [trajectory("p", number, *range(100 * number, 100 * number + 60)) for number in (1, 2)]
    short = [trajectory("p", number, 3) for number in (3, 4)]
    problem = Problem("p", [trajectory("p", 9, *range(500, 560))], [*long, *short])
    stay, move = (
        Simulation(
            [problem],
            replace(MODES[name], longest_first=False, moves=moves),
            Hardware(StepCost(0.1, 1.0, 0.0), 10_000),
            engines=2,
            batch=4,
        ).run()
        for moves in (False, True)
    )
    assert (0, 1) == (stay.moved, move.moved)
    assert (stay.tokens, 4) == (move.tokens, len(move.ends))
    assert move.seconds < 0.8 * stay.seconds


def test_the_truth_is_what_really_passed_of_tokens_of_which_so_much_was_said() -> None:
    said = [0.9] * 100 + [0.1] * 100
    passed = [number < 50 for number in range(100)] + [number < 10 for number in range(100)]
    truth = Truth(Step(survivals=said, passed=passed))
    assert [0.1, 0.9, 1.0] == truth.thresholds(np.array([0.05, 0.4, 0.6])).tolist()


def test_who_foresees_drafts_nothing_in_vain() -> None:
    rollouts = [trajectory("p", number, *range(10, 30), *range(100, 130)) for number in range(3)]
    step = run(MODES["clairvoyant"], *rollouts)
    assert 0 < step.drafted == step.accepted


def test_figures_compare_marginal_with_what_was_run_beside_it() -> None:
    steps = {Case(mode, 8, 128): Step(seconds=seconds) for mode, seconds in (("none", 10.0), ("policy-oracle", 4.0))}
    steps[Case("marginal", 8, 128)] = Step(seconds=4.6)
    steps[Case("das-optimal", 8, 128)] = Step(seconds=5.0)
    found = {figure.name: figure for figure in figures_of(steps)}
    assert 0.92 == pytest.approx(found["time, batch 128 over 8"].value)
    assert 0.54 == pytest.approx(found["rollout time saved, batch 128 over 8"].value)
    assert 0.9 == pytest.approx(found["share of the saving, batch 128 over 8"].value)


def test_a_cost_model_is_a_name_or_a_file() -> None:
    assert H100_7B == hardware_of("h100-7b").cost
    with pytest.raises(ValueError, match=r"--cost-model h200: FileNotFound.*h100-7b, fit, or a JSON file"):
        hardware_of("h200")
