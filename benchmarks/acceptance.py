"""What drafts are worth on recorded rollouts: ours and arctic-inference's, replayed side by side.

    python -m benchmarks.acceptance --trace FILE --tokenizer FILE --json FILE

Of each problem, rollouts of the earlier checkpoint (in a trace without checkpoints: the first samples) are history; the
others are generated again as :mod:`benchmarks.replay` says, both drafters seeing the same. Both have a few settings,
and all are run; between them is interpolated, so that each is compared at its best for as many drafted tokens.
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
from benchmarks.problems import Problem, add_trace_arguments, chosen_problems
from benchmarks.replay import Drafter, Outcome, replay
from benchmarks.suffix_drafters import PEER, Ours, Peer, Scope

MIN_SURVIVALS = (0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01)
MIN_TOKEN_PROBS = (0.0, 0.03, 0.1, 0.3, 0.5)
MAX_SPEC_FACTORS = (1.0, 2.0, 4.0, 8.0)
DRAFTED = (2, 4, 8)
PEERS_BUDGET = 32
"""Of its default setting here, with a factor of 1 and a least probability of 0.1."""
LEAST_IN_DECILE = 200


@dataclass(frozen=True)
class Setting:
    """A drafter and how it drafts."""

    scope: Scope
    budget: int
    ours: bool
    min_survival: float = 0.0
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1

    def drafter(self) -> Drafter:
        """A new one."""
        if self.ours:
            return Ours(self.scope, min_survival=self.min_survival)
        return Peer(self.scope, max_spec_factor=self.max_spec_factor, min_token_prob=self.min_token_prob)


_problems: list[Problem] = []
"""Of this process; workers inherit it."""


def run(setting: Setting) -> Outcome:
    """Replay all problems under a setting, from a cold start."""
    drafter, outcome = setting.drafter(), Outcome()
    together = setting.scope in ("foreign", "all")
    if together:
        for problem in _problems:
            for trajectory in problem.history:
                drafter.learn(trajectory)
    for problem in _problems:
        if not together:
            for trajectory in problem.history:
                drafter.learn(trajectory)
        replay(drafter, problem.name, problem.running, setting.budget, outcome)
    return outcome


def settings(scope: Scope, budgets: Sequence[int]) -> list[Setting]:
    """All that are run for a scope."""
    peer = [
        Setting(scope, budget, ours=False, max_spec_factor=factor, min_token_prob=least)
        for budget in sorted({*budgets, PEERS_BUDGET})
        for factor in MAX_SPEC_FACTORS
        for least in MIN_TOKEN_PROBS
    ]
    return peer + [
        Setting(scope, budget, ours=True, min_survival=least) for budget in budgets for least in MIN_SURVIVALS
    ]


def frontier(outcomes: Sequence[Outcome]) -> list[tuple[float, float]]:
    """Drafted and accepted tokens a step on the upper hull of what settings, or mixtures of them, reach."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted([(0.0, 0.0), *((one.drafted_per_step, one.accepted_per_step) for one in outcomes)]):
        while len(hull) > 1 and (hull[-1][0] - hull[-2][0]) * (y - hull[-2][1]) >= (hull[-1][1] - hull[-2][1]) * (
            x - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    best = max(range(len(hull)), key=lambda place: hull[place][1])
    return hull[: best + 1]


def accepted_at(hull: Sequence[tuple[float, float]], drafted: float) -> float:
    """Accepted tokens a step for as many drafted; the most there are beyond the last point."""
    for (x0, y0), (x1, y1) in pairwise(hull):
        if drafted <= x1:
            return y0 + (y1 - y0) * (drafted - x0) / (x1 - x0)
    return hull[-1][1]


def drafted_for(hull: Sequence[tuple[float, float]], accepted: float) -> float:
    """Drafted tokens a step for as many accepted; infinite if that is never reached."""
    for (x0, y0), (x1, y1) in pairwise(hull):
        if accepted <= y1:
            return x0 + (x1 - x0) * (accepted - y0) / (y1 - y0)
    return float("inf")


def compare(scope: Scope, outcomes: dict[Setting, Outcome], *, multi_turn: bool) -> list[Figure]:
    """What is asked of a scope."""
    ours = {setting: outcome for setting, outcome in outcomes.items() if setting.ours}
    peers = {setting: outcome for setting, outcome in outcomes.items() if not setting.ours}
    our_hull, peer_hull = frontier(list(ours.values())), frontier(list(peers.values()))
    least = {"problem": 1.06 if multi_turn else 1.10, "all": 1.05 if multi_turn else 1.12}.get(scope)
    figures = [
        Figure(
            f"accepted a step at {drafted} drafted, {scope}",
            accepted_at(our_hull, drafted) / accepted_at(peer_hull, drafted),
            "of the peer's",
            f"{PEER} at its best",
            ">=",
            least,
        )
        for drafted in DRAFTED
    ]
    default = peers[Setting(scope, PEERS_BUDGET, ours=False)]
    figures.append(
        Figure(
            f"tokens drafted for the default's acceptance, {scope}",
            drafted_for(our_hull, default.accepted_per_step) / default.drafted_per_step,
            "of the peer's",
            PEER,
            "<=",
            {"problem": 0.90 if multi_turn else 0.80}.get(scope),
        )
    )
    nearest = min(ours.values(), key=lambda one: abs(one.accepted_per_step - default.accepted_per_step))
    for name, outcome, peer, asked in (("", nearest, "", scope == "problem"), (f" of {PEER}", default, PEER, False)):
        calibration = outcome.calibration()
        figures += [
            Figure(
                f"Brier score{name} under the base rate's, {scope}",
                100 * calibration.gain,
                "%",
                peer,
                ">=",
                28 if asked else None,
            ),
            Figure(
                f"worst decile{name}, {scope}",
                100 * calibration.worst(LEAST_IN_DECILE),
                "points",
                peer,
                "<=",
                4 if asked else None,
            ),
        ]
    return figures


def row(setting: Setting, outcome: Outcome) -> dict[str, Any]:
    """A setting's line of the JSON."""
    calibration = outcome.calibration()
    return {
        "scope": setting.scope,
        "drafter": "ours" if setting.ours else PEER,
        "budget": setting.budget,
        **(
            {"min_survival": setting.min_survival}
            if setting.ours
            else {"max_spec_factor": setting.max_spec_factor, "min_token_prob": setting.min_token_prob}
        ),
        "steps": outcome.steps,
        "drafted_per_step": outcome.drafted_per_step,
        "accepted_per_step": outcome.accepted_per_step,
        "acceptance_rate": outcome.accepted / max(1, outcome.drafted),
        "brier": calibration.brier,
        "base_brier": calibration.base_brier,
        "reliability": [one._asdict() for one in calibration.deciles],
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_trace_arguments(parser)
    parser.add_argument("--history", type=int, help="rollouts of a problem [default: all, or half its samples]")
    parser.add_argument("--budget", default="4,8,16,32", help="most tokens of a draft, each is run")
    parser.add_argument("--scope", default="problem", help="of problem, foreign, self, all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    budgets = [int(one) for one in options.budget.split(",")]
    scopes: list[Scope] = options.scope.split(",")
    if unknown := set(scopes) - set(get_args(Scope)):
        parser.error(f"--scope knows {', '.join(get_args(Scope))}, not {', '.join(sorted(unknown))}")
    _problems.extend(chosen_problems(parser, options, history=options.history))
    multi_turn = any(
        not segment.generated
        for problem in _problems
        for one in (*problem.history, *problem.running)
        for segment in one.segments
    )
    wanted = [setting for scope in scopes for setting in settings(scope, budgets)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        outcomes = dict(zip(wanted, pool.imap(run, wanted), strict=True))
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
        rollouts=sum(len(problem.running) for problem in _problems),
        tokens=sum(one.generated for problem in _problems for one in problem.running),
        history_rollouts=sum(len(problem.history) for problem in _problems),
        settings=[row(setting, outcome) for setting, outcome in outcomes.items()],
    )


if __name__ == "__main__":
    main()
