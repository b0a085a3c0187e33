"""Ray's processes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

import psutil

from rollout_worker.job.limits import OBJECT_STORE_BYTES
from rollout_worker.launch.limits import CONNECT_TIMEOUT_S, RAY_STOP_TIMEOUT_S
from rollout_worker.runtime.child_process import spawn_with_parent


@contextlib.contextmanager
def run_ray(options: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``ray start`` in a process group of its own, and end all its processes on exit.

    Args:
        options: further options of ``ray start``.
        environment: environment variables of Ray's processes and actors, in addition to those of this process.
    """
    # The module is run directly, because the ``ray`` command is in a directory that depends on the image.
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", *options]
    process = spawn_with_parent(command, env={**os.environ, **environment}, process_group=0, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        descendants = _descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(RAY_STOP_TIMEOUT_S)
        process.kill()
        process.wait()
        for descendant in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()


def is_reachable(address: str) -> bool:
    """Return whether something listens at *address*, which has the form ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []
