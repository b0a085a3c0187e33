"""Measures the drafter's time on the critical path: from sampled tokens on the host to drafts in the output buffer.

    python -m benchmarks.hot_path --trace FILE --tokenizer FILE --json FILE
    python -m benchmarks.hot_path --exposed --json FILE

Recorded rollouts run in a batch. Between two steps, the benchmark waits for as long as the forward pass of a 7B model
on an H100 takes according to the cost model ``h100-7b``; meanwhile the index drafts ahead, and the policy computes the
next budgets. The rollouts of the earlier checkpoint are the history. For this project, the time is that of the whole
drafting loop of an engine (:mod:`rollout_worker.engine.drafting_loop`); for the peers, that of their proposer.

With ``--exposed``, it measures instead for how long a GPU waits for the host (:mod:`benchmarks.exposed_time`).

With ``--competitors``, that many other processes use as much processor time as they can get.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import exposed_time
from benchmarks.batch_drafters import (
    MAX_DRAFT,
    BatchDrafter,
    LoopDrafter,
    RecordedBatch,
    SuffixGpuDrafter,
    SuffixProposerDrafter,
    first_turn,
)
from benchmarks.figures import Figure, quantile, report, spread
from benchmarks.traces import Problem, add_trace_arguments, selected_problems
from rollout_worker.policy.step_cost import H100_7B

HISTORY = 50
"""Maximum history rollouts per problem."""
REST_STEPS = 16
"""Number of steps that an engine skips at most while nothing is worth drafting."""
RESTS = 12
"""Number of rests that are measured."""
WARM_UP_STEPS = 100
"""First steps of a round, which are not measured; fewer if fewer are measured."""
TARGETS_US = {(256, "p50"): 300, (256, "p99"): 600, (8, "p50"): 30}
"""Targets for one drafting thread, in microseconds, by batch size and quantile."""
PEERS: dict[type[SuffixProposerDrafter] | type[SuffixGpuDrafter], int] = {
    SuffixProposerDrafter: 1,
    SuffixGpuDrafter: 10,
}
"""Peer → divisor of its number of steps, because one step takes up to seconds."""
REQUEST_BYTES_TARGET = 64 * 1024
"""Target for the bytes of the index for each running rollout."""
WITHOUT_AHEAD = "das-rollout without drafting ahead"
WITH_LENGTHS = "das-rollout with marginal-with-lengths, threads 1"
MakeDrafter = Callable[[Sequence[Problem], int, int], BatchDrafter]


@contextmanager
def competitors(count: int) -> Iterator[None]:
    """Run processes that use as much processor time as they can get."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_steps(drafter: BatchDrafter, batch: RecordedBatch, steps: int) -> dict[str, Any]:
    """Run decoding steps and return the seconds that each spent drafting, and the numbers of tokens."""
    seconds, planning, drafted, sampled = [], [], 0, 0
    for _ in range(steps):
        batch.verify(drafter.drafts, drafter.lengths)
        verified = drafter.lengths.copy()
        drafter.before_step(batch.sampled, batch.num_sampled)
        started = time.perf_counter()
        drafter.step(batch.sampled, batch.num_sampled)
        ended = time.perf_counter()
        seconds.append(ended - started)
        drafter.after_step(batch.num_sampled, verified)
        planning.append(time.perf_counter() - ended)
        drafter.lengths[batch.replace_ended(drafter)] = 0
        drafted, sampled = drafted + int(verified.sum()), sampled + int(batch.num_sampled.sum())
        tokens = len(verified) + int(drafter.lengths.sum())
        forward_s = H100_7B.step_time(tokens, int(batch.context_tokens.sum()))
        time.sleep(max(0.0, ended + forward_s - time.perf_counter()))
    return {"seconds": seconds, "planning": planning, "drafted": drafted, "sampled": sampled}


