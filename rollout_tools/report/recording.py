"""All that a report about a job needs, as plain data, and as a compressed JSON file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import pvariance
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from rollout_api.protocol.timeline import EndedRollout, Measurement


class PastLength(NamedTuple):
    """The length of a rollout in the history, which may belong to an earlier job."""

    generation: int
    length: int
    """Number of tokens of the response."""
    cut_off: bool
    """Whether the rollout was cut off, so that its full length would have been larger."""
    reward: float | None


class DraftCounts(NamedTuple):
    """Verified draft tokens of one engine at one position of its drafts."""

    engine: str
    """Name of the engine."""
    position: str
    """The position, from 1. The last one, such as ``16+``, also counts all later positions."""
    drafted: int
    accepted: int

    @property
    def number(self) -> int:
        """The position as a number."""
        return int(self.position.removesuffix("+"))


class ClassCounts(NamedTuple):
    """What one engine has drafted for the rollouts of one length class."""

    engine: str
    """Name of the engine."""
    length_class: str
    steps: int
    """Number of verification steps of these rollouts."""
    budget: int
    """Number of draft tokens that were permitted in these steps."""
    drafted: int
    accepted: int


@dataclass(frozen=True)
class ViewedRollout:
    """A rollout whose text the report shows."""

    rollout_id: str
    weight_version: int
    """Weight version that sampled the last token."""
    generation: int
    finish_reason: str
    reward: float | None
    num_tokens: int
    """Number of tokens of the whole rollout."""
    tokens: list[str]
    """Text of each of the first tokens; their ids if no tokenizer was at hand."""
    sources: list[int]
    """Code of each of these tokens: whether it is an accepted draft token, and its source.

    See :mod:`rollout_api.protocol.history_encoding`. Empty if no draft was verified, or if it is unknown."""


@dataclass(frozen=True)
class ViewedProblem:
    """A problem whose rollouts the report shows."""

    problem_id: str
    prompt: str | None
    """Text of the prompt; None if it is unknown, because neither a job nor its history keeps prompts."""
    rollouts: list[ViewedRollout]
    """Rollouts of this and earlier jobs, oldest generation first."""
    num_omitted: int
    """Number of older rollouts that were left out because the recording would become too large."""


@dataclass(frozen=True)
class JobRecording:
    """A job as it was at one moment."""

    name: str
    """``namespace/name`` of the job; its uid if the name is unknown."""
    uid: str
    recorded_at: float
    """Unix time, by the clock of Redis."""
    release: str
    """Release of das-rollout that made the recording."""
    state: str
    """``running``, ``closed`` or ``failed``."""
    model: str
    history: str
    """Full name of the history."""
    is_dataset: bool
    """Whether the job samples a dataset, so that its training steps are epochs."""
    decoded: bool
    """Whether the shown tokens are texts; otherwise they are ids."""
    ended: list[EndedRollout] = field(default_factory=list)
    """The rollouts that have ended, in order. The oldest are missing if there were very many."""
    rewards: list[float | None] = field(default_factory=list)
    """Reward of each of these rollouts; None if the history has none."""
    measurements: list[Measurement] = field(default_factory=list)
    """Measurements in the order of their times."""
    lengths: dict[str, list[PastLength]] = field(default_factory=dict)
    """Problem of this job → lengths of its rollouts in the history, oldest generation first."""
    positions: list[DraftCounts] = field(default_factory=list)
    """Draft tokens by position, of the engines that are still registered."""
    classes: list[ClassCounts] = field(default_factory=list)
    """Draft tokens by length class, of those of these engines whose draft policy determines classes."""
    problems: list[ViewedProblem] = field(default_factory=list)
    """The problems whose rollouts the report shows."""


MAX_PROBLEMS = 12
"""Number of problems whose rollouts a report shows by default."""
FORMAT = "das-rollout recording"
VERSION = 1
"""Version of the format, which changes when files of earlier releases could not be read any more."""
_RECORDING: TypeAdapter[JobRecording] = TypeAdapter(JobRecording)
_MAX_BYTES = 2**30
"""Maximum decompressed size of a file, so that damaged data does not request all memory."""


class RecordingError(ValueError):
    """A file is not a recording that this release can read; the message says why and what to do."""


def save_recording(recording: JobRecording, file: Path) -> None:
    """Write *recording* to *file*, which it replaces at once when everything is written.

    Raises:
        OSError: if the file cannot be written.
    """
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION} | _RECORDING.dump_python(recording)
    content["ended"] = _table(content["ended"])
    for measurement in content["measurements"]:
        measurement["engines"] = _table(measurement["engines"])
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        with gzip.open(temporary, "wt", encoding="utf-8", compresslevel=6) as stream:
            stream.write(json.dumps(content, separators=(",", ":")))
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def load_recording(file: Path) -> JobRecording:
    """Read a recording.

    Raises:
        RecordingError: if the file cannot be read, is something else, or was written by a later release.
    """
    try:
        with gzip.open(file, "rb") as stream:
            text = stream.read(_MAX_BYTES + 1)
    except gzip.BadGzipFile:
        raise RecordingError(f"{file} is not a recording of a job, which is a compressed JSON file") from None
    except EOFError:
        raise RecordingError(f"{file} is incomplete; write it again with rollout report JOB --save") from None
    except OSError as error:
        raise RecordingError(f"cannot read {file}: {error.strerror or error}") from None
    if len(text) > _MAX_BYTES:
        raise RecordingError(f"{file} is too large for a recording of a job")
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RecordingError(f"{file} is not a recording of a job; write one with rollout report JOB --save FILE")
    if content.get("version") != VERSION:
        raise RecordingError(
            f"{file} has version {content.get('version')} of the format of recordings, and this release reads version "
            f"{VERSION}; use the release that wrote it ({content.get('release')})"
        )
    try:
        content["ended"] = _rows(content["ended"])
        for measurement in content["measurements"]:
            measurement["engines"] = _rows(measurement["engines"])
        return _RECORDING.validate_python(content)
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RecordingError(f"{file} is a damaged recording ({reason}); write it again") from None


def _table(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return entries with equal names as rows of values with the names of the columns, which are written only once."""
    return {"columns": list(entries[0]) if entries else [], "rows": [list(entry.values()) for entry in entries]}


def _rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def choose_problems(lengths: Mapping[str, Sequence[PastLength]], count: int = MAX_PROBLEMS) -> list[str]:
    """Return the problems that are most worth reading.

    Those with the highest variance of rewards and those with the longest rollouts take turns. Problems of a single
    generation come last, because there is nothing to compare.
    """
    known = {problem: entries for problem, entries in lengths.items() if entries}
    by_length = sorted(known, key=lambda problem: (-max(entry.length for entry in known[problem]), problem))
    by_variance = sorted(known, key=lambda problem: (-_variance(known[problem]), problem))
    turns = dict.fromkeys(problem for pair in zip(by_variance, by_length, strict=True) for problem in pair)
    return sorted(turns, key=lambda problem: len({entry.generation for entry in known[problem]}) == 1)[:count]


def _variance(entries: Sequence[PastLength]) -> float:
    rewards = [entry.reward for entry in entries if entry.reward is not None]
    return pvariance(rewards) if rewards else 0.0
