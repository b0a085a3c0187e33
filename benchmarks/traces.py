"""Recorded rollouts as benchmarks read them.

A trace is a file of JSON lines (gzip or not) with ``problem_id``, ``sample_index``, ``epoch_or_checkpoint``, ``prompt``
and ``text``; of agents with tools also ``segments``, a list of ``["gen" | "env", text]``: what the model said, and what
its environment answered.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

Tokens = npt.NDArray[np.uint32]
_ENCODED_AT_ONCE = 256
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Segment:
    """A stretch of a trajectory."""

    generated: bool
    """By the model; else the environment's."""
    tokens: Tokens


@dataclass(frozen=True)
class Trajectory:
    """One recorded rollout, in tokens."""

    problem: str
    sample: int
    checkpoint: str
    """Of the model; empty where the trace knows none."""
    prompt: Tokens
    segments: tuple[Segment, ...]

    @property
    def generated(self) -> int:
        """Tokens that the model sampled."""
        return sum(len(segment.tokens) for segment in self.segments if segment.generated)


def load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``, gzip or not."""
    data = file.read_bytes()
    return Tokenizer.from_buffer(gzip.decompress(data) if file.suffix == ".gz" else data)


def read_trace(file: Path, tokenizer: Tokenizer) -> list[Trajectory]:
    """All trajectories of a trace, in its order.

    Raises:
        ValueError: for a line that is none; says which.
    """
    texts: list[str] = []
    shapes: list[tuple[Any, list[bool]]] = []
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                one = json.loads(line)
                parts = one.get("segments") or [["gen", one["text"]]]
                texts += [one["prompt"], *(text for _, text in parts)]
                checkpoint = one.get("epoch_or_checkpoint")
                checkpoint = "" if checkpoint is None else str(checkpoint)
                about = (str(one["problem_id"]), int(one["sample_index"]), checkpoint)
                shapes.append((about, [{"gen": True, "env": False}[who] for who, _ in parts]))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{file}, line {number} is no trajectory: {type(error).__name__}: {error}") from None
    if not shapes:
        raise ValueError(f"{file} has no trajectory")
    encoded = iter(_encoded(texts, tokenizer))
    return [
        Trajectory(*about, next(encoded), tuple(Segment(generated, next(encoded)) for generated in parts))
        for about, parts in shapes
    ]


def _encoded(texts: list[str], tokenizer: Tokenizer) -> list[Tokens]:
    found: list[Tokens] = []
    for first in range(0, len(texts), _ENCODED_AT_ONCE):
        batch = tokenizer.encode_batch_fast(texts[first : first + _ENCODED_AT_ONCE], add_special_tokens=False)
        found += [np.array(one.ids, dtype=np.uint32) for one in batch]
    return found


def by_problem(trajectories: list[Trajectory]) -> dict[str, list[Trajectory]]:
    """Grouped, in the order of the trace."""
    groups: dict[str, list[Trajectory]] = {}
    for one in trajectories:
        groups.setdefault(one.problem, []).append(one)
    return groups


def checkpoints(trajectories: Iterable[Trajectory]) -> list[str]:
    """Those of the trace, the earliest first: by their numbers where they differ in nothing else, else as they come."""
    found = list(dict.fromkeys(one.checkpoint for one in trajectories))
    if len({_NUMBER.sub("", name) for name in found}) == 1:
        found.sort(key=lambda name: [int(number) for number in _NUMBER.findall(name)])
    return found
