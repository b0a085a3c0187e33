"""Measures real engines on the same rollouts: plain vLLM, vLLM's own speculation, and this project's.

    python -m benchmarks.rollout --modes none,none-v1-sync,ngram,suffix,das,drop-in --batch 1,4,8,32,64 --json FILE

The engines of all modes are started together and take turns, so that changes of the machine's speed affect all alike.
All produce the same rollouts (:mod:`benchmarks.forced_sampling`). With a trace, these are the rollouts of one
checkpoint, and the history consists of those of an earlier checkpoint. Without a trace, plain vLLM first samples
several epochs at temperature 1; the history of each epoch then consists of the epochs before it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, from_columns, quantile, report, to_columns, write_figures
from benchmarks.redis_server import redis_server
from benchmarks.rollout_runs import (
    DROP_IN,
    END,
    GROUP_SIZE,
    KEYS,
    LENGTH_POLICIES,
    MODELS,
    MODES,
    SUFFIX_DRAFT,
    Measurement,
    ModeRunner,
    RecordedEpochs,
    RecordedGroup,
    start_engines,
)
from benchmarks.suffix_drafters import PEERS_DIRECTORY
from benchmarks.traces import Problem, add_trace_arguments, selected_problems
from rollout_api.redis_client.connection import connect
from rollout_store.history.store import HistoryStore

POSITIONS = 8192
"""Context length of the models with random weights, in tokens."""
MIN_SPEED, MIN_SPEED_LOWER_BOUND = 0.98, 0.95
"""Targets for the speed of ``das`` relative to ``none``: the median, and the lower bound of the median."""
MIN_SPEED_BESIDE_NEIGHBOR = 0.97
"""The target for the median beside a process that takes a core in bursts."""
NEIGHBOR = """
import random, time
rng = random.Random(0)
while True:
    end = time.monotonic() + rng.uniform(0.3, 4.0)
    while time.monotonic() < end:
        sum(range(10_000))
    time.sleep(rng.uniform(0.3, 4.0))
"""
"""The program of that process."""
MIN_SPEED_267M = {1: 1.7, 4: 1.25, 8: 1.05}
"""By batch size: the target for the median with 267M parameters and a forced trace."""
MIN_PAIRS_FOR_BOUND = 5
"""Without an effect, the fewest pairs that all exceed the median with a probability below 5 % (1 in 32)."""
MAX_DRAFTER_SHARE = 0.03
"""Target for the drafter's share of the time."""
FULL_ROUNDS = 7
"""Rounds of a full benchmark."""
MAX_ROUNDS = 1000
"""Rounds of a benchmark that ends when its time is up."""
DEFAULT_MINUTES = 3.0
MAX_SAMPLED_TOKENS = 1024
"""Maximum tokens of a rollout that the model samples itself."""


def model_directory(name: str) -> Path:
    """Return the directory of a model: ``tiny``, ``267m``, ``7b``, or a path."""
    if name in MODELS:
        return MODELS[name](positions=POSITIONS)
    if name == "tiny":
        from rollout_store.models.model_source import default_cache
        from rollout_tools.tiny_model import ensure

        return ensure(default_cache() / "das" / "tiny-qwen3")[-1]
    return Path(name)


def epochs_of_trace(problems: Sequence[Problem], max_tokens: int) -> RecordedEpochs:
    """Return one epoch with the single-turn rollouts that fit into *max_tokens* together with their prompts.

    Raises:
        ValueError: if there is no such rollout.
    """
    epoch = {}
    for problem in problems:
        prompt = problem.evaluated[0].prompt.tolist()
        rollouts, history = (
            [
                [*trajectory.segments[0].tokens.tolist(), END]
                for trajectory in trajectories
                if len(trajectory.segments) == 1 and 0 < trajectory.generated < max_tokens - len(prompt)
            ]
            for trajectories in (problem.evaluated, problem.history)
        )
        if rollouts:
            epoch[problem.name] = RecordedGroup(prompt, rollouts, history, max_tokens - len(prompt))
    if not epoch:
        raise ValueError(f"the trace has no single-turn rollout of at most {max_tokens} tokens")
    return RecordedEpochs([epoch], [END])


def tiny_model_prompts(model: Path, count: int) -> dict[str, list[int]]:
    """Return prompts of the kind of problem that the tiny model was trained on, by problem name."""
    from rollout_store.models.model_source import load_tokenizer
    from scripts.tiny_model.tasks import training_problems

    tokenizer, prompts = load_tokenizer(model), {}
    for _, question, _ in training_problems(1):
        if len(prompts) == count:
            break
        chat = [{"role": "user", "content": question}]
        prompts[f"problem {len(prompts)}"] = tokenizer.apply_chat_template(chat, add_generation_prompt=True)[
            "input_ids"
        ]
    return prompts


