"""Measures acceptance and calibration of drafts for recorded rollouts: the suffix index and arctic-inference's tree.

    python -m benchmarks.acceptance --trace FILE --tokenizer FILE --json FILE

The rollouts of the earlier checkpoint (in a trace without checkpoints: the first samples of each problem) are history.
The others are replayed by :mod:`benchmarks.replay`, for both drafters in the same way. Both run with many settings, and
the results are interpolated, so that each is compared at its best settings for the same number of draft tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from benchmarks.figures import Figure, report
from benchmarks.replay import HistoryDrafter, Outcome, replay
from benchmarks.suffix_drafters import PEER, Scope, SuffixIndexDrafter, SuffixTreeDrafter
from benchmarks.traces import Problem, add_trace_arguments, selected_problems

MIN_SURVIVALS = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01)
MIN_TOKEN_PROBS = (0.0, 0.03, 0.1, 0.3, 0.5)
MAX_SPEC_FACTORS = (1.0, 2.0, 4.0, 8.0)
DRAFTED = (2, 4, 8)
PEER_BUDGET = 32
"""Budget of the peer's default setting, which has a factor of 1 and a minimum probability of 0.1."""
MIN_DECILE_TOKENS = 200
"""Deciles with fewer tokens are ignored."""


@dataclass(frozen=True)
class Setting:
    """A drafter and its parameters."""

    scope: Scope
    budget: int
    is_index: bool
    """Whether the drafter is the suffix index; otherwise it is the peer."""
    min_survival: float = 0.0
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1

    def drafter(self) -> HistoryDrafter:
        """Create the drafter."""
        if self.is_index:
            return SuffixIndexDrafter(self.scope, min_survival=self.min_survival)
        return SuffixTreeDrafter(self.scope, max_spec_factor=self.max_spec_factor, min_token_prob=self.min_token_prob)


_problems: list[Problem] = []
"""The problems of the trace; worker processes inherit them."""


def run(setting: Setting) -> Outcome:
    """Replay all problems with a setting. Nothing was learned before."""
    drafter, outcome = setting.drafter(), Outcome()
    shares_history = setting.scope in ("cross_problem", "all")
    if shares_history:
        for problem in _problems:
            for trajectory in problem.history:
                drafter.add_history(trajectory)
    for problem in _problems:
        if not shares_history:
            for trajectory in problem.history:
                drafter.add_history(trajectory)
        replay(drafter, problem.name, problem.evaluated, setting.budget, outcome)
    return outcome


def settings(scope: Scope, budgets: Sequence[int]) -> list[Setting]:
    """Return all settings of a scope."""
    peer = [
        Setting(scope, budget, is_index=False, max_spec_factor=factor, min_token_prob=min_prob)
        for budget in sorted({*budgets, PEER_BUDGET})
        for factor in MAX_SPEC_FACTORS
        for min_prob in MIN_TOKEN_PROBS
    ]
    return peer + [
        Setting(scope, budget, is_index=True, min_survival=survival) for budget in budgets for survival in MIN_SURVIVALS
    ]


