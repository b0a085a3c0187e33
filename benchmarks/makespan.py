"""Simulates the makespan of a training step under each way to draft, on recorded rollouts.

    python -m benchmarks.makespan --trace FILE --tokenizer FILE --cost-model h100-7b --workers 1 --batch 128 --json FILE

All rollouts of the evaluated checkpoint form one training step; the rollouts of the checkpoint before it are the
history. Drafts come from the real drafters and are accepted where they agree with the recording. The duration of a
verification step comes from a cost model, not from a measurement (:mod:`benchmarks.simulation`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.figures import Figure, report, save_svg
from benchmarks.ngram_drafter import NgramDrafter
from benchmarks.problems import Problem, add_trace_arguments, selected_problems
from benchmarks.simulation import Hardware, KnownLengths, MeasuredSurvival, Mode, SimulatedStep, Simulation
from benchmarks.step_times import fit_cost_model
from benchmarks.suffix_drafters import Scope, SuffixIndexDrafter, SuffixTreeDrafter
from rollout_worker.arrays import Integers
from rollout_worker.policy.das_policies import DasClasses, DasOptimal
from rollout_worker.policy.draft_policy import EMPTY_QUEUE, DraftBudgets, DraftLimits, DraftPolicy, QueueState
from rollout_worker.policy.marginal import Marginal
from rollout_worker.policy.simple_policies import Fixed
from rollout_worker.policy.step_cost import H100_7B, StepCost

MAX_DRAFT, UNLIMITED_DRAFT, SUFFIX_DRAFT, NGRAM_DRAFT = 16, 64, 32, 5
"""Maximum tokens of a draft: a job's default, the policy ``unlimited``, vLLM's suffix decoding, vLLM's n-grams."""
MAX_BATCHED_TOKENS = 8192
"""Maximum tokens of a verification step, as vLLM sets it on such a GPU."""
FIT = "fit"
HARDWARE = {"h100-7b": Hardware(H100_7B, kv_tokens=1_000_000)}
PLOT_POINTS = 200
"""Points in time, from 0 to the makespan, at which the number of unfinished rollouts is recorded."""
MIN_TOKEN_PROB = 0.1
"""The survival below which arctic-inference ends a draft, by default in vLLM."""


CONSTANT_THRESHOLD = 0.5
"""The survival below which the mode ``constant-threshold`` ends a draft."""


class _Inputs(NamedTuple):
    """The common inputs of all simulations; the simulating processes inherit it from the main process."""

    problems: Sequence[Problem]
    hardware: Hardware


_inputs: list[_Inputs] = []


def _index() -> SuffixIndexDrafter:
    return SuffixIndexDrafter("all")


def _tree(scope: Scope, min_token_prob: float) -> SuffixTreeDrafter:
    return SuffixTreeDrafter(scope, depth=24, min_token_prob=min_token_prob)


class ConstantThreshold(Fixed):
    """Drafts a token of every rollout while its survival is at least :data:`CONSTANT_THRESHOLD`."""

    def compute_budgets(self, rows: Integers, cost: StepCost, queue: QueueState = EMPTY_QUEUE) -> DraftBudgets:
        """See :meth:`DraftPolicy.compute_budgets`."""
        budgets = super().compute_budgets(rows, cost, queue)
        return budgets._replace(min_survivals=np.full(len(rows), CONSTANT_THRESHOLD))


def _marginal(lengths: KnownLengths) -> DraftPolicy:
    return Marginal(DraftLimits(MAX_DRAFT, MAX_BATCHED_TOKENS), lengths.of_problem)


def _fixed(lengths: KnownLengths) -> DraftPolicy:
    return Fixed(DraftLimits(MAX_DRAFT, MAX_BATCHED_TOKENS), lengths.of_problem)


def _constant_threshold(lengths: KnownLengths) -> DraftPolicy:
    return ConstantThreshold(DraftLimits(MAX_DRAFT, MAX_BATCHED_TOKENS), lengths.of_problem)


def _unlimited(lengths: KnownLengths) -> DraftPolicy:
    return Fixed(DraftLimits(UNLIMITED_DRAFT, MAX_BATCHED_TOKENS), lengths.of_problem)


def _das_classes(lengths: KnownLengths) -> DraftPolicy:
    return DasClasses(DraftLimits(MAX_DRAFT, MAX_BATCHED_TOKENS), lengths.of_problem, lengths.overall)


def _das_optimal(lengths: KnownLengths) -> DraftPolicy:
    return DasOptimal(DraftLimits(MAX_DRAFT, MAX_BATCHED_TOKENS), lengths.of_problem)


