"""How long rollouts take in real engines: plain vLLM, vLLM's own speculation, and ours, on the same rollouts.

    python -m benchmarks.rollout --modes none,none-v1-sync,ngram,suffix,das --batch 1,4,8,32,64 --json FILE

Engines of all modes live side by side and take turns, so that each pair of runs has the machine in the same mood. All
make the same rollouts (:mod:`benchmarks.forced_sampling`): those of a trace, of which an earlier checkpoint's are the
history, or, by default, what the model itself sampled before (plain vLLM, temperature 1), an epoch after the other,
each with the epochs before it as history.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure, report, write_results
from benchmarks.problems import Problem, add_trace_arguments, chosen_problems
from benchmarks.random_model import END, random_model, shape_of_7b
from benchmarks.rollout_runs import (
    GROUP,
    KEYS,
    MODES,
    PEERS_DRAFT,
    Bench,
    Material,
    Run,
    Sampled,
    engines_of,
    redis_server,
)
from benchmarks.suffix_drafters import PEERS
from rollout_worker.history.connection import connect
from rollout_worker.history.store import HistoryStore

POSITIONS = 8192
NEVER_SLOWER, NEVER_SLOWER_LEAST = 0.98, 0.95
FASTER_267M = {1: 1.7, 4: 1.25, 8: 1.05}
"""Batch → how many times faster than none, of 267M parameters and the trace that is forced through them."""
DRAFTER_SHARE = 0.03
PAIRS = 7
"""For a claim."""
MINUTES = 3.0
"""Of runs, where none are said: engines start and end besides."""
_LONGEST = 1024
"""Most tokens of what the model samples itself."""
_ROUNDS_AT_MOST = 1000


def model_of(name: str) -> Path:
    """The directory of a model: tiny, 267m, 7b, or one of the caller's."""
    if name == "267m":
        return random_model(positions=POSITIONS)
    if name == "7b":
        return shape_of_7b(positions=POSITIONS)
    if name == "tiny":
        from rollout_worker.engine.model_source import default_cache
        from rollout_worker.tiny_model import ensure

        return ensure(default_cache() / "das" / "tiny-qwen3")[-1]
    return Path(name)


def of_trace(problems: Sequence[Problem], most: int) -> Material:
    """One epoch, of rollouts of one turn that with their prompts have at most *most* tokens."""
    epoch = {}
    for problem in problems:
        prompt = problem.running[0].prompt.tolist()
        made, before = (
            [
                [*one.segments[0].tokens.tolist(), END]
                for one in group
                if len(one.segments) == 1 and 0 < one.generated < most - len(prompt)
            ]
            for group in (problem.running, problem.history)
        )
        if made:
            epoch[problem.name] = Sampled(prompt, made, before, most - len(prompt))
    if not epoch:
        raise ValueError(f"the trace has no rollout of a single turn and {most} tokens at most")
    return Material([epoch], [END])


def prompts_of(model: Path, count: int) -> dict[str, list[int]]:
    """Problems that the tiny model was trained on the like of."""
    from rollout_worker.tiny_model.tasks import training_problems
    from rollout_worker.tiny_model.tokenizer import load_tokenizer

    tokenizer, found = load_tokenizer(model), {}
    for _, question, _ in training_problems(1):
        if len(found) == count:
            break
        asked = [{"role": "user", "content": question}]
        found[f"problem {len(found)}"] = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    return found


def lower_bound(ratios: Sequence[float], share: float = 0.05) -> float:
    """Bootstrap: the median is no less than this with probability 1 - *share*."""
    drawn = np.random.default_rng(0).choice(np.array(ratios), (4000, len(ratios)))
    return float(np.quantile(np.median(drawn, axis=1), share))


def figures_of(runs: Sequence[Run], modes: Sequence[str], batches: Sequence[int], *, claim_267m: bool) -> list[Figure]:
    """Speeds by that of none, of the pairs that there are."""
    by_key = {run.key: run for run in runs}
    figures = []
    for batch in batches:
        keys = [run.key[1:] for run in runs if run.mode == modes[0] and run.batch == batch]
        keys = [key for key in keys if all((mode, *key) in by_key for mode in modes)]
        if not keys:
            continue
        seconds = {mode: np.array([by_key[mode, *key].seconds for key in keys]) for mode in modes}
        medians = {}
        for mode in modes:
            mine = [by_key[mode, *key] for key in keys]
            accepted = sum(run.accepted for run in mine) / max(1, sum(run.tokens - run.accepted for run in mine))
            figures.append(
                Figure(f"accepted per step (replayed), {mode}, batch {batch}", accepted, "tokens", "", ">=", None)
            )
            speed = float(np.median([run.tokens / run.seconds for run in mine]))
            figures.append(Figure(f"tokens a second, {mode}, batch {batch}", speed, "tokens/s", "", ">=", None))
            shim = sum(run.shim_seconds for run in mine) / sum(run.seconds for run in mine)
            figures.append(Figure(f"shim's share of the time, {mode}, batch {batch}", shim, "", "", "<=", None))
            if "none" not in modes or mode == "none":
                continue
            ratios = (seconds["none"] / seconds[mode]).tolist()
            medians[mode] = float(np.median(ratios))
            least, surely = None, None
            if mode == "das":
                least, surely = NEVER_SLOWER, NEVER_SLOWER_LEAST
                if claim_267m and batch in FASTER_267M:
                    least = FASTER_267M[batch]
            name = f"speed of {mode}, batch {batch}"
            figures.append(Figure(f"{name}, median of {len(ratios)} pairs", medians[mode], "x", "none", ">=", least))
            figures.append(Figure(f"{name}, lower bound", lower_bound(ratios), "x", "none", ">=", surely))
        if "das" in modes and len(modes) > 1:
            fastest = min((mode for mode in modes if mode != "das"), key=lambda mode: float(np.median(seconds[mode])))
            ratio = float(np.median(seconds[fastest] / seconds["das"]))
            figures.append(Figure(f"speed of das, batch {batch}", ratio, "x", f"{fastest} (fastest)", ">=", 0.98))
        if "das" in modes:
            mine = [by_key["das", *key] for key in keys]
            share = sum(run.drafting_seconds for run in mine) / sum(run.seconds for run in mine)
            figures.append(Figure(f"drafter's share of the time, batch {batch}", share, "", "", "<=", DRAFTER_SHARE))
            step = sum(run.drafting_seconds for run in mine) / sum(run.steps for run in mine) * 1e6
            figures.append(Figure(f"drafter's time in a step, batch {batch}", step, "us", "", "<=", None))
            if fitted := [run.base_tokens for run in mine if run.base_tokens is not None]:
                name = f"c_base / c_tok as fitted, batch {batch}"
                figures.append(Figure(name, float(np.median(fitted)), "tokens", "", ">=", None))
    return figures


