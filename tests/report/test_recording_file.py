"""Saving a recording and loading it again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rollout_worker.report.recording_file import RecordingError, load_recording, save_recording
from tests.support.recordings import small_job


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "recording.json.gz"
    save_recording(small_job(), file)
    return file


def changed(file: Path, **fields: Any) -> Path:
    content = json.loads(gzip.decompress(file.read_bytes())) | fields
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    return file


def test_a_recording_is_loaded_as_it_was_saved(file: Path) -> None:
    assert small_job() == load_recording(file)
    assert ["recording.json.gz"] == [one.name for one in file.parent.iterdir()]


def test_fields_of_a_later_release_are_ignored(file: Path) -> None:
    assert small_job() == load_recording(changed(file, later=1))


def test_another_version_is_rejected(file: Path) -> None:
    with pytest.raises(RecordingError, match=r"has version 2 .*reads version 1; use the release that wrote it \(9\.1"):
        load_recording(changed(file, version=2, release="9.1"))


def test_a_damaged_recording_is_rejected(file: Path) -> None:
    with pytest.raises(RecordingError, match="damaged recording"):
        load_recording(changed(file, ended={"columns": ["sample"], "rows": [["x"]]}))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RecordingError, match="incomplete"):
        load_recording(file)


@pytest.mark.parametrize(
    "content", [b"text", gzip.compress(b"text", mtime=0), gzip.compress(b'{"name": "x"}', mtime=0)]
)
def test_something_else_is_rejected(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "other"
    file.write_bytes(content)
    with pytest.raises(RecordingError, match="is not a recording of a job"):
        load_recording(file)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"cannot read .*No such file"):
        load_recording(tmp_path / "missing")
