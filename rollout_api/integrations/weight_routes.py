"""The routes of a trainer's weights to the engines of a job: from the trainer's memory, or through files."""

from __future__ import annotations

import logging
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

from rollout_api.errors import WeightsError
from rollout_api.str_enum import StrEnum

logger = logging.getLogger(__name__)


class Route(StrEnum):
    """A way from the trainer to the engines."""

    MEMORY = "memory"
    """The trainer sends the weights to the engines through vLLM's weight transfer."""
    FILES = "files"
    """The trainer writes the weights to a directory, and the engines load them from there."""


def why_not_from_memory(backend: str, *, has_gpu: bool) -> str:
    """Return why weights cannot be sent to the engines from memory; an empty string if they can.

    Args:
        backend: vLLM's backend of the engines' weight transfer; an empty string if they have none.
        has_gpu: whether the trainer's process has a GPU.
    """
    if not backend:
        return "spec.weights.transfer of the job is none"
    if backend not in ("nccl", "gloo"):
        return f"the engines receive weights with {backend}, for which only vLLM has a sender"
    if backend == "nccl" and not has_gpu:
        return "the engines receive weights with NCCL, and this process has no GPU"
    if backend == "nccl" and find_spec("vllm") is None:
        return "the engines receive weights with NCCL, for which vLLM must be installed in this environment"
    return ""


class WeightRoutes:
    """Chooses the route of each weight version, and logs the choice when it changes.

    Weights are sent from memory if that is possible, and otherwise through files. If sending fails, the same weights go
    through files, or if there is no directory, once more from memory. If none were sent successfully before, for
    example because the engines cannot reach the trainer, it is not tried again as long as there is a directory.

    Args:
        directory: directory that trainer and job share; None if there is none.
        setting: how the user sets this directory, for errors.
    """

    def __init__(self, directory: object | None, setting: str) -> None:
        self._directory, self._setting = directory, setting
        self._has_succeeded = False
        self._obstacle = ""
        """Why nothing is sent from memory any more."""
        self._logged: tuple[Route, str] | None = None

    def first(self, obstacle: str) -> Route:
        """Return the first route to try for a version.

        Args:
            obstacle: why it cannot be sent from memory; an empty string if it can.

        Raises:
            WeightsError: there is no route.
        """
        obstacle = obstacle or self._obstacle
        route = Route.FILES if obstacle else Route.MEMORY
        if obstacle and self._directory is None:
            raise WeightsError(
                f"the weights cannot be published. From memory: {obstacle}. Through files: no directory is set. Remove "
                f"the obstacle, or set {self._setting} to a directory that trainer and job share (spec.weights)"
            )
        if self._logged != (route, obstacle):
            self._logged = route, obstacle
            if obstacle:
                logger.warning("Weights are published through files in %s: %s.", self._directory, obstacle)
            else:
                logger.info("Weights are published from memory.")
        return route

    def after_failure(self, error: WeightsError) -> Route:
        """Return the route for a version that could not be sent from memory.

        Args:
            error: why it could not be sent.
        """
        if self._directory is None:
            logger.warning("Weights could not be published from memory; trying once more: %s", error)
            return Route.MEMORY
        if not self._has_succeeded:
            self._obstacle = f"the first attempt has failed ({error})"
        logger.warning("Weights could not be published from memory; publishing them through files: %s", error)
        return Route.FILES

    def succeeded(self) -> None:
        """Record that weights were sent from memory."""
        self._has_succeeded = True


class VersionDirectories:
    """The directories of one trainer's weight versions.

    Args:
        root: parent directory, which the job sees under the same path.
        num_kept: number of versions to keep, at least 1.

    Raises:
        ValueError: *num_kept* is less than 1.
    """

    def __init__(self, root: str | Path, num_kept: int) -> None:
        if num_kept < 1:
            raise ValueError(f"kept_versions = {num_kept}: at least the version in use must be kept")
        self._root, self._num_kept = Path(root).absolute(), num_kept
        self._next = self._root / "next"

    def new(self) -> Path:
        """Return a directory, which does not exist yet, for weights that have no version yet."""
        shutil.rmtree(self._next, ignore_errors=True)
        return self._next

    def assign(self, version: int) -> Path:
        """Rename the new directory for a version that the job does not serve yet, and return the path."""
        directory = self._directory(version)
        shutil.rmtree(directory, ignore_errors=True)
        return self._next.rename(directory)

    def delete_before(self, version: int) -> None:
        """Delete the oldest versions up to *version*, including those of earlier runs of the trainer.

        Later versions are kept: they belong to an earlier run, and possibly to another job.
        """
        found = [(int(m[1]), path) for path in self._root.iterdir() if (m := re.fullmatch(r"version-(\d+)", path.name))]
        earlier = [(number, path) for number, path in found if number <= version and path != self._directory(version)]
        for _, path in sorted(earlier, reverse=True)[self._num_kept - 1 :]:
            shutil.rmtree(path, ignore_errors=True)

    def _directory(self, version: int) -> Path:
        return self._root / f"version-{version:06d}"