class Results:
    """What was measured, in a file that a run which is broken off goes on from."""

    def __init__(self, file: Path | None, settings: dict[str, object], *, resume: bool) -> None:
        self.runs: list[Run] = []
        self._file, self._settings = file, settings
        if resume and file is not None and file.exists():
            found = json.loads(file.read_text())
            if found["settings"] != settings:
                raise ValueError(f"{file} holds runs with other settings; move it away, or use another")
            self.runs = [Run(**one) for one in found["runs"]]

    def add(self, run: Run, figures: Sequence[Figure]) -> None:
        """Keep a run at once."""
        self.runs.append(run)
        if self._file is not None:
            content = {
                "figures": [asdict(one) for one in figures],
                "settings": self._settings,
                "runs": [asdict(one) for one in self.runs],
            }
            write_results(self._file, content)


async def measure(
    options: argparse.Namespace, problems: Sequence[Problem], results: Results, batches: Sequence[int]
) -> None:
    """Make runs until there are enough, or time is up."""
    modes = options.modes.split(",")
    model = model_of(options.model)
    most = POSITIONS - PEERS_DRAFT if options.trace is not None else 2 * _LONGEST
    with redis_server() as url:
        async with engines_of(modes, model, url, most=most, batch=max(batches)) as engines:
            if options.trace is not None:
                material = of_trace(problems, most)
            else:
                count = options.problems or max(2, max(batches) // GROUP)
                material = await Material.sampled(
                    engines[modes[0]], prompts_of(model, count), epochs=options.epochs, samples=GROUP, most=_LONGEST
                )
            bench = Bench(engines, material, HistoryStore(connect(url), KEYS, window=16))
            for mode in modes:  # what is compiled, or read for the first time, is no run's
                await bench.run(mode, min(batches), 0, -1)
            started = time.monotonic()
            rng = random.Random(0)
            for round_ in range(PAIRS if options.full else _ROUNDS_AT_MOST):
                for batch in batches:
                    for epoch in range(len(material.epochs)):
                        order = [mode for mode in modes if (mode, batch, epoch, round_) not in _keys(results)]
                        rng.shuffle(order)
                        for mode in order:
                            run = await bench.run(mode, batch, epoch, round_)
                            results.add(
                                run, figures_of([*results.runs, run], modes, batches, claim_267m=_claim(options))
                            )
                            print(
                                f"round {round_ + 1}, epoch {epoch + 1}, batch {batch}, {mode}: {run.seconds:.2f} s, "
                                f"{run.tokens / run.seconds:.0f} tokens/s, {run.accepted} of {run.drafted} accepted",
                                file=sys.stderr,
                                flush=True,
                            )
                        if not options.full and time.monotonic() - started > 60 * options.minutes:
                            return


def _keys(results: Results) -> set[tuple[str, int, int, int]]:
    return {run.key for run in results.runs}


def _claim(options: argparse.Namespace) -> bool:
    return bool(options.model == "267m" and options.trace is not None)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--modes", default=",".join(MODES), help="some of: %(default)s")
    parser.add_argument("--batch", default="1,4,8,32,64", help="rollouts at a time, each is run [%(default)s]")
    parser.add_argument("--epochs", type=int, default=3, help="of what the model samples itself [%(default)s]")
    parser.add_argument(
        "--model", default="tiny", help="tiny, 267m or 7b (random weights), or a directory [%(default)s]"
    )
    add_trace_arguments(parser, flag="--force-trace", required=False)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of runs [%(default)s]")
    parser.add_argument("--full", action="store_true", help=f"{PAIRS} rounds, however long; goes on from --json")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    modes, batches = options.modes.split(","), [int(one) for one in options.batch.split(",")]
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes knows {', '.join(MODES)}, not {', '.join(sorted(unknown))}")
    if options.trace is None and options.model in ("267m", "7b"):
        parser.error(
            f"--model {options.model} has random weights, which say nothing of use; --force-trace says what to say"
        )
    sys.path.append(PEERS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path.cwd()), PEERS)))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    problems = chosen_problems(parser, options) if options.trace is not None else []
    settings = {
        "modes": modes,
        "batches": batches,
        "model": options.model,
        "trace": None if options.trace is None else options.trace.name,
        "problems": options.problems,
        "epochs": options.epochs if options.trace is None else 1,
    }
    try:
        results = Results(options.json, settings, resume=options.full)
        asyncio.run(measure(options, problems, results, batches))
    except ValueError as error:
        parser.error(str(error))
    figures = figures_of(results.runs, modes, batches, claim_267m=_claim(options))
    report(options.json, figures, settings=settings, runs=[asdict(run) for run in results.runs])


if __name__ == "__main__":
    main()
