"""Records the manifest of a local job in its state directory, so that other commands know how it was started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollout_api.manifest.rollout_job import RolloutJob
from rollout_worker.launch.errors import StateError

_FILE = "manifest.json"


def record_manifest(directory: Path, job: RolloutJob) -> None:
    """Write the manifest to a file that only its owner can read, because it may contain a password of Redis."""
    temporary = directory / f"{_FILE}.tmp"
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(job.model_dump(mode="json", by_alias=True), indent=1))
    temporary.replace(directory / _FILE)


def read_recorded_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of the last run of the job in *directory*; None if none was recorded.

    Raises:
        StateError: if the file cannot be read.
    """
    path = directory / _FILE
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StateError(f"cannot read {path}: {error}") from None
    return manifest
