"""The versions of Python on this machine, and new environments of them."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from scripts.release.steps import run

CLIENT_PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""Versions that the client supports."""
PACKAGE_PYTHONS = ("3.11", "3.12")
"""Versions that the package with the native extension supports."""


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
