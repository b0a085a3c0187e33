"""Kernels that change logits before a token is sampled: modules of ``vllm/v1/worker/gpu/sample`` in vLLM 0.32.

The samplers pass a float32 copy of the model's logits. Other types run in the interpreter.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollout_worker.engine.cpu_kernels import Grid, Kernel
from rollout_worker.engine.cpu_kernels.arrays import Array


def temperature(
    logits_ptr: Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: Tensor,
    temperature_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> Grid | None:
    """Divide the logits by the temperature (``gumbel._temperature_kernel``)."""
    if logits_ptr.dtype != torch.float32:
        return len(logits_ptr), -(-vocab_size // BLOCK_SIZE)
    temperatures = temperature_ptr.numpy()[expanded_idx_mapping_ptr.numpy()]
    logits_ptr.numpy()[:, :vocab_size] /= np.where(temperatures == 0, np.float32(1), temperatures)[:, None]
    return None


def min_p(
    logits_ptr: Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: Tensor,
    min_p_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> Grid | None:
    """Exclude tokens that are much less probable than the most probable one (``min_p._min_p_kernel``)."""
    if logits_ptr.dtype != torch.float32:
        return (len(logits_ptr),)
    ratios = min_p_ptr.numpy()[expanded_idx_mapping_ptr.numpy()]
    rows = np.flatnonzero(ratios)
    logits = logits_ptr.numpy()[:, :vocab_size]
    chosen = logits[rows]
    chosen[chosen < (chosen.max(axis=1) + np.log(ratios[rows]))[:, None]] = -np.inf
    logits[rows] = chosen
    return None


def penalties(
    logits_ptr: Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: Tensor,
    token_ids_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    repetition_penalty_ptr: Tensor,
    frequency_penalty_ptr: Tensor,
    presence_penalty_ptr: Tensor,
    prompt_bin_mask_ptr: Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> Grid | None:
    """Make tokens that have occurred less probable, drafts of the step included (``penalties._penalties_kernel``)."""
    if logits_ptr.dtype != torch.float32:
        return len(logits_ptr), -(-vocab_size // BLOCK_SIZE)
    requests, places = expanded_idx_mapping_ptr.numpy(), expanded_local_pos_ptr.numpy()
    repetition, frequency, presence = (
        tensor.numpy()[requests] for tensor in (repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr)
    )
    all_logits, token_ids = logits_ptr.numpy(), token_ids_ptr.numpy()
    for row in np.flatnonzero((repetition != 1) | (frequency != 0) | (presence != 0)).tolist():
        request, logits = requests[row], all_logits[row, :vocab_size]
        counts = output_bin_counts_ptr.numpy()[request, :vocab_size].copy()
        drafts = token_ids[row - places[row] + 1 : row + 1]
        np.add.at(counts, drafts[(drafts >= 0) & (drafts < vocab_size)], 1)
        if repetition[row] != 1:
            in_prompt = _unpack(prompt_bin_mask_ptr.numpy()[request], vocab_size)
            scale = np.where(in_prompt | (counts > 0), repetition[row], np.float32(1))
            logits *= np.where(logits > 0, 1 / scale, scale)
        logits -= frequency[row] * counts.astype(np.float32)
        logits -= presence[row] * (counts > 0).astype(np.float32)
    return None


def bincount(
    expanded_idx_mapping_ptr: Tensor,
    all_token_ids_ptr: Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: Tensor,
    prefill_len_ptr: Tensor,
    prompt_bin_mask_ptr: Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: Tensor,
    output_bin_counts_stride: int,
    BLOCK_SIZE: int,
) -> None:
    """Count the tokens of new requests, whose counts are 0 (``penalties._bincount_kernel``)."""
    masks, counts = prompt_bin_mask_ptr.numpy().view(np.uint32), output_bin_counts_ptr.numpy()
    for request in expanded_idx_mapping_ptr.tolist():
        prompt_len, prefill_len = int(prompt_len_ptr[request]), int(prefill_len_ptr[request])
        tokens = all_token_ids_ptr.numpy()[request]
        prompt, output = tokens[: min(prompt_len, prefill_len)], tokens[prompt_len:prefill_len]
        np.bitwise_or.at(masks[request], prompt // 32, np.uint32(1) << (prompt % 32).astype(np.uint32))
        np.add.at(counts[request], output, 1)


def bias(
    logits_ptr: Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: Tensor,
    num_allowed_token_ids_ptr: Tensor,
    allowed_token_ids_ptr: Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: Tensor,
    bias_token_ids_ptr: Tensor,
    bias_token_ids_stride: int,
    bias_ptr: Tensor,
    bias_stride: int,
    pos_ptr: Tensor,
    min_lens_ptr: Tensor,
    num_stop_token_ids_ptr: Tensor,
    restore_when_all_masked_ptr: Tensor,
    stop_token_ids_ptr: Tensor,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> Grid | None:
    """Apply allowed tokens, biases and minimum lengths (``logit_bias._bias_kernel``)."""
    if logits_ptr.dtype != torch.float32:
        return (len(logits_ptr),)
    requests = expanded_idx_mapping_ptr.numpy()
    allowed, biased = num_allowed_token_ids_ptr.numpy()[requests], num_logit_bias_ptr.numpy()[requests]
    stops = num_stop_token_ids_ptr.numpy()[requests]
    stops = np.where(pos_ptr.numpy() + 1 < min_lens_ptr.numpy()[requests], stops, 0)
    for row in np.flatnonzero((allowed > 0) | (biased > 0) | (stops > 0)).tolist():
        request, logits = requests[row], logits_ptr.numpy()[row, :vocab_size]
        if allowed[row] > 0:
            tokens = allowed_token_ids_ptr.numpy()[request, : allowed[row]]
            kept = logits[tokens]
            logits[:] = -np.inf
            logits[tokens] = kept
        if biased[row] > 0:
            tokens = bias_token_ids_ptr.numpy()[request, : biased[row]]
            logits[tokens] += bias_ptr.numpy()[request, : biased[row]]
        if stops[row] > 0:
            restore = CHECK_ALL_MASKED_ROWS and bool(restore_when_all_masked_ptr[request])
            _exclude(logits, stop_token_ids_ptr.numpy()[request, : stops[row]], restore_if_none_left=restore)
    return None


def _exclude(logits: Array, tokens: Array, *, restore_if_none_left: bool) -> None:
    kept = logits[tokens]
    logits[tokens] = -np.inf
    if restore_if_none_left and logits.max() == -np.inf:
        is_finite = np.isfinite(kept)
        logits[tokens[is_finite]] = kept[is_finite]


def _unpack(mask: Array, count: int) -> Array:
    """Return the first bits of 32-bit integers as booleans, the lowest bit first."""
    return np.unpackbits(mask.view(np.uint8), count=count, bitorder="little").astype(np.bool_)


KERNELS: dict[str, Kernel] = {
    "sample.gumbel._temperature_kernel": temperature,
    "sample.min_p._min_p_kernel": min_p,
    "sample.penalties._penalties_kernel": penalties,
    "sample.penalties._bincount_kernel": bincount,
    "sample.logit_bias._bias_kernel": bias,
}
