"""Builds the source distributions and wheels, checks what they contain, and writes their SBOMs.

The wheels are installed into environments of each version of Python, in which what they are for is run.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import sys
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.release.steps import CheckError, run
from scripts.repository import ROOT
from tests.support.fake_job import record_lengths
from tests.support.updating_job import UpdatingJob


@dataclass
class Distributions:
    """Paths of the distributions of a release."""

    client_source: Path
    client: Path
    """The client's wheel, which is for every version of Python."""
    source: Path
    wheels: dict[str, Path] = field(default_factory=dict)
    """Version of Python → the package's wheel for it and for this machine."""

    def paths(self) -> list[Path]:
        """Return the paths of all distributions."""
        return [self.client_source, self.client, self.source, *self.wheels.values()]


def build_pure(tools: Path, directory: Path) -> Distributions:
    """Build the source distributions, and the client's wheel from its source distribution.

    Args:
        tools: Python of an environment with ``build``.
        directory: where the distributions are written; earlier ones are removed.
    """
    directory.mkdir(exist_ok=True)
    for pattern in ("das_rollout*.whl", "das_rollout*.tar.gz"):
        for path in directory.glob(pattern):
            path.unlink()
    run(tools, "-m", "build", "--outdir", directory, ROOT / "rollout_api")
    run(tools, "-m", "build", "--sdist", "--outdir", directory, ROOT)
    [client_source], [client] = (
        directory.glob("das_rollout_api-*.tar.gz"),
        directory.glob("das_rollout_api-*.whl"),
    )
    [source] = directory.glob("das_rollout-*.tar.gz")
    return Distributions(client_source, client, source)


def build_wheel(python: str, source: Path, directory: Path) -> Path:
    """Build the package's wheel for a version of Python from the source distribution, and return its path.

    Args:
        python: path of this version of Python.
        source: the source distribution.
        directory: a new directory for building the wheel.
    """
    directory.mkdir()
    interpreter = create_environment(python, directory / "environment")
    run(interpreter, "-m", "ensurepip")
    pip = (interpreter, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", directory, source)
    [wheel] = directory.glob("*.whl")
    return wheel.rename(source.parent / wheel.name)


def check_contents(tools: Path, distributions: Distributions) -> None:
    """Check the metadata of all distributions, and that the wheels have all modules of their packages and no others.

    The wheels are built from the source distributions, so these have all that is needed, too.

    Args:
        tools: Python of an environment with ``twine`` and ``check-wheel-contents``.
        distributions: the distributions.

    Raises:
        CheckError: if something is missing or should not be in them, or a wheel has no native extension for its Python.
    """
    run(tools, "-m", "twine", "check", "--strict", *distributions.paths())
    check = (tools.with_name("check-wheel-contents"), "--no-config")
    omitted = "LICENSE,README.md,pyproject.toml,__pycache__,*.pyc"
    run(*check, "--package", ROOT / "rollout_api", "--package-omit", omitted, distributions.client)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
    expected = [option for package in packages for option in ("--package", ROOT / package)]
    for python, wheel in distributions.wheels.items():
        # C++ sources, and extensions that an editable installation may have left in the tree, are not in it.
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        native = fnmatch.filter(names, f"rollout_worker/drafting/_native.cpython-{python.replace('.', '')}-*.so")
        if len(native) != 1:
            raise CheckError(f"{wheel.name} has {len(native)} native extensions; expected one for Python {python}")
        # W102 would report the extension, which is not in the tree.
        run(*check, "--ignore", "W102", *expected, "--package-omit", "native,__pycache__,*.pyc,*.so", wheel)


def write_sbom(tools: Path, python: Path, project: Path, output: Path) -> None:
    """Write the software bill of materials of a distribution and everything that is installed with it.

    Args:
        tools: Python of an environment with ``cyclonedx-bom``, which validates the result.
        python: Python of an environment that has the distribution and what it requires, and nothing else.
        project: pyproject.toml of the distribution.
        output: the file that is written, in CycloneDX's format.
    """
    options = ("--pyproject", project, "--mc-type", "library", "--output-reproducible", "--output-format", "JSON")
    run(tools.with_name("cyclonedx-py"), "environment", *options, "--output-file", output, python)
    sbom = json.loads(output.read_text())
    for component in sbom["components"]:
        # Where on this machine the project's own wheels were installed from says nothing to readers.
        references = component.get("externalReferences", [])
        component["externalReferences"] = [one for one in references if not one["url"].startswith("file:")]
    output.write_text(json.dumps(sbom, indent=2, sort_keys=True) + "\n")


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
