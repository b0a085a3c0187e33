"""Directories of published weight versions, of which only the newest are kept."""

from __future__ import annotations

import re
import shutil
from pathlib import Path


class VersionDirectories:
    """The directories of one trainer's weight versions.

    Args:
        root: parent directory, which the job sees under the same path.
        num_kept: number of versions to keep, at least 1.

    Raises:
        ValueError: *num_kept* is less than 1.
    """

    def __init__(self, root: str | Path, num_kept: int) -> None:
        if num_kept < 1:
            raise ValueError(f"kept_versions = {num_kept}: at least the version in use must be kept")
        self._root, self._num_kept = Path(root).absolute(), num_kept
        self._next = self._root / "next"

    def new(self) -> Path:
        """Return a directory, which does not exist yet, for weights that have no version yet."""
        shutil.rmtree(self._next, ignore_errors=True)
        return self._next

    def assign(self, version: int) -> Path:
        """Rename the new directory for a version that the job does not serve yet, and return the path."""
        directory = self._directory(version)
        shutil.rmtree(directory, ignore_errors=True)
        return self._next.rename(directory)

    def delete_before(self, version: int) -> None:
        """Delete the oldest versions up to *version*, including those of earlier runs of the trainer.

        Later versions are kept: they belong to an earlier run, and possibly to another job.
        """
        found = [(int(m[1]), path) for path in self._root.iterdir() if (m := re.fullmatch(r"version-(\d+)", path.name))]
        earlier = [(number, path) for number, path in found if number <= version and path != self._directory(version)]
        for _, path in sorted(earlier, reverse=True)[self._num_kept - 1 :]:
            shutil.rmtree(path, ignore_errors=True)

    def _directory(self, version: int) -> Path:
        return self._root / f"version-{version:06d}"
