"""A model with recurrent layers, without weights."""

from __future__ import annotations

from pathlib import Path


def qwen3_next(directory: Path) -> Path:
    """Write the configuration of Qwen3-Next-80B-A3B, and return the directory."""
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"],
        dtype="bfloat16",
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        max_position_embeddings=262_144,
        num_hidden_layers=48,
    )
    config.save_pretrained(directory)
    return directory
