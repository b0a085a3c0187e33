"""A job as a person runs it, for as long as a benchmark needs it."""

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

from rollout_worker.embedded_redis import EmbeddedRedis

ENDING_S = 120.0


@contextmanager
def served(manifest: dict[str, Any], directory: Path) -> Iterator[str]:
    """``rollout run`` with an empty Redis of its own; the URL of that. The caller closes the job.

    Args:
        manifest: of the job.
        directory: made anew, for state and ``job.log``; it stays.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    job = directory / "job.yaml"
    job.write_text(yaml.safe_dump(manifest))
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR)
    server = EmbeddedRedis(directory / "redis", keep_open=lock)
    try:
        url = server.start()
        command = [sys.executable, "-m", "rollout_worker.cli", "run", "-f", str(job), "--redis", url, "--no-compare"]
        command += ["--state-dir", str(directory / "state")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (directory / "job.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            try:
                yield url
                process.wait(timeout=ENDING_S)
            finally:
                process.terminate()
                process.wait()
    finally:
        server.stop()
        os.close(lock)
