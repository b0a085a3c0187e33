"""Where an engine finds the weights that a trainer has published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rollout_api.messages import WeightsKind, WeightUpdate
from rollout_api.weights import checksum
from rollout_worker.engine.model_source import ModelError, resolve_adapter, resolve_checkpoint


class WeightsError(RuntimeError):
    """Published weights that cannot be used; the text says which, and why."""


class WeightTransport(Protocol):
    """Brings published weights to where an engine can load them."""

    def locate(self, update: WeightUpdate) -> Path:
        """The local directory of an update's weights, verified; may take as long as reading them.

        Raises:
            WeightsError: if they are not there, not allowed, or not what was published.
        """
        ...


class SharedFiles:
    """Weights in a directory that trainer and workers both see."""

    def __init__(self, model: Path, cache: Path, allowed_roots: Sequence[str]) -> None:
        """Allow what lies in the model's directory, in the model *cache* or below *allowed_roots*."""
        self._model, self._cache, self._allowed_roots = model, cache, list(allowed_roots)

    def locate(self, update: WeightUpdate) -> Path:
        """See :class:`WeightTransport`."""
        resolve = resolve_adapter if update.weights is WeightsKind.LORA else resolve_checkpoint
        try:
            directory = resolve(update.uri, self._cache, self._model, self._allowed_roots)
            found = checksum(directory) if update.sha256 is not None else None
        except (ModelError, OSError) as error:
            raise WeightsError(str(error)) from error
        if found != update.sha256:
            raise WeightsError(
                f"{directory} has the checksum {found}, version {update.weight_version} was published with "
                f"{update.sha256}: it was changed, or is still being written"
            )
        return directory
