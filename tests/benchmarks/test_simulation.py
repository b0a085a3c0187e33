"""Tests of the simulated engines, with cases whose duration can be calculated by hand."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.makespan import MODES, Case, figures_of, hardware_of, probabilities
from benchmarks.problems import Problem
from benchmarks.simulation import Hardware, MeasuredSurvival, Mode, SimulatedStep, Simulation
from benchmarks.traces import Segment, Trajectory
from rollout_worker.policy.step_cost import H100_7B, StepCost

COST = StepCost(1.0, 0.01, 0.0001)


def trajectory(problem: str, sample: int, *tokens: int, environment: int = 0) -> Trajectory:
    turn = Segment(True, np.array(tokens, np.uint32))
    answer = Segment(False, np.full(environment, 7, np.uint32))
    segments = (turn, answer, turn) if environment else (turn,)
    return Trajectory(problem, sample, "1", np.array([1, 2, 3], np.uint32), segments)


def simulate(
    mode: Mode, *rollouts: Trajectory, kv_tokens: int = 10_000, engines: int = 1, batch: int = 8
) -> SimulatedStep:
    history = [trajectory("p", 9, *range(10, 60))]
    problem = Problem("p", history, list(rollouts))
    return Simulation([problem], mode, Hardware(COST, kv_tokens), engines=engines, batch=batch).run()


def step_seconds(tokens: list[int], contexts: list[int]) -> float:
    return sum(COST.step_time(*step) for step in zip(tokens, contexts, strict=True))


def test_rollout_without_drafts_takes_one_step_per_token() -> None:
    step = simulate(MODES["none"], trajectory("p", 0, 20, 21, 22))
    # The prompt's three tokens are processed in the first step. The fourth sampled token is the end of the turn.
    assert pytest.approx(step_seconds([3, 1, 1, 1], [3, 4, 5, 6])) == step.seconds
    assert (4, 4, 0) == (step.tokens, step.rollout_steps, step.drafted)


def test_rollouts_wait_for_a_slot_and_run_in_parallel_on_two_engines() -> None:
    both = (trajectory("p", 0, 20, 21), trajectory("p", 1, 30, 31))
    alone = simulate(MODES["none"], both[0]).seconds
    assert pytest.approx(2 * alone) == simulate(MODES["none"], *both, batch=1).seconds
    assert pytest.approx(alone) == simulate(MODES["none"], *both, batch=2, engines=2).seconds


def test_environment_tokens_are_processed_but_not_sampled() -> None:
    step = simulate(MODES["none"], trajectory("p", 0, 20, 21, environment=5))
    assert 6 == step.tokens
    assert pytest.approx(step_seconds([3, 1, 1, 5, 1, 1], [3, 4, 5, 11, 12, 13])) == step.seconds


def test_last_rollout_is_preempted_and_completed_when_the_cache_is_full() -> None:
    rollouts = [trajectory("p", number, *range(20, 40)) for number in range(4)]
    step = simulate(MODES["none"], *rollouts, kv_tokens=60)
    assert step.preempted > 0
    assert (4 * 21, 4) == (step.tokens, len(step.ends))


@pytest.mark.parametrize("name", [name for name in MODES if name not in ("none", "none-longest-first", "ngram")])
def test_drafts_from_the_history_are_accepted_and_save_time(name: str) -> None:
    rollouts = [trajectory("p", number, *range(10, 60)) for number in range(3)]
    without, step = simulate(MODES["none"], *rollouts), simulate(MODES[name], *rollouts)
    assert without.tokens == step.tokens
    assert step.accepted > 30
    # Each step samples one more token, except after a draft that ends the turn.
    assert 0 <= step.rollout_steps + step.accepted - step.tokens <= len(rollouts)
    assert step.seconds < 0.8 * without.seconds


@pytest.mark.parametrize("name", ["none", "marginal"])
def test_rollout_migrates_to_an_idle_engine_when_that_shortens_the_makespan(name: str) -> None:
    long = [trajectory("p", number, *range(100 * number, 100 * number + 60)) for number in (1, 2)]
    short = [trajectory("p", number, 3) for number in (3, 4)]
    problem = Problem("p", [trajectory("p", 9, *range(500, 560))], [*long, *short])
    without, with_migration = (
        Simulation(
            [problem],
            replace(MODES[name], longest_first=False, migrates=migrates),
            Hardware(StepCost(0.1, 1.0, 0.0), 10_000),
            engines=2,
            batch=4,
        ).run()
        for migrates in (False, True)
    )
    assert (0, 1) == (without.migrated, with_migration.migrated)
    assert (without.tokens, 4) == (with_migration.tokens, len(with_migration.ends))
    assert with_migration.seconds < 0.8 * without.seconds


def test_thresholds_map_measured_to_predicted_survival() -> None:
    predicted = [0.9] * 100 + [0.1] * 100
    survived = [number < 50 for number in range(100)] + [number < 10 for number in range(100)]
    measured = MeasuredSurvival(SimulatedStep(survivals=predicted, survived=survived))
    assert [0.1, 0.9, 1.0] == measured.thresholds(np.array([0.05, 0.4, 0.6])).tolist()


def test_all_draft_tokens_are_accepted_when_acceptance_is_known() -> None:
    rollouts = [trajectory("p", number, *range(10, 30), *range(100, 130)) for number in range(3)]
    step = simulate(MODES["clairvoyant"], *rollouts)
    assert 0 < step.drafted == step.accepted


def test_figures_compare_marginal_with_the_modes_of_the_same_size() -> None:
    modes = {"none": 10.0, "policy-oracle": 4.0, "marginal": 4.6, "das-optimal": 5.0}
    figures = {figure.name: figure for figure in figures_of({Case(mode, 8, 128): s for mode, s in modes.items()})}
    assert pytest.approx(0.92) == figures["makespan of marginal, batch 128 over 8"].value
    assert pytest.approx(0.54) == figures["makespan saved by marginal, batch 128 over 8"].value
    assert pytest.approx(0.9) == figures["saving of marginal, batch 128 over 8"].value


def test_marginal_is_compared_with_the_best_threshold_of_a_peer() -> None:
    peer = "arctic-inference-per-problem"
    seconds = {Case(peer, 1, 16, 0.1): 9.0, Case(peer, 1, 16, 0.5): 8.0, Case("marginal", 1, 16): 6.0}
    (figure,) = figures_of(seconds)
    assert (0.75, f"{peer}, best of 2 thresholds") == (figure.value, figure.peer)


@pytest.mark.parametrize("text", ["", "often", "0.1,,0.2", "0.1,1.5", "nan"])
def test_thresholds_that_are_no_probabilities_are_rejected(text: str) -> None:
    assert [0.1, 1.0] == probabilities("0.1,1")
    with pytest.raises(argparse.ArgumentTypeError, match="give probabilities from 0 to 1, separated by commas"):
        probabilities(text)


def test_a_constant_threshold_drafts_what_survives_it() -> None:
    rollouts = [trajectory("p", number, *range(10, 30), *range(100, 130)) for number in range(3)]
    step = simulate(MODES["constant-threshold"], *rollouts)
    assert 0 < step.drafted < simulate(MODES["unlimited"], *rollouts).drafted


def test_cost_model_is_a_name_or_a_file() -> None:
    assert H100_7B == hardware_of("h100-7b").cost
    with pytest.raises(ValueError, match=r"--cost-model h200: FileNotFound.*h100-7b, fit, or a JSON file"):
        hardware_of("h200")
