"""How published weights come into an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from rollout_api.protocol.messages import WeightsKind, WeightUpdate
from rollout_api.weights.broadcast import BACKENDS
from rollout_api.weights.checksum import checksum
from rollout_worker.engine.host import Engine
from rollout_worker.engine.model_source import ModelError, resolve_adapter, resolve_checkpoint
from rollout_worker.engine.weights import Incoming

Load = Callable[[Engine], Awaitable[float]]
"""Puts weights into an engine; returns the seconds in which nothing was decoded, raises EngineError."""


class WeightsError(RuntimeError):
    """Published weights that cannot be used; the text says which, and why."""


class WeightTransport(Protocol):
    """One way from a trainer to an engine."""

    async def prepare(self, update: WeightUpdate, engine_id: str) -> Load:
        """Do all that can be done while the engine goes on decoding, as verifying a checksum.

        Args:
            update: what was published.
            engine_id: of the engine that is to load it.

        Raises:
            WeightsError: if the weights are not there, not allowed, or not what was published.
        """
        ...


class SharedFiles:
    """Weights in a directory that trainer and workers both see."""

    def __init__(self, model: Path, cache: Path, allowed_roots: Sequence[str], *, model_uri: str = "") -> None:
        """Allow what lies in the model's directory, in the model *cache* or below *allowed_roots*.

        *model_uri* is another name of the model's directory: its address in the manifest.
        """
        self._model, self._cache, self._allowed_roots = model, cache, list(allowed_roots)
        self._model_uri = model_uri

    async def prepare(self, update: WeightUpdate, engine_id: str) -> Load:
        """See :class:`WeightTransport`; takes as long as reading the files."""
        directory = await asyncio.to_thread(self._locate, update)
        if update.weights is WeightsKind.LORA:
            return lambda engine: engine.load_adapter(directory, update.weight_version)
        return lambda engine: engine.load_weights(directory, update.weight_version, update.mode)

    def _locate(self, update: WeightUpdate) -> Path:
        resolve = resolve_adapter if update.weights is WeightsKind.LORA else resolve_checkpoint
        uri = str(self._model) if update.uri == self._model_uri else update.uri
        try:
            directory = resolve(uri, self._cache, self._model, self._allowed_roots)
            found = checksum(directory) if update.sha256 is not None else None
        except (ModelError, OSError) as error:
            raise WeightsError(str(error)) from error
        if found != update.sha256:
            raise WeightsError(
                f"{directory} has the checksum {found}, version {update.weight_version} was published with "
                f"{update.sha256}: it was changed, or is still being written"
            )
        return directory


class TrainerMemory:
    """Weights that a trainer broadcasts; an engine that comes later cannot have them."""

    async def prepare(self, update: WeightUpdate, engine_id: str) -> Load:
        """See :class:`WeightTransport`."""
        sent = update.broadcast
        try:
            at = urlsplit(update.uri)
            backend, host, port = at.scheme, at.hostname, at.port
        except ValueError:  # a port that is no number of one
            backend, host, port = "", None, None
        full = update.weights is WeightsKind.FULL
        if sent is None or not full or backend not in BACKENDS or host is None or port is None:
            raise WeightsError(
                f"a broadcast of {update.weights} weights from {update.uri}: it must be of full ones, from "
                "nccl://host:port or gloo://host:port"
            )
        if engine_id not in sent.ranks:
            raise WeightsError(
                f"version {update.weight_version} was broadcast before this engine was there; it takes the next, or "
                "these weights published from a directory under a later version"
            )
        tensors = [(tensor.name, tensor.dtype, tensor.shape) for tensor in sent.tensors]
        incoming = Incoming(backend, host, port, sent.group, sent.ranks[engine_id], sent.world_size, tensors)
        return lambda engine: engine.receive_weights(incoming, update.weight_version, update.mode)


class ByAddress:
    """From memory what says so, where that is allowed; everything else from files."""

    def __init__(self, files: SharedFiles, memory: TrainerMemory | None) -> None:
        self._files, self._memory = files, memory

    async def prepare(self, update: WeightUpdate, engine_id: str) -> Load:
        """See :class:`WeightTransport`."""
        if update.broadcast is None:
            return await self._files.prepare(update, engine_id)
        if self._memory is None:
            raise WeightsError("engines take no weights from a trainer's memory: spec.weights.broadcast is false")
        return await self._memory.prepare(update, engine_id)
