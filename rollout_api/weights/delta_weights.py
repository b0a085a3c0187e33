"""Weights that a trainer publishes as differences to the previous version. Needs torch and numpy when they are used."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_api.errors import InvalidRequestError
from rollout_api.protocol.messages import DeltaFile
from rollout_api.weights.checksum import checksum
from rollout_api.weights.in_memory import NamedTensors, TensorsInMemory

if TYPE_CHECKING:
    from rollout_api.weights.delta_codec import Words
    from rollout_api.weights.delta_file import TensorDelta

logger = logging.getLogger(__name__)

MAX_CHAIN_SHARE = 0.5
"""Bytes of all differences to a keyframe, compared with those of the keyframe, above which the next one is written: an
engine that joins reads them all."""
_DEFAULT_KEYFRAME_INTERVAL = 32
_MAX_ENCODERS = 8
"""Largest number of threads that compute differences."""
_PREFIX, _PARTIAL_PREFIX = "keyframe-", ".partial-"


@dataclass(frozen=True)
class VersionFiles:
    """The files that make up one version of the weights."""

    directory: Path
    """Directory of the keyframe, which also contains the differences."""
    sha256: str | None
    """Checksum of the keyframe; None if the engines should not verify it."""
    deltas: list[DeltaFile]
    """The differences that lead from the keyframe to this version, in order."""
    size: int
    """Bytes that were written for this version."""


@dataclass
class _Chain:
    """A keyframe and what was written after it."""

    directory: Path
    sha256: str | None
    size: int
    """Bytes of the keyframe's tensors."""
    version: int
    """The version that was written last."""
    deltas: list[DeltaFile] = field(default_factory=list)
    delta_bytes: int = 0


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the version that was written last."""

    dtype: str
    """PyTorch's name of the data type."""
    shape: tuple[int, ...]
    elements: Words