MODES: dict[str, Mode] = {
    "none": Mode(None, longest_first=False),
    "none-longest-first": Mode(None),
    "ngram": Mode(NgramDrafter, budget=NGRAM_DRAFT, longest_first=False),
    "arctic-inference": Mode(partial(_tree, "all", MIN_TOKEN_PROB), budget=SUFFIX_DRAFT, longest_first=False),
    "arctic-inference-per-problem": Mode(
        partial(_tree, "problem", MIN_TOKEN_PROB), budget=SUFFIX_DRAFT, longest_first=False
    ),
    "arctic-inference-longest-first": Mode(partial(_tree, "problem", MIN_TOKEN_PROB), budget=SUFFIX_DRAFT),
    "fixed": Mode(_index, _fixed, migrates=True),
    "unlimited": Mode(_index, _unlimited, migrates=True),
    "das-classes": Mode(_index, _das_classes, migrates=True),
    "das-optimal": Mode(_index, _das_optimal, migrates=True),
    "constant-threshold": Mode(_index, _constant_threshold, migrates=True),
    "marginal": Mode(_index, _marginal, migrates=True),
    "marginal-arrival-order": Mode(_index, _marginal, longest_first=False, migrates=True),
    "marginal-no-migration": Mode(_index, _marginal),
    "policy-oracle": Mode(_index, _marginal, knows_lengths=True, migrates=True),
    "clairvoyant": Mode(_index, _unlimited, knows_lengths=True, knows_acceptance=True, migrates=True),
}
"""By name: every mode that can be simulated; benchmarks/README.md describes them."""
TREES: dict[str, Scope] = {
    "arctic-inference": "all",
    "arctic-inference-per-problem": "problem",
    "arctic-inference-longest-first": "problem",
}
"""Modes whose ``min_token_prob`` can be set → scope of their suffix tree."""
RIVALS = ("das-classes", "das-optimal", *TREES)
"""Modes than which `marginal` must not take longer."""


class Case(NamedTuple):
    """One simulation: a mode, the number of engines, and the rollouts that run at a time on all of them."""

    mode: str
    workers: int
    batch: int
    min_token_prob: float | None = None
    """The survival below which arctic-inference ends a draft; None for all other modes."""

    def __str__(self) -> str:
        threshold = "" if self.min_token_prob is None else f", min_token_prob {self.min_token_prob:g}"
        return f"{self.mode}, batch {self.batch} over {self.workers}{threshold}"


def simulate(case: Case) -> SimulatedStep:
    """Simulate one case."""
    mode, (inputs,) = MODES[case.mode], _inputs
    if case.min_token_prob is not None:
        mode = replace(mode, drafter=partial(_tree, TREES[case.mode], case.min_token_prob))

    def run(measured: MeasuredSurvival | None = None) -> SimulatedStep:
        return Simulation(
            inputs.problems, mode, inputs.hardware, engines=case.workers, batch=case.batch, measured=measured
        ).run()

    step = run()
    if mode.knows_lengths and not mode.knows_acceptance:
        # The first simulation measures how often tokens of each predicted survival are accepted; the second uses it.
        step = run(MeasuredSurvival(step))
    step.survivals, step.survived = [], []
    return step


