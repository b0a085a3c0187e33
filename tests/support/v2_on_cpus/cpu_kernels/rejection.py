"""Kernels that verify drafts: ``spec_decode/rejection_sampler.py`` and ``rejection_sampler_utils.py`` of vLLM.

Supported are drafts without logits, whose tokens are accepted with their probability. Drafts with logits, verification
of blocks, synthetic acceptance rates, watermarks and noise of 64 bits run in the interpreter.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from cpu_kernels import Grid, Kernel
from cpu_kernels.arrays import Array, Float32, enumerate_rows, float32
from cpu_kernels.sampling import add_noise, philox_uniform, store_block_maxima


def gather_draft_sampled(
    draft_sampled_ptr: Tensor,
    pos_ptr: Tensor,
    input_ids_ptr: Tensor,
    positions_ptr: Tensor,
    logits_indices_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    prefill_len_ptr: Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Gather token and position of each row of logits (``_gather_draft_sampled_kernel``).

    The token of a place for a draft within the prompt is -1.
    """
    tokens = logits_indices_ptr.numpy()[:num_logits]
    positions = positions_ptr.numpy()[tokens]
    places = expanded_local_pos_ptr.numpy()[:num_logits]
    prefill = prefill_len_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[:num_logits]]
    in_prompt = (places > 0) & (positions - places < prefill)
    draft_sampled_ptr.numpy()[:num_logits] = np.where(in_prompt, -1, input_ids_ptr.numpy()[tokens])
    pos_ptr.numpy()[:num_logits] = positions


def compute_local_logits_stats(
    target_local_argmax_ptr: Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: Tensor,
    target_logits_stride: int,
    draft_logits_ptr: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: Tensor,
    expanded_local_pos_ptr: Tensor,
    temp_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
) -> Grid | None:
    """Compute maxima and sums of exponentials by blocks of the vocabulary (``_compute_local_logits_stats_kernel``).

    Tokens of maxima are needed for greedy requests only, and sums for others; here, all rows have tokens.
    """
    if HAS_DRAFT_LOGITS:
        return tuple(target_local_argmax_ptr.shape)
    # A request's last row verifies no draft; the next row is the first one of the next request.
    rows = np.flatnonzero(expanded_local_pos_ptr.numpy()[1 : len(target_local_argmax_ptr)])
    values = float32(target_logits_ptr)[rows, :vocab_size]
    store_block_maxima(values, BLOCK_SIZE, rows, target_local_argmax_ptr, target_local_max_ptr)
    is_random = temp_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[rows]] != 0
    rows, values = rows[is_random], values[is_random]
    maxima, sums = target_local_max_ptr.numpy(), target_local_sumexp_ptr.numpy()
    for block, start in enumerate(range(0, vocab_size, BLOCK_SIZE)):
        block_maxima = maxima[rows, block]
        finite_maxima = np.where(block_maxima > -np.inf, block_maxima, np.float32(0))
        sums[rows, block] = np.exp(values[:, start : start + BLOCK_SIZE] - finite_maxima[:, None]).sum(axis=1)
    return None


def rejection(
    sampled_ptr: Tensor,
    sampled_stride: int,
    rejected_steps_ptr: Tensor,
    target_rejected_logsumexp_ptr: Tensor,
    draft_rejected_logsumexp_ptr: Tensor,
    target_logits_ptr: Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: Tensor,
    draft_logits_ptr: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: Tensor,
    idx_mapping_ptr: Tensor,
    temp_ptr: Tensor,
    seed_ptr: Tensor,
    pos_ptr: Tensor,
    synthetic_conditional_rates_ptr: Tensor | None,
    cumulative_log_p_ptr: Tensor | None,
    local_residual_mass_ptr: Tensor | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
) -> Grid | None:
    """Accept drafts up to the first rejected one (``_rejection_kernel``).

    A greedy request accepts a draft if the model's most probable token is the same, and gets that token if it is not.
    Others accept a draft if its probability is greater than a uniform number. The outputs of log-sums stay undefined,
    because they are used for drafts with logits only.
    """
    requests = idx_mapping_ptr.numpy()
    if HAS_DRAFT_LOGITS or SYNTHETIC_MODE or USE_BLOCK_VERIFICATION:
        return (len(requests),)
    first_logits = cu_num_logits_ptr.numpy()[: len(requests) + 1]
    draft_counts = np.diff(first_logits) - 1
    rows, places = enumerate_rows(draft_counts)
    lengths = rejected_steps_ptr.numpy()[: len(requests)]
    if not len(rows):
        lengths[:] = 0
        return None
    sampled = sampled_ptr.numpy()
    logits_rows = first_logits[rows] + places
    drafts = draft_sampled_ptr.numpy()[logits_rows + 1].astype(np.int64)
    is_greedy = temp_ptr.numpy()[requests[rows]] == 0

    best = drafts.copy()
    accepted = np.zeros(len(rows), np.bool_)
    greedy = np.flatnonzero(is_greedy)
    if len(greedy):
        argmax = target_local_argmax_ptr.numpy()[logits_rows[greedy]]
        best[greedy] = argmax[np.arange(len(greedy)), _argmax(target_local_max_ptr.numpy()[logits_rows[greedy]])]
        accepted[greedy] = best[greedy] == drafts[greedy]
    random = np.flatnonzero(~is_greedy & (drafts >= 0))
    if len(random):
        random_rows = logits_rows[random]
        log_sums = _log_sum(target_local_max_ptr.numpy()[random_rows], target_local_sumexp_ptr.numpy()[random_rows])
        log_probabilities = float32(target_logits_ptr)[random_rows, drafts[random]] - log_sums
        uniform = philox_uniform(seed_ptr.numpy()[requests[rows[random]]], pos_ptr.numpy()[random_rows])
        accepted[random] = log_probabilities > np.log(uniform)

    # The place of the first rejected draft; the number of drafts if there is none.
    lengths[:] = draft_counts
    rejected = np.flatnonzero(~accepted)
    np.minimum.at(lengths, rows[rejected], places[rejected].astype(lengths.dtype))
    verified = places <= lengths[rows]
    sampled[rows[verified], places[verified]] = best[verified]
    return None