def measure(make: MakeDrafter, problems: Sequence[Problem], size: int, *, steps: int, rounds: int) -> dict[str, Any]:
    """Return the time and the outcome of the steps of a batch of *size* rollouts, in rounds with a new drafter each."""
    turns = [(trajectory, first_turn(trajectory)) for problem in problems for trajectory in problem.evaluated]
    longest = max(len(trajectory.prompt) + len(turn) for trajectory, turn in turns)
    p50, p99, planning, outcomes = [], [], [], []
    look_ups = np.zeros(3, np.int64)
    total_bytes = request_bytes = 0
    for _ in range(rounds):
        drafter = make(problems, size, longest)
        batch = RecordedBatch(problems, size, MAX_DRAFT)
        batch.start(drafter)
        run_steps(drafter, batch, min(WARM_UP_STEPS, steps))
        before = drafter.look_ups() if isinstance(drafter, LoopDrafter) else (0, 0, 0)
        gc.collect()
        gc.disable()
        outcome = run_steps(drafter, batch, steps)
        gc.enable()
        if isinstance(drafter, LoopDrafter):
            look_ups += np.subtract(drafter.look_ups(), before)
            total_bytes = drafter.index.bytes()
            drafter.loop.keep_only([])
            request_bytes = (total_bytes - drafter.index.bytes()) // size
        outcomes.append(outcome)
        p50.append(1e6 * quantile(outcome["seconds"], 0.5))
        p99.append(1e6 * quantile(outcome["seconds"], 0.99))
        planning.append(1e6 * quantile(outcome["planning"], 0.99))
    total = steps * rounds * size
    drafted, sampled = sum(each["drafted"] for each in outcomes), sum(each["sampled"] for each in outcomes)
    return {
        "drafter": drafter.name,
        "batch": size,
        "p50_us": spread(p50),
        "p99_us": spread(p99),
        "planning_p99_us": spread(planning),
        "drafted_per_step": drafted / total,
        "accepted_per_step": sampled / total - 1.0,
        "found_share": float(look_ups[0] / max(look_ups.sum(), 1)),
        "omitted_share": float(look_ups[2] / max(look_ups.sum(), 1)),
        "total_bytes": total_bytes,
        "request_bytes": request_bytes,
    }


def measure_rests(make: MakeDrafter, problems: Sequence[Problem], size: int, *, rests: int) -> dict[str, float]:
    """Return the microseconds of the first step after a rest of :data:`REST_STEPS` steps."""
    turns = [(trajectory, first_turn(trajectory)) for problem in problems for trajectory in problem.evaluated]
    drafter = make(problems, size, max(len(trajectory.prompt) + len(turn) for trajectory, turn in turns))
    batch = RecordedBatch(problems, size, MAX_DRAFT)
    batch.start(drafter)
    run_steps(drafter, batch, WARM_UP_STEPS)
    times = []
    for _ in range(rests):
        for _ in range(REST_STEPS):
            drafter.lengths[:] = 0
            batch.replace_ended(drafter)
            batch.verify(drafter.drafts, drafter.lengths)
            drafter.before_step(batch.sampled, batch.num_sampled)
        started = time.perf_counter()
        drafter.step(batch.sampled, batch.num_sampled)
        times.append(1e6 * (time.perf_counter() - started))
        drafter.after_step(batch.num_sampled, np.zeros(size, np.int32))
        drafter.lengths[batch.replace_ended(drafter)] = 0
        run_steps(drafter, batch, REST_STEPS)
    return spread(times)


