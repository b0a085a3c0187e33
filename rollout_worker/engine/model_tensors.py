"""The weights of a running engine's model, in the form in which vLLM computes with them.

After loading, vLLM shards, fuses and repacks the tensors of a checkpoint. Two engines of the same job do this in the
same way, so that the tensors of one can be copied into the other, rank by rank. This module depends on vLLM's
version (0.32).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rollout_worker.engine.errors import EngineError
from rollout_worker.engine.weight_stream import StreamTensor

_COLUMNS_PER_PIECE = 64
"""Number of columns of a packed weight that are unpacked at once."""


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model."""

    description: StreamTensor
    stored: Any
    """The parameter or buffer, which is empty if the weight is packed."""
    packed_in: Any = None
    """The layer in which the weight is packed; None if it is not packed."""


def list_tensors(model: Any, vllm_config: Any) -> list[ModelTensor]:
    """Return everything in which the weights of a model are stored, in an order that depends on the model only.

    Raises:
        EngineError: if the model's weights are, or may be, also stored in another form.
    """
    if vllm_config.model_config.quantization is not None:
        raise EngineError("the weights are quantized, and vLLM may keep such weights in further forms")
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        raise EngineError("with enable_eplb, the experts are at different places in each engine")
    found: list[ModelTensor] = []
    seen: set[int] = set()
    for prefix, layer in model.named_modules():
        _check_no_copies(prefix, layer)
        # named_modules() yields a shared layer once, and tied weights are one parameter of two layers.
        for name, tensor in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            found.append(_describe(f"{prefix}.{name}" if prefix else name, layer, name, tensor))
    return found


def read_tensors(model: Any, vllm_config: Any) -> Iterator[tuple[StreamTensor, Any] | None]:
    """Yield each tensor of :func:`list_tensors` with its description.

    Packed weights are unpacked piece by piece, and None is yielded after each piece. The others are not copied.

    Raises:
        EngineError: see :func:`list_tensors`.
    """
    for tensor in list_tensors(model, vllm_config):
        value = tensor.stored
        if tensor.packed_in is not None:
            value = tensor.description.empty()
            for _ in _unpack(tensor.packed_in, value):
                yield None
        yield tensor.description, value


def load_tensors(model: Any, vllm_config: Any, receive: Callable[[Any], None]) -> None:
    """Replace all tensors of a model in place.

    If *receive* fails, some weights are old and some are new.

    Args:
        model: the model.
        vllm_config: vLLM's configuration.
        receive: receives the next tensor of :func:`list_tensors` into the tensor that it is given.
    """
    import torch

    with torch.no_grad():
        for tensor in list_tensors(model, vllm_config):
            if tensor.packed_in is None:
                receive(tensor.stored.detach())
                continue
            weight = tensor.description.empty()
            receive(weight)
            layer = tensor.packed_in
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            layer.quant_method.process_weights_after_loading(layer)
        _update_copies(model, vllm_config)


def _describe(full_name: str, layer: Any, name: str, tensor: Any) -> ModelTensor:
    packed = _packed_shape(layer, name, tensor)
    shape = tuple(tensor.shape) if packed is None else packed
    description = StreamTensor(full_name, str(tensor.dtype).removeprefix("torch."), shape)
    return ModelTensor(description, tensor, packed_in=None if packed is None else layer)


def _packed_shape(layer: Any, name: str, tensor: Any) -> tuple[int, int] | None:
    """Return the shape of a weight of which the layer keeps a packed copy only; None for any other tensor.

    On CPU, vLLM packs the weight of a linear layer for the kernel in ``cpu_linear`` and leaves an empty parameter.

    Raises:
        EngineError: if the weight was removed and is not packed in this way.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters, buffers = get_layerwise_info(layer).restore_metadata
    original = parameters.get(name, buffers.get(name))
    if tensor.numel() or original is None or not original.numel():
        return None
    if name != "weight" or "cpu_linear" not in vars(layer) or original.ndim != 2:
        raise EngineError(f"{type(layer).__name__} keeps its {name} in an unknown form")
    rows, columns = original.shape
    return int(rows), int(columns)


def _unpack(layer: Any, weight: Any) -> Iterator[None]:
    """Unpack the weight of a layer into *weight*, piece by piece.

    The layer is applied to the unit vectors. Each element of the result is one element of the weight, multiplied by one
    and added to zeros, which is exact in every data type.
    """
    import torch

    columns = weight.shape[1]
    for start in range(0, columns, _COLUMNS_PER_PIECE):
        stop = min(start + _COLUMNS_PER_PIECE, columns)
        units = torch.zeros(stop - start, columns, dtype=weight.dtype)
        units[:, start:stop].fill_diagonal_(1)
        weight[:, start:stop] = layer.cpu_linear(units, layer.weight, None).t()
        yield


def _check_no_copies(prefix: str, layer: Any) -> None:
    """Check that a layer has no tensor beside its parameters and buffers that may be computed from its weights.

    Raises:
        EngineError: if it has one.
    """
    import torch
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    # Adapters do not belong to the full weights. Attention layers compute their copies from these again.
    if isinstance(layer, BaseLayerWithLoRA) or is_deferred_attention_layer(layer):
        return
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1:
            raise EngineError(f"{prefix}.{name} may be computed from weights in an unknown way")


def _update_copies(model: Any, vllm_config: Any) -> None:
    """Compute again what layers have computed from their weights, as vLLM does after loading them."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    layers = list(_layers_with_copies(model))
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            layer.process_weights_after_loading(vllm_config.model_config.dtype)


def _layers_with_copies(model: Any) -> Iterator[Any]:
    """Yield the layers that keep their weight and compute with a packed copy of it, as output projections do on CPU."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None) if "cpu_linear" in vars(layer) else None
        if weight is not None and weight.numel() and weight.ndim == 2:
            yield layer
