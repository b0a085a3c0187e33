"""A checkpoint in main memory that is brought from version to version by differences.

vLLM shards, fuses and repacks the tensors of a checkpoint when it loads them, so that a difference cannot be applied to
the weights with which it computes. The engine's host process therefore keeps the tensors as they were published, while
the engine continues to decode, and vLLM's worker processes load them from there.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout_api.weights.delta_codec import DeltaError, Words, apply, fingerprint, word_type
from rollout_api.weights.delta_file import TensorDelta, read_delta
from rollout_api.weights.safetensors_file import SAFETENSORS_DTYPES, StoredTensor, read_layout
from rollout_worker.engine.model_source import ModelError

logger = logging.getLogger(__name__)

_TORCH_DTYPES = {stored: name for name, stored in SAFETENSORS_DTYPES.items()}
_ALIGNMENT = 64
_MAX_THREADS = 4


@dataclass(frozen=True)
class DeltaVersion:
    """A version of the weights that is stored as a keyframe and differences to it."""

    keyframe: Path
    """Directory of the keyframe, whose checksum was verified if it has one."""
    identity: str
    """What identifies the contents of the keyframe."""
    deltas: tuple[tuple[str, str], ...]
    """Name, in the directory of the keyframe, and SHA-256 of the differences, in order."""

    def __str__(self) -> str:
        if not self.deltas:
            return f"the keyframe {self.keyframe}"
        return f"the keyframe {self.keyframe} with the differences up to {self.deltas[-1][0]}"


@dataclass(frozen=True)
class MemoryTensors:
    """Tensors in a memory file, which other processes of this machine can map."""

    path: str
    """Path of the file."""
    tensors: list[tuple[str, str, tuple[int, ...], int]]
    """Name, safetensors data type, shape, and position in the file of each tensor."""


class PatchedCheckpoint:
    """The tensors of one version in main memory."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._file = -1
        self._tensors: dict[str, StoredTensor] = {}
        """Tensors by name; their offsets are those in the memory."""
        self._version: DeltaVersion | None = None
        """What the memory contains; None if it must be read again."""

    def prepare(self, version: DeltaVersion) -> None:
        """Bring the memory to a version, by the differences that are missing, or else from its keyframe on.

        Raises:
            ModelError: the version cannot be read, or its files do not belong together.
        """
        try:
            if not self._advance(version):
                self._read_keyframe(version)
                if not self._advance(version):
                    raise DeltaError("the differences do not lead to what was published")
        except (DeltaError, OSError, ValueError) as error:
            raise ModelError(f"{version} cannot be used: {error}") from error

    def tensors(self) -> dict[str, tuple[list[int], str]]:
        """Return shape and safetensors data type of each tensor."""
        return {name: (list(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def shared(self) -> MemoryTensors:
        """Return where the tensors are, for the engine's other processes. They must be ended before this one."""
        tensors = [(name, tensor.dtype, tensor.shape, tensor.offset) for name, tensor in self._tensors.items()]
        return MemoryTensors(f"/proc/{os.getpid()}/fd/{self._file}", tensors)

    def close(self) -> None:
        """Release the memory."""
        self._version, self._tensors = None, {}
        if self._memory is not None:
            os.close(self._file)
            with suppress(BufferError):  # an array in the traceback of an error keeps it open as long as it exists
                self._memory.close()
            self._memory = None

    def _advance(self, version: DeltaVersion) -> bool:
        """Apply the missing differences; return False if the memory cannot be brought to the version in this way.

        Raises:
            DeltaError: a difference cannot be read, or is not one to these tensors.
        """
        current = self._version
        if current is None or current.identity != version.identity:
            return False
        count = len(current.deltas)
        if current.deltas != version.deltas[:count]:
            return False
        missing = [read_delta(version.keyframe / name, sha256) for name, sha256 in version.deltas[count:]]
        self._version = None
        with ThreadPoolExecutor(_num_threads()) as pool:
            for tensors in missing:
                list(pool.map(self._apply, tensors))
            expected = {tensor.name: tensor.fingerprint for tensors in missing for tensor in tensors}
            found = dict(zip(expected, pool.map(lambda name: fingerprint(self._words(name)), expected), strict=True))
        if wrong := [name for name in expected if found[name] != expected[name]]:
            logger.warning("After the differences were applied, %s is not what was published.", ", ".join(wrong[:3]))
            return False
        self._version = version
        return True

    def _apply(self, delta: TensorDelta) -> None:
        stored = self._tensors.get(delta.name)
        if stored is None or stored.size != delta.element_bytes * delta.num_elements:
            raise DeltaError(f"a difference is to {delta.name} with {delta.num_elements} elements, which is not there")
        apply(self._words(delta.name, delta.element_bytes), delta.num_changed, delta.data)

    def _words(self, name: str, element_bytes: int = 1) -> Words:
        """Return the elements of a tensor in the memory. No such array may exist when the memory is closed."""
        if self._memory is None:
            raise DeltaError("there is no memory")
        stored, dtype = self._tensors[name], word_type(element_bytes)
        words: Words = np.frombuffer(self._memory, dtype, stored.size // element_bytes, stored.offset)
        return words

    def _read_keyframe(self, version: DeltaVersion) -> None:
        files = {path: read_layout(path) for path in sorted(version.keyframe.glob("*.safetensors"))}
        if not files:
            raise DeltaError("there is no safetensors file")
        self.close()
        end = 0
        reads: list[tuple[Path, StoredTensor, int]] = []
        for path, tensors in files.items():
            for tensor in tensors:
                reads.append((path, tensor, end))
                self._tensors[tensor.name] = StoredTensor(tensor.name, tensor.dtype, tensor.shape, end, tensor.size)
                end += -(-tensor.size // _ALIGNMENT) * _ALIGNMENT
        self._file = os.memfd_create("rollout-weights")
        os.ftruncate(self._file, max(end, 1))
        self._memory = memory = mmap.mmap(self._file, max(end, 1))
        with memoryview(memory) as view, ThreadPoolExecutor(_num_threads()) as pool:
            list(pool.map(lambda read: _read_into(read[0], read[1], view[read[2] : read[2] + read[1].size]), reads))
        self._version = DeltaVersion(version.keyframe, version.identity, ())


def map_tensors(path: str, tensors: list[tuple[str, str, tuple[int, ...], int]]) -> Iterator[tuple[str, Any]]:
    """Yield the names and torch tensors of :class:`MemoryTensors`, without a copy, in another process."""
    import torch

    with Path(path).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for name, dtype, shape, offset in tensors:
        kind = getattr(torch, _TORCH_DTYPES[dtype])
        count = int(np.prod(shape, dtype=np.int64))
        flat = torch.frombuffer(memory, dtype=kind, count=count, offset=offset) if count else torch.empty(0, dtype=kind)
        yield name, flat.view(tuple(shape))


def _read_into(path: Path, tensor: StoredTensor, target: memoryview) -> None:
    with target, path.open("rb", buffering=0) as file:
        file.seek(tensor.offset)
        position = 0
        while position < len(target):
            if not (count := file.readinto(target[position:])):
                raise DeltaError(f"{path} ends within {tensor.name}")
            position += count


def _num_threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))
