"""Creates environments of each version of Python, and runs in them what a wheel is for."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from scripts.release.steps import CheckError, run
from scripts.repository import ROOT
from tests.support.fake_job import record_lengths
from tests.support.updating_job import UpdatingJob

CLIENT_PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""Versions that the client supports."""
PACKAGE_PYTHONS = ("3.11", "3.12")
"""Versions that the package with the native extension supports."""
_PROGRAMS = ROOT / "tests" / "packaging"
_COMMANDS = (
    ("rollout", "--help"),
    ("rollout", "check", "-f", str(ROOT / "examples" / "quickstart.yaml")),
    ("rollout", "check", "-f", str(ROOT / "examples" / "trainer.yaml")),
    ("rollout-history", "--help"),
)


def find_python(version: str) -> str | None:
    """Return the path of this version of Python, or None if it is not installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [*map(str, sorted(pyenv.glob(f"versions/{version}.*/bin"))), os.environ["PATH"]]
    return shutil.which(f"python{version}", path=os.pathsep.join(folders))


def create_environment(python: str, directory: Path) -> Path:
    """Create an environment without pip, and return the path of its Python."""
    run(python, "-m", "venv", "--without-pip", directory)
    return directory / "bin" / "python"


def install(python: Path, *requirements: str | Path) -> None:
    """Install distributions into an environment with this process's pip."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "--python", python, "install", "--no-compile", *requirements)


def _expect_report(python: Path, report: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check a program's report, whose ``location`` must be in the environment of *python*."""
    location = Path(report.pop("location"))
    if not location.is_relative_to(python.parents[1]):
        raise CheckError(f"{python} imports {location}, which is not in its environment")
    if expected != report:
        raise CheckError(f"expected {expected}, got {report}")


def check_client(python: Path, redis_url: str, directory: Path) -> None:
    """Run a trainer's session with a job, and kubectl's plugin, in an environment that has the client.

    Args:
        python: Python of the environment.
        redis_url: URL of an empty Redis server, on which this function answers as a job.
        directory: an empty directory.

    Raises:
        CheckError: if the session fails, or trainer or job receive anything but what they should.
    """
    job = UpdatingJob(redis_url)
    record_lengths(job.redis, "problem", 1, [(10, False), (20, False)])
    (directory / "model.safetensors").write_bytes(b"weights")
    session = _PROGRAMS / "client_session.py"
    with job.serving():
        output = run(python, "-I", session, redis_url, job.name, directory, cwd=directory, timeout_s=60)
    expected = {"tokens": [[1, 1, 1], [2, 2, 2]], "ends": ["stop", "stop"], "mean_length": 15.0}
    _expect_report(python, json.loads(output), expected)
    received = {
        "updates": [(update.weight_version, update.uri) for update in job.updates],
        "rewards": list(job.rewards().values()),
    }
    if received != (wanted := {"updates": [(1, str(directory))], "rewards": [0.5, 0.5]}):
        raise CheckError(f"the job received {received} instead of {wanted}")
    if "drain" not in run(python.with_name("kubectl-rollouts"), "--help", cwd=directory):
        raise CheckError("kubectl-rollouts --help does not name the command drain")


def check_package(python: Path, directory: Path) -> None:
    """Run the package's commands, and draft with the native extension, in an environment that has the package.

    Args:
        python: Python of the environment.
        directory: an empty directory, so that nothing is imported from the repository.

    Raises:
        CheckError: if a command fails, or the draft is not the expected one.
    """
    for command, *arguments in _COMMANDS:
        run(python.with_name(command), *arguments, cwd=directory)
    output = run(python, "-I", _PROGRAMS / "package_session.py", cwd=directory)
    _expect_report(python, json.loads(output), {"added": 1, "draft": [7, 8]})
