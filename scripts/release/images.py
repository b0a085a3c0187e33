"""Builds the images and starts them as the pods do: as a user without privileges, on a read-only file system.

With Docker, docker-bake.hcl says how they are built. Otherwise, buildah builds them on a base of Debian packages, as
for the test cluster, and Podman starts them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.release.steps import CheckError, NotCheckedError, run
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


@dataclass(frozen=True)
class Image:
    """An image, and the commands that its containers run."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    """Programs with their arguments; a program without a name is the entry point."""
    buildah_name: str | None
    """Its name among the images that build-images builds; None if it is not one of them."""


_WORKER_COMMANDS = (("", "--help"), ("", "worker", "--help"), ("", "head", "--help"), ("python3", "-c", _PROBE))
IMAGES = (
    Image(
        "das-rollout-operator",
        (
            ("", "--help"),
            ("rollout-redis-users", "--help"),
            ("rollout-history", "--help"),
            ("python3", "-c", _PROBE),
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
    if os.geteuid() or not all(map(shutil.which, ("apt-get", "podman", "runc"))):
        raise NotCheckedError("needs Docker, or Debian with podman, runc and the permissions of root")
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
