"""Does training on drafted rollouts learn as well? The minimal GRPO loop with drafts and without, on paired seeds.

    .venv/bin/python -m benchmarks.training_curves --json docs/training_curves.json --plot docs/training_curves.svg

Each run is a job of its own (two CPU engines, an empty Redis) and ``examples/minimal_grpo.py``; the two runs of a pair
differ in ``speculation.policy`` alone. What is compared is a run's mean reward over its last 10 steps. Two one-sided
t tests (TOST, Schuirmann 1987) on the pairs' differences show equivalence within ±0.03 at level 0.05.

How many pairs there are comes from their own spread, which is all that is looked at before the end (an internal pilot,
Wittes and Brittain 1990): from the fifth on, pairs are added until there are so many that the test has power 0.8 if
there is no difference, where the standard deviation is taken at its upper 80% confidence limit (Browne 1995).

A run that has ended is kept in the JSON file and not made again; remove the file to begin anew. About 3 minutes a run
on two cores. Runs are long enough for rewards to level off: while they still rise, runs of one arm differ among
themselves by more than the margin.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.figures import Figure, report, save_svg, write_results
from benchmarks.serving import served
from rollout_worker.engine.model_source import default_cache
from rollout_worker.tiny_model import ensure

ROOT = Path(__file__).parents[1]
ARMS = {"drafts": "fixed", "no drafts": "off"}
"""Name of an arm → its ``spec.speculation.policy``."""
WORK = Path(".rollout/training_curves")
FIRST, LAST = 5, 10
"""Steps at a run's two ends whose mean rewards are compared."""
MARGIN, LEVEL, POWER, LEAST_GAIN, LEAST_PAIRS = 0.03, 0.05, 0.8, 0.1, 5
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


@dataclass(frozen=True)
class Run:
    """What one run measured, each by step."""

    about: dict[str, Any]
    """What it is a run of; another one of the same would measure the same, but for chance."""
    reward: list[float]
    tokens_per_step: list[float]
    """Tokens of a rollout for each of its decoding steps."""
    rollout_seconds: list[float]

    @property
    def first(self) -> float:
        """Mean reward at the beginning."""
        return fmean(self.reward[:FIRST])

    @property
    def last(self) -> float:
        """Mean reward at the end."""
        return fmean(self.reward[-LAST:])


def run_once(about: dict[str, Any], directory: Path) -> Run:
    """Train once, in *directory*, which is made and removed.

    Raises:
        subprocess.CalledProcessError: if the loop fails; what it and the job said is left in the directory.
    """
    weights, lines = directory.resolve() / "weights", directory / "steps.jsonl"
    with served(manifest(about["arm"], about["seed"], weights), directory) as url:
        train = [sys.executable, str(ROOT / "examples/minimal_grpo.py"), "--redis", url, "--job", "training-curves"]
        train += ["--model", str(default_cache() / MODEL), "--weights", str(weights), "--output", str(lines)]
        train += [f"--{name}={about[name]}" for name in ("seed", "steps", "batch")]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with (directory / "train.log").open("w") as log:
            subprocess.run(train, stdout=log, stderr=subprocess.STDOUT, env=environment, check=True)
    steps = [json.loads(line) for line in lines.read_text().splitlines()]
    shutil.rmtree(directory)
    return Run(
        about,
        reward=[round(step["reward"], 5) for step in steps],
        tokens_per_step=[round(step["tokens_per_step"], 4) for step in steps],
        rollout_seconds=[step["seconds"]["rollouts"] for step in steps],
    )


def about_run(arm: str, seed: int, steps: int, batch: int) -> dict[str, Any]:
    """What tells a run from others, the loop's own text included."""
    loop = hashlib.sha256((ROOT / "examples/minimal_grpo.py").read_bytes()).hexdigest()
    return {"arm": arm, "seed": seed, "steps": steps, "batch": batch, "loop": loop}


def kept_runs(file: Path) -> list[Run]:
    """What an earlier call has made."""
    return [Run(**run) for run in json.loads(file.read_text())["runs"]] if file.exists() else []


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


def pairs_needed(differences: Sequence[float], margin: float, *, most: int) -> int:
    """Fewest pairs, at least those that there are, with power POWER at their spread; at most *most*."""
    freedom = len(differences) - 1
    deviation = max(stdev(differences) * math.sqrt(freedom / stats.chi2.ppf(1 - POWER, freedom)), 1e-6)
    return next((n for n in range(len(differences), most) if power_of_tost(n, deviation, margin) >= POWER), most)


def differences_of(runs: dict[str, list[Run]]) -> list[float]:
    """Final reward with drafts less that without, of each pair."""
    return [one.last - other.last for one, other in zip(runs["drafts"], runs["no drafts"], strict=True)]


