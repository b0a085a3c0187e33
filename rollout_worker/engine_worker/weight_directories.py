"""Published weights that are in a directory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rollout_api.protocol.messages import WeightsKind, WeightUpdate
from rollout_api.weights.checksum import checksum
from rollout_store.models.model_source import ModelError, resolve_adapter, resolve_checkpoint
from rollout_worker.engine.engine import Engine

Load = Callable[[Engine], Awaitable[float]]
"""Loads weights into an engine and returns for how many seconds decoding was paused; raises EngineError."""
Checksum = Callable[[Path, str], Awaitable[str]]
"""Returns the checksum of the weights in a directory, given the expected one; raises OSError."""


async def compute_checksum(directory: Path, expected: str) -> str:
    """Return the checksum of the weights in *directory*, whatever is expected; see :data:`Checksum`."""
    return await asyncio.to_thread(checksum, directory)


class UnusableWeightsError(RuntimeError):
    """Published weights cannot be used. The text says which ones, and why."""


class WeightDirectories:
    """Finds and verifies weights in directories that the trainer and the workers share."""

    def __init__(
        self,
        model: Path,
        cache: Path,
        allowed_roots: Sequence[str],
        *,
        model_uri: str = "",
        checksum: Checksum = compute_checksum,
    ) -> None:
        """Allow weights in the model's directory, in the model cache and below certain directories.

        Args:
            model: the model's directory.
            cache: the model cache.
            allowed_roots: directories below which trainers may publish weights.
            model_uri: the model's address in the manifest, which means the model's directory.
            checksum: computes checksums.
        """
        self._model, self._cache, self._allowed_roots = model, cache, list(allowed_roots)
        self._model_uri, self._checksum = model_uri, checksum

    async def prepare(self, update: WeightUpdate) -> Load:
        """Verify published weights while the engine continues decoding.

        The first engine takes as long as reading the files.

        Returns:
            A function that loads the weights.

        Raises:
            UnusableWeightsError: if the weights do not exist, are not allowed, or differ from what was published.
        """
        is_adapter, version, mode = update.weights_kind is WeightsKind.LORA, update.weight_version, update.mode
        resolve = resolve_adapter if is_adapter else resolve_checkpoint
        uri = str(self._model) if update.uri == self._model_uri else update.uri
        try:
            directory = await asyncio.to_thread(resolve, uri, self._cache, self._model, self._allowed_roots)
            await self._verify(directory, update)
        except (ModelError, OSError) as error:
            raise UnusableWeightsError(str(error)) from error
        if is_adapter:
            return lambda engine: engine.load_adapter(directory, version)
        return lambda engine: engine.load_weights(directory, version, mode)

    async def _verify(self, directory: Path, update: WeightUpdate) -> None:
        expected = update.sha256
        if expected is None:
            return
        found = await self._checksum(directory, expected)
        if found != expected:
            raise UnusableWeightsError(
                f"{directory} has the checksum {found}, but weight version {update.weight_version} was published with "
                f"{expected}: the files were changed, or are still being written"
            )
