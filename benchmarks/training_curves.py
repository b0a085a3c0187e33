"""Does training on drafted rollouts learn as well? The minimal GRPO loop with drafts and without, on paired seeds.

    .venv/bin/python -m benchmarks.training_curves --json training_curves.json --plot docs/training_curves.svg

Each run is a job of its own (two CPU engines, an empty Redis) and ``examples/minimal_grpo.py``; the two runs of a pair
differ in ``speculation.policy`` alone. What is compared is a run's mean reward over its last 10 steps. Two one-sided
t tests (TOST, Schuirmann 1987) on the pairs' differences show equivalence within ±0.03 at level 0.05.

How many pairs there are comes from the spread of the first few: the fewest with which the test has power 0.8 if there
is no difference, where the standard deviation is taken at its upper 80% confidence limit (Browne 1995). The first pairs
count in the test; only their spread is looked at before.

A run that has ended is kept as one JSON file and not made again. About 3 minutes a run on two cores. Runs are long
enough for rewards to level off: while they still rise, runs of one arm differ among themselves by more than the margin.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.figures import Figure, report
from benchmarks.serving import served
from rollout_worker.engine.model_source import default_cache
from rollout_worker.tiny_model import ensure

ROOT = Path(__file__).parents[1]
ARMS = {"drafts": "fixed", "no drafts": "off"}
"""Name of an arm → its ``spec.speculation.policy``."""
FIRST, LAST = 5, 10
"""Steps at a run's two ends whose mean rewards are compared."""
MARGIN, LEVEL, POWER, LEAST_GAIN = 0.03, 0.05, 0.8, 0.1
MODEL = "das/tiny-qwen3/step-0360"


def manifest(arm: str, seed: int, weights: Path) -> dict[str, Any]:
    """The job of one run."""
    return {
        "apiVersion": "das.rollout.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": "training-curves"},
        "spec": {
            "source": {"trainer": {}},
            "model": {"uri": MODEL},
            "weights": {"allowedRoots": [str(weights)]},
            "engine": {
                "maxModelLen": 512,
                "dtype": "float32",
                "maxNumSeqs": 64,
                "kvCacheMemory": "512Mi",
                "enforceEager": True,
            },
            "sampling": {"n": 8, "temperature": 1.0, "maxTokens": 160, "logprobs": True, "seed": seed},
            "workers": {"replicas": 2, "gpusPerWorker": 0},
            "speculation": {"policy": ARMS[arm]},
        },
    }


