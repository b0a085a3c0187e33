"""How published weights are brought into an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from rollout_api.protocol.messages import WeightsKind, WeightUpdate
from rollout_api.weights.broadcast import BACKENDS
from rollout_api.weights.checksum import checksum
from rollout_worker.engine.checkpoint_check import BroadcastWeights
from rollout_worker.engine.engine import Engine
from rollout_worker.engine.model_source import ModelError, allowed_directory, resolve_adapter, resolve_checkpoint
from rollout_worker.engine.patched_checkpoint import DeltaVersion


def broadcast_address(uri: str) -> tuple[str, str, int] | None:
    """Return backend, host and port of a process group; None if *uri* is not that of a group."""
    try:
        address = urlsplit(uri)
        backend, host, port = address.scheme, address.hostname, address.port
    except ValueError:  # not a valid port
        return None
    return None if backend not in BACKENDS or host is None or port is None else (backend, host, port)


Load = Callable[[Engine], Awaitable[float]]
"""Loads weights into an engine and returns for how many seconds decoding was paused; raises EngineError."""
Checksum = Callable[[Path, str], Awaitable[str]]
"""Returns the checksum of the weights in a directory, given the expected one; raises OSError."""


async def compute_checksum(directory: Path, expected: str) -> str:
    """Return the checksum of the weights in *directory*, whatever is expected; see :data:`Checksum`."""
    return await asyncio.to_thread(checksum, directory)


class UnusableWeightsError(RuntimeError):
    """Published weights cannot be used. The text says which ones, and why."""


class MissedBroadcastError(UnusableWeightsError):
    """Published weights were broadcast without this engine. Another engine may pass them on."""


class WeightTransport(Protocol):
    """A way to bring weights from a trainer into an engine."""

    async def prepare(self, update: WeightUpdate, engine_id: str) -> Load:
        """Do everything that is possible while the engine continues decoding, such as verifying a checksum.

        Args:
            update: the published weights.
            engine_id: id of the engine that loads them.

        Returns:
            A function that loads the weights.

        Raises:
            UnusableWeightsError: if the weights do not exist, are not allowed, or differ from what was published.
        """
        ...


class DirectoryTransport:
    """Loads weights from a directory that the trainer and the workers share."""

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
        self._verified_keyframe: tuple[Path, str] | None = None
        """Directory and checksum of the last keyframe that was verified."""

    async def prepare(self, update: WeightUpdate, engine_id: str) -> Load:
        """Verify the files; see :class:`WeightTransport`. The first engine takes as long as reading them."""
        try:
            directory = await asyncio.to_thread(self._locate, update)
            await self._verify(directory, update)
        except (ModelError, OSError) as error:
            raise UnusableWeightsError(str(error)) from error
        version, mode = update.weight_version, update.mode
        if update.weights_kind is WeightsKind.LORA:
            return lambda engine: engine.load_adapter(directory, version)
        if update.deltas is None:
            return lambda engine: engine.load_weights(directory, version, mode)
        files = tuple((delta.name, delta.sha256) for delta in update.deltas)
        stored = DeltaVersion(directory, update.sha256 or str(directory), files)
        return lambda engine: engine.load_deltas(stored, version, mode)

    def _locate(self, update: WeightUpdate) -> Path:
        if update.deltas is not None:
            resolve = allowed_directory
        else:
            resolve = resolve_adapter if update.weights_kind is WeightsKind.LORA else resolve_checkpoint
        uri = str(self._model) if update.uri == self._model_uri else update.uri
        return resolve(uri, self._cache, self._model, self._allowed_roots)

    async def _verify(self, directory: Path, update: WeightUpdate) -> None:
        expected = update.sha256
        if expected is None or (directory, expected) == self._verified_keyframe:
            return
        found = await self._checksum(directory, expected)
        if found != expected:
            raise UnusableWeightsError(
                f"{directory} has the checksum {found}, but weight version {update.weight_version} was published with "
                f"{expected}: the files were changed, or are still being written"
            )
        if update.deltas is not None:  # the differences to it are verified one by one
            self._verified_keyframe = directory, expected


class BroadcastTransport:
    """Receives weights that a trainer broadcasts to the engines that have joined before."""

    async def prepare(self, update: WeightUpdate, engine_id: str) -> Load:
        """Check the description of the broadcast; see :class:`WeightTransport`."""
        broadcast, address = update.broadcast, broadcast_address(update.uri)
        if broadcast is None or update.weights_kind is not WeightsKind.FULL or address is None:
            raise UnusableWeightsError(
                f"cannot receive {update.weights_kind} weights from {update.uri}: a broadcast must contain full "
                "weights and come from nccl://host:port or gloo://host:port"
            )
        if engine_id not in broadcast.ranks:
            raise MissedBroadcastError(
                f"weight version {update.weight_version} was broadcast before this engine joined"
            )
        tensors = [(tensor.name, tensor.dtype, tensor.shape) for tensor in broadcast.tensors]
        incoming = BroadcastWeights(
            *address,
            broadcast.group,
            broadcast.ranks[engine_id],
            broadcast.world_size,
            tensors,
            broadcast.bucket_bytes,
            broadcast.packed_bytes,
        )
        return lambda engine: engine.receive_weights(incoming, update.weight_version, update.mode)


class CombinedTransport:
    """Receives broadcast weights, if the job allows broadcasts, and loads all others from directories."""

    def __init__(self, directories: DirectoryTransport, broadcasts: BroadcastTransport | None) -> None:
        self._directories, self._broadcasts = directories, broadcasts

    async def prepare(self, update: WeightUpdate, engine_id: str) -> Load:
        """Use the transport that fits the update; see :class:`WeightTransport`."""
        if update.broadcast is None:
            return await self._directories.prepare(update, engine_id)
        if self._broadcasts is None:
            raise UnusableWeightsError("this job does not accept broadcast weights: spec.weights.broadcast is false")
        return await self._broadcasts.prepare(update, engine_id)