def resample(
    resampled_local_argmax_ptr: Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: Tensor,
    draft_logits_ptr: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: Tensor,
    rejected_step_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    draft_sampled_ptr: Tensor,
    temp_ptr: Tensor,
    seed_ptr: Tensor,
    pos_ptr: Tensor,
    cumulative_log_p_ptr: Tensor | None,
    contexts_ptr: Tensor | None,
    contexts_stride: int,
    watermarking_ptr: Tensor | None,
    watermarking_skip_mask_ptr: Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
) -> Grid | None:
    """Sample the token after the accepted drafts, but not the rejected draft (``_resample_kernel``)."""
    if HAS_DRAFT_LOGITS or USE_FP64 or USE_BLOCK_VERIFICATION or WATERMARK:
        return tuple(resampled_local_argmax_ptr.shape)
    logits_rows, requests, is_last, is_known = _next_tokens(
        rejected_step_ptr.numpy(), cu_num_logits_ptr.numpy(), expanded_idx_mapping_ptr.numpy(), temp_ptr.numpy()
    )
    rows = np.flatnonzero(~is_known)
    if not len(rows):
        return None
    logits_rows, requests, is_last = logits_rows[rows], requests[rows], is_last[rows]
    logits = float32(target_logits_ptr)[logits_rows, :vocab_size]
    rejected = draft_sampled_ptr.numpy()[np.where(is_last, 0, logits_rows + 1)]
    masked = np.flatnonzero(~is_last & (rejected >= 0))
    logits[masked, rejected[masked]] = -np.inf
    temperatures, seeds = temp_ptr.numpy()[requests], seed_ptr.numpy()[requests]
    scores = add_noise(logits, temperatures, seeds, pos_ptr.numpy()[logits_rows])
    store_block_maxima(scores, BLOCK_SIZE, rows, resampled_local_argmax_ptr, resampled_local_max_ptr)
    return None


def insert_resampled(
    sampled_ptr: Tensor,
    sampled_stride: int,
    num_sampled_ptr: Tensor,
    resampled_local_argmax_ptr: Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: Tensor,
    expanded_idx_mapping_ptr: Tensor,
    temp_ptr: Tensor,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    """Append the resampled tokens to the accepted drafts (``_insert_resampled_kernel``)."""
    num_sampled = num_sampled_ptr.numpy()
    *_, is_known = _next_tokens(
        num_sampled, cu_num_logits_ptr.numpy(), expanded_idx_mapping_ptr.numpy(), temp_ptr.numpy()
    )
    rows = np.flatnonzero(~is_known)
    blocks = _argmax(resampled_local_max_ptr.numpy()[rows])
    sampled_ptr.numpy()[rows, num_sampled[rows]] = resampled_local_argmax_ptr.numpy()[rows, blocks]
    num_sampled += 1


def flatten_sampled(
    flat_sampled_ptr: Tensor,
    sampled_ptr: Tensor,
    sampled_stride: int,
    num_sampled_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
) -> None:
    """Copy the sampled tokens to their rows of logits (``_flatten_sampled_kernel``)."""
    num_sampled = num_sampled_ptr.numpy()
    rows, places = enumerate_rows(num_sampled)
    flat_sampled_ptr.numpy()[cu_num_logits_ptr.numpy()[rows] + places] = sampled_ptr.numpy()[rows, places]


def _next_tokens(accepted: Array, cu_num_logits: Array, mapping: Array, temp: Array) -> tuple[Array, ...]:
    """Describe the token after the accepted drafts of each request.

    Returns:
        Its row of logits; the request; whether no draft was rejected; and whether the token is already known, which is
        so if a greedy request has rejected a draft.
    """
    logits_rows = cu_num_logits[:-1] + accepted
    is_last = logits_rows == cu_num_logits[1:] - 1
    requests = mapping[logits_rows]
    return logits_rows, requests, is_last, (temp[requests] == 0) & ~is_last


def _argmax(maxima: Float32) -> Array:
    """Return the block with the largest maximum of each row."""
    blocks: Array = np.where(np.isnan(maxima), -np.inf, maxima).argmax(axis=1)
    return blocks


def _log_sum(maxima: Float32, sums: Float32) -> Float32:
    """Return the logarithm of the sum of exponentials of each row, from those of its blocks."""
    largest = maxima.max(axis=1)
    with np.errstate(invalid="ignore"):
        total: Float32 = largest + np.log((sums * np.exp(maxima - largest[:, None])).sum(axis=1))
    return total


KERNELS: dict[str, Kernel] = {
    "spec_decode.rejection_sampler._gather_draft_sampled_kernel": gather_draft_sampled,
    "spec_decode.rejection_sampler._flatten_sampled_kernel": flatten_sampled,
    "spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel": compute_local_logits_stats,
    "spec_decode.rejection_sampler_utils._rejection_kernel": rejection,
    "spec_decode.rejection_sampler_utils._resample_kernel": resample,
    "spec_decode.rejection_sampler_utils._insert_resampled_kernel": insert_resampled,
}
