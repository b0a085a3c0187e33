"""Compares all methods on recorded rollouts; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import report
from benchmarks.rollout_bench.accelerators import ACCELERATORS
from benchmarks.rollout_bench.comparison import figures_of
from benchmarks.rollout_bench.job import JobSimulation, StepResult
from benchmarks.rollout_bench.methods import RIVALS
from benchmarks.rollout_bench.page import write_page
from benchmarks.rollout_bench.workload import Half, Job, make_job, make_long_tail_job
from benchmarks.traces import Trajectory, load_tokenizer, named_files, read_trace

MAX_TOKENS = 16_384
"""Length at which responses are cut off. Most recorded responses that are longer are loops."""
TUNING_BLOCKS = 2
"""Training steps of each epoch that are used for tuning."""


class Case(NamedTuple):
    """One simulated job."""

    trace: str
    without_loops: bool
    half: Half
    accelerator: str
    engines: int
    batch: int
    method: str
    blocks: int
    """Number of training steps of an epoch."""
    seed: int | None
    """Determines lengths with a long tail; None for the recorded lengths."""
    values: tuple[tuple[str, Any], ...]
    """The values that the method is created with."""

    @property
    def size(self) -> str:
        """The concurrency in words."""
        return f"{self.batch} over {self.engines}"


_traces: dict[str, list[Trajectory]] = {}
"""By name; the simulating processes inherit it from the main process."""


def simulate(case: Case) -> list[StepResult]:
    """Simulate one case."""
    job = job_of(case)
    method = RIVALS[case.method].make(**dict(case.values))
    simulation = JobSimulation(job, method, ACCELERATORS[case.accelerator], engines=case.engines, batch=case.batch)
    return list(simulation.run())


def job_of(case: Case) -> Job:
    """Return the job of a case."""
    if case.seed is not None:
        return make_long_tail_job(_traces[case.trace], case.half, rollouts=case.batch, seed=case.seed)
    return make_job(
        _traces[case.trace],
        case.half,
        blocks=case.blocks,
        max_blocks=TUNING_BLOCKS if case.half == "tuning" else None,
        max_tokens=MAX_TOKENS,
        without_loops=case.without_loops,
    )


class Results:
    """The simulated cases, kept in a file so that an interrupted run can be continued."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._steps: dict[Case, list[StepResult]] = {}
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                case, steps = json.loads(line)
                case[-1] = tuple((name, value) for name, value in case[-1])
                self._steps[Case(*case)] = [StepResult(**step) for step in steps]

    def __getitem__(self, case: Case) -> list[StepResult]:
        return self._steps[case]

    def seconds(self, case: Case) -> float:
        """Return the makespan of a whole job."""
        return sum(step.seconds for step in self._steps[case])

    def simulate(self, pool: Any, cases: Iterable[Case]) -> None:
        """Simulate the cases that are not known yet."""
        missing = [case for case in dict.fromkeys(cases) if case not in self._steps]
        for case, steps in zip(missing, pool.imap(simulate, missing), strict=True):
            self._steps[case] = steps
            print(f"{case}: {self.seconds(case):.2f} s", flush=True)
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(json.dumps([case, [asdict(step) for step in steps]]) + "\n")


