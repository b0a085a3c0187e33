"""Kernels that change logits, sample tokens without drafts and compute log-probabilities, in vLLM 0.32 and 0.33.

These are the kernels of ``vllm/v1/worker/gpu/sample``, and the one that applies grammars. The samplers pass a float32
copy of the model's logits; other types run in the interpreter. The random number generators return the same numbers as
V2's for the same seeds and positions: Murmur3 is that of ``gumbel.py``, Philox is ``triton.language.rand``. All arrays
of random numbers have one row for each position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_kernels import Grid, Kernel
from cpu_kernels.arrays import Array, Float32, Integers, float32


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


_Words = npt.NDArray[np.uint32]

_HALF = np.uint64(32)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_PHILOX_KEYS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_PHILOX_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_PHILOX_ROUNDS = 10
_PHILOX_SCALE = np.float32(4.6566127342e-10)
"""The factor that makes integers numbers below 1, and the smallest number that :func:`philox_uniform` returns."""


def gumbel_noise(seeds: Array, positions: Array, tokens: int) -> Float32:
    """Return noise from Gumbel's distribution, shape (positions, tokens) (``gumbel_noised_argmax``)."""
    noise = murmur3_uniform(seeds, positions, tokens)
    noise = _minus_log_of_complement(noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def murmur3_uniform(seeds: Array, positions: Array, tokens: int) -> Float32:
    """Return uniform numbers between 0 and 1, shape (positions, tokens) (``murmur3_uniform32``)."""
    seeds, positions = seeds.astype(np.int64), positions.astype(np.int64)
    prefix = np.zeros(len(seeds), np.uint32)
    for words in (seeds, seeds >> 32, positions):
        prefix = _murmur3_mix(prefix, words.astype(np.uint32))
    hashed = _murmur3_mix(prefix[:, None], np.arange(tokens, dtype=np.uint32)[None]) ^ np.uint32(16)
    hashed ^= hashed >> 16
    hashed *= np.uint32(0x85EBCA6B)
    hashed ^= hashed >> 13
    hashed *= np.uint32(0xC2B2AE35)
    hashed ^= hashed >> 16
    high = (hashed >> 16).astype(np.float32)
    low = (hashed & np.uint32(0xFFFF)).astype(np.float32)
    uniform: Float32 = high * np.float32(1.52587890625e-05) + (low + np.float32(0.5)) * np.float32(
        2.3283064365386963e-10
    )
    return uniform


def philox_uniform(seeds: Array, positions: Array) -> Float32:
    """Return uniform numbers between 0 and 1, shape (positions,) (``tl_rand32``)."""
    positions, seeds = positions.astype(np.int64), seeds.astype(np.int64)
    c0, c1 = _words(positions), _words(positions >> 32)
    key0, key1 = _words(seeds), _words(seeds >> 32)
    c2 = c3 = np.zeros_like(c0)
    for _ in range(_PHILOX_ROUNDS):
        # 32 bits in 64, so that products do not overflow.
        product_a, product_b = c0 * _PHILOX_FACTORS[0], c2 * _PHILOX_FACTORS[1]
        c0, c2 = (product_b >> _HALF) ^ c1 ^ key0, (product_a >> _HALF) ^ c3 ^ key1
        c1, c3 = product_b & _LOW_WORD, product_a & _LOW_WORD
        key0, key1 = (key0 + _PHILOX_KEYS[0]) & _LOW_WORD, (key1 + _PHILOX_KEYS[1]) & _LOW_WORD
    integers = c0.astype(np.uint32).view(np.int32)
    integers = np.where(integers < 0, ~integers, integers)
    uniform: Float32 = np.maximum(integers.astype(np.float32) * _PHILOX_SCALE, _PHILOX_SCALE)
    return uniform


def _words(integers: Array) -> npt.NDArray[np.uint64]:
    """Return the low 32 bits of each integer."""
    return integers.astype(np.uint64) & _LOW_WORD


def _murmur3_mix(state: _Words, key: _Words) -> _Words:
    key = _rotate_left(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate_left(state ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotate_left(words: _Words, bits: int) -> _Words:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


def _minus_log_of_complement(value: Float32) -> Float32:
    """Return -log(1 - value) as ``_log1p_neg_stable`` approximates it."""
    polynomial = np.full_like(value, 1 / 8)
    for degree in range(7, 1, -1):
        polynomial *= value
        polynomial += np.float32(1 / degree)
    polynomial *= value
    polynomial += np.float32(1)
    series = value * polynomial
    direct = -np.log(np.maximum(np.float32(1) - value, np.float32(5.960464477539063e-08)))
    return np.where(value < np.float32(0.25), series, direct)


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


def topk_log_softmax(
    output_ptr: Tensor,
    logits_ptr: Tensor,
    logits_stride: int,
    topk_ids_ptr: Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Compute the log-probabilities of chosen tokens (``_topk_log_softmax_kernel``)."""
    logits = float32(logits_ptr)[:, :vocab_size]
    maxima = logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(logits - maxima).sum(axis=1, keepdims=True))
    chosen = np.take_along_axis(logits, topk_ids_ptr.numpy()[:, :topk], axis=1)
    output_ptr.numpy()[:] = chosen - maxima - log_sums


def ranks(
    output_ptr: Tensor, logits_ptr: Tensor, logits_stride: int, token_ids_ptr: Tensor, vocab_size: int, BLOCK_SIZE: int
) -> None:
    """Count the tokens that are at least as probable as the sampled ones (``_ranks_kernel``)."""
    logits = float32(logits_ptr)[:, :vocab_size]
    chosen = np.take_along_axis(logits, token_ids_ptr.numpy()[:, None], axis=1)
    output_ptr.numpy()[:] = (logits >= chosen).sum(axis=1)


def grammar_bitmask(
    logits_ptr: Tensor,
    logits_stride: int,
    logits_indices_ptr: Tensor,
    cu_num_logits_ptr: Tensor,
    bitmask_ptr: Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Exclude the tokens that grammars do not permit (``structured_outputs._apply_grammar_bitmask_kernel``)."""
    requests, positions = np.divmod(logits_indices_ptr.numpy(), MASK_STRIDE)
    ends = cu_num_logits_ptr.numpy()
    rows = ends[requests] + positions
    for mask in np.flatnonzero(rows < ends[requests + 1]).tolist():
        permitted = _unpack(bitmask_ptr.numpy()[mask], vocab_size)
        logits_ptr[int(rows[mask]), :vocab_size][torch.from_numpy(~permitted)] = -torch.inf


KERNELS: dict[str, Kernel] = {
    "structured_outputs._apply_grammar_bitmask_kernel": grammar_bitmask,
    "sample.gumbel._temperature_kernel": temperature,
    "sample.min_p._min_p_kernel": min_p,
    "sample.penalties._penalties_kernel": penalties,
    "sample.penalties._bincount_kernel": bincount,
    "sample.logit_bias._bias_kernel": bias,
    "sample.gumbel._gumbel_sample_kernel": gumbel_sample,
    "sample.logprob._topk_log_softmax_kernel": topk_log_softmax,
    "sample.logprob._ranks_kernel": ranks,
}