def lower_bound(ratios: Sequence[float], level: float = 0.05) -> float:
    """Return a bootstrap lower bound of the median, which holds with probability 1 - *level*."""
    samples = np.random.default_rng(0).choice(np.array(ratios), (4000, len(ratios)))
    return float(np.quantile(np.median(samples, axis=1), level))


def figures_of(
    measurements: Sequence[Measurement],
    modes: Sequence[str],
    batches: Sequence[int],
    *,
    claim_267m: bool,
    beside_neighbor: bool = False,
) -> list[Figure]:
    """Compare the modes, using the sets of rollouts that all modes have produced.

    Args:
        measurements: the measurements so far.
        modes: the modes to compare.
        batches: the batch sizes.
        claim_267m: whether the targets for 267M parameters with a forced trace apply.
        beside_neighbor: whether another process took a core in bursts.
    """
    min_speed = MIN_SPEED_BESIDE_NEIGHBOR if beside_neighbor else MIN_SPEED
    by_key = {measurement.key: measurement for measurement in measurements}
    figures = []
    for batch in batches:
        sets = [
            measurement.key[1:]
            for measurement in measurements
            if measurement.mode == modes[0] and measurement.batch == batch
        ]
        sets = [key for key in sets if all((mode, *key) in by_key for mode in modes)]
        if sets:
            by_mode = {mode: [by_key[mode, *key] for key in sets] for mode in modes}
            figures += _figures_of_batch(by_mode, batch, min_speed=min_speed, claim_267m=claim_267m)
    return figures


def _figures_of_batch(
    by_mode: dict[str, list[Measurement]], batch: int, *, min_speed: float, claim_267m: bool
) -> list[Figure]:
    figures = []
    seconds = {mode: np.array([measurement.seconds for measurement in of_mode]) for mode, of_mode in by_mode.items()}
    for mode, of_mode in by_mode.items():
        case = f"{mode}, batch {batch}"
        accepted = sum(measurement.accepted for measurement in of_mode)
        rollout_steps = max(1, sum(measurement.tokens - measurement.accepted for measurement in of_mode))
        throughput = float(np.median([measurement.tokens / measurement.seconds for measurement in of_mode]))
        shim = sum(measurement.shim_seconds for measurement in of_mode) / sum(
            measurement.seconds for measurement in of_mode
        )
        figures += [
            Figure(f"accepted per step (replayed), {case}", accepted / rollout_steps, "tokens", "", ">=", None),
            Figure(f"throughput, {case}", throughput, "tokens/s", "", ">=", None),
            Figure(f"shim's share of the time, {case}", shim, "", "", "<=", None),
        ]
        if "none" not in by_mode or mode == "none":
            continue
        ratios = (seconds["none"] / seconds[mode]).tolist()
        target, bound_target = None, None
        if mode == "das":
            target, bound_target = min_speed, MIN_SPEED_LOWER_BOUND
            if claim_267m:
                target = MIN_SPEED_267M.get(batch, target)
        name = f"speed of {case}"
        figures.append(
            Figure(f"{name}, median of {len(ratios)} pairs", float(np.median(ratios)), "x", "none", ">=", target)
        )
        if len(ratios) >= MIN_PAIRS_FOR_BOUND:
            figures.append(Figure(f"{name}, lower bound", lower_bound(ratios), "x", "none", ">=", bound_target))
    if "das" in by_mode:
        figures += _figures_of_das(by_mode, seconds, batch)
    return figures


