"""Estimates how much memory the weights and the KV cache of an engine take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one engine on each of its GPUs, in bytes. vLLM needs some more for activations and CUDA graphs."""

    weights: int
    kv_cache_per_token: int
    max_model_len: int

    @property
    def kv_cache_of_longest(self) -> int:
        """KV cache of one rollout of the maximum length, without which vLLM does not start."""
        return self.kv_cache_per_token * self.max_model_len

    @property
    def minimum(self) -> int:
        """Memory without which the engine does not start."""
        return self.weights + self.kv_cache_of_longest

    def rollouts_in(self, memory: int) -> int:
        """Return how many rollouts of the maximum length fit into *memory* together with the weights."""
        return max(0, memory - self.weights) // max(1, self.kv_cache_of_longest)


def estimate_memory(
    config: Mapping[str, Any],
    weight_bytes: int,
    *,
    max_model_len: int,
    gpus: int,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
) -> MemoryEstimate | None:
    """Return the estimate for a model; None if its configuration does not have the usual fields.

    Layers with a sliding window or without attention count as if they kept all tokens, so that the estimate is an upper
    bound for models with such layers.

    Args:
        config: its ``config.json``.
        weight_bytes: size of its safetensors files.
        max_model_len: maximum number of tokens of a prompt and its response.
        gpus: number of GPUs among which the engine divides the model.
        dtype: ``engine.dtype``.
        kv_cache_dtype: ``engine.kvCacheDtype``.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    stored = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype"))
    computed = stored if dtype == "auto" else dtype
    try:
        layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
        values = _values_per_layer(text, heads)
    except (KeyError, TypeError, ValueError):
        return None
    width = 1 if kv_cache_dtype.startswith("fp8") else _BYTES.get(computed, 2)
    if stored in _BYTES and "quantization_config" not in config:
        weight_bytes = weight_bytes * _BYTES.get(computed, 2) // _BYTES[stored]
    return MemoryEstimate(
        weights=weight_bytes // gpus, kv_cache_per_token=layers * values * width // gpus, max_model_len=max_model_len
    )


def _values_per_layer(config: Mapping[str, Any], heads: int) -> int:
    """Return how many numbers a layer keeps for each token."""
    if (rank := config.get("kv_lora_rank")) is not None:  # multi-head latent attention
        return int(rank) + int(config["qk_rope_head_dim"])
    head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
    return 2 * int(config.get("num_key_value_heads") or heads) * int(head_dim)
