"""Builds the source distributions and wheels, and checks what they contain."""

from __future__ import annotations

import fnmatch
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.code_map import ROOT, tracked_files
from scripts.release.pythons import create_environment
from scripts.release.steps import CheckError, run


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
        directory: a new directory, in which the wheel is built.
    """
    directory.mkdir()
    interpreter = create_environment(python, directory / "environment")
    run(interpreter, "-m", "ensurepip")
    pip = (interpreter, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", directory, source)
    [wheel] = directory.glob("*.whl")
    return wheel.rename(source.parent / wheel.name)


def _names(distribution: Path) -> set[str]:
    """Return the names of all files in a wheel or, without its top-level folder, a source distribution."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as wheel:
            return {name for name in wheel.namelist() if not name.endswith("/")}
    with tarfile.open(distribution) as source:
        return {member.name.partition("/")[2] for member in source.getmembers() if member.isfile()}


def _expect(distribution: Path, expected: set[str], actual: set[str]) -> None:
    problems = [f"{name} is missing" for name in sorted(expected - actual)]
    problems += [f"{name} should not be in it" for name in sorted(actual - expected)]
    if problems:
        raise CheckError(f"{distribution.name}: " + "; ".join(problems))


def _project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def _metadata_files(wheel: Path) -> set[str]:
    """Return the names of a wheel's files that describe it."""
    name, version, *_ = wheel.name.split("-")
    files = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    return {f"{name}-{version}.dist-info/{file}" for file in files}


def check_client_files(distributions: Distributions) -> None:
    """Check that the client's distributions have all files of ``rollout_api`` and nothing else of the project."""
    package = set(tracked_files("rollout_api/*"))
    _expect(
        distributions.client,
        package | _metadata_files(distributions.client),
        _names(distributions.client),
    )
    others = {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml"}
    source = distributions.client_source
    _expect(source, package | others, _names(source) - {".gitignore"})  # hatchling adds the latter


def check_package_files(distributions: Distributions) -> None:
    """Check that the package's distributions have all files of its packages, and nothing that they need not have."""
    settings = _project(ROOT)["tool"]["scikit-build"]
    excluded = settings["sdist"]["exclude"]
    tracked = [name for name in tracked_files() if not any(_is_below(name, pattern) for pattern in excluded)]
    _expect(distributions.source, {*tracked, "PKG-INFO"}, _names(distributions.source))
    excluded = settings["wheel"]["exclude"]
    for python, wheel in distributions.wheels.items():
        tag = f"cp{python.replace('.', '')}"
        if f"-{tag}-{tag}-" not in wheel.name:
            raise CheckError(f"{wheel.name} is not a wheel for Python {python}")
        expected = _metadata_files(wheel)
        for folder in map(Path, settings["wheel"]["packages"]):
            files = tracked_files(f"{folder}/*")
            expected |= {
                str(Path(name).relative_to(folder.parent))
                for name in files
                if not any(_is_below(name, pattern) for pattern in excluded)
            }
        names = _names(wheel)
        native = fnmatch.filter(names, f"rollout_worker/drafting/_native.cpython-{python.replace('.', '')}-*.so")
        if len(native) != 1:
            raise CheckError(f"{wheel.name} has {len(native)} native extensions; expected one for Python {python}")
        _expect(wheel, expected, names - {*native})


def _is_below(name: str, pattern: str) -> bool:
    """Return whether a file is what a pattern of pyproject.toml names, or is below it."""
    folder = pattern.strip("/").removesuffix("/**")
    return name == folder or name.startswith(f"{folder}/")