def frontier(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Return the upper convex hull of (drafted, accepted) tokens per step that settings or mixtures of them reach."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted([(0.0, 0.0), *((outcome.drafted_per_step, outcome.accepted_per_step) for outcome in outcomes)]):
        while len(hull) > 1 and (hull[-1][0] - hull[-2][0]) * (y - hull[-2][1]) >= (hull[-1][1] - hull[-2][1]) * (
            x - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    best = max(range(len(hull)), key=lambda index: hull[index][1])
    return hull[: best + 1]


def accepted_at(hull: Sequence[tuple[float, float]], drafted: float) -> float:
    """Return the accepted tokens per step at a number of drafted tokens per step; beyond the hull, its maximum."""
    for (x0, y0), (x1, y1) in pairwise(hull):
        if drafted <= x1:
            return y0 + (y1 - y0) * (drafted - x0) / (x1 - x0)
    return hull[-1][1]


def drafted_for(hull: Sequence[tuple[float, float]], accepted: float) -> float:
    """Return the drafted tokens per step at a number of accepted tokens per step; infinite beyond the hull."""
    for (x0, y0), (x1, y1) in pairwise(hull):
        if accepted <= y1:
            return x0 + (x1 - x0) * (accepted - y0) / (y1 - y0)
    return float("inf")


def compare(scope: Scope, outcomes: dict[Setting, Outcome], *, multi_turn: bool) -> list[Figure]:
    """Return the figures of a scope, which compare the two drafters."""
    index = {setting: outcome for setting, outcome in outcomes.items() if setting.is_index}
    peers = {setting: outcome for setting, outcome in outcomes.items() if not setting.is_index}
    index_hull, peer_hull = frontier(list(index.values())), frontier(list(peers.values()))
    target = {"problem": 1.06 if multi_turn else 1.10, "all": 1.05 if multi_turn else 1.12}.get(scope)
    figures = [
        Figure(
            f"accepted per step at {drafted} drafted, {scope}",
            accepted_at(index_hull, drafted) / accepted_at(peer_hull, drafted),
            "times the peer",
            f"{PEER} at its best settings",
            ">=",
            target,
        )
        for drafted in DRAFTED
    ]
    default = peers[Setting(scope, PEER_BUDGET, is_index=False)]
    figures.append(
        Figure(
            f"drafted tokens at the acceptance of the default setting, {scope}",
            drafted_for(index_hull, default.accepted_per_step) / default.drafted_per_step,
            "times the peer",
            PEER,
            "<=",
            {"problem": 0.90 if multi_turn else 0.80}.get(scope),
        )
    )
    nearest = min(index.values(), key=lambda outcome: abs(outcome.accepted_per_step - default.accepted_per_step))
    for name, outcome, peer, has_target in (
        ("", nearest, "", scope == "problem"),
        (f" of {PEER}", default, PEER, False),
    ):
        calibration = outcome.calibration()
        figures += [
            Figure(
                f"Brier score{name} below that of the base rate, {scope}",
                100 * calibration.brier_skill,
                "%",
                peer,
                ">=",
                28 if has_target else None,
            ),
            Figure(
                f"largest decile error{name}, {scope}",
                100 * calibration.max_decile_error(MIN_DECILE_TOKENS),
                "points",
                peer,
                "<=",
                4 if has_target else None,
            ),
        ]
    return figures


def row(setting: Setting, outcome: Outcome) -> dict[str, Any]:
    """Return the entry of a setting in the JSON file."""
    calibration = outcome.calibration()
    return {
        "scope": setting.scope,
        "drafter": "suffix index" if setting.is_index else PEER,
        "budget": setting.budget,
        **(
            {"min_survival": setting.min_survival}
            if setting.is_index
            else {"max_spec_factor": setting.max_spec_factor, "min_token_prob": setting.min_token_prob}
        ),
        "steps": outcome.steps,
        "drafted_per_step": outcome.drafted_per_step,
        "accepted_per_step": outcome.accepted_per_step,
        "acceptance_rate": outcome.accepted / max(1, outcome.drafted),
        "brier": calibration.brier,
        "base_brier": calibration.base_brier,
        "reliability": [decile._asdict() for decile in calibration.deciles],
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_trace_arguments(parser)
    parser.add_argument(
        "--history", type=int, help="history rollouts per problem [default: all, or half of the samples]"
    )
    parser.add_argument("--budget", default="4,8,16,32", help="maximum draft lengths; each is run")
    parser.add_argument("--scope", default="problem", help="comma-separated: problem, cross_problem, self, all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    budgets = [int(budget) for budget in options.budget.split(",")]
    scopes: list[Scope] = options.scope.split(",")
    if unknown := set(scopes) - set(get_args(Scope)):
        parser.error(f"--scope must be some of {', '.join(get_args(Scope))}; got {', '.join(sorted(unknown))}")
    _problems.extend(selected_problems(parser, options, history=options.history))
    multi_turn = any(
        not segment.generated
        for problem in _problems
        for trajectory in (*problem.history, *problem.evaluated)
        for segment in trajectory.segments
    )
    all_settings = [setting for scope in scopes for setting in settings(scope, budgets)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        outcomes = dict(zip(all_settings, pool.imap(run, all_settings), strict=True))
    figures = [
        figure
        for scope in scopes
        for figure in compare(
            scope,
            {setting: outcome for setting, outcome in outcomes.items() if setting.scope == scope},
            multi_turn=multi_turn,
        )
    ]
    report(
        options.json,
        figures,
        trace=options.trace.name,
        problems=len(_problems),
        rollouts=sum(len(problem.evaluated) for problem in _problems),
        tokens=sum(trajectory.generated for problem in _problems for trajectory in problem.evaluated),
        history_rollouts=sum(len(problem.history) for problem in _problems),
        settings=[row(setting, outcome) for setting, outcome in outcomes.items()],
    )


if __name__ == "__main__":
    main()
