"""Where a trainer's weights lie while they are published: a directory for each version, of which the last few stay."""

from __future__ import annotations

import re
import shutil
from pathlib import Path


class VersionDirectories:
    """The directories of one trainer below one directory, which the job sees under the same path."""

    def __init__(self, root: str | Path, kept: int) -> None:
        """Keep *kept* versions, at least 1, below *root*."""
        if kept < 1:
            raise ValueError(f"kept_versions = {kept}: the version in use must stay")
        self._root, self._kept = Path(root).absolute(), kept

    def new(self) -> Path:
        """Where to write weights that have no version yet; nothing is there."""
        directory = self._root / "next"
        shutil.rmtree(directory, ignore_errors=True)
        return directory

    def number(self, written: Path, version: int) -> Path:
        """Give what was written its version, which the job does not serve yet."""
        directory = self._directory(version)
        shutil.rmtree(directory, ignore_errors=True)
        return written.rename(directory)

    def forget_before(self, version: int) -> None:
        """Delete what is older than the last versions up to this one, by whichever run of the trainer.

        Later versions are of an earlier run, and maybe of a job that is left.
        """
        found = [(int(m[1]), path) for path in self._root.iterdir() if (m := re.fullmatch(r"version-(\d+)", path.name))]
        earlier = [(number, path) for number, path in found if number <= version and path != self._directory(version)]
        for _, path in sorted(earlier, reverse=True)[self._kept - 1 :]:
            shutil.rmtree(path, ignore_errors=True)

    def _directory(self, version: int) -> Path:
        return self._root / f"version-{version:06d}"
