"""How a trainer's weights reach the engines of a job: from the trainer's memory, or through files."""

from __future__ import annotations

import logging
from importlib.util import find_spec

from rollout_api.errors import WeightsError
from rollout_api.str_enum import StrEnum

logger = logging.getLogger(__name__)


class Route(StrEnum):
    """A way from the trainer to the engines."""

    MEMORY = "memory"
    """The trainer sends the weights to the engines through vLLM's weight transfer."""
    FILES = "files"
    """The trainer writes the weights to a directory from which the engines load them."""


def why_not_from_memory(backend: str, *, has_gpu: bool) -> str:
    """Return why weights cannot be sent to the engines from memory; an empty string if they can.

    Args:
        backend: vLLM's backend with which the engines receive weights; an empty string if they receive none.
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
        """Return the route on which a version is sent first.

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
        """Return the route on which a version is sent once more after it could not be sent from memory.

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
