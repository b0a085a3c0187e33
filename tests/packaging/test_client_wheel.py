"""The client's own distribution: what it contains, how large it is, and that it works on each version of Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts.code_map import ROOT, tracked_files
from tests.support.fake_job import record_lengths
from tests.support.updating_job import UpdatingJob

CLIENT = ROOT / "client"
MAX_MEGABYTES = 20
SESSION = Path(__file__).with_name("client_session.py")
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


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


def find_python(version: str) -> str:
    """Return the path of this version of Python, or skip the test if it is not installed."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders = [*map(str, sorted(pyenv.glob(f"versions/{version}.*/bin"))), os.environ["PATH"]]
    found = shutil.which(f"python{version}", path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"Python {version} is not installed")
    return found


@pytest.fixture(params=PYTHONS)
def python(request: pytest.FixtureRequest, tmp_path: Path, distributions: tuple[Path, Path]) -> Path:
    """Python of a new environment that has the client alone."""
    directory = tmp_path / "environment"
    subprocess.run([find_python(request.param), "-m", "venv", "--without-pip", str(directory)], check=True)
    interpreter = directory / "bin" / "python"
    # The versions that are tested here are in pip's cache.
    pip("--python", interpreter, "install", "--no-compile", "-c", ROOT / "requirements" / "cpu.txt", distributions[0])
    return interpreter


def test_the_wheel_has_the_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    wheel, _ = distributions
    assert wheel.name.endswith("-py3-none-any.whl")
    metadata = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    expected = set(tracked_files("rollout_api/*"))
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
    job = UpdatingJob(redis_url)
    record_lengths(job.redis, "problem", 1, [(10, False), (20, False)])
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with job.serving():
        command = [str(python), "-I", str(SESSION), redis_url, job.name, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert 0 == done.returncode, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    environment = python.parents[1]
    assert Path(report.pop("location")).is_relative_to(environment)
    expected = {"tokens": [[1, 1, 1], [2, 2, 2]], "ends": ["stop", "stop"], "mean_length": 15.0}
    assert expected == report
    assert [(1, str(tmp_path))] == [(update.weight_version, update.uri) for update in job.updates]
    assert [0.5, 0.5] == list(job.rewards().values())
    plugin = subprocess.run([environment / "bin" / "kubectl-rollouts", "--help"], capture_output=True, text=True)
    assert "drain" in plugin.stdout, plugin.stderr
    size = sum(path.stat().st_size for path in environment.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < MAX_MEGABYTES * 1e6


def test_the_license_is_that_of_the_repository() -> None:
    assert (ROOT / "LICENSE").read_text() == (CLIENT / "LICENSE").read_text()


def test_the_package_requires_the_client_in_its_own_version_and_has_none_of_its_files() -> None:
    client, package = (tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (CLIENT, ROOT))
    version = package["project"]["version"]
    assert version == client["project"]["version"]
    assert f"das-rollout-client=={version}" in package["project"]["dependencies"]
    shared = {*client["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert set() == shared & {*package["tool"]["scikit-build"]["wheel"]["packages"]}
