"""The CPU time and the memory that this process may use, according to its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_UNLIMITED = 2**60
"""Version 1 writes a number near 2**63 if memory is not limited."""


def usable_cores() -> float:
    """Return the number of cores whose time this process may use.

    Containers limit the time by a quota of their control group, which the affinity mask does not show.
    """
    cores, limit = len(os.sched_getaffinity(0)), read_cpu_limit()
    return cores if limit is None else min(cores, limit)


def read_cpu_limit(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """Return the number of cores whose time the control group may use; None if it is not limited.

    Args:
        root: where the file systems of control groups are mounted.
        own: the file that names the groups of this process.
    """
    limits = []
    for directory in _directories(root, own, "cpu"):
        quota, period = [*_words(directory / "cpu.max"), "", ""][:2]
        if not quota:
            quota = "".join(_words(directory / "cpu.cfs_quota_us"))
            period = "".join(_words(directory / "cpu.cfs_period_us"))
        if quota.isdigit() and period.isdigit():
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def read_memory_limit(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """Return the memory limit of the control group in bytes; None if there is none. See :func:`read_cpu_limit`."""
    limits = []
    for directory in _directories(root, own, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = "".join(_words(directory / name))
            if text.isdigit() and int(text) < _UNLIMITED:
                limits.append(int(text))
    return min(limits, default=None)


def _directories(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of the group and its ancestors. Each of them may have a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        if controllers and not base.is_dir():
            base = root / controller
        group = base / path.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(base))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
