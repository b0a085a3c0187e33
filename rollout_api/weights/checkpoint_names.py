"""The names and shapes that a model's parameters have in a checkpoint. Needs torch, and transformers for its models."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def checkpoint_pieces(model: Any, name: str, parameter: Any) -> Iterable[tuple[str, Any]]:
    """Return the tensors of a checkpoint, with their names, that a parameter of a model contains.

    Since version 5, models of transformers hold the experts of a layer in one parameter, and a checkpoint has one
    tensor for each. Parameters of other models have the names and shapes of their checkpoint.

    Args:
        model: the model.
        name: name of the parameter.
        parameter: its value, or a tensor of its shape on torch's device ``meta``.
    """
    transformers = sys.modules.get("transformers")  # a model of transformers cannot exist before this is imported
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return [(name, parameter)]
    from transformers.core_model_loading import revert_weight_conversion

    pieces: dict[str, Any] = revert_weight_conversion(model, {name: parameter})
    return pieces.items()