def run_once(arm: str, seed: int, steps: int, batch: int, directory: Path) -> list[dict[str, Any]]:
    """Train once, in *directory*, which is made and removed.

    Returns:
        What each step measured; see ``examples/minimal_grpo.py``.

    Raises:
        subprocess.CalledProcessError: if the loop fails; what it and the job said is left in the directory.
    """
    weights, lines = directory.resolve() / "weights", directory / "steps.jsonl"
    with served(manifest(arm, seed, weights), directory) as url:
        train = [sys.executable, str(ROOT / "examples/minimal_grpo.py"), "--redis", url, "--job", "training-curves"]
        train += ["--model", str(default_cache() / MODEL), "--weights", str(weights), "--output", str(lines)]
        train += ["--seed", str(seed), "--steps", str(steps), "--batch", str(batch)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (directory / "train.log").open("w") as log:
            subprocess.run(train, stdout=log, stderr=subprocess.STDOUT, env=environment, check=True)
    measured = [json.loads(line) for line in lines.read_text().splitlines()]
    shutil.rmtree(directory)
    return measured


def kept_run(arm: str, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One run, made if it is not kept yet."""
    loop = (ROOT / "examples/minimal_grpo.py").read_bytes()
    about = {
        "arm": arm,
        "seed": seed,
        "steps": args.steps,
        "batch": args.batch,
        "loop": hashlib.sha256(loop).hexdigest(),
    }
    file: Path = args.runs / f"{arm.replace(' ', '-')}-{seed:03d}.json"
    if file.exists() and (kept := json.loads(file.read_text()))["about"] == about:
        return list(kept["steps"])
    started = time.monotonic()
    measured = run_once(arm, seed, args.steps, args.batch, args.runs / "running")
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"about": about, "steps": measured}))
    partial.replace(file)
    say(
        f"{arm}, seed {seed}: reward {_first(measured):.3f} → {_last(measured):.3f}, {time.monotonic() - started:.0f} s"
    )
    return measured


def tost(differences: Sequence[float], margin: float) -> tuple[float, float, float]:
    """Two one-sided paired t tests of a mean difference within ±*margin*.

    Returns:
        The larger of the two p values, and the ends of the confidence interval of level 1 − 2 · LEVEL, which lies
        within the margin exactly where p < LEVEL.
    """
    n, mean = len(differences), fmean(differences)
    error = max(stdev(differences) / math.sqrt(n), 1e-12)
    p = max(stats.t.sf((mean + margin) / error, n - 1), stats.t.sf((margin - mean) / error, n - 1))
    reach = float(stats.t.isf(LEVEL, n - 1)) * error
    return float(p), mean - reach, mean + reach


def power_of_tost(n: int, deviation: float, margin: float) -> float:
    """Chance that *n* pairs show equivalence if there is no difference and the differences spread by *deviation*."""
    # given the estimated deviation s, the test passes where |mean| < margin − t · s / √n
    quantiles = (np.arange(2000) + 0.5) / 2000
    estimated = deviation * np.sqrt(stats.chi2.ppf(quantiles, n - 1) / (n - 1))
    room = margin - stats.t.isf(LEVEL, n - 1) * estimated / math.sqrt(n)
    passing = 2 * stats.norm.cdf(np.maximum(room, 0) * math.sqrt(n) / deviation) - 1
    return float(passing.mean())


def pairs_needed(pilot: Sequence[float], margin: float, *, most: int) -> int:
    """Fewest pairs, at least those of the *pilot*, with power POWER; at most *most*."""
    freedom = len(pilot) - 1
    deviation = max(stdev(pilot) * math.sqrt(freedom / stats.chi2.ppf(1 - POWER, freedom)), 1e-6)
    return next((n for n in range(len(pilot), most) if power_of_tost(n, deviation, margin) >= POWER), most)


def figures(runs: dict[str, list[list[dict[str, Any]]]]) -> list[Figure]:
    """What the runs (arm → seed → steps) come to."""
    drafted, plain = runs["drafts"], runs["no drafts"]
    differences = [_last(one) - _last(other) for one, other in zip(drafted, plain, strict=True)]
    p, low, high = tost(differences, MARGIN)
    gains = [_last(run) - _first(run) for runs_of_arm in runs.values() for run in runs_of_arm]
    peer = "no drafts"
    power = power_of_tost(len(differences), stdev(differences), MARGIN)
    seconds = [fmean(step["seconds"]["rollouts"] for run in arm for step in run) for arm in (drafted, plain)]
    return [
        Figure("p of equivalence", p, "", peer, "<=", LEVEL),
        Figure("difference of final rewards, 90% interval, low end", low, "reward", peer, ">=", -MARGIN),
        Figure("difference of final rewards, 90% interval, high end", high, "reward", peer, "<=", MARGIN),
        Figure("least gain of a run", min(gains), "reward", "", ">=", LEAST_GAIN),
        Figure("power with the spread that was found", power, "", "", ">=", None),
        Figure("pairs of runs", len(differences), "pairs", "", ">=", None),
        Figure("final reward with drafts", fmean(map(_last, drafted)), "reward", "", ">=", None),
        Figure("final reward without drafts", fmean(map(_last, plain)), "reward", "", ">=", None),
        Figure("tokens a decoding step with drafts", _mean(drafted, "tokens_per_step"), "tokens", "", ">=", None),
        Figure("seconds of rollouts a step, with drafts / without", seconds[0] / seconds[1], "", peer, "<=", None),
    ]


def plot(runs: dict[str, list[list[dict[str, Any]]]], file: Path) -> None:
    """Mean reward by step of each arm, its runs' spread behind it."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "training curves", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    canvas, axes = plt.subplots(figsize=(6.4, 3.6))
    for (arm, runs_of_arm), color in zip(runs.items(), ("#0072b2", "#d55e00"), strict=True):
        rewards = np.array([[step["reward"] for step in run] for run in runs_of_arm])
        at = np.arange(rewards.shape[1])
        axes.fill_between(at, rewards.min(0), rewards.max(0), color=color, alpha=0.15, linewidth=0)
        axes.plot(at, rewards.mean(0), color=color, label=f"{arm} ({len(runs_of_arm)} seeds; band: least to most)")
    axes.set(xlabel="optimiser step", ylabel="mean reward", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    canvas.tight_layout()
    canvas.savefig(file, metadata={"Date": None})


def _first(run: list[dict[str, Any]]) -> float:
    return fmean(step["reward"] for step in run[:FIRST])


def _last(run: list[dict[str, Any]]) -> float:
    return fmean(step["reward"] for step in run[-LAST:])


def _mean(runs: list[list[dict[str, Any]]], what: str) -> float:
    return fmean(step[what] for run in runs for step in run)


def say(text: str) -> None:
    """Tell whoever watches."""
    sys.stderr.write(text + "\n")


def main() -> int:
    """Make what runs are missing, and report; 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path(".rollout/training_curves"), help="where ended runs are kept")
    parser.add_argument("--steps", type=int, default=64, help="optimiser steps of a run")
    parser.add_argument("--batch", type=int, default=9, help="problems in a step")
    parser.add_argument("--pilot", type=int, default=5, help="pairs from whose spread the number of pairs is chosen")
    parser.add_argument("--pairs", type=int, help="so many pairs, whatever the spread")
    parser.add_argument("--most-pairs", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write figures and curves here")
    parser.add_argument("--plot", type=Path, help="draw the curves here (SVG)")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    ensure(default_cache() / "das" / "tiny-qwen3")

    runs: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in ARMS}
    wanted = args.pairs or args.pilot
    while (seed := len(runs["drafts"])) < wanted:
        for arm in list(ARMS) if seed % 2 else list(reversed(ARMS)):  # neither arm always has the quieter machine
            runs[arm].append(kept_run(arm, seed, args))
        if args.pairs is None and seed + 1 == args.pilot:
            pilot = [_last(one) - _last(other) for one, other in zip(*runs.values(), strict=True)]
            wanted = pairs_needed(pilot, MARGIN, most=args.most_pairs)
            say(f"{wanted} pairs are needed; the differences of the first {args.pilot} spread by {stdev(pilot):.4f}")
    found = figures(runs)
    curves = {arm: [[step["reward"] for step in run] for run in runs[arm]] for arm in runs}
    report(args.json, found, curves=curves)
    if args.plot:
        plot(runs, args.plot)
    return int(any(one.met is False for one in found))


if __name__ == "__main__":
    sys.exit(main())
