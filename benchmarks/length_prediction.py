"""Compares predicted lengths of recorded rollouts with their lengths; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.figures import Figure, report
from benchmarks.rollout_bench.job import KnownLengths
from benchmarks.rollout_bench.workload import Group, Job, make_job, make_long_tail_job
from benchmarks.traces import Tokens, load_tokenizer, named_files, read_trace
from rollout_store.arrays import Floats
from rollout_worker.drafting import SuffixIndex
from rollout_worker.policy.length_predictor import Evidence, Example, LengthPredictor, Source
from rollout_worker.policy.marginal_with_lengths import EXAMINE_FACTOR, EXAMINE_TOKENS

LIVES = (0.1, 0.5, 0.9)
"""Shares of a rollout's life at which its predicted length is compared with the real one."""
QUANTILES = (0.1, 0.5, 0.9)
"""Predicted quantiles that are compared: as large a share of the rollouts should end earlier."""
_COUNT = 20
"""Number of quantiles that are predicted; those of QUANTILES are between them."""
_BASELINE = "lengths of all problems"
SOURCES: dict[str, tuple[Source, ...]] = {
    _BASELINE: (),
    "lengths of the problem": (Source.LENGTHS,),
    "position of the text": (Source.TEXT,),
    "loops": (Source.LOOPS,),
    "all sources": tuple(Source),
}


class Running(NamedTuple):
    """A rollout that is replayed."""

    problem: str
    tokens: Tokens
    handle: int
    points: tuple[int, ...]
    """Numbers of tokens at which its length is predicted."""


class Prediction(NamedTuple):
    """A predicted length."""

    life: float
    """Share of the rollout's life at which it was made; 0 at other times."""
    example: Example
    quantiles: Floats
    """Of the logarithm of the remaining tokens."""


class Outcome(NamedTuple):
    """A prediction and what became of it."""

    life: float
    quantiles: Floats
    """See :class:`Prediction`."""
    log_rest: float
    """The logarithm of the tokens that remained."""


