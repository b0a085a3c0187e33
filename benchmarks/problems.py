"""The problems of a trace: which rollouts are history, which are evaluated, and the CLI options that select them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from benchmarks.traces import Trajectory, by_problem, checkpoints, load_tokenizer, read_trace


class Problem(NamedTuple):
    """One problem of a trace."""

    name: str
    history: list[Trajectory]
    evaluated: list[Trajectory]
    """The rollouts that the benchmark replays."""


def problems_of(
    trajectories: list[Trajectory], train: str | None, evaluated: str | None, history: int | None
) -> list[Problem]:
    """Split each problem's trajectories into history and evaluated rollouts.

    Args:
        trajectories: all trajectories of a trace.
        train: checkpoint of the history; None selects the last but one, or the only one.
        evaluated: checkpoint of the evaluated rollouts; None selects the last.
        history: maximum history rollouts per problem; None selects all, or half of the samples if history and
            evaluated rollouts have the same checkpoint.

    Raises:
        ValueError: if a checkpoint does not exist, or if no rollouts are left to evaluate.
    """
    known = checkpoints(trajectories)
    for name in (train, evaluated):
        if name is not None and name not in known:
            raise ValueError(f"the trace has no checkpoint {name!r}; its checkpoints are {', '.join(known)}")
    evaluated = known[-1] if evaluated is None else evaluated
    train = known[max(0, len(known) - 2)] if train is None else train
    problems = []
    for name, group in by_problem(trajectories).items():
        earlier = [trajectory for trajectory in group if trajectory.checkpoint == train]
        later = [trajectory for trajectory in group if trajectory.checkpoint == evaluated]
        if train == evaluated:
            half = len(group) // 2 if history is None else history
            earlier, later = earlier[:half], later[half:]
        elif history is not None:
            earlier = earlier[:history]
        if later:
            problems.append(Problem(name, earlier, later))
    if not problems:
        raise ValueError("no rollouts are left to evaluate; use a smaller --history")
    return problems


def add_trace_arguments(parser: argparse.ArgumentParser, *, flag: str = "--trace", required: bool = True) -> None:
    """Add the options that select a trace, its checkpoints and its problems."""
    parser.add_argument(
        flag, dest="trace", type=Path, required=required, help="trace file (JSON lines, optionally gzipped)"
    )
    parser.add_argument("--tokenizer", type=Path, required=required, help="tokenizer.json, optionally gzipped")
    parser.add_argument("--train-checkpoint", help="checkpoint of the history [default: the last but one]")
    parser.add_argument("--eval-checkpoint", help="checkpoint of the evaluated rollouts [default: the last]")
    parser.add_argument("--problems", type=int, help="use only the first N problems")


def selected_problems(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *, history: int | None = None
) -> list[Problem]:
    """Return the problems that the command line selects; exit with a usage error if the selection is invalid.

    *history* has the same meaning as in :func:`problems_of`.
    """
    try:
        trajectories = read_trace(options.trace, load_tokenizer(options.tokenizer))
        problems = problems_of(trajectories, options.train_checkpoint, options.eval_checkpoint, history)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return problems[: options.problems]
