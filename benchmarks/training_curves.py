"""Compares training with and without drafts: the minimal GRPO loop, on paired seeds.

    .venv/bin/python -m benchmarks.training_curves --json docs/training_curves.json --plot docs/training_curves.svg

Each training run is a job of its own, with two CPU engines and an empty Redis server, and a process of
``examples/minimal_grpo.py``. The two runs of a pair differ only in ``speculation.policy``. The compared quantity is a
run's mean reward over its last 10 steps. Two one-sided t tests (TOST, Schuirmann 1987) on the differences within pairs
show equivalence within ±0.03 at level 0.05.

The number of pairs follows from the spread of the differences, and nothing else is examined before the end (an internal
pilot study, Wittes and Brittain 1990). After the fifth pair, pairs are added until the test has a power of 0.8 if there
is no difference, with the standard deviation taken at its upper 80 % confidence limit (Browne 1995).

Finished runs are kept in the JSON file and not repeated; delete the file to start over. A run takes about 3 minutes on
two cores. Runs are long enough for the rewards to level off: while rewards still rise, runs of the same arm differ from
each other by more than the margin.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import yaml
from scipy import stats

from benchmarks.figures import Figure, report, save_svg, write_figures
from benchmarks.redis_server import redis_server
from rollout_store.runtime.command_line import default_cache
from rollout_tools.tiny_model import ensure

ROOT = Path(__file__).parents[1]
ARMS = {"drafts": "fixed", "no drafts": "off"}
"""By name of the arm: its ``spec.speculation.policy``."""
WORK = Path(".rollout/training_curves")
FIRST_STEPS, LAST_STEPS = 5, 10
"""Steps over which the reward at the start and at the end of a run is averaged."""
MARGIN = 0.03
"""Largest difference of rewards that counts as equivalent."""
LEVEL = 0.05
"""Significance level of the equivalence test."""
POWER = 0.8
"""The power that the test should have; it determines the number of pairs."""
MIN_GAIN = 0.1
"""Smallest reward that every run has to gain."""
MIN_PAIRS = 5
MODEL = "das/tiny-qwen3/step-0270"
_EXIT_TIMEOUT_S = 120.0
"""Seconds within which the job has to exit after it was closed."""


@contextmanager
def run_job(manifest: dict[str, Any], directory: Path) -> Iterator[str]:
    """Run a job with ``rollout run`` and an empty Redis server, and yield the server's URL.

    The caller closes the job through the client; the context manager then waits for it to exit.

    Args:
        manifest: the RolloutJob.
        directory: directory for the job's state and ``job.log``. It is emptied first and kept afterwards.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    job = directory / "job.yaml"
    job.write_text(yaml.safe_dump(manifest))
    with redis_server() as url:
        command = [sys.executable, "-m", "rollout_tools.cli", "run", "-f", str(job), "--redis", url, "--no-compare"]
        command += ["--state-dir", str(directory / "state")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (directory / "job.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            try:
                yield url
                process.wait(timeout=_EXIT_TIMEOUT_S)
            finally:
                process.terminate()
                process.wait()


def manifest(arm: str, seed: int, weights: Path) -> dict[str, Any]:
    """Return the RolloutJob of one training run."""
    return {
        "apiVersion": "das.rollout.dev/v1beta1",
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
            "sampling": {"rolloutsPerPrompt": 8, "temperature": 1.0, "maxTokens": 160, "logprobs": True, "seed": seed},
            "workers": {"replicas": 2, "gpusPerWorker": 0},
            "speculation": {"policy": ARMS[arm]},
        },
    }


@dataclass(frozen=True)
class Run:
    """The measurements of one training run; each list has one element per training step."""

    settings: dict[str, Any]
    """Arm, seed and size of the run; runs with equal settings differ only by chance."""
    reward: list[float]
    tokens_per_step: list[float]
    """Tokens of a rollout per decoding step."""
    rollout_seconds: list[float]

    @property
    def initial_reward(self) -> float:
        """Mean reward of the first steps."""
        return fmean(self.reward[:FIRST_STEPS])

    @property
    def final_reward(self) -> float:
        """Mean reward of the last steps."""
        return fmean(self.reward[-LAST_STEPS:])


def train(settings: dict[str, Any], directory: Path) -> Run:
    """Run one training run in *directory*, which is created and removed.

    Raises:
        subprocess.CalledProcessError: if the training loop fails; the directory with its log and the job's log is kept.
    """
    weights, lines = directory.resolve() / "weights", directory / "steps.jsonl"
    with run_job(manifest(settings["arm"], settings["seed"], weights), directory) as url:
        command = [sys.executable, str(ROOT / "examples/minimal_grpo.py"), "--redis", url, "--job", "training-curves"]
        command += ["--model", str(default_cache() / MODEL), "--weights", str(weights), "--output", str(lines)]
        command += [f"--{name}={settings[name]}" for name in ("seed", "steps", "batch")]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with (directory / "train.log").open("w") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=True)
    steps = [json.loads(line) for line in lines.read_text().splitlines()]
    shutil.rmtree(directory)
    return Run(
        settings,
        reward=[round(step["reward"], 5) for step in steps],
        tokens_per_step=[round(step["tokens_per_step"], 4) for step in steps],
        rollout_seconds=[step["seconds"]["rollouts"] for step in steps],
    )


