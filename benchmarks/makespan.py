"""How long a training step's rollouts take under each way to draft, simulated on recorded rollouts.

    python -m benchmarks.makespan --trace FILE --tokenizer FILE --cost-model h100-7b --workers 1 --batch 128 --json FILE

All rollouts of the evaluated checkpoint are one training step; those of the checkpoint before are the history. Drafts
come from the real drafters and pass where the recording says so; what a step of an engine costs is the cost model's
word (:mod:`benchmarks.simulation`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figures import Figure, report, save_svg
from benchmarks.ngram_drafter import Ngram
from benchmarks.problems import Problem, add_trace_arguments, chosen_problems
from benchmarks.simulation import Hardware, Lengths, Mode, Simulation, Step, Truth
from benchmarks.step_times import fitted
from benchmarks.suffix_drafters import Ours, Peer
from rollout_worker.policy.budgets import BudgetPolicy, DasClasses, DasOptimal, Fixed, Marginal, Pool
from rollout_worker.policy.step_cost import H100_7B, StepCost

DRAFT, UNLIMITED, PEERS_DRAFT, NGRAM_DRAFT = 16, 64, 32, 5
"""Most tokens of a draft: by default in a job, without limit, vLLM's for suffix decoding, and its usual n-grams'."""
POOL = 8192
"""Most tokens of a step in vLLM on such a GPU."""
FIT = "fit"
HARDWARE = {"h100-7b": Hardware(H100_7B, kv_tokens=1_000_000)}


def _ours() -> Ours:
    return Ours("all")


def _arctic() -> Peer:
    return Peer("all", depth=24)


def _arctic_by_problem() -> Peer:
    return Peer("problem", depth=24)


def _marginal(lengths: Lengths) -> BudgetPolicy:
    return Marginal(Pool(DRAFT, POOL), lengths.of)


def _fixed(lengths: Lengths) -> BudgetPolicy:
    return Fixed(Pool(DRAFT, POOL), lengths.of)


def _unlimited(lengths: Lengths) -> BudgetPolicy:
    return Fixed(Pool(UNLIMITED, POOL), lengths.of)


def _das_classes(lengths: Lengths) -> BudgetPolicy:
    return DasClasses(Pool(DRAFT, POOL), lengths.of, lengths.of_all)


def _das_optimal(lengths: Lengths) -> BudgetPolicy:
    return DasOptimal(Pool(DRAFT, POOL), lengths.of)


MODES: dict[str, Mode] = {
    "none": Mode(None, longest_first=False),
    "none-longest-first": Mode(None),
    "ngram": Mode(Ngram, budget=NGRAM_DRAFT, longest_first=False),
    "arctic-inference": Mode(_arctic, budget=PEERS_DRAFT, longest_first=False),
    "arctic-inference-by-problem": Mode(_arctic_by_problem, budget=PEERS_DRAFT, longest_first=False),
    "fixed": Mode(_ours, _fixed, moves=True),
    "unlimited": Mode(_ours, _unlimited, moves=True),
    "das-classes": Mode(_ours, _das_classes, moves=True),
    "das-optimal": Mode(_ours, _das_optimal, moves=True),
    "marginal": Mode(_ours, _marginal, moves=True),
    "marginal-as-they-come": Mode(_ours, _marginal, longest_first=False, moves=True),
    "marginal-where-they-are": Mode(_ours, _marginal),
    "policy-oracle": Mode(_ours, _marginal, true_lengths=True, moves=True),
    "clairvoyant": Mode(_ours, _unlimited, true_lengths=True, foresees=True, moves=True),
}


RIVALS = ("das-classes", "das-optimal", "arctic-inference", "arctic-inference-by-problem")
"""Beside which `marginal` is to take less time."""


class Case(NamedTuple):
    """What is simulated."""

    mode: str
    workers: int
    batch: int


_problems: list[Problem] = []
_hardware: list[Hardware] = []


def simulate(case: Case) -> Step:
    """One step."""
    mode, (hardware,) = MODES[case.mode], _hardware
    step = Simulation(_problems, mode, hardware, engines=case.workers, batch=case.batch).run()
    if mode.true_lengths and not mode.foresees:
        # once more, with what the first time has shown of what is accepted
        truth = Truth(step)
        step = Simulation(_problems, mode, hardware, engines=case.workers, batch=case.batch, truth=truth).run()
    step.survivals, step.passed = [], []
    return step


def hardware_of(name: str) -> Hardware:
    """By name, of this machine, or of a file with the parts of :class:`StepCost` (seconds) and ``kv_tokens``.

    Raises:
        ValueError: if it is neither.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    try:
        said = asyncio.run(fitted()) if name == FIT else json.loads(Path(name).read_text())
        cost = StepCost(**{one: float(said[one]) for one in StepCost._fields if one in said})
        return Hardware(cost, int(said["kv_tokens"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        known = ", ".join((*HARDWARE, FIT))
        raise ValueError(
            f"--cost-model {name}: {type(error).__name__}: {error}; it is one of {known}, or a JSON file "
            f"with {', '.join(StepCost._fields)} (seconds) and kv_tokens"
        ) from None


def tail(step: Step, points: int = 200) -> list[tuple[float, int]]:
    """Rollouts that have not ended, over time in seconds."""
    ends = np.sort(step.ends)
    times = np.linspace(0, step.seconds, points)
    left = len(ends) - np.searchsorted(ends, times, side="right")
    return [(float(time), int(count)) for time, count in zip(times, left, strict=True)]


def figures_of(steps: Mapping[Case, Step]) -> list[Figure]:
    """What is promised of ``marginal``, in each case in which what it is compared with was run."""
    figures = []
    for case, step in steps.items():
        if case.mode != "marginal":
            continue
        where = f"batch {case.batch} over {case.workers}"
        seconds = {mode: steps[case._replace(mode=mode)].seconds for mode in MODES if case._replace(mode=mode) in steps}
        figures += [
            Figure(f"time, {where}", step.seconds / seconds[rival], "x", rival, "<=", 1.0)
            for rival in RIVALS
            if rival in seconds
        ]
        if "none" not in seconds:
            continue
        saved = {mode: 1 - one / seconds["none"] for mode, one in seconds.items()}
        least = 0.5 if (case.workers, case.batch) == (8, 128) else None
        figures.append(Figure(f"rollout time saved, {where}", saved["marginal"], "of none's", "none", ">=", least))
        for limit, target in (("policy-oracle", 0.9), ("clairvoyant", None)):
            if limit in saved:
                share = saved["marginal"] / saved[limit]
                figures.append(Figure(f"share of the saving, {where}", share, "of the limit's", limit, ">=", target))
        figures += [
            Figure(f"rollout time saved by {mode}, {where}", saved[mode], "of none's", "none", ">=", None)
            for mode in saved
            if mode not in ("none", "marginal")
        ]
    return figures


def row(case: Case, step: Step) -> dict[str, Any]:
    """A case's line of the JSON."""
    return {
        **case._asdict(),
        "seconds": step.seconds,
        "tokens": step.tokens,
        "engine_steps": step.verifications,
        "accepted_per_step": step.accepted_per_step,
        "drafted_per_step": step.drafted_per_step,
        "preempted": step.preempted,
        "moved": step.moved,
        "left_over_time": tail(step),
    }


def plot(file: Path, steps: Mapping[Case, Step]) -> None:
    """Draw how many rollouts have not ended, over time: a panel for each number of engines and batch."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "makespan", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((case.workers, case.batch) for case in steps))
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 4 * len(panels)), squeeze=False)
    for (workers, batch), axis in zip(panels, axes[:, 0], strict=True):
        for case, step in steps.items():
            if (case.workers, case.batch) == (workers, batch):
                axis.plot(*zip(*tail(step), strict=True), label=case.mode)
        axis.set(title=f"batch {batch} over {workers}", xlabel="seconds", ylabel="rollouts left", yscale="symlog")
        axis.legend(fontsize="small")
    figure.tight_layout()
    save_svg(figure, file)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_trace_arguments(parser)
    parser.add_argument(
        "--cost-model", default="h100-7b", help="h100-7b, fit (267M parameters on this machine), or a JSON file"
    )
    parser.add_argument("--workers", default="1", help="engines, each is run: 1,8")
    parser.add_argument("--batch", default="128", help="rollouts at a time on all engines, each is run: 16,64,128")
    parser.add_argument("--policies", default=",".join(MODES), help="some of: %(default)s")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="an SVG of how many rollouts run over time")
    options = parser.parse_args()
    try:
        _hardware.append(hardware_of(options.cost_model))
    except ValueError as error:
        parser.error(str(error))
    _problems.extend(chosen_problems(parser, options))
    modes = options.policies.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--policies knows {', '.join(MODES)}, not {', '.join(sorted(unknown))}")
    cases = [
        Case(mode, workers, batch)
        for workers in map(int, options.workers.split(","))
        for batch in map(int, options.batch.split(","))
        for mode in modes
        if batch >= workers
    ]
    steps: dict[Case, Step] = {}
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for case, step in zip(cases, pool.imap(simulate, cases), strict=True):
            steps[case] = step
            print(
                f"{case.mode}, batch {case.batch} over {case.workers}: {step.seconds:.2f} s, "
                f"{step.accepted_per_step:.2f} accepted of {step.drafted_per_step:.2f} drafted a step",
                flush=True,
            )
    report(
        options.json,
        figures_of(steps),
        trace=options.trace.name,
        problems=len(_problems),
        rollouts=sum(len(problem.running) for problem in _problems),
        cost_model={**_hardware[0].cost._asdict(), "kv_tokens": _hardware[0].kv_tokens},
        steps=[row(case, step) for case, step in steps.items()],
    )
    if options.plot is not None:
        plot(options.plot, steps)


if __name__ == "__main__":
    main()
