"""Child processes that end with their parent, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def spawn_with_parent(
    command: Sequence[str | Path], *, end_signal: signal.Signals = signal.SIGTERM, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process that gets a signal from Linux when the calling thread ends, even if this process is killed.

    Args:
        command: the program and its arguments.
        end_signal: the signal.
        options: further arguments of :class:`subprocess.Popen`.

    Raises:
        OSError: if the program cannot be started.
    """

    def end_with_parent() -> None:
        _prctl(_PR_SET_PDEATHSIG, end_signal)

    # A preexec_fn is unsafe in a process with threads if it waits for a lock that another thread held during the fork.
    # This one only makes a system call.
    return subprocess.Popen(command, preexec_fn=end_with_parent, **options)  # noqa: PLW1509


class Reaper:
    """Kills descendants of this process that outlive it, as Ray's agents do, except those that exist already.

    The reaper is a process of its own. It reads from a pipe, whose end tells it that this process has ended.
    """

    def __init__(self) -> None:
        self._ignored = {(child.pid, child.create_time()) for child in _descendants()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollout_store.runtime.child_process"], stdin=subprocess.PIPE, process_group=0
        )

    def track_descendants(self) -> None:
        """Record the descendants that this process has now, so that they are killed when it ends."""
        if self._process.stdin is None:
            return
        for child in _descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                identity = child.pid, child.create_time()
                if child.pid != self._process.pid and identity not in self._ignored:
                    self._process.stdin.write(f"{child.pid} {child.create_time()}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill the recorded processes that are still running."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def _descendants() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


def _reap() -> None:
    """Kill the processes that are named on stdin, once it is closed."""
    tracked = [line.split() for line in sys.stdin]
    for pid, created in tracked:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):  # otherwise the pid was reused
                process.kill()


if __name__ == "__main__":
    os.chdir("/")
    _reap()