def run_settings(arm: str, seed: int, steps: int, batch: int) -> dict[str, Any]:
    """Return the settings that identify a run, including a hash of the training loop's source."""
    loop = hashlib.sha256((ROOT / "examples/minimal_grpo.py").read_bytes()).hexdigest()
    return {"arm": arm, "seed": seed, "steps": steps, "batch": batch, "loop": loop}


def load_runs(file: Path) -> list[Run]:
    """Return the runs that an earlier call has written to *file*."""
    return [Run(**run) for run in json.loads(file.read_text())["runs"]] if file.exists() else []


def tost(differences: Sequence[float], margin: float) -> tuple[float, float, float]:
    """Test with two one-sided paired t tests whether the mean difference lies within ±*margin*.

    Returns:
        The larger of the two p values, and the ends of the confidence interval of level 1 − 2 · LEVEL. The interval
        lies within the margin exactly if p < LEVEL.
    """
    n, mean = len(differences), fmean(differences)
    error = max(stdev(differences) / math.sqrt(n), 1e-12)
    p = max(stats.t.sf((mean + margin) / error, n - 1), stats.t.sf((margin - mean) / error, n - 1))
    half_width = float(stats.t.isf(LEVEL, n - 1)) * error
    return float(p), mean - half_width, mean + half_width


def power_of_tost(n: int, deviation: float, margin: float) -> float:
    """Return the probability that *n* pairs show equivalence if there is no difference.

    Args:
        n: number of pairs.
        deviation: true standard deviation of the differences.
        margin: margin of the test.
    """
    # Given an estimated deviation s, the test passes if |mean| < margin − t · s / √n.
    quantiles = (np.arange(2000) + 0.5) / 2000
    estimated = deviation * np.sqrt(stats.chi2.ppf(quantiles, n - 1) / (n - 1))
    limit = margin - stats.t.isf(LEVEL, n - 1) * estimated / math.sqrt(n)
    passing = 2 * stats.norm.cdf(np.maximum(limit, 0) * math.sqrt(n) / deviation) - 1
    return float(passing.mean())


def pairs_needed(differences: Sequence[float], margin: float, *, max_pairs: int) -> int:
    """Return the number of pairs that gives the test power POWER, from those that exist to *max_pairs*."""
    freedom = len(differences) - 1
    deviation = max(stdev(differences) * math.sqrt(freedom / stats.chi2.ppf(1 - POWER, freedom)), 1e-6)
    candidates = range(len(differences), max_pairs)
    return next((n for n in candidates if power_of_tost(n, deviation, margin) >= POWER), max_pairs)


def differences_of(runs: dict[str, list[Run]]) -> list[float]:
    """Return, for each pair, the final reward with drafts minus that without."""
    pairs = zip(runs["drafts"], runs["no drafts"], strict=True)
    return [drafted.final_reward - undrafted.final_reward for drafted, undrafted in pairs]