class Replay:
    """Replays the rollouts of a job, all of a training step at the same speed."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._index = SuffixIndex(threads=1)
        self._lengths = KnownLengths()
        self._open_of: defaultdict[str, list[int]] = defaultdict(list)
        """Numbers of the running rollouts of each problem."""
        self._predictors = {name: LengthPredictor(sources) for name, sources in SOURCES.items()}
        self.outcomes: defaultdict[tuple[str, int], list[Outcome]] = defaultdict(list)
        """By name of the sources and epoch."""

    def run(self) -> None:
        """Replay all training steps."""
        for number, step in enumerate(self._job.steps):
            self._run_step(number, step.epoch, step.groups)

    def _run_step(self, number: int, epoch: int, groups: Sequence[Group]) -> None:
        running = [rollout for group in groups for rollout in self._open(group)]
        examples: list[dict[str, list[Prediction]]] = [defaultdict(list) for _ in running]
        queue = [(point, i) for i, rollout in enumerate(running) for point in rollout.points]
        heapq.heapify(queue)
        done = [0] * len(running)
        for i, rollout in enumerate(running):
            self._open_of[rollout.problem].append(i)
        while queue:
            point, i = heapq.heappop(queue)
            rollout = running[i]
            self._index.extend(rollout.handle, rollout.tokens[done[i] : point])
            done[i] = point
            length = len(rollout.tokens)
            if point < length:
                self._predict(rollout, point, done, examples[i])
                continue
            self._index.close(rollout.handle)
            self._open_of[rollout.problem].remove(i)
            self._index.add(rollout.problem, [(f"{number}/{i}", number, rollout.tokens)])
            self._lengths.add(rollout.problem, number, length)
            for name, made in examples[i].items():
                for life, example, quantiles in made:
                    rest = np.log(length - example.generated)
                    self.outcomes[name, epoch].append(Outcome(life, quantiles, float(rest)))
        for rollout, made in zip(running, examples, strict=True):
            for name, predictor in self._predictors.items():
                predictor.learn([example for _, example, _ in made[name]], len(rollout.tokens))
        self._lengths.end_step()

    def _open(self, group: Group) -> Iterator[Running]:
        for trajectory in group.rollouts:
            tokens = np.concatenate([segment.tokens for segment in trajectory.segments if segment.generated])
            points = {max(1, int(life * len(tokens))) for life in LIVES} | {len(tokens)}
            point = float(EXAMINE_TOKENS)
            while point < len(tokens):
                points.add(int(point))
                point = point * EXAMINE_FACTOR + EXAMINE_TOKENS
            yield Running(
                group.problem, tokens, self._index.open(group.problem, trajectory.prompt), tuple(sorted(points))
            )

    def _predict(self, rollout: Running, point: int, done: Sequence[int], made: dict[str, list[Prediction]]) -> None:
        self._index.wait_idle()
        life = next((one for one in LIVES if point == max(1, int(one * len(rollout.tokens)))), 0.0)
        evidence = Evidence(
            point,
            self._job.max_tokens,
            self._lengths.of_problem(rollout.problem),
            self._lengths.overall(),
            [done[j] for j in self._open_of[rollout.problem]],
            *self._index.text_position(rollout.handle),
        )
        for name, predictor in self._predictors.items():
            example = predictor.examine(evidence)
            made[name].append(Prediction(life, example, predictor.predict(example, _COUNT)))


def explained(outcomes: Sequence[Outcome], baseline: Sequence[Outcome]) -> float:
    """Return the share of the variance of the remaining tokens, in logarithms, that predictions explain.

    It is negative if they are worse than those of *baseline*.
    """
    errors, others = (
        sum((float(np.mean(one.quantiles)) - one.log_rest) ** 2 for one in each) for each in (outcomes, baseline)
    )
    return 1.0 - errors / others


def coverage(outcomes: Sequence[Outcome], quantile: float) -> float:
    """Return the share of the rollouts that ended before a predicted quantile."""
    points = (np.arange(_COUNT) + 0.5) / _COUNT
    return float(np.mean([one.log_rest <= np.interp(quantile, points, one.quantiles) for one in outcomes]))


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.length_prediction", description=__doc__)
    parser.add_argument("--trace", action="append", required=True, type=named_files, help="NAME=FILE; may be repeated")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json, optionally gzipped")
    parser.add_argument("--half", choices=("tuning", "report"), default="report", help="[%(default)s]")
    parser.add_argument("--long-tail", type=int, metavar="SEEDS", help="as in benchmarks.rollout_bench")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    figures: list[Figure] = []
    for name, file in options.trace:
        trajectories = read_trace(file, tokenizer)
        if options.long_tail:
            jobs = [
                make_long_tail_job(trajectories, options.half, rollouts=128, seed=seed)
                for seed in range(options.long_tail)
            ]
            name += " with a long tail"
        else:
            jobs = [make_job(trajectories, options.half, blocks=1, max_tokens=16_384)]
        outcomes: defaultdict[tuple[str, float], list[Outcome]] = defaultdict(list)
        for job in jobs:
            replay = Replay(job)
            replay.run()
            for (sources, epoch), of_epoch in replay.outcomes.items():
                for one in of_epoch if epoch else ():
                    outcomes[sources, one.life].append(one)
        for sources, life in itertools.product(SOURCES, (0.0, *LIVES)):
            when = f"at {life:.0%} of the life" if life else "whenever it is predicted"
            case = f"{name}, {sources}, {when}"
            these, baseline = outcomes[sources, life], outcomes[_BASELINE, life]
            share = explained(these, baseline)
            figures.append(Figure(f"explained variance, {case}", share, "share", _BASELINE, ">=", None))
            for quantile in QUANTILES:
                share = coverage(these, quantile)
                figures.append(Figure(f"rollouts below quantile {quantile}, {case}", share, "share", "", ">=", None))
    report(options.json, figures)


if __name__ == "__main__":
    main()