def figures_of(measurements: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return the figures of all measurements; those of the index with one drafting thread have targets."""
    figures = []
    for each in measurements:
        threads = each.get("threads")
        who = each["drafter"] if threads is None else f"{each['drafter']}, threads {threads}"
        drafted, accepted = each["drafted_per_step"], each["accepted_per_step"]
        setting = f"batch {each['batch']}, {who}"
        figures += [
            Figure(f"draft tokens, {setting}", drafted, "per step and rollout", "", ">=", None),
            Figure(f"accepted tokens, {setting}", accepted / max(drafted, 1e-9), "of all draft tokens", "", ">=", None),
        ]
        for name in ("p50", "p99"):
            target = TARGETS_US.get((each["batch"], name)) if threads == 1 else None
            value = each[f"{name}_us"]["median"]
            figures.append(Figure(f"critical path, {name}, {setting}", value, "µs", "", "<=", target))
        if threads is not None:
            figures += [
                Figure(f"rows answered by look-up, {setting}", each["found_share"], "of all rows", "", ">=", None),
                Figure(
                    f"rows without time for a draft, {setting}", each["omitted_share"], "of all rows", "", "<=", None
                ),
                Figure(f"index, {setting}", each["request_bytes"], "bytes per rollout", "", "<=", REQUEST_BYTES_TARGET),
                Figure(f"index in total, {setting}", each["total_bytes"], "bytes", "", "<=", None),
            ]
    for each in measurements:
        for other in measurements:
            if each.get("threads") != 1 or other["batch"] != each["batch"]:
                continue
            if other["drafter"] == WITHOUT_AHEAD:
                ratio = each["p99_us"]["median"] / other["p99_us"]["median"]
                name = f"critical path, p99, batch {each['batch']}, threads 1"
                figures.append(Figure(name, ratio, "times that without drafting ahead", "", "<=", 1.0))
            if other["drafter"] == WITH_LENGTHS:
                for quantile_name in ("p50_us", "p99_us", "planning_p99_us"):
                    ratio = other[quantile_name]["median"] / each[quantile_name]["median"]
                    name = f"{quantile_name}, batch {each['batch']}, {WITH_LENGTHS}"
                    figures.append(Figure(name, ratio, "times that of marginal", each["drafter"], "<=", None))
    for each in measurements:
        for peer in measurements:
            if each.get("threads") == 1 and "steps" in peer and peer["batch"] == each["batch"]:
                ratio = each["p50_us"]["median"] / peer["p50_us"]["median"]
                name = f"critical path, p50, batch {each['batch']}, threads 1"
                figures.append(Figure(name, ratio, "times the peer", peer["drafter"], "<=", None))
    return figures


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_trace_arguments(parser, required=False)
    parser.add_argument("--exposed", action="store_true", help="measure the exposed time; needs no trace")
    parser.add_argument("--batch", help="comma-separated batch sizes [8,64,256; with --exposed 1,16,64,128,256]")
    parser.add_argument("--threads", default="1,2", help="comma-separated numbers of drafting threads [%(default)s]")
    parser.add_argument("--steps", type=int, default=400, help="measured steps of each round [%(default)s]")
    parser.add_argument("--rounds", type=int, default=3, help="rounds for each measurement [%(default)s]")
    parser.add_argument(
        "--peer-steps", type=int, default=100, help="measured steps of each peer; 0: none [%(default)s]"
    )
    parser.add_argument("--competitors", type=int, default=0, help="other busy processes [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if options.exposed:
        sizes = list(map(int, (options.batch or "1,16,64,128,256").split(",")))
        figures, measurements = exposed_time.measure(exposed_time.MODES, sizes)
        report(options.json, figures, measurements=measurements)
        return
    if options.trace is None or options.tokenizer is None:
        parser.error("--trace and --tokenizer are required without --exposed")
    problems = selected_problems(parser, options, history=HISTORY)
    with competitors(options.competitors):
        run(options, problems)


def run(options: argparse.Namespace, problems: Sequence[Problem]) -> None:
    """Measure everything and report the figures."""
    measurements = []
    sizes = list(map(int, (options.batch or "8,64,256").split(",")))
    for size in sizes:
        for threads in map(int, options.threads.split(",")):
            make = partial(LoopDrafter, threads=threads)
            measured = measure(make, problems, size, steps=options.steps, rounds=options.rounds)
            measurements.append({**measured, "threads": threads})
            print(measurements[-1], flush=True)
        make = partial(LoopDrafter, threads=1, policy="marginal-with-lengths")
        measured = measure(make, problems, size, steps=options.steps, rounds=options.rounds)
        measurements.append({**measured, "drafter": WITH_LENGTHS})
        print(measurements[-1], flush=True)
        make = partial(LoopDrafter, threads=1, draft_ahead=False)
        measured = measure(make, problems, size, steps=options.steps, rounds=1)
        measurements.append({**measured, "drafter": WITHOUT_AHEAD})
        print(measurements[-1], flush=True)
    rests = {size: measure_rests(partial(LoopDrafter, threads=1), problems, size, rests=RESTS) for size in sizes}
    # The peers come last, because PyTorch's threads would disturb the index.
    for peer, share in PEERS.items():
        for size in sizes if options.peer_steps else ():
            steps = max(1, options.peer_steps // share)
            measurements.append({**measure(peer, problems, size, steps=steps, rounds=1), "steps": steps})
            print(measurements[-1], flush=True)
    figures = figures_of(measurements)
    for size, times in rests.items():
        name = f"first step after a rest, batch {size}, {LoopDrafter.name}, threads 1"
        figures.append(Figure(name, times["median"], "µs", "", "<=", None))
    report(
        options.json,
        figures,
        trace=options.trace.name,
        competitors=options.competitors,
        measurements=measurements,
        rests_us=rests,
    )


if __name__ == "__main__":
    main()
