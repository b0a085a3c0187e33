"""Checks new weights before they are loaded into a running engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rollout_store.models.model_source import ModelError

_SAFETENSORS_DTYPES = {
    "bfloat16": "BF16",
    "bool": "BOOL",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
}
"""PyTorch's names of data types → those of safetensors."""
_SENT = "what the trainer sends"
_FLOAT_DTYPES = {"BF16", "F16", "F32", "F64"}
"""Data types between which vLLM converts when it loads weights."""
_OUTPUT_PROJECTION = "lm_head.weight"
"""Some trainers write it although it is tied to the embeddings; vLLM then ignores it."""
_Tensors = dict[str, tuple[list[int], str]]
"""Name → shape and safetensors data type."""


class CheckpointCheck:
    """Checks tensors that arrive in several parts as :func:`check_checkpoint` does those of a directory.

    Args:
        model: the model with which the engine was started.
        is_partial: whether tensors may be missing, because only differences are sent.
    """

    def __init__(self, model: Path, *, is_partial: bool) -> None:
        self._expected, self._is_partial = _read_tensors(model), is_partial
        self._found: _Tensors = {}

    def add(self, update_info: Mapping[str, Any]) -> None:
        """Check the tensors that a call of vLLM's ``update_weights`` describes.

        Raises:
            ModelError: if they are not described, or the model has no such tensors.
        """
        try:
            described = zip(update_info["names"], update_info["dtype_names"], update_info["shapes"], strict=True)
            found = {
                str(name): (list(shape), _SAFETENSORS_DTYPES.get(dtype, str(dtype))) for name, dtype, shape in described
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"update_info needs names, dtype_names and shapes of the same length: {error!r}") from None
        _check_known(_SENT, found, self._expected)
        self._found |= found

    def clear(self) -> None:
        """Forget which tensors were described."""
        self._found = {}

    def finish(self) -> None:
        """Check that all tensors were sent.

        Raises:
            ModelError: if they were not.
        """
        if not self._is_partial:
            _check_complete(_SENT, self._found, self._expected)


def check_checkpoint(directory: Path, model: Path) -> None:
    """Check that vLLM can load all weights of a checkpoint, and that none of the old ones would remain.

    This reads the headers only, so that it is fast for models of any size. It does detect a truncated file.

    Args:
        directory: the checkpoint.
        model: the model with which the engine was started.

    Raises:
        ModelError: if a tensor is missing or unknown, or has another shape or data type than the model's.
    """
    source, tensors, expected = f"checkpoint {directory}", _read_tensors(directory), _read_tensors(model)
    _check_complete(source, tensors, expected)
    _check_known(source, tensors, expected)


def _check_complete(source: str, tensors: _Tensors, expected: _Tensors) -> None:
    if missing := sorted(expected.keys() - tensors.keys()):
        raise ModelError(f"{source} has no {_list_names(missing)}: it must have all of the model's tensors")


def _check_known(source: str, tensors: _Tensors, expected: _Tensors) -> None:
    if unknown := sorted(tensors.keys() - expected.keys() - {_OUTPUT_PROJECTION}):
        raise ModelError(f"{source} has {_list_names(unknown)}, which the model does not have")
    for name in (name for name in expected if name in tensors):
        (actual_shape, actual_dtype), (shape, dtype) = tensors[name], expected[name]
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
