"""A job that a benchmark runs as a user does, with ``rollout run``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.redis_server import redis_server

_EXIT_TIMEOUT_S = 120.0
"""Seconds within which the job has to exit after it was closed."""


@contextmanager
def run_job(manifest: dict[str, Any], directory: Path) -> Iterator[str]:
    """Run a job with ``rollout run`` and an empty Redis server, and yield the server's URL.

    The caller closes the job through the client; the context manager then waits for it to exit.

    Args:
        manifest: the RolloutJob.
        directory: directory for the job's state and ``job.log``. It is emptied first and kept afterwards.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    job = directory / "job.yaml"
    job.write_text(yaml.safe_dump(manifest))
    with redis_server() as url:
        command = [sys.executable, "-m", "rollout_worker.cli", "run", "-f", str(job), "--redis", url, "--no-compare"]
        command += ["--state-dir", str(directory / "state")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (directory / "job.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            try:
                yield url
                process.wait(timeout=_EXIT_TIMEOUT_S)
            finally:
                process.terminate()
                process.wait()
