"""The time of a verification step's forward pass on GPUs, and the time that the host adds.

The time of a forward pass is linear in the number of tokens, as DAS measured it for a 7B model on an H100
(arXiv 2511.13841: 8 ms + 26 µs for each token). The other models and GPUs are scaled from that: weights are read at
the same share of the memory's bandwidth (57 % of 3.35 TB/s), and a token uses the same share of the operations per
second (59 % of 989 TFLOP/s).
Attention reads keys and values at the memory's full bandwidth, in the favour of plain decoding.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from rollout_worker.engine.config import cuda_graph_sizes

_BYTES_PER_S = 15.2e9 / 8e-3
"""Bytes of weights that are read per second: 7.6 billion parameters in bfloat16 in 8 ms."""
_FLOP_PER_S = 2 * 7.6e9 / 26e-6
_USABLE_SHARE = 0.9
"""vLLM uses 90 % of a GPU's memory by default."""
_ALL_REDUCE_S = 12e-6
"""Latency of one small all-reduce over NVLink. vLLM's custom all-reduce takes 10 to 15 µs for a few kilobytes."""
_ALL_REDUCE_BYTES_PER_S = 450e9
"""NVLink's bandwidth in one direction (NVIDIA's data sheet)."""
_EAGER_LAYER_S = 0.6e-3
"""Time that the host takes to launch the kernels of one layer without CUDA graphs.

An assumption: eager decoding of a model with 32 layers takes about 20 ms, however small the batch."""
_PIECEWISE_LAYER_S = 0.15e-3
"""Time that the host takes to launch one layer's attention and piecewise CUDA graph. An assumption."""
CAPTURED_SIZES = tuple(cuda_graph_sizes(max_num_seqs=128, max_draft_tokens=16))
"""Sizes of every method's CUDA graphs, in tokens; a step is padded to the next one.

vLLM's default ends at 512 tokens; this project configures more, which other methods can do as well."""


class _Gpu(NamedTuple):
    """A GPU, according to NVIDIA's data sheet."""

    bytes_per_s: float
    """Bandwidth of its memory."""
    flop_per_s: float
    """Operations per second in bfloat16, without sparsity."""
    memory_bytes: float


_H100 = _Gpu(3.35e12, 989e12, 80e9)
_A100 = _Gpu(2.04e12, 312e12, 80e9)
_H20 = _Gpu(4.0e12, 148e12, 96e9)


class Accelerator(NamedTuple):
    """One engine's GPUs with a model, as times of a forward pass."""

    name: str
    description: str
    weights_s: float
    """Seconds to read all weights that every token uses, with the all-reduces of a forward pass."""
    token_s: float
    """Seconds for each token, including those that pad a step to the size of a CUDA graph."""
    context_s: float
    """Seconds for each token of context that attention reads."""
    kv_tokens: int
    """Capacity of the KV cache in tokens."""
    layers: int
    experts_s: float = 0.0
    """Seconds to read the weights of all experts."""
    expert_share: float = 0.0
    """Share of the experts that one token uses."""

    def forward_s(self, tokens: int, context_tokens: int, *, piecewise: bool = False) -> float:
        """Return the duration of a forward pass in seconds.

        Args:
            tokens: number of verified tokens.
            context_tokens: number of context tokens of all rollouts together.
            piecewise: whether attention is not part of the CUDA graphs, as in V1 with drafts of different lengths.
        """
        is_captured = tokens <= CAPTURED_SIZES[-1]
        padded = CAPTURED_SIZES[bisect.bisect_left(CAPTURED_SIZES, tokens)] if is_captured else tokens
        used_experts = 1.0 - (1.0 - self.expert_share) ** tokens
        gpu_s = self.weights_s + self.experts_s * used_experts + self.token_s * padded + self.context_s * context_tokens
        # The GPU waits only if the host takes longer than the kernels.
        layer_s = (_PIECEWISE_LAYER_S if piecewise else 0.0) if is_captured else _EAGER_LAYER_S
        return max(gpu_s, self.layers * layer_s)


def _dense(
    name: str,
    description: str,
    *,
    params: float,
    layers: int,
    hidden: int,
    kv_bytes: int,
    gpus: int = 1,
    gpu: _Gpu = _H100,
) -> Accelerator:
    bytes_per_s = _BYTES_PER_S * gpu.bytes_per_s / _H100.bytes_per_s
    flop_per_s = _FLOP_PER_S * gpu.flop_per_s / _H100.flop_per_s
    all_reduces = 2 * layers if gpus > 1 else 0
    reduced_bytes = all_reduces * hidden * 2 * 2 * (gpus - 1) / gpus
    return Accelerator(
        name,
        description,
        weights_s=2 * params / gpus / bytes_per_s + all_reduces * _ALL_REDUCE_S,
        token_s=2 * params / gpus / flop_per_s + reduced_bytes / _ALL_REDUCE_BYTES_PER_S,
        context_s=kv_bytes / gpus / gpu.bytes_per_s,
        kv_tokens=int((gpus * _USABLE_SHARE * gpu.memory_bytes - 2 * params) / kv_bytes),
        layers=layers,
    )


def _kv_bytes(layers: int, kv_heads: int, head_size: int = 128) -> int:
    """Return the bytes of keys and values of one token, in bfloat16."""
    return layers * kv_heads * head_size * 2 * 2


def _qwen2_7b(name: str, on: str, gpu: _Gpu) -> Accelerator:
    kv_bytes = _kv_bytes(28, 4)
    description = f"Qwen2.5-7B in bfloat16 on {on}"
    return _dense(name, description, params=7.6e9, layers=28, hidden=3584, kv_bytes=kv_bytes, gpu=gpu)


def _qwen3_30b_a3b() -> Accelerator:
    layers, hidden, experts, per_token, gpus = 48, 2048, 128, 8, 2
    expert_params = layers * experts * 3 * hidden * 768
    active = 3.3e9
    dense = _dense(
        "30b-a3b-2xh100",
        "Qwen3-30B-A3B in bfloat16 on two H100, tensor parallel",
        params=30.5e9 - expert_params,
        layers=layers,
        hidden=hidden,
        kv_bytes=_kv_bytes(layers, 4),
        gpus=gpus,
    )
    return dense._replace(
        token_s=dense.token_s + 2 * (active - (30.5e9 - expert_params)) / gpus / _FLOP_PER_S,
        kv_tokens=int((gpus * _USABLE_SHARE * _H100.memory_bytes - 2 * 30.5e9) / _kv_bytes(layers, 4)),
        experts_s=2 * expert_params / gpus / _BYTES_PER_S,
        expert_share=per_token / experts,
    )


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        _qwen2_7b("7b-h100", "one H100 (measured by DAS)", _H100),
        _qwen2_7b("7b-a100", "one A100 with 80 GB", _A100),
        _qwen2_7b("7b-h20", "one H20", _H20),
        _dense(
            "8b-h100",
            "Llama-3.1-8B in bfloat16 on one H100",
            params=8.03e9,
            layers=32,
            hidden=4096,
            kv_bytes=_kv_bytes(32, 8),
        ),
        _dense(
            "32b-4xh100",
            "Qwen2.5-32B in bfloat16 on four H100, tensor parallel",
            params=32.8e9,
            layers=64,
            hidden=5120,
            kv_bytes=_kv_bytes(64, 8),
            gpus=4,
        ),
        _qwen3_30b_a3b(),
    )
}
"""The simulated models, by name. Shapes are those of the models' published configurations."""
