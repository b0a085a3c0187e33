"""Beside a noisy neighbour, the governor loses little against the better of drafting always and never.

Steps are replayed: ``data/step_times.json`` holds the cost model of the tiny model's engine on two cores, and by which
factors 3,000 successive steps took longer beside other programs. Bursts of a second neighbour make all steps 2 to 20
times as long for up to four seconds. Times are compared without both, because a neighbour slows all modes alike: its
luck would otherwise decide.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from rollout_store.arrays import Floats, Integers
from rollout_worker.policy.controller import DraftController
from rollout_worker.policy.draft_policy import DraftLimits, Marginal
from rollout_worker.policy.governor import StepOutcome
from rollout_worker.policy.step_cost import CPU, StepCost

RECORDED = json.loads((Path(__file__).parent / "data" / "step_times.json").read_text())
RATIOS = np.array(RECORDED["ratios"])
COST = StepCost(**RECORDED["cost"])
ROLLOUTS, STEPS, MAX_DRAFT_TOKENS = 8, 1200, 16
REPLAYS = 40
CONTEXT_TOKENS = np.full(ROLLOUTS, 100)


class Workload(NamedTuple):
    """What a replay drafts."""

    cost: StepCost
    probability: float
    """Mean acceptance probability of a draft token, according to the drafter."""
    calibration: float = 1.0
    """Ratio of the true probability to that."""


WORKLOADS = {
    "pays": Workload(COST, 0.6),
    "pays little": Workload(COST, 0.2),
    "is overconfident": Workload(COST, 0.7, 0.3),
    "is never accepted": Workload(COST, 0.7, 0.02),
    "is dear to verify": Workload(COST._replace(drafting_s=COST.base_s), 0.4),
}


def slowness(seed: int) -> Iterator[float]:
    """Yield the factor by which each step is longer beside the neighbours; send it the duration of the step before."""
    rng = np.random.default_rng(seed)
    step, busy = int(rng.integers(len(RATIOS))), (0.0, 0.3, 0.8)[seed % 3]
    now, until, factor = 0.0, 0.0, 1.0
    while True:
        if now >= until:
            is_burst = factor == 1.0 and busy > 0
            factor = float(np.exp(rng.uniform(np.log(2), np.log(20)))) if is_burst else 1.0
            until = now + rng.uniform(0.3, 4.0) * (1.0 if is_burst else (1 - busy) / max(busy, 0.01))
        step += 1
        now += (yield factor * float(RATIOS[step % len(RATIOS)])) or 0.0


def replay(workload: Workload, seed: int, *, governed: bool = True, is_quiet: bool = False) -> float:
    """Return the seconds per token and rollout, without the neighbours, of a job beside them."""
    rng, neighbours = np.random.default_rng(seed), slowness(seed)
    prior = CPU if governed else workload.cost
    controller = DraftController(Marginal(DraftLimits(MAX_DRAFT_TOKENS, 1000)), prior, governed=governed)
    for _ in range(ROLLOUTS):
        controller.open("p", prompt_tokens=10, generated=0, max_tokens=10**9)
    rows = np.arange(ROLLOUTS)
    verified, expected = np.zeros(ROLLOUTS, np.int64), np.zeros(ROLLOUTS)
    probabilities, trial, is_timed = np.zeros(ROLLOUTS), None, False
    seconds, generated = 0.0, 0
    factor = next(neighbours)
    while generated < STEPS * ROLLOUTS:
        hits = rng.random((ROLLOUTS, MAX_DRAFT_TOKENS)) < workload.calibration * probabilities[:, None]
        accepted = np.minimum(np.cumprod(hits, axis=1).sum(axis=1), verified)
        step_s = workload.cost.step_time(
            ROLLOUTS + int(verified.sum()), int(CONTEXT_TOKENS.sum()), has_drafts=bool(verified.any())
        )
        seconds, generated = seconds + step_s, generated + ROLLOUTS + int(accepted.sum())
        measured_s = step_s if is_quiet else step_s * factor
        factor = neighbours.send(measured_s)
        if controller.skip_step():
            verified, is_timed = np.zeros(ROLLOUTS, np.int64), False
            continue
        outcome = StepOutcome(rows, accepted + 1, verified, expected, CONTEXT_TOKENS, trial)
        controller.observe_step(outcome, measured_s if is_timed else None)
        budgets = controller.compute_budgets(rows)
        probabilities = np.clip(
            rng.beta(3 * workload.probability, 3 * (1 - workload.probability), ROLLOUTS), 0.01, 0.99
        )
        drafts = draft_lengths(probabilities, np.maximum(budgets.min_survivals, 0.01))
        drafts = np.minimum(drafts * (rng.random(ROLLOUTS) < 0.8), budgets.tokens)
        expected = probabilities * (1 - probabilities**drafts) / (1 - probabilities)
        gain_s = float((expected * budgets.token_values_s).sum() - controller.draft_costs_s[drafts.sum()])
        verified, is_timed = drafts, True
        if drafts.any() and gain_s <= controller.min_gain_s:
            selected = controller.select_trial(rows, drafts, gain_s)
            verified = drafts * (rows == selected)
        trial = controller.governor.trial
        controller.record_drafts(int(np.count_nonzero(drafts)))
        expected = np.where(verified > 0, expected, 0.0)
    return seconds / generated


def draft_lengths(probabilities: Floats, min_survivals: Floats) -> Integers:
    """Return for how many tokens the survival is not below its limit."""
    return np.minimum(np.log(min_survivals) // np.log(probabilities), MAX_DRAFT_TOKENS).astype(np.int64)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_governor_loses_at_most_2_percent_beside_a_noisy_neighbour(name: str) -> None:
    """The loss was at most 0.6 % on average and 5 % in the worst of 200 replays when this was written.

    The worst replays are those of drafts that pay. The better choice is taken from other replays, and whether a short
    job accepts more or less by chance makes up most of this. With sums in place of comparisons, the losses were up to
    5 % and 24 %.
    """
    workload = WORKLOADS[name]
    never = workload.cost.step_time(ROLLOUTS, int(CONTEXT_TOKENS.sum())) / ROLLOUTS
    always = float(np.mean([replay(workload, seed, governed=False, is_quiet=True) for seed in range(8)]))
    losses = np.array([replay(workload, seed) for seed in range(REPLAYS)]) / min(never, always)
    assert losses.mean() < 1.02
    assert losses.max() < 1.1
