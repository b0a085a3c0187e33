"""What must be true of new weights before a running engine is touched with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rollout_worker.engine.model_source import ModelError

_FLOATS = {"BF16", "F16", "F32", "F64"}
"""Types between which vLLM converts as it loads."""
_OUTPUT = "lm_head.weight"
"""Written by some trainers though it is tied to the embeddings; vLLM then leaves it out."""


_SAFETENSORS_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
"""torch's names of types → those of safetensors."""
_Tensors = dict[str, tuple[list[int], str]]
"""Name → shape and safetensors' type."""


@dataclass(frozen=True)
class Incoming:
    """Weights that a trainer is about to broadcast."""

    backend: str
    """nccl or gloo."""
    host: str
    """Of the trainer."""
    port: int
    group: str
    """Name of the group; there is no need to join one twice."""
    rank: int
    """Of the engine's first worker process."""
    world_size: int
    tensors: list[tuple[str, str, list[int]]]
    """Name, torch's name of the type, and shape, in the order in which they come."""


def check_incoming(incoming: Incoming, model: Path) -> None:
    """As :func:`check_weights`, of weights that are about to come."""
    theirs = {name: (shape, _SAFETENSORS_TYPES.get(kind, kind)) for name, kind, shape in incoming.tensors}
    _check(f"the broadcast of {incoming.host}:{incoming.port}", theirs, model)


def check_weights(directory: Path, model: Path) -> None:
    """Refuse weights with which vLLM would fail half-way, or silently keep some of the old.

    Reads the headers only, so that it costs little whatever the model's size; a file that was cut short is found.

    Args:
        directory: the checkpoint.
        model: the model that the engine was started with.

    Raises:
        ModelError: if a tensor is missing, unknown, or of another shape or type than the model's.
    """
    _check(f"checkpoint {directory}", _tensors(directory), model)


def _check(what: str, theirs: _Tensors, model: Path) -> None:
    ours = _tensors(model)
    if missing := sorted(ours.keys() - theirs.keys()):
        raise ModelError(f"{what} has no {_named(missing)}: it must have all of the model's tensors")
    if unknown := sorted(theirs.keys() - ours.keys() - {_OUTPUT}):
        raise ModelError(f"{what} has {_named(unknown)}, which the model has not")
    for name, (shape, kind) in ours.items():
        found, found_kind = theirs[name]
        if found != shape:
            raise ModelError(f"{what}: {name} has shape {found} where the model has {shape}")
        if found_kind != kind and not {found_kind, kind} <= _FLOATS:
            raise ModelError(f"{what}: {name} is {found_kind} where the model has {kind}")


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _tensors(directory: Path) -> _Tensors:
    """Shape and type of each tensor that vLLM would load from a directory, by name."""
    tensors: _Tensors = {}
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
