"""The client's own distribution: what it contains, how large it is, and that it works on each version of Python."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from scripts.release.distributions import CLIENT_PYTHONS, check_client, create_environment, find_python, install
from scripts.repository import ROOT, tracked_files

CLIENT = ROOT / "rollout_api"
MAX_MEGABYTES = 20


def pip(*arguments: str | Path) -> None:
    """Run pip, and fail with its output."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
    subprocess.run(command, cwd=CLIENT, check=True, capture_output=True)
    [wheel], [source] = directory.glob("*.whl"), directory.glob("*.tar.gz")
    return wheel, source


def names(wheel: Path) -> set[str]:
    """Return the names of a wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(params=CLIENT_PYTHONS)
def python(request: pytest.FixtureRequest, tmp_path: Path, distributions: tuple[Path, Path]) -> Path:
    """Python of a new environment that has the client alone."""
    found = find_python(request.param)
    if found is None:
        pytest.skip(f"Python {request.param} is not installed")
    interpreter = create_environment(found, tmp_path / "environment")
    # The versions that are tested here are in pip's cache.
    install(interpreter, "-c", ROOT / "requirements" / "cpu.txt", distributions[0])
    return interpreter


def test_the_wheel_has_the_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    wheel, _ = distributions
    assert wheel.name.endswith("-py3-none-any.whl")
    metadata = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    about = {f"rollout_api/{name}" for name in ("LICENSE", "README.md", "pyproject.toml")}
    expected = set(tracked_files("rollout_api/*")) - about
    assert expected == {name for name in names(wheel) if not name.startswith(metadata)}
    assert f"{metadata}/licenses/LICENSE" in names(wheel)
    with zipfile.ZipFile(wheel) as archive:
        scripts = archive.read(f"{metadata}/entry_points.txt").decode().split("\n")
    assert ["[console_scripts]", "kubectl-rollouts = rollout_api.kubectl_plugin.cli:main", ""] == scripts


def test_the_source_distribution_builds_the_same_wheel(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, source = distributions
    with tarfile.open(source) as archive:
        assert all(member.isfile() for member in archive.getmembers())
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, source)
    [rebuilt] = tmp_path.glob("*.whl")
    assert names(wheel) == names(rebuilt)


def test_a_session_in_an_environment_with_the_client_alone(python: Path, redis_url: str, tmp_path: Path) -> None:
    check_client(python, redis_url, tmp_path)
    environment = python.parents[1]
    size = sum(path.stat().st_size for path in environment.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < MAX_MEGABYTES * 1e6


def test_the_license_is_that_of_the_repository() -> None:
    assert (ROOT / "LICENSE").read_text() == (CLIENT / "LICENSE").read_text()


def test_the_package_has_none_of_the_clients_files() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert CLIENT.name not in package["tool"]["scikit-build"]["wheel"]["packages"]