def hardware_of(name: str) -> Hardware:
    """Return the hardware of a built-in cost model, of this machine (``fit``), or of a JSON file.

    A file has the fields of :class:`StepCost`, in seconds, and ``kv_tokens``; ``benchmarks.step_times`` writes one.

    Raises:
        ValueError: if *name* is neither a known name nor a valid file.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    try:
        values: Mapping[str, Any] = asyncio.run(fit_cost_model()) if name == FIT else json.loads(Path(name).read_text())
        cost = StepCost(**{field: float(values[field]) for field in StepCost._fields if field in values})
        return Hardware(cost, int(values["kv_tokens"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        known = ", ".join((*HARDWARE, FIT))
        raise ValueError(
            f"--cost-model {name}: {type(error).__name__}: {error}; use one of {known}, or a JSON file with the "
            f"fields {', '.join(StepCost._fields)} (in seconds) and kv_tokens"
        ) from None


def unfinished_over_time(step: SimulatedStep) -> list[int]:
    """Return the number of unfinished rollouts at :data:`PLOT_POINTS` equidistant times from 0 to the makespan."""
    ends = np.sort(step.ends)
    times = np.linspace(0, step.seconds, PLOT_POINTS)
    unfinished: list[int] = (len(ends) - np.searchsorted(ends, times, side="right")).tolist()
    return unfinished


def figures_of(seconds: Mapping[Case, float]) -> list[Figure]:
    """Compare the makespan of ``marginal``, in seconds, with that of every other mode of the same size.

    A mode that was simulated with several values of ``min_token_prob`` is compared at the best one.
    """
    figures = []
    num_values = len({case.min_token_prob for case in seconds if case.min_token_prob is not None})
    for case in seconds:
        if case.mode != "marginal":
            continue
        size = f"batch {case.batch} over {case.workers}"
        makespans: dict[str, float] = {}
        for other, makespan in seconds.items():
            if (other.workers, other.batch) == (case.workers, case.batch):
                makespans[other.mode] = min(makespan, makespans.get(other.mode, makespan))
        for rival in RIVALS:
            if rival in makespans:
                peer = f"{rival}, best of {num_values} thresholds" if rival in TREES and num_values > 1 else rival
                ratio = makespans["marginal"] / makespans[rival]
                figures.append(Figure(f"makespan of marginal, {size}", ratio, "x", peer, "<=", 1.0))
        if "none" not in makespans:
            continue
        saved = {mode: 1 - makespan / makespans["none"] for mode, makespan in makespans.items()}
        target = 0.5 if (case.workers, case.batch) == (8, 128) else None
        figures.append(
            Figure(f"makespan saved by marginal, {size}", saved["marginal"], "of none's", "none", ">=", target)
        )
        for limit, share_target in (("policy-oracle", 0.9), ("clairvoyant", None)):
            if limit in saved:
                share = saved["marginal"] / saved[limit]
                figures.append(
                    Figure(f"saving of marginal, {size}", share, "of the limit's", limit, ">=", share_target)
                )
        figures += [
            Figure(f"makespan saved by {mode}, {size}", saved[mode], "of none's", "none", ">=", None)
            for mode in saved
            if mode not in ("none", "marginal")
        ]
    return figures


def row_of(case: Case, step: SimulatedStep) -> dict[str, Any]:
    """Return the JSON object of one case."""
    return {
        **case._asdict(),
        "seconds": step.seconds,
        "tokens": step.tokens,
        "engine_steps": step.verifications,
        "accepted_per_step": step.accepted_per_step,
        "drafted_per_step": step.drafted_per_step,
        "preempted": step.preempted,
        "migrated": step.migrated,
        "unfinished_over_time": unfinished_over_time(step),
    }


def plot(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plot the unfinished rollouts over time, with one panel per number of engines and batch size.

    Args:
        file: the SVG file to write.
        rows: the results of :func:`row_of`, which a results file also contains under ``cases``.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "makespan", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["workers"], row["batch"]) for row in rows))
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 4 * len(panels)), squeeze=False)
    for (workers, batch), axis in zip(panels, axes[:, 0], strict=True):
        for row in rows:
            if (row["workers"], row["batch"]) == (workers, batch):
                unfinished = row["unfinished_over_time"]
                threshold = row.get("min_token_prob")
                label = row["mode"] if threshold is None else f"{row['mode']}, {threshold:g}"
                axis.plot(np.linspace(0, row["seconds"], len(unfinished)), unfinished, label=label)
        engines = "1 engine" if workers == 1 else f"{workers} engines"
        axis.set(
            title=f"batch {batch} on {engines} (simulated)",
            xlabel="seconds",
            ylabel="unfinished rollouts",
            yscale="symlog",
        )
        axis.legend(fontsize="small")
    figure.tight_layout()
    save_svg(figure, file)


def probabilities(text: str) -> list[float]:
    """Return the probabilities of a comma-separated list.

    Raises:
        argparse.ArgumentTypeError: if *text* is no such list.
    """
    try:
        values = list(map(float, text.split(",")))
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"give probabilities from 0 to 1, separated by commas, not {text!r}")
    return values


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_trace_arguments(parser)
    parser.add_argument(
        "--cost-model",
        default="h100-7b",
        help="h100-7b, fit (measure 267M parameters on this machine), or a JSON file [%(default)s]",
    )
    parser.add_argument("--workers", default="1", help="comma-separated numbers of engines, such as 1,8 [%(default)s]")
    parser.add_argument(
        "--batch", default="128", help="comma-separated numbers of concurrent rollouts on all engines [%(default)s]"
    )
    parser.add_argument("--policies", default=",".join(MODES), help="comma-separated modes [%(default)s]")
    parser.add_argument(
        "--min-token-prob",
        type=probabilities,
        default=str(MIN_TOKEN_PROB),
        help="comma-separated survivals below which arctic-inference ends a draft [%(default)s, as in vLLM]",
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument(
        "--plot", type=Path, help="SVG file for a plot of the unfinished rollouts over time; --json then has its data"
    )
    options = parser.parse_args()
    modes = options.policies.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--policies: unknown {', '.join(sorted(unknown))}; the modes are {', '.join(MODES)}")
    try:
        hardware = hardware_of(options.cost_model)
    except ValueError as error:
        parser.error(str(error))
    problems = selected_problems(parser, options)
    _inputs.append(_Inputs(problems, hardware))
    cases = [
        Case(mode, workers, batch, threshold)
        for workers in map(int, options.workers.split(","))
        for batch in map(int, options.batch.split(","))
        for mode in modes
        for threshold in (options.min_token_prob if mode in TREES else [None])
        if batch >= workers
    ]
    steps: dict[Case, SimulatedStep] = {}
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for case, step in zip(cases, pool.imap(simulate, cases), strict=True):
            steps[case] = step
            print(
                f"{case}: {step.seconds:.2f} s, "
                f"{step.accepted_per_step:.2f} accepted of {step.drafted_per_step:.2f} draft tokens per step",
                flush=True,
            )
    rows = [row_of(case, step) for case, step in steps.items()]
    if options.plot is None:
        for row in rows:
            del row["unfinished_over_time"]
    report(
        options.json,
        figures_of({case: step.seconds for case, step in steps.items()}),
        trace=options.trace.name,
        problems=len(problems),
        rollouts=sum(len(problem.evaluated) for problem in problems),
        cost_model={**hardware.cost._asdict(), "kv_tokens": hardware.kv_tokens},
        cases=rows,
    )
    if options.plot is not None:
        plot(options.plot, rows)


if __name__ == "__main__":
    main()
