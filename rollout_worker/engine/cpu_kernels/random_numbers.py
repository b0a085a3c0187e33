"""The random number generators of V2's samplers, which return the same numbers for the same seeds and positions.

Murmur3 is that of ``vllm/v1/worker/gpu/sample/gumbel.py`` in vLLM 0.32; Philox is ``triton.language.rand``. All arrays
of numbers have one row for each position.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollout_worker.engine.cpu_kernels.arrays import Array, Float32

_Words = npt.NDArray[np.uint32]

_HALF = np.uint64(32)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_PHILOX_KEYS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_PHILOX_FACTORS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_PHILOX_ROUNDS = 10
_PHILOX_SCALE = np.float32(4.6566127342e-10)
"""The factor by which integers become numbers below 1, and the smallest number that :func:`philox_uniform` returns."""


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