def figures_of(runs: dict[str, list[Run]]) -> list[Figure]:
    """Return the figures of all pairs; *runs* holds the runs of each arm in the order of their seeds."""
    drafted, undrafted = runs["drafts"], runs["no drafts"]
    differences = differences_of(runs)
    p, low, high = tost(differences, MARGIN)
    gains = [run.final_reward - run.initial_reward for runs_of_arm in runs.values() for run in runs_of_arm]
    peer = "no drafts"
    power = power_of_tost(len(differences), stdev(differences), MARGIN)
    seconds = [fmean(fmean(run.rollout_seconds) for run in arm) for arm in (drafted, undrafted)]
    tokens = fmean(fmean(run.tokens_per_step) for run in drafted)
    final_rewards = [fmean(run.final_reward for run in arm) for arm in (drafted, undrafted)]
    return [
        Figure("p value of equivalence", p, "", peer, "<=", LEVEL),
        Figure("difference of final rewards, lower end of the 90% interval", low, "reward", peer, ">=", -MARGIN),
        Figure("difference of final rewards, upper end of the 90% interval", high, "reward", peer, "<=", MARGIN),
        Figure("smallest gain of a run", min(gains), "reward", "", ">=", MIN_GAIN),
        Figure("power at the measured spread", power, "", "", ">=", POWER),
        Figure("pairs of runs", len(differences), "pairs", "", ">=", MIN_PAIRS),
        Figure("final reward with drafts", final_rewards[0], "reward", "", ">=", None),
        Figure("final reward without drafts", final_rewards[1], "reward", "", ">=", None),
        Figure("tokens per decoding step with drafts", tokens, "tokens", "", ">=", None),
        Figure("rollout time per training step", seconds[0] / seconds[1], "of the peer's", peer, "<=", None),
    ]


def plot(runs: dict[str, list[Run]], file: Path) -> None:
    """Plot the mean reward of each arm by step, with a band from the lowest to the highest run."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "training curves", "svg.fonttype": "none"})
    import matplotlib.pyplot as plt

    canvas, axes = plt.subplots(figsize=(6.4, 3.6))
    for (arm, runs_of_arm), color in zip(runs.items(), ("#0072b2", "#d55e00"), strict=True):
        rewards = np.array([run.reward for run in runs_of_arm])
        steps = np.arange(rewards.shape[1])
        axes.fill_between(steps, rewards.min(0), rewards.max(0), color=color, alpha=0.15, linewidth=0)
        axes.plot(steps, rewards.mean(0), color=color, label=f"{arm} ({len(runs_of_arm)} seeds; band: min to max)")
    axes.set(xlabel="training step", ylabel="mean reward", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    canvas.tight_layout()
    save_svg(canvas, file)


def save_runs(file: Path, runs: Sequence[Run]) -> None:
    """Write the runs so far, without figures."""
    write_figures(file, [], runs=[asdict(run) for run in runs])


def print_progress(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Run the missing training runs and report; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=64, help="training steps per run [%(default)s]")
    parser.add_argument("--batch", type=int, default=9, help="problems per training step [%(default)s]")
    parser.add_argument("--min-pairs", type=int, default=MIN_PAIRS, help="minimum number of pairs [%(default)s]")
    parser.add_argument("--pairs", type=int, help="exact number of pairs, whatever the spread")
    parser.add_argument("--max-pairs", type=int, default=30, help="maximum number of pairs [%(default)s]")
    parser.add_argument(
        "--json",
        type=Path,
        default=WORK / "curves.json",
        help="file for figures and runs; runs that it contains are reused [%(default)s]",
    )
    parser.add_argument("--plot", type=Path, help="SVG file for a plot of the curves")
    options = parser.parse_args()
    ensure(default_cache() / "das" / "tiny-qwen3")

    known = load_runs(options.json)
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    num_pairs = options.pairs or options.min_pairs
    while (seed := len(runs["drafts"])) < num_pairs:
        for arm in list(ARMS) if seed % 2 else list(reversed(ARMS)):  # Neither arm is always the first of a pair.
            settings = run_settings(arm, seed, options.steps, options.batch)
            run = next((run for run in known if run.settings == settings), None)
            if run is None:
                run = train(settings, WORK / "running")
                known.append(run)
                save_runs(options.json, known)
                print_progress(f"{arm}, seed {seed}: reward {run.initial_reward:.3f} → {run.final_reward:.3f}")
            runs[arm].append(run)
        if options.pairs is None and seed + 1 >= options.min_pairs:
            differences = differences_of(runs)
            num_pairs = pairs_needed(differences, MARGIN, max_pairs=options.max_pairs)
            deviation = stdev(differences)
            print_progress(
                f"{num_pairs} pairs are needed: {seed + 1} pairs have a standard deviation of {deviation:.4f}"
            )
    figures = figures_of(runs)
    report(options.json, figures, runs=[asdict(run) for run in known])
    if options.plot:
        plot(runs, options.plot)
    return int(any(figure.met is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
