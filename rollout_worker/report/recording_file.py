"""Saves a recording to a compressed JSON file, and loads it again."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rollout_api.protocol.timeline import EndedRollout, EngineMeasurement
from rollout_worker.report.recording import JobRecording

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
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    content |= {one.name: getattr(recording, one.name) for one in fields(recording)}
    content["ended"] = _table(EndedRollout, recording.ended)
    content["measurements"] = [
        _values(measurement) | {"engines": _table(EngineMeasurement, measurement.engines)}
        for measurement in recording.measurements
    ]
    content["problems"] = [
        _values(problem) | {"rollouts": [_values(rollout) for rollout in problem.rollouts]}
        for problem in recording.problems
    ]
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


def _values(entry: Any) -> dict[str, Any]:
    return {one.name: getattr(entry, one.name) for one in fields(entry)}


def _table(kind: Any, entries: Sequence[Any]) -> dict[str, Any]:
    """Return dataclasses as rows of values with the names of the columns, which are written only once."""
    names = [one.name for one in fields(kind)]
    return {"columns": names, "rows": [[getattr(entry, name) for name in names] for entry in entries]}


def _rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
