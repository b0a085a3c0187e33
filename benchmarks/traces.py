"""Recorded rollouts, read from trace files, and the problems of a trace, which CLI options select.

A trace is a file of JSON lines (optionally gzipped) with the fields ``problem_id``, ``sample_index``,
``epoch_or_checkpoint``, ``prompt`` and ``text``. Traces of agents that use tools also have ``segments``, a list of
``["gen" | "env", text]`` pairs: what the model sampled, and what its environment answered. Instead of texts, a trace
may have ``prompt_tokens`` and ``tokens``: token ids as base64 of little-endian 16-bit integers.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Tokens = npt.NDArray[np.uint32]
_ENCODE_BATCH = 256
"""Texts that are tokenized in one call."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Segment:
    """A part of a trajectory that the model or its environment produced."""

    generated: bool
    """Whether the model sampled the tokens; otherwise they are the environment's answer."""
    tokens: Tokens


@dataclass(frozen=True)
class Trajectory:
    """One recorded rollout or conversation, tokenized."""

    problem: str
    sample: int
    checkpoint: str
    """The checkpoint of the model that sampled it; empty if the trace has no checkpoints."""
    prompt: Tokens
    segments: tuple[Segment, ...]

    @property
    def generated(self) -> int:
        """Number of tokens that the model sampled."""
        return sum(len(segment.tokens) for segment in self.segments if segment.generated)


def named_files(text: str) -> tuple[str, Path]:
    """Return name and path of a trace that is given as ``NAME=FILE`` or ``FILE``."""
    name, separator, file = text.rpartition("=")
    path = Path(file)
    return (name if separator else path.name.split(".")[0]), path


def load_tokenizer(file: Path) -> Tokenizer:
    """Load a ``tokenizer.json`` file, which may be gzipped."""
    data = file.read_bytes()
    return Tokenizer.from_buffer(gzip.decompress(data) if file.suffix == ".gz" else data)


def read_trace(file: Path, tokenizer: Tokenizer | None) -> list[Trajectory]:
    """Read and tokenize all trajectories of a trace, in the order of the file.

    Raises:
        ValueError: if a line is not a valid trajectory, or if the file has none; the message names the line.
    """
    parts: list[str | Tokens] = []
    headers: list[tuple[Any, list[bool]]] = []
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if "tokens" in entry:
                    segments = [["gen", decode(entry["tokens"]).astype(np.uint32)]]
                    prompt = decode(entry["prompt_tokens"]).astype(np.uint32)
                else:
                    segments = entry.get("segments") or [["gen", entry["text"]]]
                    prompt = entry["prompt"]
                parts += [prompt, *(text for _, text in segments)]
                checkpoint = entry.get("epoch_or_checkpoint")
                checkpoint = "" if checkpoint is None else str(checkpoint)
                identity = (str(entry["problem_id"]), int(entry["sample_index"]), checkpoint)
                headers.append((identity, [{"gen": True, "env": False}[kind] for kind, _ in segments]))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{file}, line {number}, is not a trajectory: {type(error).__name__}: {error}"
                ) from None
    if not headers:
        raise ValueError(f"{file} contains no trajectories")
    encoded = iter(_encode(parts, tokenizer))
    return [
        Trajectory(*identity, next(encoded), tuple(Segment(generated, next(encoded)) for generated in kinds))
        for identity, kinds in headers
    ]


def decode(text: str, dtype: str = "<u2") -> Any:
    """Return the array of numbers that a trace contains as base64; by default, token ids."""
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def _encode(parts: list[str | Tokens], tokenizer: Tokenizer | None) -> list[Tokens]:
    """Return the token ids of each part, which is a text or consists of token ids already."""
    encoded: list[Tokens] = []
    for first in range(0, len(parts), _ENCODE_BATCH):
        batch = parts[first : first + _ENCODE_BATCH]
        texts = [part for part in batch if isinstance(part, str)]
        if texts and tokenizer is None:
            raise ValueError("the trace contains text; give its tokenizer")
        encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False) if tokenizer is not None else ())
        encoded += [np.array(next(encodings).ids, np.uint32) if isinstance(part, str) else part for part in batch]
    return encoded


def by_problem(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    """Group trajectories by problem, in the order of the trace."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.problem, []).append(trajectory)
    return groups


def checkpoints(trajectories: Iterable[Trajectory]) -> list[str]:
    """Return the checkpoints of a trace, earliest first.

    Names that differ only in their numbers are sorted by those; otherwise the order of the trace is kept.
    """
    names = list(dict.fromkeys(trajectory.checkpoint for trajectory in trajectories))
    if len({_NUMBER.sub("", name) for name in names}) == 1:
        names.sort(key=lambda name: [int(number) for number in _NUMBER.findall(name)])
    return names


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
