"""What must be true of a checkpoint before a running engine is touched with it."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rollout_worker.engine.model_source import ModelError

_FLOATS = {"BF16", "F16", "F32", "F64"}
"""Types between which vLLM converts as it loads."""
_OUTPUT = "lm_head.weight"
"""Written by some trainers though it is tied to the embeddings; vLLM then leaves it out."""


def check_weights(directory: Path, model: Path) -> None:
    """Refuse weights with which vLLM would fail half-way, or silently keep some of the old.

    Reads the headers only, so that it costs little whatever the model's size; a file that was cut short is found.

    Args:
        directory: the checkpoint.
        model: the model that the engine was started with.

    Raises:
        ModelError: if a tensor is missing, unknown, or of another shape or type than the model's.
    """
    theirs, ours = _tensors(directory), _tensors(model)
    if missing := sorted(ours.keys() - theirs.keys()):
        raise ModelError(f"checkpoint {directory} has no {_named(missing)}: it must have all of the model's tensors")
    if unknown := sorted(theirs.keys() - ours.keys() - {_OUTPUT}):
        raise ModelError(f"checkpoint {directory} has {_named(unknown)}, which the model has not")
    for name, (shape, kind) in ours.items():
        found, found_kind = theirs[name]
        if found != shape:
            raise ModelError(f"checkpoint {directory}: {name} has shape {found} where the model has {shape}")
        if found_kind != kind and not {found_kind, kind} <= _FLOATS:
            raise ModelError(f"checkpoint {directory}: {name} is {found_kind} where the model has {kind}")


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _tensors(directory: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and type of each tensor that vLLM would load from a directory, by name."""
    tensors: dict[str, tuple[list[int], str]] = {}
    for path in _files(directory):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    tensor = file.get_slice(name)
                    tensors[name] = (tensor.get_shape(), tensor.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"checkpoint {directory}: {path.name} cannot be read: {error}") from None
    return tensors


def _files(directory: Path) -> list[Path]:
    """The files of a checkpoint: those its index names, where it has one."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        names: set[str] = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise ModelError(f"checkpoint {directory}: {index.name} cannot be read: {error}") from None
    return [directory / name for name in sorted(names)]
