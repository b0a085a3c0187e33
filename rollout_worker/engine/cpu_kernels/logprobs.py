"""Kernels of log-probabilities: ``sample/logprob.py`` of vLLM 0.32."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rollout_worker.engine.cpu_kernels import Kernel
from rollout_worker.engine.cpu_kernels.arrays import float32


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


KERNELS: dict[str, Kernel] = {
    "sample.logprob._topk_log_softmax_kernel": topk_log_softmax,
    "sample.logprob._ranks_kernel": ranks,
}
