"""Child processes that do not outlive their parent, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

import psutil

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """For ``preexec_fn``: ask Linux for a SIGTERM when the parent is gone, so that not even kill -9 leaves it behind.

    It is one system call, which nothing that a lock of another thread protects could hold up.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Reaper:
    """Ends what was started below this process and stays behind when it is gone, as Ray's agents do.

    It is a process of its own that reads from this one: the end of that pipe is the end of this process.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollout_worker.child_process"], stdin=subprocess.PIPE, process_group=0
        )

    def know(self) -> None:
        """Take note of all processes that are below this one now."""
        if self._process.stdin is not None:
            for child in psutil.Process().children(recursive=True):
                if child.pid != self._process.pid:
                    self._process.stdin.write(f"{child.pid} {child.create_time()}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """End what is left of them now."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def _reap() -> None:
    known = [line.split() for line in sys.stdin]
    for pid, created in known:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):  # and not another that got its number
                process.kill()


if __name__ == "__main__":
    os.chdir("/")
    _reap()