def figures(runs: dict[str, list[Run]]) -> list[Figure]:
    """What the runs (arm → seed → run) come to."""
    drafted, plain = runs["drafts"], runs["no drafts"]
    differences = differences_of(runs)
    p, low, high = tost(differences, MARGIN)
    gains = [run.last - run.first for runs_of_arm in runs.values() for run in runs_of_arm]
    peer = "no drafts"
    power = power_of_tost(len(differences), stdev(differences), MARGIN)
    seconds = [fmean(fmean(run.rollout_seconds) for run in arm) for arm in (drafted, plain)]
    tokens = fmean(fmean(run.tokens_per_step) for run in drafted)
    return [
        Figure("p of equivalence", p, "", peer, "<=", LEVEL),
        Figure("difference of final rewards, 90% interval, low end", low, "reward", peer, ">=", -MARGIN),
        Figure("difference of final rewards, 90% interval, high end", high, "reward", peer, "<=", MARGIN),
        Figure("least gain of a run", min(gains), "reward", "", ">=", LEAST_GAIN),
        Figure("power with the spread that was found", power, "", "", ">=", POWER),
        Figure("pairs of runs", len(differences), "pairs", "", ">=", LEAST_PAIRS),
        Figure("final reward with drafts", fmean(run.last for run in drafted), "reward", "", ">=", None),
        Figure("final reward without drafts", fmean(run.last for run in plain), "reward", "", ">=", None),
        Figure("tokens a decoding step with drafts", tokens, "tokens", "", ">=", None),
        Figure("seconds of rollouts a step, with drafts / without", seconds[0] / seconds[1], "", peer, "<=", None),
    ]


def plot(runs: dict[str, list[Run]], file: Path) -> None:
    """Mean reward by step of each arm, its runs' spread behind it."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "training curves", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    canvas, axes = plt.subplots(figsize=(6.4, 3.6))
    for (arm, runs_of_arm), color in zip(runs.items(), ("#0072b2", "#d55e00"), strict=True):
        rewards = np.array([run.reward for run in runs_of_arm])
        at = np.arange(rewards.shape[1])
        axes.fill_between(at, rewards.min(0), rewards.max(0), color=color, alpha=0.15, linewidth=0)
        axes.plot(at, rewards.mean(0), color=color, label=f"{arm} ({len(runs_of_arm)} seeds; band: least to most)")
    axes.set(xlabel="optimiser step", ylabel="mean reward", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    canvas.tight_layout()
    save_svg(canvas, file)


def write(file: Path, runs: Sequence[Run]) -> None:
    """Keep what there is so far."""
    write_results(file, {"figures": [], "runs": [asdict(run) for run in runs]})


def say(text: str) -> None:
    """Tell whoever watches."""
    sys.stderr.write(text + "\n")


def main() -> int:
    """Make what runs are missing, and report; 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=64, help="optimiser steps of a run")
    parser.add_argument("--batch", type=int, default=9, help="problems in a step")
    parser.add_argument("--least-pairs", type=int, default=LEAST_PAIRS)
    parser.add_argument("--pairs", type=int, help="so many pairs, whatever the spread")
    parser.add_argument("--most-pairs", type=int, default=30)
    parser.add_argument(
        "--json", type=Path, default=WORK / "curves.json", help="figures and runs; what is there is kept"
    )
    parser.add_argument("--plot", type=Path, help="draw the curves here (SVG)")
    args = parser.parse_args()
    ensure(default_cache() / "das" / "tiny-qwen3")

    kept = kept_runs(args.json)
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    wanted = args.pairs or args.least_pairs
    while (seed := len(runs["drafts"])) < wanted:
        for arm in list(ARMS) if seed % 2 else list(reversed(ARMS)):  # neither arm always has the quieter machine
            about = about_run(arm, seed, args.steps, args.batch)
            run = next((run for run in kept if run.about == about), None)
            if run is None:
                run = run_once(about, WORK / "running")
                kept.append(run)
                write(args.json, kept)
                say(f"{arm}, seed {seed}: reward {run.first:.3f} → {run.last:.3f}")
            runs[arm].append(run)
        if args.pairs is None and seed + 1 >= args.least_pairs:
            differences = differences_of(runs)
            wanted = pairs_needed(differences, MARGIN, most=args.most_pairs)
            say(f"{wanted} pairs are needed; the differences of {seed + 1} spread by {stdev(differences):.4f}")
    found = figures(runs)
    report(args.json, found, runs=[asdict(run) for run in kept])
    if args.plot:
        plot(runs, args.plot)
    return int(any(one.met is False for one in found))


if __name__ == "__main__":
    sys.exit(main())
