"""Checks new weights before they are loaded into a running engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rollout_api.weights.safetensors_file import SAFETENSORS_DTYPES
from rollout_worker.engine.model_source import ModelError

_FLOAT_DTYPES = {"BF16", "F16", "F32", "F64"}
"""Data types between which vLLM converts when it loads weights."""
_OUTPUT_PROJECTION = "lm_head.weight"
"""Some trainers write it although it is tied to the embeddings; vLLM then ignores it."""
_Tensors = dict[str, tuple[list[int], str]]
"""Name → shape and safetensors data type."""


@dataclass(frozen=True)
class BroadcastWeights:
    """Weights that a trainer is about to broadcast to the engine."""

    backend: str
    """nccl or gloo."""
    host: str
    """The trainer's address."""
    port: int
    group: str
    """Name of the process group; a group that was joined before is used again."""
    rank: int
    """Rank of the engine's first worker process in the group."""
    world_size: int
    tensors: list[tuple[str, str, list[int]]]
    """Name, PyTorch data type and shape of each tensor, in the order in which they are sent."""
    bucket_bytes: int = 0
    """Largest number of bytes of successive tensors that are sent at once; 0 if each tensor is."""
    packed_bytes: int | None = None
    """Set if *group* is a transfer group; see :class:`~rollout_api.protocol.messages.Broadcast`."""


def check_broadcast(weights: BroadcastWeights, model: Path) -> None:
    """Check the tensors of a broadcast as :func:`check_checkpoint` does those of a directory."""
    tensors = {name: (shape, SAFETENSORS_DTYPES.get(dtype, dtype)) for name, dtype, shape in weights.tensors}
    check_tensors(f"the broadcast from {weights.host}:{weights.port}", tensors, model)


def check_checkpoint(directory: Path, model: Path) -> None:
    """Check that vLLM can load all weights of a checkpoint, and that none of the old ones would remain.

    This reads the headers only, so that it is fast for models of any size. It does detect a truncated file.

    Args:
        directory: the checkpoint.
        model: the model with which the engine was started.

    Raises:
        ModelError: if a tensor is missing or unknown, or has another shape or data type than the model's.
    """
    check_tensors(f"checkpoint {directory}", _read_tensors(directory), model)


def check_tensors(source: str, tensors: dict[str, tuple[list[int], str]], model: Path) -> None:
    """Check tensors, by shape and safetensors data type, as :func:`check_checkpoint` does those of a directory."""
    expected = _read_tensors(model)
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ModelError(f"{source} has no {_list_names(missing)}: it must have all of the model's tensors")
    if unknown := sorted(tensors.keys() - expected.keys() - {_OUTPUT_PROJECTION}):
        raise ModelError(f"{source} has {_list_names(unknown)}, which the model does not have")
    for name, (shape, dtype) in expected.items():
        actual_shape, actual_dtype = tensors[name]
        if actual_shape != shape:
            raise ModelError(f"{source}: {name} has shape {actual_shape}, but the model has {shape}")
        if actual_dtype != dtype and not {actual_dtype, dtype} <= _FLOAT_DTYPES:
            raise ModelError(f"{source}: {name} is {actual_dtype}, but the model has {dtype}")


def _list_names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _read_tensors(directory: Path) -> _Tensors:
    """Read shape and data type of each tensor that vLLM would load from a directory."""
    tensors: _Tensors = {}
    for path in _weight_files(directory):
        try:
            with safe_open(path, framework="numpy") as file:
                names = file.keys()  # the file itself is not iterable
                for name in names:
                    tensor = file.get_slice(name)
                    tensors[name] = (tensor.get_shape(), tensor.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"checkpoint {directory}: {path.name} cannot be read: {error}") from None
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint: those that its index names, if it has one."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names: set[str] = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise ModelError(f"checkpoint {directory}: {index.name} cannot be read: {error}") from None
    return [directory / name for name in sorted(names)]