class DeltaWeights:
    """Weights that are published as compressed differences to the previous version::

        weights = DeltaWeights(ModelInMemory(model), "/weights/run-7", dtype=torch.bfloat16)
        client.publish_weights(version, weights)

    The first version, and after that each *keyframe_interval*-th, is a keyframe: a file with all tensors. The versions
    in between are files with the elements that have changed, bit by bit, so that an engine loads exactly the tensors
    that the trainer has. An engine that has not loaded the previous version reads the last keyframe and all differences
    since. If these would be larger than half a keyframe, a keyframe is written earlier.

    This object keeps a copy of all tensors in main memory, and so does each engine.

    If the tensors are sharded, the trainer's other processes call :meth:`take_part` of their own
    :class:`~rollout_api.TensorsInMemory` meanwhile.

    Args:
        weights: a :class:`~rollout_api.ModelInMemory` or :class:`~rollout_api.TensorsInMemory`, or tensors of which one
            is created.
        directory: a directory for these files only, which the engines can read under the same path; ``spec.weights``
            says where it may be. Files of the last two keyframes are kept.
        dtype: data type, such as ``torch.bfloat16``, to which floating-point tensors are converted. Trainers with
            float32 weights pass the one with which the engines compute: almost every float32 weight changes in each
            step. Default: none.
        keyframe_interval: number of versions from one keyframe to the next.

    Raises:
        InvalidRequestError: an argument cannot be used.
    """

    def __init__(
        self,
        weights: TensorsInMemory | NamedTensors,
        directory: str | Path,
        *,
        dtype: Any = None,
        keyframe_interval: int = _DEFAULT_KEYFRAME_INTERVAL,
    ) -> None:
        if keyframe_interval < 1:
            raise InvalidRequestError(f"keyframe_interval is {keyframe_interval}; it must be at least 1")
        self._source = weights if isinstance(weights, TensorsInMemory) else TensorsInMemory(weights)
        self._directory, self._dtype, self._keyframe_interval = Path(directory).absolute(), dtype, keyframe_interval
        self._token = secrets.token_hex(4)
        """Distinguishes the files of this object from those that an earlier process has left."""
        self._copy: dict[str, _Tensor] = {}
        self._chain: _Chain | None = None
        """The current keyframe; None if the next version must be one."""
        self._kept: list[list[Path]] = []
        """Directories in use, oldest first; those of a previous process are together."""
        self._writing = threading.Lock()

    def replace(self, tensors: NamedTensors) -> None:
        """Publish these tensors from now on; see :meth:`rollout_api.TensorsInMemory.replace`."""
        self._source.replace(tensors)

    def write(self, version: int, *, with_checksum: bool = True) -> VersionFiles:
        """Write the current tensors as a version. :meth:`AsyncRolloutClient.publish_weights` calls this.

        Args:
            version: number of the version.
            with_checksum: whether the engines should verify the keyframe. Differences are always verified.

        Raises:
            InvalidRequestError: a tensor has a data type that safetensors files cannot contain.
            OSError: a file cannot be written.
        """
        with self._writing:
            chain, self._chain = self._chain, None  # if this fails, the next version is a keyframe
            is_due = chain is None or len(chain.deltas) + 1 >= self._keyframe_interval
            is_repeated = chain is not None and chain.version == version
            tensors = self._update_copy(encode=is_repeated or not is_due)
            if chain is not None and is_repeated and tensors == []:  # as after a failed attempt to publish it
                self._chain = chain
                return VersionFiles(chain.directory, chain.sha256, list(chain.deltas), 0)
            if chain is not None and not is_due and tensors is not None:
                size = sum(len(tensor.data) for tensor in tensors)
                if chain.delta_bytes + size <= MAX_CHAIN_SHARE * chain.size:
                    return self._write_delta(version, chain, tensors)
                if size > MAX_CHAIN_SHARE * chain.size:
                    logger.warning(
                        "Weight version %d is a keyframe, because its difference would take %.0f %% of the bytes. If "
                        "the engines compute in another data type than the trainer, pass it as dtype.",
                        version,
                        100 * size / chain.size,
                    )
            return self._write_keyframe(version, with_checksum=with_checksum)

    def abort(self, reason: str) -> None:
        """Tell the trainer's other processes that :meth:`write` will not be called."""
        self._source.abort(reason)

    def _write_delta(self, version: int, chain: _Chain, tensors: list[TensorDelta]) -> VersionFiles:
        from rollout_api.weights.delta_file import write_delta

        path = chain.directory / f"{version:08d}-{len(chain.deltas):04d}-{self._token}.delta"
        size, digest = write_delta(path, tensors)
        chain.deltas.append(DeltaFile(weight_version=version, name=path.name, sha256=digest))
        chain.delta_bytes += size
        chain.version = version
        self._chain = chain
        return VersionFiles(chain.directory, chain.sha256, list(chain.deltas), size)

    def _write_keyframe(self, version: int, *, with_checksum: bool) -> VersionFiles:
        from rollout_api.weights.safetensors_file import SAFETENSORS_DTYPES, write_safetensors

        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._kept:
            self._kept.append(self._leftovers())
        name = f"{version:08d}-{self._token}-{secrets.token_hex(4)}"
        partial, directory = self._directory / f"{_PARTIAL_PREFIX}{name}", self._directory / f"{_PREFIX}{name}"
        partial.mkdir()
        try:
            write_safetensors(
                partial / "model.safetensors",
                [
                    (name, SAFETENSORS_DTYPES[tensor.dtype], tensor.shape, tensor.elements)
                    for name, tensor in self._copy.items()
                ],
            )
            digest = checksum(partial) if with_checksum else None
            partial.rename(directory)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._kept.append([directory])
        while len(self._kept) > 2:  # engines may still read the previous keyframe and its differences
            for old in self._kept.pop(0):
                shutil.rmtree(old, ignore_errors=True)
        size = sum(tensor.elements.nbytes for tensor in self._copy.values())
        self._chain = _Chain(directory, digest, size, version)
        return VersionFiles(directory, digest, [], size)

    def _leftovers(self) -> list[Path]:
        return [
            path
            for path in self._directory.iterdir()
            if path.is_dir() and path.name.startswith((_PREFIX, _PARTIAL_PREFIX))
        ]

    def _update_copy(self, *, encode: bool) -> list[TensorDelta] | None:
        """Make the copy equal to the current tensors.

        Args:
            encode: whether to compute the differences.

        Returns:
            The tensors that differ; None without *encode*, or if the tensors' names, data types or shapes differ.
        """
        previous, self._copy = self._copy, {}
        threads = min(_MAX_ENCODERS, os.cpu_count() or 1)
        free = threading.Semaphore(2 * threads)  # bounds the number of tensors that are copied from a GPU
        pending: dict[str, Future[tuple[_Tensor, TensorDelta | None]]] = {}
        with ThreadPoolExecutor(threads, thread_name_prefix="weight-deltas") as pool:
            for name, current in self._read():
                free.acquire()
                pending[name] = pool.submit(_update_tensor, name, previous.get(name), current, encode=encode)
                pending[name].add_done_callback(lambda _: free.release())
        updated = {name: task.result() for name, task in pending.items()}
        self._copy = {name: tensor for name, (tensor, _) in updated.items()}
        # A tensor that is new, or of another type or shape, has a copy of its own.
        is_same = previous.keys() == updated.keys() and all(previous[name] is self._copy[name] for name in previous)
        return [delta for _, delta in updated.values() if delta is not None] if encode and is_same else None

    def _read(self) -> Iterator[tuple[str, _Tensor]]:
        """Yield the current tensors. Their elements may be those of the trainer itself."""
        import torch

        from rollout_api.weights.delta_codec import word_type
        from rollout_api.weights.safetensors_file import SAFETENSORS_DTYPES

        for name, tensor in self._source.gather():
            if self._dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self._dtype)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in SAFETENSORS_DTYPES:
                raise InvalidRequestError(f"{name} is {dtype}, which safetensors files cannot contain")
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            yield name, _Tensor(dtype, tuple(tensor.shape), flat.view(word_type(tensor.element_size())))


def _update_tensor(
    name: str, previous: _Tensor | None, current: _Tensor, *, encode: bool
) -> tuple[_Tensor, TensorDelta | None]:
    """Make the copy of a tensor equal to it, and return the copy, and the difference if there is one."""
    from rollout_api.weights import delta_codec
    from rollout_api.weights.delta_file import TensorDelta

    new = current.elements
    if previous is None or (previous.dtype, previous.shape) != (current.dtype, current.shape):
        return _Tensor(current.dtype, current.shape, new.copy()), None
    if not encode:
        previous.elements[:] = new
        return previous, None
    count, data = delta_codec.encode(previous.elements, new)
    if not count:
        return previous, None
    previous.elements[:] = new
    digest = delta_codec.fingerprint(new)
    return previous, TensorDelta(name, new.dtype.itemsize, len(new), count, digest, data)
