"""Shows where the time of a decoding step goes, and where the device waits for the host.

    python -m benchmarks.step_profile --json FILE

A real engine with random weights verifies drafts, as in :mod:`benchmarks.step_times`. PyTorch's profiler records its
worker process. On a CPU, there is no device that could wait, so that only the host's time is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure, report
from benchmarks.random_model import MODELS, add_model_argument
from benchmarks.redis_server import redis_server
from benchmarks.rollout_runs import UNGOVERNED, start_engines
from benchmarks.step_times import POSITIONS, decode
from benchmarks.worker_profile import StepProfile, analyze
from rollout_worker.engine.engine import Engine

_PROMPT = 64
"""Length of a prompt, in tokens."""


async def profile_steps(model: str, batch: int, budgets: Sequence[int]) -> list[StepProfile]:
    """Return where the time of steps goes, for each budget.

    Args:
        model: a key of :data:`MODELS`.
        batch: number of rollouts.
        budgets: numbers of draft tokens of each rollout in each step; 0: none are drafted.
    """
    directory = MODELS[model](positions=POSITIONS)
    profiles = []
    with redis_server() as url, tempfile.TemporaryDirectory() as folder:
        async with start_engines([UNGOVERNED], directory, url, max_tokens=POSITIONS - 64, batch=batch) as engines:
            await engines[UNGOVERNED].collective_rpc("bench_name_ranges")
            for budget in budgets:
                trace = Path(folder) / "trace.json"
                await _record(engines[UNGOVERNED], batch, budget, trace)
                profiles.append(analyze(json.loads(trace.read_text())["traceEvents"]))
    return profiles


async def _record(engine: Engine, batch: int, budget: int, trace: Path) -> None:
    await decode(engine, batch, budget, _PROMPT, name=f"{budget}-warm-up")
    await engine.collective_rpc("bench_start_profile")
    await decode(engine, batch, budget, _PROMPT, name=f"{budget}-profiled")
    await engine.collective_rpc("bench_stop_profile", str(trace))


def figures_of(profile: StepProfile, batch: int, budget: int) -> list[Figure]:
    """Return the figures of a profile."""
    setting = f"batch {batch}, {budget} draft tokens"
    figures = [
        Figure(f"host: {name}, {setting}", us / 1e3, "ms per step", "", "<=", None) for name, us in profile.host.items()
    ]
    if profile.busy:
        idle = sum(profile.idle.values())
        figures += [
            Figure(f"device idle, {setting}", 100 * idle / (idle + profile.busy), "%", "", "<=", None),
            Figure(f"device busy, {setting}", profile.busy / 1e3, "ms per step", "", "<=", None),
        ]
        figures += [
            Figure(f"device idle during: {name}, {setting}", us / 1e3, "ms per step", "", "<=", None)
            for name, us in profile.idle.items()
        ]
    return figures


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_model_argument(parser)
    parser.add_argument("--batch", type=int, default=16, help="number of rollouts [%(default)s]")
    parser.add_argument("--budgets", default="0,6", help="comma-separated numbers of draft tokens [%(default)s]")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    budgets = [int(budget) for budget in options.budgets.split(",")]
    figures, profiles = [], []
    for budget, profile in zip(budgets, asyncio.run(profile_steps(options.model, options.batch, budgets)), strict=True):
        figures += figures_of(profile, options.batch, budget)
        profiles.append({"batch": options.batch, "budget": budget, **profile._asdict()})
    report(options.json, figures, model=options.model, profiles=profiles)


if __name__ == "__main__":
    main()