def _figures_of_das(by_mode: dict[str, list[Measurement]], seconds: dict[str, np.ndarray], batch: int) -> list[Figure]:
    figures = []
    if others := [mode for mode in by_mode if mode not in ("das", DROP_IN, *LENGTH_POLICIES)]:
        fastest = min(others, key=lambda mode: float(np.median(seconds[mode])))
        name = f"speed of das against the fastest other mode, batch {batch}"
        figures += _speed(name, seconds[fastest] / seconds["das"], f"{fastest} (fastest)", MIN_SPEED)
    if DROP_IN in by_mode:
        name = f"speed of {DROP_IN} against a job's engine, batch {batch}"
        figures += _speed(name, seconds["das"] / seconds[DROP_IN], "das", MIN_SPEED)
    das = by_mode["das"]
    epochs = np.array([measurement.epoch for measurement in das])
    for mode in (mode for mode in by_mode if mode in LENGTH_POLICIES):
        for epoch in np.unique(epochs):
            name = f"speed of {mode} against das, batch {batch}, epoch {epoch + 1}"
            figures += _speed(name, (seconds["das"] / seconds[mode])[epochs == epoch], "das", None)
    drafting = sum(measurement.drafting_seconds for measurement in das)
    share = drafting / sum(measurement.seconds for measurement in das)
    per_step = 1e6 * drafting / sum(measurement.steps for measurement in das)
    figures += [
        Figure(f"drafter's share of the time, batch {batch}", share, "", "", "<=", MAX_DRAFTER_SHARE),
        Figure(f"drafter's time per step, batch {batch}", per_step, "us", "", "<=", None),
    ]
    if fitted := [measurement.base_tokens for measurement in das if measurement.base_tokens is not None]:
        figures.append(
            Figure(f"fitted c_base / c_tok, batch {batch}", float(np.median(fitted)), "tokens", "", ">=", None)
        )
    return figures


def _speed(name: str, ratios: np.ndarray, peer: str, target: float | None) -> list[Figure]:
    """Return the median of the pairs' ratios and, from enough pairs on, its lower bound."""
    figures = [Figure(name, float(np.median(ratios)), "x", peer, ">=", target)]
    if len(ratios) >= MIN_PAIRS_FOR_BOUND:
        figures.append(Figure(f"{name}, lower bound", lower_bound(ratios.tolist()), "x", peer, ">=", None))
    return figures


class Results:
    """The measurements so far, in a file that an interrupted benchmark resumes from."""

    def __init__(self, file: Path | None, settings: dict[str, object], *, resume: bool) -> None:
        """Begin without measurements, or with those of an existing *file* if *resume* is true.

        Raises:
            ValueError: if the file has other settings.
        """
        self.measurements: list[Measurement] = []
        self.sampled_lengths: list[dict[str, float]] = []
        """The distribution of the lengths that the model has sampled in each epoch, in tokens."""
        self._file, self._settings = file, settings
        if resume and file is not None and file.exists():
            content = json.loads(file.read_text())
            if content["settings"] != settings:
                raise ValueError(f"{file} has other settings; use another file, or move this one away")
            self.measurements = [Measurement(**row) for row in from_columns(content["measurements"])]

    def add(self, measurement: Measurement) -> None:
        """Add a measurement."""
        self.measurements.append(measurement)

    def save(self, figures: Sequence[Figure]) -> None:
        """Write everything to the file, if there is one."""
        if self._file is not None:
            write_figures(self._file, figures, **self.details())

    def details(self) -> dict[str, object]:
        """Return what the file holds besides the figures."""
        return {
            "settings": self._settings,
            **({"sampled_lengths": self.sampled_lengths} if self.sampled_lengths else {}),
            "measurements": to_columns([asdict(measurement) for measurement in self.measurements]),
        }


