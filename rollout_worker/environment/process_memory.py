"""Memory of a process and all its descendants, from Linux's /proc."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


def process_tree(pid: int) -> list[int]:
    """Return *pid* and the ids of all its descendants.

    This is called several times per second. psutil would read the state of every process of the machine for it.
    """
    found = [pid]
    for parent in found:
        # The kernel lists children by the thread that created them.
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def kill_tree(pid: int) -> None:
    """Kill a process, which leads a process group, with its group and all its descendants."""
    for process in process_tree(pid)[1:]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def exceeds_memory(pid: int, limit: int) -> bool:
    """Return whether a process and its descendants together use more than *limit* bytes.

    Pages that several of them share count once. Counting them takes longer, and is only done if it may matter.
    """
    processes = process_tree(pid)
    return sum(map(_resident_bytes, processes)) > limit and sum(map(_proportional_bytes, processes)) > limit


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):  # it has ended
        return 0


def _proportional_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, IndexError):
        pass
    return 0
