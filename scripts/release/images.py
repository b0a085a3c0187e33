"""Builds the images and starts them as the pods do: ``python -m scripts.release.images``.

They run as a user without privileges, on a read-only file system. With Docker, docker-bake.hcl says how they are built.
Otherwise, buildah builds them on a base of Debian packages, as for the test cluster, and Podman starts them. The base
of the image for GPUs is not at hand then, and what is installed on it is resolved only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packaging.utils import canonicalize_name

from scripts.release.steps import CheckError, NotCheckedError, Report, run
from scripts.release.versions import current_version
from scripts.repository import ROOT

_BUILD_IMAGES = ROOT / "tests" / "support" / "cluster" / "build-images"
_STORE = Path.home() / ".cache" / "das-rollout" / "images"
"""Directory of the images; ``make images`` uses it, too."""
_USER = "1000"
_RESTRICTIONS = (
    *("--network", "none", "--read-only", "--tmpfs", "/tmp", "--env", "HOME=/tmp", "--user", _USER),  # noqa: S108
    *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    # Podman would raise the limits, which some machines do not permit.
    *("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"),
)
"""Settings of the pods' containers. /tmp is a volume of a pod."""
_PROBE = (
    "import os, pathlib, sys; assert os.getuid() == 1000, os.getuid()\n"
    "try: pathlib.Path('/written').touch()\n"
    "except OSError: pathlib.Path('/tmp/written').touch()\n"
    "else: sys.exit('the root file system is writable')"
)
_IMPORT = """
import importlib, pkgutil, sys
for package in sys.argv[1:]:
    path = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(path, f"{package}.", onerror=lambda name: None):
        try:
            module.name.endswith("__main__") or importlib.import_module(module.name)
        except ImportError as error:
            if error.name not in ("verl", "verifiers"):
                raise
"""
"""Imports all modules of packages, except for those that need a trainer or an environment that is not in the image."""
_UV = Path(sys.executable).with_name("uv")
_GPU_PLATFORM = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_35")
"""The Python and the C library of vLLM's image."""


@dataclass(frozen=True)
class Image:
    """An image, and the commands that its containers run."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    """Programs with their arguments; a program without a name is the entry point."""
    buildah_name: str | None
    """Its name among the images that build-images builds; None if it is not one of them."""


_WORKER_PACKAGES = ("rollout_api", "rollout_head", "rollout_server", "rollout_store", "rollout_tools", "rollout_worker")
_OPERATOR_PACKAGES = ("rollout_api", "rollout_operator", "rollout_store.history", "rollout_store.history_service")
_WORKER_COMMANDS = (
    ("", "--help"),
    ("", "worker", "--help"),
    ("", "head", "--help"),
    ("python3", "-c", _PROBE),
    ("python3", "-c", _IMPORT, *_WORKER_PACKAGES),
)
IMAGES = (
    Image(
        "das-rollout-operator",
        (
            ("", "--help"),
            ("rollout-redis-users", "--help"),
            ("rollout-history", "--help"),
            ("python3", "-c", _PROBE),
            ("python3", "-c", _IMPORT, *_OPERATOR_PACKAGES),
        ),
        buildah_name="das-rollout-operator",
    ),
    Image("das-rollout-worker-cpu", _WORKER_COMMANDS, buildah_name="das-rollout-worker"),
    Image("das-rollout-worker", _WORKER_COMMANDS, buildah_name=None),
)


def check_image(image: Image) -> None:
    """Build an image, and run its commands.

    Raises:
        CheckError: if it cannot be built, a command fails, or it would run as root by default.
        NotCheckedError: if this machine can neither build it with Docker nor with buildah.
    """
    engine, name = _build(image)
    user = run(*engine, "image", "inspect", "--format", "{{.Config.User}}", name).strip()
    if user != _USER:
        raise CheckError(f"{name} runs as user {user or 'root'} by default instead of {_USER}")
    for program, *arguments in image.commands:
        options = ("--entrypoint", program) if program else ()
        run(*engine, "run", "--rm", *_RESTRICTIONS, *options, name, *arguments, timeout_s=120)


def check_gpu_requirements() -> None:
    """Check that vLLM's builds for GPUs accept the tested versions of all packages that a worker needs besides.

    Raises:
        CheckError: if they do not, or if the requirements of a worker lack a package that vLLM does not need.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    tested = ROOT / "requirements" / "worker.txt"
    with tempfile.TemporaryDirectory() as temporary:
        base, worker = Path(temporary, "base.in"), Path(temporary, "worker.in")
        base.write_text("\n".join(extras["gpu"]))
        worker.write_text("\n".join(extras["worker"]))
        in_base = _resolve(base)
        resolved = _resolve(base, worker, ROOT / "rollout_api" / "pyproject.toml", "--constraints", tested)
    if missing := resolved - in_base - _names(tested.read_text()):
        raise CheckError(f"{tested.name} lacks {', '.join(sorted(missing))}. Run make generate.")


def _resolve(*arguments: str | Path) -> set[str]:
    """Return the names of all packages that the requirements need in the image for GPUs."""
    return _names(run(_UV, "pip", "compile", "-q", *_GPU_PLATFORM, *arguments))


def _names(requirements: str) -> set[str]:
    return {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", requirements, re.MULTILINE)}


def _build(image: Image) -> tuple[tuple[str, ...], str]:
    """Build an image; return the command line of the engine that has it, and its name there."""
    if _succeeds("docker", "info"):
        if not _succeeds("docker", "buildx", "version"):
            raise NotCheckedError("Docker lacks its plugin buildx")
        version = current_version()
        bake = ("docker", "buildx", "bake", "--load", image.name)
        run("env", "REGISTRY=", f"VERSION={version}", *bake, cwd=ROOT, timeout_s=7200)
        return ("docker",), f"{image.name}:{version}"
    if image.buildah_name is None:
        raise NotCheckedError("needs Docker, because its base is vLLM's image for GPUs")
    if os.geteuid() or shutil.which("apt-get") is None:
        raise NotCheckedError("needs Docker, or Debian with the permissions of root")
    run(_BUILD_IMAGES, _STORE, timeout_s=7200)
    storage = ("--root", str(_STORE / "store"), "--runroot", str(_STORE / "run"), "--storage-driver", "overlay")
    # Podman would use crun if it is installed, which does not start containers on machines with both kinds of cgroups.
    return ("podman", *storage, "--cgroup-manager", "cgroupfs", "--runtime", "runc"), f"localhost/{image.buildah_name}"


def _succeeds(*command: str) -> bool:
    """Return whether a program is installed and succeeds."""
    return (
        shutil.which(command[0]) is not None
        and subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    )


def check_images(report: Report) -> None:
    """Check all images, and what the one for GPUs installs."""
    report.step("image das-rollout-worker: its packages fit together", check_gpu_requirements)
    for image in IMAGES:
        report.step(f"image {image.name}: build and start", partial(check_image, image))


if __name__ == "__main__":
    images = Report()
    check_images(images)
    sys.exit(images.finish(strict=False))