async def measure(
    options: argparse.Namespace, problems: Sequence[Problem], results: Results, batches: Sequence[int]
) -> None:
    """Measure sets of rollouts until all rounds are complete or the time is up."""
    modes = options.modes.split(",")
    model = model_directory(options.model)
    max_tokens = POSITIONS - SUFFIX_DRAFT if options.trace is not None else 2 * MAX_SAMPLED_TOKENS
    with redis_server() as url:
        async with start_engines(
            modes, model, url, max_tokens=max_tokens, batch=max(batches), engines=options.engines
        ) as engines:
            if options.trace is not None:
                recorded = epochs_of_trace(problems, max_tokens)
            else:
                count = options.problems or max(2, max(batches) // GROUP_SIZE)
                recorded = await RecordedEpochs.sample(
                    engines[modes[0]][0],
                    tiny_model_prompts(model, count),
                    epochs=options.epochs,
                    samples=GROUP_SIZE,
                    max_tokens=MAX_SAMPLED_TOKENS,
                )
                results.sampled_lengths = [_distribution(groups.values()) for groups in recorded.epochs]
            runner = ModeRunner(engines, recorded, HistoryStore(connect(url), KEYS, window=16))
            for mode in modes:  # Warm up, so that no measurement includes compilation.
                await runner.run(mode, min(batches), 0, -1)
            started = time.monotonic()
            rng = random.Random(0)
            for round_ in range(FULL_ROUNDS if options.full else MAX_ROUNDS):
                for batch in batches:
                    for epoch in range(len(recorded.epochs)):
                        known = {measurement.key for measurement in results.measurements}
                        order = [mode for mode in modes if (mode, batch, epoch, round_) not in known]
                        rng.shuffle(order)
                        for mode in order:
                            measurement = await runner.run(mode, batch, epoch, round_)
                            results.add(measurement)
                            results.save(_figures(options, results, modes, batches))
                            _print_progress(measurement)
                        if not options.full and time.monotonic() - started > 60 * options.minutes:
                            return


def _distribution(groups: Iterable[RecordedGroup]) -> dict[str, float]:
    lengths = [len(tokens) for group in groups for tokens in group.rollouts]
    return {"median": quantile(lengths, 0.5), "p90": quantile(lengths, 0.9), "max": max(lengths)}


def _print_progress(measurement: Measurement) -> None:
    print(
        f"round {measurement.round + 1}, epoch {measurement.epoch + 1}, batch {measurement.batch}, "
        f"{measurement.mode}: {measurement.seconds:.2f} s, {measurement.tokens / measurement.seconds:.0f} tokens/s, "
        f"{measurement.accepted} of {measurement.drafted} draft tokens accepted",
        file=sys.stderr,
        flush=True,
    )


def _figures(
    options: argparse.Namespace, results: Results, modes: Sequence[str], batches: Sequence[int]
) -> list[Figure]:
    return figures_of(
        results.measurements,
        modes,
        batches,
        claim_267m=_claims_267m(options),
        beside_neighbor=options.neighbor,
    )


@contextlib.contextmanager
def _neighbor() -> Iterator[None]:
    """Run the process that takes a core in bursts."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOR])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _claims_267m(options: argparse.Namespace) -> bool:
    return bool(options.model == "267m" and options.trace is not None)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        help=f"comma-separated modes; further ones are {', '.join(LENGTH_POLICIES)} [%(default)s]",
    )
    parser.add_argument("--batch", default="1,4,8,32,64", help="comma-separated batch sizes [%(default)s]")
    parser.add_argument(
        "--engines", type=int, default=1, help="engines of each mode, which share the batch [%(default)s]"
    )
    parser.add_argument(
        "--epochs", type=int, default=3, help="epochs that the model samples if there is no trace [%(default)s]"
    )
    parser.add_argument(
        "--model", default="tiny", help="tiny, 267m or 7b (random weights), or a directory [%(default)s]"
    )
    add_trace_arguments(parser, flag="--force-trace", required=False)
    parser.add_argument(
        "--minutes",
        type=float,
        default=DEFAULT_MINUTES,
        help="minutes of measurements, after the engines have started [%(default)s]",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help=f"measure {FULL_ROUNDS} rounds, however long they take; resumes from the file of --json",
    )
    parser.add_argument(
        "--neighbor", action="store_true", help="measure beside a process that takes a core in bursts of seconds"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    modes, batches = options.modes.split(","), [int(batch) for batch in options.batch.split(",")]
    known = (*MODES, *LENGTH_POLICIES)
    if unknown := set(modes) - set(known):
        parser.error(f"--modes: unknown {', '.join(sorted(unknown))}; the modes are {', '.join(known)}")
    if options.engines > 1 and any(batch % (GROUP_SIZE * options.engines) for batch in batches):
        parser.error(f"--batch: with {options.engines} engines, use multiples of {GROUP_SIZE * options.engines}")
    if options.trace is None and options.model in ("267m", "7b"):
        parser.error(f"--model {options.model} has random weights and samples no useful text; use --force-trace")
    sys.path.append(PEERS_DIRECTORY)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (os.environ.get("PYTHONPATH"), str(Path.cwd()), PEERS_DIRECTORY))
    )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    problems = selected_problems(parser, options) if options.trace is not None else []
    settings = {
        "modes": modes,
        "batches": batches,
        "model": options.model,
        "trace": None if options.trace is None else options.trace.name,
        "problems": options.problems,
        "epochs": options.epochs if options.trace is None else 1,
        **({"neighbor": True} if options.neighbor else {}),
        **({"engines": options.engines} if options.engines > 1 else {}),
    }
    try:
        results = Results(options.json, settings, resume=options.full)
        with _neighbor() if options.neighbor else contextlib.nullcontext():
            asyncio.run(measure(options, problems, results, batches))
    except ValueError as error:
        parser.error(str(error))
    report(options.json, _figures(options, results, modes, batches), **results.details())


if __name__ == "__main__":
    main()
