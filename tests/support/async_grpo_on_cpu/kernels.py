"""FlashAttention 3 for CPUs, in place of the package ``kernels``, which downloads the kernel for H100 GPUs.

TRL's AsyncGRPOTrainer computes attention with this kernel only. With this folder on the module path, it trains
unmodified on CPUs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def get_kernel(name: str, version: int) -> SimpleNamespace:
    """Return the functions of the kernel."""
    assert (name, version) == ("kernels-community/flash-attn3", 1)
    return SimpleNamespace(flash_attn_varlen_func=_attention)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    *_: Any,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Return the attention of several sequences, the last query of each of which sees all of its keys.

    Args:
        query: (queries of all sequences, heads, size).
        key: (keys of all sequences, key heads, size).
        value: (keys of all sequences, key heads, size).
        query_ends: where each sequence's queries begin, and the end of the last one.
        key_ends: where each sequence's keys begin, and the end of the last one.
        softmax_scale: factor of the products.
        causal: must be true.
        window_size: must not limit what is seen.
    """
    assert causal
    assert window_size == (-1, -1)
    outputs = []
    starts, key_starts = query_ends.tolist(), key_ends.tolist()
    for start, end, key_start, key_end in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
        length, context = end - start, key_end - key_start
        mask = torch.ones(length, context, dtype=torch.bool).tril(context - length)
        output = torch.nn.functional.scaled_dot_product_attention(
            query[start:end].transpose(0, 1),
            key[key_start:key_end].transpose(0, 1),
            value[key_start:key_end].transpose(0, 1),
            attn_mask=mask,
            scale=softmax_scale,
            enable_gqa=True,
        )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)