def tune(pool: Any, results: Results, cases: Sequence[Case]) -> dict[Case, Case]:
    """Choose the values of each method on the tuning half; first those of its grid, then the order if it is tuned.

    If there are several seeds, the first is used.

    Args:
        pool: simulates.
        results: the known results.
        cases: the cases to tune, with any values.

    Returns:
        Each case with the values for the half that is reported.
    """
    tuning = [case._replace(half="tuning", seed=case.seed and 0) for case in cases]
    candidates = {
        case: [
            case._replace(values=tuple({**values, **RIVALS[case.method].first_order}.items()))
            for values in RIVALS[case.method].grid
        ]
        for case in tuning
    }
    several = {case: grid for case, grid in candidates.items() if len(grid) > 1}
    results.simulate(pool, itertools.chain.from_iterable(several.values()))
    best = {case: min(grid, key=results.seconds) if case in several else grid[0] for case, grid in candidates.items()}
    in_order = {
        case: chosen._replace(values=tuple({**dict(chosen.values), "longest_first": False}.items()))
        for case, chosen in best.items()
        if RIVALS[case.method].tunes_order
    }
    results.simulate(pool, [*in_order.values(), *(best[case] for case in in_order)])
    for case, other in in_order.items():
        if results.seconds(other) < results.seconds(best[case]):
            best[case] = other
    return {case: best[one]._replace(half="report", seed=case.seed) for case, one in zip(cases, tuning, strict=True)}


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_bench", description=__doc__)
    parser.add_argument("--trace", action="append", required=True, type=named_files, help="NAME=FILE; may be repeated")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, optionally gzipped")
    parser.add_argument("--accelerators", default="7b-h100", help=f"some of {','.join(ACCELERATORS)} [%(default)s]")
    parser.add_argument("--engines", default="1,8", help="comma-separated numbers of engines [%(default)s]")
    parser.add_argument("--batch", type=int, default=128, help="rollouts that run at a time on all engines [128]")
    parser.add_argument(
        "--methods", default=",".join(name for name in RIVALS if name != "suffix-gpu"), help="[all but suffix-gpu]"
    )
    parser.add_argument("--loops", default="with", help="with, without or both: responses that loop [%(default)s]")
    parser.add_argument("--blocks", type=int, default=5, help="training steps in each epoch [%(default)s]")
    parser.add_argument(
        "--long-tail", type=int, metavar="SEEDS", help="give the responses lengths with a long tail, once for each seed"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="simulations at the same time")
    parser.add_argument("--cache", type=Path, help="file that keeps the simulated cases, to continue an aborted run")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--page", type=Path, help="HTML file for a page with plots")
    options = parser.parse_args()
    methods, accelerators = options.methods.split(","), options.accelerators.split(",")
    for flag, given, known in (("--methods", methods, RIVALS), ("--accelerators", accelerators, ACCELERATORS)):
        if unknown := set(given) - set(known):
            parser.error(f"{flag}: unknown {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    loops = {"with": [False], "without": [True], "both": [False, True]}.get(options.loops)
    if loops is None:
        parser.error(f"--loops must be with, without or both, not {options.loops!r}")
    try:
        tokenizer = load_tokenizer(options.tokenizer)
        _traces.update((name, read_trace(file, tokenizer)) for name, file in options.trace)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    cases = [
        Case(trace, without_loops, "report", accelerator, engines, options.batch, method, options.blocks, seed, ())
        for trace in _traces
        for seed in (range(options.long_tail) if options.long_tail else (None,))
        for without_loops in loops
        for accelerator in accelerators
        for engines in map(int, options.engines.split(","))
        for method in methods
    ]
    results = Results(options.cache)
    with multiprocessing.get_context("fork").Pool(options.processes, maxtasksperchild=1) as pool:
        tuned = tune(pool, results, cases)
        results.simulate(pool, tuned.values())
    rows = rows_of(results, tuned.values())
    report(options.json, figures_of(rows), rows=rows)
    if options.page is not None:
        write_page(options.page, rows)


def rows_of(results: Results, cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Return the JSON objects of all cases; those that differ only by their seed become one."""
    steps: dict[Case, list[StepResult]] = {}
    for case in cases:
        seed = case.seed or 0
        numbered = [replace(step, block=step.block + 100 * seed) for step in results[case]]
        steps.setdefault(case._replace(seed=None if case.seed is None else 0), []).extend(numbered)
    return [row_of(case, of_case) for case, of_case in steps.items()]


def row_of(case: Case, steps: Sequence[StepResult]) -> dict[str, Any]:
    """Return the JSON object of one case."""
    rollout_steps = sum(step.rollout_steps for step in steps)
    return {
        **case._asdict(),
        "trace": case.trace if case.seed is None else f"{case.trace} with a long tail",
        "values": dict(case.values),
        "seconds": [step.seconds for step in steps],
        "epochs": [step.epoch for step in steps],
        "blocks": [step.block for step in steps],
        "ends": [_quantiles(step.ends) for step in steps],
        "tokens": sum(step.tokens for step in steps),
        "engine_steps": sum(step.engine_steps for step in steps),
        "accepted_per_step": sum(step.accepted for step in steps) / max(1, rollout_steps),
        "drafted_per_step": sum(step.drafted for step in steps) / max(1, rollout_steps),
        "preempted": sum(step.preempted for step in steps),
        "run_ahead_tokens": sum(step.run_ahead_tokens for step in steps),
    }


def _quantiles(ends: Sequence[float]) -> list[float]:
    """Return the times at which 0, 5, …, 95, 96, … and 100 % of the rollouts have ended."""
    last = len(ends) - 1
    return [ends[round(share / 100 * last)] for share in (*range(0, 95, 5), *range(95, 101))]


if __name__ == "__main__":
    main()
