"""Builds the source distributions and wheels, checks what they contain, and writes their SBOMs."""

from __future__ import annotations

import fnmatch
import json
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from scripts.release.environments import create_environment
from scripts.release.steps import CheckError, run
from scripts.repository import ROOT


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
    run(tools, "-m", "build", "--outdir", directory, ROOT / "client")
    run(tools, "-m", "build", "--sdist", "--outdir", directory, ROOT)
    [client_source], [client] = (
        directory.glob("das_rollout_client-*.tar.gz"),
        directory.glob("das_rollout_client-*.whl"),
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
    run(*check, "--package", ROOT / "rollout_api", distributions.client)
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
