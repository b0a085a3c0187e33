"""The kernel that samples tokens without drafts, ``sample/gumbel.py`` of vLLM 0.32, and what it shares with drafts."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rollout_worker.arrays import Integers
from rollout_worker.engine.cpu_kernels import Grid, Kernel
from rollout_worker.engine.cpu_kernels.arrays import Array, Float32, float32
from rollout_worker.engine.cpu_kernels.random_numbers import gumbel_noise

_DRAFT_NOISE_SALT = 1 << 30
"""Added to positions, so that drafters with logits draw other noise than verification."""


def gumbel_sample(
    local_argmax_ptr: Tensor,
    local_argmax_stride: int,
    local_max_ptr: Tensor,
    local_max_stride: int,
    logits_cache_ptr: Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: Tensor | None,
    logits_cache_source_ptr: Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: Tensor,
    seeds_ptr: Tensor,
    pos_ptr: Tensor,
    temp_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> Grid | None:
    """Find the token with the largest noised logit in each block of the vocabulary (``_gumbel_sample_kernel``)."""
    if USE_FP64 or logits_cache_ptr is not None:
        return tuple(local_argmax_ptr.shape)
    requests = expanded_idx_mapping_ptr.numpy()
    # A dummy request has the index -1.
    is_real = requests >= 0
    temperatures = np.where(is_real, temp_ptr.numpy()[requests], np.float32(0))
    seeds = np.where(is_real, seeds_ptr.numpy()[requests], 0)
    scores = float32(logits_ptr)[:, :vocab_size]
    if APPLY_TEMPERATURE:
        scores = scores / np.where(temperatures == 0, np.float32(1), temperatures)[:, None]
    positions = pos_ptr.numpy() + (_DRAFT_NOISE_SALT if IS_DRAFTING else 0)
    scores = add_noise(scores, temperatures, seeds, positions)
    store_block_maxima(scores, BLOCK_SIZE, np.arange(len(scores)), local_argmax_ptr, local_max_ptr)
    return None


def add_noise(logits: Float32, temperatures: Array, seeds: Array, positions: Array) -> Float32:
    """Return the logits, with noise in the rows whose temperature is not 0."""
    rows = np.flatnonzero(temperatures)
    if not len(rows):
        return logits
    noise = gumbel_noise(seeds[rows], positions[rows], logits.shape[1])
    if len(rows) == len(logits):
        return logits + noise
    noised = logits.copy()
    noised[rows] += noise
    return noised


def store_block_maxima(values: Float32, block_size: int, rows: Integers, argmax: Tensor, maximum: Tensor) -> None:
    """Store the maximum of each block of the vocabulary, and its token, in *rows* of the outputs."""
    argmax_out, maximum_out = argmax.numpy(), maximum.numpy()
    every_row = np.arange(len(values))
    for block, start in enumerate(range(0, values.shape[1], block_size)):
        part = values[:, start : start + block_size]
        tokens = part.argmax(axis=1)
        argmax_out[rows, block] = start + tokens
        maximum_out[rows, block] = part[every_row, tokens]


KERNELS: dict[str, Kernel] = {"sample.gumbel._gumbel_sample_kernel": gumbel_sample}
