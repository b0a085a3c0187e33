"""The problems of a trace, with their history and what is generated again, and how a command is told which."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from benchmarks.traces import Trajectory, by_problem, checkpoints, load_tokenizer, read_trace


class Problem(NamedTuple):
    """One problem of a trace."""

    name: str
    history: list[Trajectory]
    running: list[Trajectory]


def problems_of(
    trajectories: list[Trajectory], train: str | None, evaluated: str | None, history: int | None
) -> list[Problem]:
    """Tell history and what is generated apart.

    Args:
        trajectories: of the trace.
        train: checkpoint of the history; None: the last but one, or the only one.
        evaluated: checkpoint of what is generated; None: the last.
        history: rollouts of a problem; None: all, or half of its samples where both are of one checkpoint.

    Raises:
        ValueError: for a checkpoint that is not there, or if nothing is left to generate.
    """
    known = checkpoints(trajectories)
    for name in (train, evaluated):
        if name is not None and name not in known:
            raise ValueError(f"the trace has no checkpoint {name!r}; it has {', '.join(known)}")
    evaluated = known[-1] if evaluated is None else evaluated
    train = known[max(0, len(known) - 2)] if train is None else train
    found = []
    for name, group in by_problem(trajectories).items():
        before = [one for one in group if one.checkpoint == train]
        running = [one for one in group if one.checkpoint == evaluated]
        if train == evaluated:
            half = len(group) // 2 if history is None else history
            before, running = before[:half], running[half:]
        elif history is not None:
            before = before[:history]
        if running:
            found.append(Problem(name, before, running))
    if not found:
        raise ValueError("no rollout is left to generate; ask for less --history")
    return found


def add_trace_arguments(parser: argparse.ArgumentParser, *, flag: str = "--trace", required: bool = True) -> None:
    """Have a command take a trace, and what of it is history."""
    parser.add_argument(flag, dest="trace", type=Path, required=required)
    parser.add_argument("--tokenizer", type=Path, required=required, help="tokenizer.json, gzip or not")
    parser.add_argument("--train-checkpoint", help="of the history [default: the last but one]")
    parser.add_argument("--eval-checkpoint", help="of what is generated [default: the last]")
    parser.add_argument("--problems", type=int, help="the first so many")


def chosen_problems(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *, history: int | None = None
) -> list[Problem]:
    """The problems that a command was told of; *history* as in :func:`problems_of`. Ends the command if it is wrong."""
    try:
        trajectories = read_trace(options.trace, load_tokenizer(options.tokenizer))
        found = problems_of(trajectories, options.train_checkpoint, options.eval_checkpoint, history)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return found[: options.problems]
